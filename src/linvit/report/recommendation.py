"""Which attention to use: the fastest of those that cannot be told from the most accurate."""

from __future__ import annotations

from dataclasses import dataclass

from linvit.report import statistics
from linvit.report.summary import Summary, Variant

TIE = 1.05  # a speed difference below 5 % is no reason
SMALL = 0.01  # an accuracy one may give up and still be sure

SURE = "At 95\N{NO-BREAK SPACE}% confidence"
HIGH, MODERATE, LOW, ALONE = "sure", "fairly sure", statistics.UNKNOWN, "not compared"
SPEEDS = {"inference_vs_softmax": "inference throughput beside softmax", "inference_throughput": "inference throughput"}


@dataclass(frozen=True)
class Recommendation:
    attention: str | None
    sentences: tuple[str, str]  # what and why; how sure
    confidence: str
    reason: str  # the rule that led there


def recommend(summary: Summary) -> Recommendation:
    verdicts = summary.verdicts
    able = {v.attention: v for v in summary.variants if v.best and not v.diverged and not v.control}
    if not able:
        why = "every variant diverged" if any(v.diverged for v in summary.variants) else "no test accuracy was measured"
        return Recommendation(
            None,
            (f"No attention can be recommended: {why}.", "Run the comparison to its end, then rebuild this page."),
            "nothing to judge", "A recommendation needs at least one variant that trained to its end.",
        )  # fmt: skip
    best = max(able.values(), key=_accuracy)
    if verdicts.best in able:
        best = able[verdicts.best]
    few = len(best.scores) < statistics.ENOUGH
    equal = [v for v in able.values() if v is best or v.verdict in (statistics.SAME, statistics.BETTER)]
    metric = next((m for m in SPEEDS if len(equal) > 1 and all(v.get(m) for v in equal)), None)
    chosen = best
    if metric and not few:
        top = max(v.numbers[metric] for v in equal)
        chosen = max((v for v in equal if v.numbers[metric] * TIE >= top), key=_accuracy)
    return Recommendation(
        chosen.attention,
        (_what(chosen, best, metric, few, len(summary.verdicts.names)), _how_sure(chosen, summary, few)),
        LOW if few else _confidence(chosen, summary),
        _reason(metric, few, len(equal), len(summary.verdicts.names)),
    )


def _accuracy(variant: Variant) -> float:
    return variant.best.mean if variant.best else -1.0


def _percent(variant: Variant) -> str:
    return f"{100 * _accuracy(variant):.1f}\N{NO-BREAK SPACE}%"


def _speed(variant: Variant) -> str:
    """How it answers beside softmax, in words; empty where that was not measured or is softmax itself."""
    ratio = variant.get("inference_vs_softmax")
    if ratio is None or variant.attention == "softmax":
        return ""
    if 1 / TIE < ratio < TIE:
        return "about as fast as softmax"
    return f"{ratio:.2g}× as fast as softmax"


def _what(chosen: Variant, best: Variant, metric: str | None, few: bool, compared: int) -> str:
    seeds = "one seed" if len(best.scores) == 1 else f"{len(best.scores)} seeds"
    speed = _speed(chosen)
    if few:
        return f"{chosen.attention} is the most accurate so far, {_percent(chosen)} of the test images in {seeds}" + (
            f", and {speed}." if speed else "."
        )
    if chosen is not best:
        text = f"Use {chosen.attention}: {_percent(chosen)} of the test images right, which {seeds} cannot tell from "
        return text + f"the most accurate, {best.attention} ({_percent(best)})" + (f", and {speed}." if speed else ".")
    if metric:
        text = f"Use {chosen.attention}: the highest accuracy, {_percent(chosen)} of the test images"
        return text + (f", and {speed}; " if speed else "; ") + "none that equals it is faster."
    text = f"Use {chosen.attention}: {_percent(chosen)} of the test images right"
    return text + (", more than any other" if compared > 1 else "") + (f", and {speed}." if speed else ".")


def _confidence(chosen: Variant, summary: Summary) -> str:
    loss = summary.verdicts.loss(chosen.attention)
    return ALONE if loss == float("inf") else HIGH if loss <= SMALL else MODERATE


def _how_sure(chosen: Variant, summary: Summary, few: bool) -> str:
    if few:
        return "Whether another is as good cannot be told from so few seeds: train three or more."
    loss = summary.verdicts.loss(chosen.attention)
    if loss == float("inf"):
        return "No other variant was trained to compare it with."
    if loss == 0:
        return f"{SURE} every other variant is less accurate."
    points = f"{100 * loss:.1f} points"
    if loss <= SMALL:
        return f"{SURE}, choosing it gives up at most {points} of accuracy."
    return f"{SURE} it is at most {points} behind the truly best; more seeds would narrow that."


def _reason(metric: str | None, few: bool, equal: int, compared: int) -> str:
    if compared < 2:
        return "It is the only variant that was trained to its end."
    if few:
        return "With fewer than three seeds the most accurate is named, and nothing is claimed about the others."
    if equal == 1:
        return (
            "A paired t-test over seeds (Holm-corrected, 95 %) finds none as accurate, so speed did not have to decide."
        )
    rule = (
        "Among the variants that a paired t-test over seeds (Holm-corrected, 95 %) cannot tell from the most accurate"
    )
    if metric:
        return f"{rule}, the one with the highest {SPEEDS[metric]}; within 5 % of it, the more accurate."
    return f"{rule}, the most accurate; there was no speed to decide between them."
