"""The documentation as text: links lead somewhere, the site shows every page, and the language is plain and short."""

from __future__ import annotations

import re

import pages
import pytest

MOST_WORDS = 15_000  # of README, CONTRIBUTING and all pages of docs/ that are not generated

# Phrases that have a usual technical equivalent, and which one.
QUAINT = {
    r"go(es|ing)? on (where|with)\b": "resumes, continues",
    r"\bgets? on\b": "logs its metrics",
    r"\bbeside (it|them|softmax|each other|the others|one another)\b": "alongside, next to, relative to",
    r"\bfrom nothing\b": "from scratch",
    r"\bso many (images|steps|times|seeds)\b": "N images, N steps",
    r"(can|could|cannot) tell something": "can detect a difference",
    r"\btold (from|apart)\b|\btells? (\w+ )?apart\b|cannot be told": "differ significantly",
    r"beside the (file|options?) goes first": "overrides",
    r"without a word": "without output",
    r"\bhopeless\b": "unpromising",
    r"nobody has|learned much yet": "barely trained",
    r"\bwould buy\b": "would allow",
    r"by the draw alone|drawn anew": "std. dev. over feature draws, redrawn",
    r"is no (file|name)\b": "is not a file",
    r"may still lose": "may still be better by",
    r"taken for a sample": "treated as a sample",
    r"waits? for the device|waiting for the device": "synchronises with the device",
    r"comparison is weak": "limitations",
    r"\bone's own\b": "your own",
}
SOURCES = {".py", ".html", ".js", ".toml", ".md"}  # help, errors, pages, docstrings
TEXTS = [
    *(path for path in sorted((pages.ROOT / "src").rglob("*")) if path.suffix in SOURCES),
    *(pages.ROOT / name for name in ("SECURITY.md", "Makefile", "mkdocs.yml", "docs/llms.txt")),
    *pages.WRITTEN,
    *(page for page in pages.PAGES if page.parent.name in ("reference", "benchmarks")),
]


@pytest.mark.parametrize("page", [*pages.ROOT.glob("*.md"), *pages.PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for path, anchor in pages.links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {path}"
        if pages.DOCS in page.parents:
            assert pages.DOCS in target.parents, f"{page.name}: {path} is not on the site"
        if anchor and target.suffix == ".md":
            assert anchor in pages.anchors(target), f"{page.name}: {path}#{anchor}"


def test_anchors_are_those_of_the_repository_and_of_the_site(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n\n## linvit.x: y, [z](w.md)\n\n## Without `--to`\n\n## Größe\n\n```\n# no\n```\n",
        encoding="utf-8",
    )
    assert pages.anchors(page) == {"one-two", "linvitx-y-z"}  # without---to or without-to, größe or grosse


def test_links_of_a_page_are_found(tmp_path):
    page = tmp_path / "page.md"
    inline = '[a](b.md#c) ![d](e.png) [f](#g) [h](https://i "j") `[k](l)` <iframe src="m.html">'
    page.write_text(f"{inline}\n\n```\n[n](o)\n```\n\n    [p](q)\n", encoding="utf-8")
    assert [*pages.links(page)] == [("b.md", "c"), ("e.png", ""), ("", "g"), ("m.html", "")]


def test_the_site_shows_every_page():
    shown = pages.navigation()
    assert len(shown) == len(set(shown))
    of_studies = {page for page in pages.PAGES if pages.DOCS / "results" in page.parents} - {pages.RESULTS}
    assert set(shown) == set(pages.PAGES) - of_studies  # to which the page of results links


def test_llms_txt_lists_every_page():
    text = (pages.DOCS / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# linvit\n\n> .+\n", text)
    assert re.findall(r"^- \[[^\]]+\]\(([^)]+)\): .+$", text, re.M) == [
        page.relative_to(pages.DOCS).as_posix() for page in pages.navigation()
    ]


def test_words_are_counted_outside_of_code(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n\n| three | 4.5 % |\n|---|---|\n\n```sh\nno\n```\n\n    no no\n\n- four·x\n", encoding="utf-8"
    )
    assert pages.count_words(page) == 4


def test_documentation_is_short():
    counts = {page.relative_to(pages.ROOT).as_posix(): pages.count_words(page) for page in pages.WRITTEN}
    total = sum(counts.values())
    assert total <= MOST_WORDS, f"{total:,} words: " + ", ".join(f"{name} {n}" for name, n in counts.items())
    assert total > MOST_WORDS / 3  # or nothing was counted


def test_language_is_plain():
    found, phrases = [], re.compile("|".join(QUAINT), re.I)
    for path in TEXTS:
        text = " ".join(path.read_text(encoding="utf-8").split())
        for at in phrases.finditer(text):
            better = next(words for phrase, words in QUAINT.items() if re.fullmatch(phrase, at[0], re.I))
            around = text[max(0, at.start() - 40) : at.end() + 30]
            found.append(f"{path.relative_to(pages.ROOT).as_posix()}: '…{around}…': {better}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "quaint", ["It goes on where it stopped.", "beside softmax", "so many images", "the two were told apart"]
)
def test_quaint_phrases_are_found(quaint):
    assert any(re.search(phrase, quaint, re.I) for phrase in QUAINT)


def test_plain_phrases_are_not_found():
    plain = "It resumes. Train it alongside softmax, from scratch; the result is not a file. Go on to the next page."
    assert not any(re.search(phrase, plain, re.I) for phrase in QUAINT)
