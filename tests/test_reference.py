"""The generated pages of the reference are those of this code, and what attentions state holds."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from cases import build, inputs, spec_of

from linvit.attention import ATTENTIONS, resolve

REFERENCE = Path(__file__).parents[1] / "docs/reference"
RANKS = {"n": 5, "d": 7, "d + 1": 8, "k": 5, "2d": 14, "blocks × d": 28}
MATRICES = [name for name in ATTENTIONS.names() if name not in ("literal", "pola", "vit3")]


@pytest.mark.parametrize("name", ["api.md", "attentions.md", "cli.md", "metrics.md"])
def test_generated_pages_are_what_the_code_says(name, monkeypatch):
    monkeypatch.syspath_prepend(str(REFERENCE.parent / "generate"))
    reference = importlib.import_module("write_reference")
    assert (REFERENCE / name).read_text(encoding="utf-8") == reference.PAGES[name](), f"{name} is old: make docs"


@pytest.mark.parametrize("name", MATRICES)
def test_stated_invariants_hold(name):
    stated = resolve(name).kind.invariants
    assert stated
    attention = build(spec_of(name)).double().eval()
    q, k, _ = inputs()
    with torch.no_grad():
        matrix = attention.attention_matrix(q, k)
        shifted = attention.attention_matrix(q, k + torch.randn(7, dtype=torch.float64))
    sums = torch.allclose(matrix.sum(-1), torch.ones((), dtype=torch.float64), atol=1e-9)
    assert sums == ("rows sum to one and" in stated or name in ("identity", "uniform", "mhla"))
    if "not negative" in stated or "positive" in stated:
        assert matrix.min() >= -1e-15
    if "may be negative" in stated:
        assert matrix.min() < 0
    assert ("adding one vector to all keys changes nothing" in stated) <= torch.allclose(matrix, shifted, atol=1e-9)
    if "rank at most" in stated:
        limit = RANKS[stated.partition("rank at most ")[2].partition(";")[0]]
        assert torch.linalg.matrix_rank(matrix, rtol=1e-10).max() <= limit
