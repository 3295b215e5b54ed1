"""The documents are of this code: the API page, the examples of CONTRIBUTING, and links."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_api_page_is_what_the_docstrings_say():
    spec = importlib.util.spec_from_file_location("api", ROOT / "docs/api.py")
    assert spec is not None
    assert spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    assert (ROOT / "docs/api.md").read_text(encoding="utf-8") == api.text(), "docs/api.md is old: make docs"


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target
