"""Which attention to use: the fastest of those that cannot be told from the most accurate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from linvit.metrics import percent
from linvit.report import statistics
from linvit.report.statistics import WORSE
from linvit.report.summary import Result, Summary, count_seeds

TIE = 1.05  # a speed difference below 5 % is no reason
SMALL, LARGE = 0.01, 0.03  # accuracies one may give up and still be sure, or fairly sure

SPEEDS = {"inference_vs_softmax": "inference throughput beside softmax", "inference_throughput": "inference throughput"}
TEST = "a paired t-test over seeds (Holm-corrected, 95\N{NO-BREAK SPACE}%)"


@dataclass(frozen=True)
class Recommendation:
    variant: str | None  # its id
    sentences: tuple[str, str]  # what and why; how sure
    confidence: str
    reason: str  # the rule that led there


def recommend(summary: Summary) -> Recommendation:
    able = {v.id: v for v in summary.variants
            if v.best and not v.diverged and not v.control and v.column != "published"}  # fmt: skip
    if not able:
        why = "every variant diverged" if any(v.diverged for v in summary.variants) else "no test accuracy was measured"
        return Recommendation(
            None,
            (f"No attention can be recommended: {why}.", "Run the comparison to its end, then rebuild this page."),
            "nothing to judge", "A recommendation needs at least one variant that trained to its end.",
        )  # fmt: skip
    verdicts = summary.verdicts
    best = able[verdicts.best] if verdicts.best in able else max(able.values(), key=_accuracy)
    if len(able) == 1:
        beside = "Beside it there were only controls and runs that diverged" if len(summary.variants) > 1 else ""
        return Recommendation(
            best.id,
            (_lead(best, summary), f"{beside or 'No other variant was trained'}: it was compared with none."),
            "not compared", "It is the only variant that can be recommended.",
        )  # fmt: skip
    unknown = statistics.UNKNOWN in (verdicts.of[name] for name in able)
    if len(best.scores) < statistics.ENOUGH or unknown or any(math.isinf(verdicts.loss(name)) for name in able):
        return Recommendation(
            best.id,
            (f"{best.label} is the most accurate so far, {_right(best)} in {_seeds(best)}{_speed(best)}.",
             "Whether another is as good cannot be told yet: every variant needs the same three seeds or more."),
            statistics.UNKNOWN,
            "With fewer than three shared seeds the most accurate is named, and nothing is claimed of the others.",
        )  # fmt: skip
    equal = [v for v in able.values() if verdicts.of[v.id] != statistics.WORSE]
    metric = next((m for m in SPEEDS if all(v.get(m) for v in equal)), None) if len(equal) > 1 else None
    chosen = best
    if metric:
        top = max(v.numbers[metric] for v in equal)
        chosen = max((v for v in equal if v.numbers[metric] * TIE >= top), key=_accuracy)
    loss = verdicts.loss(chosen.id)
    good = [f"{v.label} ({_percent(v)})" for v in summary.variants if v.control and v.best and v.verdict != WORSE]
    aside = f", the control {' and '.join(good)} aside," if good else ""
    return Recommendation(
        chosen.id,
        (_what(chosen, best, metric, summary), _how_sure(loss, summary, aside)),
        "sure" if loss <= SMALL else "fairly sure" if loss <= LARGE else "not sure",
        _reason(metric, len(equal), aside),
    )


def _accuracy(variant: Result) -> float:
    return variant.best.mean if variant.best else -1.0


def _percent(variant: Result) -> str:
    return percent(_accuracy(variant))


def _right(variant: Result) -> str:
    return f"{_percent(variant)} of the test images right"


def _seeds(variant: Result) -> str:
    return count_seeds(len(variant.scores))


def _speed(variant: Result) -> str:
    """Its speed beside softmax, to end a sentence; empty where that was not measured or is softmax itself."""
    ratio = variant.get("inference_vs_softmax")
    if ratio is None or variant.attention == "softmax":
        return ""
    return ", at softmax's speed" if 1 / TIE < ratio < TIE else f", at {ratio:.2g}× softmax's speed"


def _lead(chosen: Result, summary: Summary) -> str:
    """The most accurate: by how much, where softmax is there to be compared with."""
    softmax = next((v for v in summary.variants if v.attention == "softmax" and v.verdict == WORSE), None)
    others = [_accuracy(v) for v in summary.variants if v is not chosen and v.best]
    more = ""
    if softmax:
        gain = 100 * (_accuracy(chosen) - _accuracy(softmax))
        more = f", {gain:.1f} points more than softmax ({_percent(softmax)})"
    elif others and _accuracy(chosen) > max(others):
        more = ", more than any other"
    return f"Use {chosen.label}: {_right(chosen)}{more}{_speed(chosen)}."


def _what(chosen: Result, best: Result, metric: str | None, summary: Summary) -> str:
    if chosen is not best:
        text = f"Use {chosen.label}: {_right(chosen)}, which {_seeds(best)} cannot tell from the most accurate, "
        return f"{text}{best.label} ({_percent(best)}){_speed(chosen)}."
    lead = _lead(chosen, summary)
    return lead[:-1] + "; none that equals it is more than 5 % faster." if metric else lead


def _how_sure(loss: float, summary: Summary, aside: str) -> str:
    sure = f"At 95\N{NO-BREAK SPACE}% confidence (over seeds, on these {summary.images:,} test images)"
    points = f"{100 * loss:.1f} points"
    if loss == 0:
        return f"{sure} every other variant{aside} is less accurate."
    if loss <= SMALL:
        return f"{sure} choosing it gives up at most {points} of accuracy."
    return f"{sure} it is at most {points} behind the truly best; more seeds would narrow that."


def _reason(metric: str | None, equal: int, aside: str) -> str:
    if equal == 1:
        return f"{TEST[0].upper()}{TEST[1:]} finds none{aside} as accurate, so speed did not have to decide."
    rule = f"Among the variants that {TEST} cannot tell from the most accurate"
    if metric is None:
        return f"{rule}, the most accurate; there was no speed to decide between them."
    return f"{rule}, the one with the highest {SPEEDS[metric]}; within 5\N{NO-BREAK SPACE}% of it, the more accurate."
