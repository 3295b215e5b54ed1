"""Whether it is too early to decide: what half of the training and all of it show about longer training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linvit.report.merit import ACCURACY
from linvit.report.summary import Summary, VariantResult, number

GAIN = 0.05  # from half to whole: with more, the models are not trained to their limit
NOISE = 1.64  # standard errors that a difference may move by chance
MAX_DOUBLINGS = 6  # that are extrapolated
MINUTES = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 1440)


@dataclass(frozen=True)
class Growth:
    why: str
    doublings: int  # of the training, after which another would gain little
    more: bool  # even that many are too few
    budget: str  # for the whole command; empty if it is not known how long training took


def growth(
    summary: Summary,
    best: VariantResult,
    able: Sequence[VariantResult],
    deciding: Sequence[VariantResult],
    others: Sequence[VariantResult],
) -> Growth | None:
    """Why it is too early, and what would suffice; None if it is not, or if nothing was trained for half of the steps.

    The difference of `deciding` to the best must not change; `others` must not be about to overtake it."""
    known = [v for v in able if v.both and v.id in summary.verdicts.names]
    whom = best if best.both else max(known, key=lambda v: sum(_ends(v)), default=None)
    if whom is None:
        return None
    whole, half = _ends(whom)
    why = _why(summary, whom, whole - half, [(v, v in deciding) for v in (*deciding, *others) if v is not whom])
    if not why:
        return None
    if summary.merit is not ACCURACY:  # the lowest possible number of bits is not known
        return Growth(why, 1, True, _budget(summary, 1))
    left = max(1 - whole, 1e-9)
    ratio = min(1.0, left / max(1 - half, 1e-9))  # a doubling leaves this share of the error: a power law
    after = [left * ratio**k * (1 - ratio) for k in range(1, MAX_DOUBLINGS + 1)]  # what one more doubling would gain
    doublings = next((k for k, more in enumerate(after, 1) if more <= GAIN), MAX_DOUBLINGS)
    return Growth(why, doublings, after[-1] > GAIN, _budget(summary, doublings))


def gained(variant: VariantResult) -> float:
    """From half of the training to all of it; nothing where that is not known."""
    whole, half = _ends(variant) if variant.both else (0.0, 0.0)
    return whole - half


def _ends(variant: VariantResult) -> tuple[float, float]:
    """Its score after all of the training, and after half, over the runs that have both."""
    whole, half = (sum(of[run] for run in variant.both) / len(variant.both) for of in (variant.scores, variant.half))
    return whole, half


def _why(summary: Summary, best: VariantResult, gain: float, others: Sequence[tuple[VariantResult, bool]]) -> str:
    when, merit = "in the second half of training", summary.merit
    if gain > GAIN:
        return f"{best.label} still gained {merit.plain(gain)} {merit.unit} {when}: more training may change the order."
    for other, decides in others:
        moved, allowed = _moved(summary, best, other)
        passes = moved > allowed and summary.verdicts.ahead(other.id, best.id) + moved > summary.margin
        if (decides and abs(moved) > allowed) or passes:
            how = f"{'gained' if moved > 0 else 'lost'} {merit.plain(abs(moved))} {merit.unit} on"
            return f"{other.label} {how} {best.label} {when}: their order may still change."
    return ""


def _moved(summary: Summary, best: VariantResult, other: VariantResult) -> tuple[float, float]:
    """How far `other` gained on `best` from half to whole, and how far is allowed: the margin and noise."""
    seeds = [seed for seed in other.both if seed in best.both]
    variance, shared = summary.verdicts.deviation(other.id, best.id)
    if not seeds or shared < 2:
        return 0.0, math.inf
    rise = [(other.scores[s] - best.scores[s]) - (other.half[s] - best.half[s]) for s in seeds]
    return sum(rise) / len(seeds), summary.margin + NOISE * math.sqrt(2 * variance / len(seeds))


def _budget(summary: Summary, doublings: int) -> str:
    """The time of the whole command with this much more training, rounded up."""
    placement, spent = summary.study.placement, summary.study.seconds
    training = sum(number(r.value) or 0 for r in summary.evidence.of("train_seconds"))
    training /= placement.jobs if placement else 1
    measuring, whole = (spent.get(name, 0.0) for name in ("measuring", "all"))
    if whole > measuring:
        training = whole - measuring
    if not training:
        return ""
    minutes = (max(whole - training, measuring) + training * 2**doublings) / 60
    rounded = next((m for m in MINUTES if m >= minutes), 1440 * math.ceil(minutes / 1440))
    return f"{rounded}m" if rounded < 60 else f"{rounded / 60:g}h"
