"""What an attention costs in multiply–accumulates, as a number and as a formula."""

from __future__ import annotations

import numpy as np

from linvit.attention import attention_options, create_attention

# N tokens, d head_dim, m the number of features (or k of projected keys); all per head
_TERMS = {
    "N²d": lambda n, d, m: n * n * d,
    "Nmd": lambda n, d, m: n * m * d,
    "Nd²": lambda n, d, m: n * d * d,
    "Nm²": lambda n, d, m: n * m * m,
    "Nd": lambda n, d, m: n * d,
}
_POINTS = [(64, 16, 16), (64, 32, 16), (128, 16, 32), (96, 64, 64), (128, 32, 64), (64, 16, 32), (128, 64, 32)]


def macs_formula(name: str) -> str:
    """MACs per head, found by counting at a few sizes: `4Nmd`. Empty if it is no sum of the terms above."""
    options = attention_options(name)
    size = next((key for key in ("m", "k") if key in options), None)
    counted, terms = [], []
    for n, d, m in _POINTS:
        spec = f"{name}:{size}={m}" if size else name
        counted.append(create_attention(spec, heads=1, head_dim=d, tokens=n).macs(n))
        terms.append([term(n, d, m) for term in _TERMS.values()])
    found = np.linalg.lstsq(np.array(terms, float), np.array(counted, float), rcond=None)[0].round().astype(int)
    if (np.array(terms) @ found != counted).any():
        return ""
    parts = [("" if c == 1 else str(c)) + term for c, term in zip(found, _TERMS, strict=True) if c]
    return " + ".join(parts).replace("m", size or "m") or "0"
