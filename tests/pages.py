"""The documentation as tests see it: which pages are written by hand, what the site shows, links and headings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = "<!-- Written by `make docs`"  # near the top of pages of the reference
STUDIES = (DOCS / "results", DOCS / "benchmarks")  # written by linvit and by benchmarks/, but for this one:
RESULTS = DOCS / "results/README.md"


def _is_written(page: Path) -> bool:
    of_study = any(place in page.parents for place in STUDIES) and page != RESULTS
    return not of_study and GENERATED not in page.read_text(encoding="utf-8")[:300]


PAGES = sorted(page for page in DOCS.rglob("*.md") if "records" not in page.parts)
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *filter(_is_written, PAGES)]


def without_code(text: str) -> str:
    return re.sub(r"^(```|~~~).*?^\1|^(?: {4}|\t).*?$", "", text, flags=re.M | re.S)


def count_words(page: Path) -> int:
    """Of the text: what has a letter and stands between spaces, outside of code blocks; a number is no word."""
    return sum(bool(re.search(r"[^\W\d_]", word)) for word in without_code(page.read_text(encoding="utf-8")).split())


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(path, anchor) of every link and image that does not lead elsewhere."""
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text(encoding="utf-8")))
    for target in re.findall(r"(?:\]\(|<iframe src=\")([^)\s\"]+)", text):
        if not re.match(r"\w+:", target):
            yield target.partition("#")[::2]


def anchors(page: Path) -> set[str]:
    """Those of the page's headings that are the same in the repository (GitHub) and on the site (Python-Markdown)."""
    text, found = page.read_text(encoding="utf-8"), set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        github = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        if github == re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()):
            found.add(github)
    return found


def navigation() -> list[Path]:
    """The pages of the site, in order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return [DOCS / name for name in re.findall(r": (\S+\.md)$", text.partition("\nnav:")[2], re.M)]
