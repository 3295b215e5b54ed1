"""Tests of speed and memory, by the races at the reports' own sizes (`true_sizes`). What was measured on a busy core
decides nothing."""

from __future__ import annotations

from dataclasses import replace

from linvit.records import Record
from linvit.studies.hypotheses import SOFTMAX, Part, Test
from linvit.studies.results import Results

RACED = {"train_step": "trains", "inference": "infers"}
TOPICS = {"train_step": "training", "inference": "inference"}
CLOSE = "they are equally fast on this machine"
LESS = 0.02  # of memory that is no difference


def is_busy(*records: Record) -> bool:
    return any(record.tags.get("busy") for record in records)


def _apart(one: Record, other: Record) -> tuple[bool | None, str]:
    """Whether the first is faster by all quartiles, None if these overlap or the core was busy; and a note."""
    if is_busy(one, other):
        return None, "; measured on a busy core, which decides nothing"
    (low, high), (least, most) = ([float(r.tags.get(e) or r.value or 0) for e in ("low", "high")] for r in (one, other))
    return True if low > most else False if high < least else None, ""


def quicker(race: str, a: str, b: str, task: str = "train_step") -> Test:
    """At the report's own size, each relative to softmax in the same race. race: a study, and what distinguishes it."""
    study = f"{race[:3]}-sizes"
    what = f"{a} {RACED[task]} faster than {b} ({study}, {race})"

    topic = TOPICS[task] if b in SOFTMAX else ""

    def run(results: Results) -> Part:
        one, other = (results.sized(race[:3], f"{task}_vs_softmax", f"{race}: {row}") for row in (a, b))
        if one is None or other is None or not (one.value and other.value):
            return replace(Part.missing(what), topic=topic)
        holds, note = _apart(one, other)
        found = f"{one.value:.2f}× against {other.value:.2f}× softmax's speed, batch {one.tags.get('batch')}{note}"
        return replace(Part.certain(what, found, holds), topic=topic, busy=is_busy(one, other), open=CLOSE)

    return Test((study,), run)


def lighter(race: str, a: str, b: str) -> Test:
    """Peak memory of a training step at the report's own size; a difference below LESS is none."""
    study = f"{race[:3]}-sizes"
    what, topic = f"{a} takes less memory than {b} ({study}, {race})", "memory" if b in SOFTMAX else ""

    def run(results: Results) -> Part:
        one, other = (results.sized(race[:3], "peak_memory", f"{race}: {row}") for row in (a, b))
        if one is None or other is None or not (one.value and other.value):
            return replace(Part.missing(what), topic=topic)
        ratio = one.value / other.value
        holds = True if ratio < 1 - LESS else False if ratio > 1 + LESS else None
        found = f"{ratio:.0%} of its memory, batch {one.tags.get('batch')}"
        return replace(Part.certain(what, found, holds), topic=topic, open="their memory is the same")

    return Test((study,), run)


def fewer_features_are_quicker(row: str) -> Test:
    """Relative to one ViT, in the races of experiments I and II."""
    what = f"{row} trains faster with 16 features than with 64 (001-sizes)"

    def run(results: Results) -> Part:
        one, other = (results.sized("001", "train_step_vs_softmax", f"001-{n}: {row}") for n in ("I", "II"))
        if one is None or other is None or not (one.value and other.value):
            return Part.missing(what)
        holds, note = _apart(one, other)
        found = Part.certain(what, f"{one.value:.2f}× against {other.value:.2f}× ViT's speed{note}", holds)
        return replace(found, busy=is_busy(one, other), open=CLOSE)

    return Test(("001-sizes",), run)
