"""What an attention costs in multiply–accumulates, as a number and as a formula."""

from __future__ import annotations

import math

import numpy as np

from linvit.attention import attention_options, create_attention

# per head, the powers of N tokens, d head_dim, and m features (or k projected keys)
_TERMS = {"N²d": (2, 1, 0), "Nmd": (1, 1, 1), "Nd²": (1, 2, 0), "Nm²": (1, 0, 2), "Nd": (1, 1, 0)}
_POINTS = [(64, 16, 16), (64, 32, 16), (128, 16, 32), (96, 64, 64), (128, 32, 64), (64, 16, 32), (128, 64, 32)]


def squarest(tokens: int) -> tuple[int, int]:
    """The grid of so many tokens that is nearest to a square."""
    rows = next(n for n in range(math.isqrt(tokens), 0, -1) if tokens % n == 0)
    return rows, tokens // rows


def macs_formula(name: str) -> str:
    """MACs per head, found by counting at a few sizes: `4Nmd`. Empty if it is no sum of the terms above."""
    options = attention_options(name)
    size = next((key for key in ("m", "k") if key in options), None)
    counted = []
    for n, d, m in _POINTS:
        spec = f"{name}:{size}={m}" if size else name
        counted.append(create_attention(spec, heads=1, head_dim=d, tokens=1024, grid=(32, 32)).macs(n))
    terms = np.prod(np.array(_POINTS)[:, None] ** np.array([*_TERMS.values()]), axis=-1)  # (points, terms)
    found = np.linalg.lstsq(terms.astype(float), np.array(counted, float), rcond=None)[0].round().astype(int)
    if (terms @ found != counted).any():
        return ""
    parts = [("" if c == 1 else str(c)) + term for c, term in zip(found, _TERMS, strict=True) if c]
    return " + ".join(parts).replace("m", size or "m") or "0"
