"""Which attention to use: the fastest of those that are shown to lose less than the margin to every other.

What would resolve an open question is proposed as changes to the last request, such as {"seeds": 12}.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from linvit.report import following, statistics
from linvit.report.comparison import ENOUGH, MAX_SEEDS
from linvit.report.following import Changes, longer, more_seeds
from linvit.report.growth import GAIN, Growth, growth
from linvit.report.merit import BITS, Merit
from linvit.report.summary import Summary, VariantResult, count_seeds
from linvit.requests import Request

TIE = 1.05  # a speed difference below 5 % is no reason

SPEEDS = {"inference_vs_softmax": "inference speed relative to softmax", "inference_throughput": "inference throughput"}


@dataclass(frozen=True)
class Recommendation:
    variant: str | None  # its id
    headline: str
    use: str  # what to use, why, and what to do next: a sentence or two each
    why: str
    next: str
    confidence: str
    reason: str  # the rule that was applied
    more: tuple[str, ...] = ()  # what else is open
    changes: Changes | None = None  # to the last request, that would resolve what is open; None: there are none
    request: Request | None = None  # another one, that uses the answer
    attention_worth: str = ""  # on these images, relative to a control
    growth: Growth | None = None  # how accuracy grows with training, if it is too early to decide


def recommend(summary: Summary) -> Recommendation:
    able = {v.id: v for v in summary.variants if v.best and not v.diverged and v.judged}
    if not able:
        return _nothing(summary)
    best = able[summary.verdicts.best] if summary.verdicts.best in able else max(able.values(), key=_score)
    open_to = [v for v in able.values() if v is best or v.standing.shown or v.standing.undecided]
    speed = next((m for m in SPEEDS if all(v.get(m) for v in open_to)), None)
    found = _alone(summary, best) if len(able) == 1 else _advice(summary, able, best, speed)
    if early := growth(summary, best, list(able.values()), *_deciding(able, best, found.variant, speed)):
        found = _too_early(summary, early)
    return _with_control(found, summary, best)


def _nothing(summary: Summary) -> Recommendation:
    real = [v for v in summary.variants if v.judged]
    every = bool(real) and all(v.diverged for v in real)
    why = "Every variant diverged." if every else f"No {summary.merit.title.lower()} was measured."
    return Recommendation(
        None,
        "Nothing to recommend",
        use="Nothing: no attention can be recommended.",
        why=why,
        next="Try a lower learning rate: --set lr=…" if every else "The same command completes the comparison:",
        confidence="no results",
        reason="A recommendation needs at least one variant that was trained to the end.",
        changes=None if every else {},
    )


def _alone(summary: Summary, best: VariantResult) -> Recommendation:
    """One variant that can be recommended, and nothing to compare it with."""
    if any(not (v.best or v.diverged or v.failed or v.control) for v in summary.variants):
        reached = f"{_score_of(best, summary)} ({_seeds(best, summary)})"
        return Recommendation(
            None,
            "Not finished",
            use="Nothing yet: the comparison is not finished.",
            why=f"Only {best.label} has been trained so far: {reached}.",
            next="The same command trains the others:",
            confidence="not compared",
            reason="It is the only variant that was trained.",
            changes={},
        )
    others = "All others are controls, were trained for a different time, or diverged"
    others = others if len(summary.variants) > 1 else "No other variant was trained"
    text, request = following.use(summary, best)
    return Recommendation(
        best.id,
        "The only usable variant",
        use=f"{best.label}: it is the only usable variant.",
        why=f"{_sentence(_score_of(best, summary))}{_speed(best)}. {others}, so it was not compared.",
        next=text,
        confidence="not compared",
        reason="It is the only variant that can be recommended.",
        request=request,
    )


def _advice(summary: Summary, able: dict[str, VariantResult], best: VariantResult, speed: str | None) -> Recommendation:
    merit = summary.merit
    margin, so_far = merit.amount(summary.margin), f"{merit.best.capitalize()} so far"
    lead = f"{best.label} for now: {_is_best(summary)} so far."
    reached = f"{_sentence(_score_of(best, summary))} ({_seeds(best, summary)}){_speed(best)}."
    few = [v for v in able.values() if v.verdict == statistics.UNKNOWN and v.id in summary.verdicts.names]
    if few or len(best.scores) < summary.enough:
        who = list(able.values()) if len(best.scores) < ENOUGH else [best, *few]
        runs = "folds" if summary.folds else "seeds"
        seeds = _in_seeds(max(ENOUGH, *(len(v.scores) for v in who)), summary)
        needs = f"every variant needs {ENOUGH} shared {runs} or more"
        return Recommendation(
            best.id,
            so_far,
            use=lead,
            why=f"{reached} Whether another variant is as good is not known: {needs}.",
            next=f"Train every variant with {count_seeds(seeds)}:",
            confidence=statistics.UNKNOWN,
            reason=f"With fewer than {ENOUGH} shared {runs}, the best is named; nothing is claimed about the others.",
            changes=more_seeds(summary, who, seeds),
        )
    shown = [v for v in able.values() if v.standing.shown]
    chosen = _fastest(summary, shown, speed) if shown else best
    faster = [v for v in able.values() if v.standing.undecided and v is not chosen and _is_faster(v, chosen, speed)]
    is_open, text, changes = _undecided(summary, faster, [] if shown else [best], speed)
    if shown:
        after, request = (text, None) if text else following.use(summary, chosen)
        return Recommendation(
            chosen.id,
            "Recommendation",
            use=_use(chosen, best, speed, summary),
            why=f"{_accuracy(chosen, best, summary)} {_confidence(chosen, summary)}",
            next=after,
            confidence=merit.within(summary.margin),
            reason=_reason(speed, len(shown), summary),
            more=(is_open,) if is_open else (),
            changes=changes,
            request=request,
        )
    if speed and not faster and len(able) > 1:
        lead = f"{best.label}: {_is_best(summary)} so far, and no variant that may be as good is faster."
    is_open = is_open or f"Another variant may still be more than {margin} better."
    return Recommendation(
        best.id,
        so_far,
        use=lead,
        why=f"{reached} {is_open}",
        next=text,
        confidence=statistics.OPEN,
        reason=f"No variant is shown to lose less than {margin} to every other, so the best is named.",
        changes=changes,
    )


def _fastest(summary: Summary, variants: Sequence[VariantResult], speed: str | None) -> VariantResult:
    """Of those within 5 % of the fastest, the best, over the seeds that they share."""
    top = max(v.numbers[speed] for v in variants) if speed else 0.0
    near = [v for v in variants if not speed or v.numbers[speed] * TIE >= top]
    ahead = summary.verdicts.ahead
    return max(near, key=lambda v: min((ahead(v.id, other.id) for other in near if other is not v), default=0.0))


def _is_faster(variant: VariantResult, than: VariantResult, speed: str | None) -> bool:
    """Or may be, where that was not measured."""
    own, other = (None if speed is None else v.get(speed) for v in (variant, than))
    return own is None or other is None or own > TIE * other


def _deciding(
    able: dict[str, VariantResult], best: VariantResult, chosen: str | None, speed: str | None
) -> tuple[list[VariantResult], list[VariantResult]]:
    """Those whose difference to the best the choice depends on; and the others, which matter if they overtake it."""
    known = [v for v in able.values() if v is not best and v.verdict != statistics.UNKNOWN]
    decide = [v for v in known if v.id == chosen or (v.verdict == statistics.WORSE and _is_faster(v, best, speed))]
    return decide, [v for v in known if v not in decide]


def _undecided(
    summary: Summary, faster: Sequence[VariantResult], also: Sequence[VariantResult], speed: str | None
) -> tuple[str, str, Changes | None]:
    """Which variants are open, what would resolve that, and the changes to the request."""
    seeds, who, times = summary.verdicts.settle(v.id for v in [*faster, *also])
    if not who:
        return "", "", None
    one, margin, count = len(faster) == 1, summary.merit.amount(summary.margin), f"{summary.images:,} test images"
    are = ("is" if one else "are") + " faster" if speed else "may be faster, which was not measured"
    names = _and(f"{v.label} ({_behind(v, summary.merit)})" for v in faster)
    whether = f"whether {'it loses' if one else 'they lose'} {margin} or more"
    lead = f"{names} {are}, but {whether} is undecided." if faster else ""
    runs = [summary[name] for name in who]
    if missing := [v for v in runs if v.missing]:
        what = f"{sum(v.missing for v in missing)} runs of this study are missing ({_and(v.label for v in missing)})"
        return lead, f"{what}; the same command completes them:", {}
    if summary.looks(who) > 1:
        text = (
            f"A second look did not resolve it: the difference is close to {margin}, or there are too few test images."
        )
        return lead, f"{text} Another margin may resolve it.", None
    if math.isfinite(seeds):
        needed = _in_seeds(seeds, summary)
        each = f" of {summary.folds} folds" if summary.folds else ""
        return lead, f"About {needed} seeds{each} would resolve it:", more_seeds(summary, runs, needed)
    if math.isfinite(times) and times > 0:
        images = _rounded(max(1.1, times) * summary.images)
        return lead, f"These {count} cannot resolve it; about {images:,} could.", None
    if summary.verdicts.too_few_images:
        return lead, f"These {count} cannot resolve it with any number of seeds, and seeds differ too much.", None
    return lead, f"Even {_in_seeds(MAX_SEEDS, summary)} seeds would not resolve it: they differ too much.", None


def _in_seeds(runs: float, summary: Summary) -> int:
    """How many seeds make at least this many runs of a variant."""
    return math.ceil(runs / max(1, summary.folds))


def _behind(variant: VariantResult, merit: Merit) -> str:
    """The difference to the best, over the seeds that both have."""
    return f"{merit.signed(merit.sign * (variant.standing.behind or 0.0))} {merit.unit}"


def _rounded(value: float) -> int:
    """Up, to two digits."""
    unit = 10 ** (math.floor(math.log10(value)) - 1)
    return int(math.ceil(value / unit) * unit)


def _too_early(summary: Summary, early: Growth) -> Recommendation:
    times = "twice" if early.doublings == 1 else f"{2**early.doublings} times"
    time = f" (about {early.budget} here)" if early.budget else ""
    changes = longer(summary, 2**early.doublings)
    return Recommendation(
        None,
        "Too early to tell",
        use="Nothing yet: it is too early to choose.",
        why=early.why,
        next=f"Train {'more than ' * early.more}{times} as long{time} before choosing{'' if changes is None else ':'}",
        confidence="too early",
        reason=f"A variant is recommended only if twice the training gains the best at most "
        f"{summary.merit.amount(GAIN)}, and the differences that decide do not change.",
        changes=changes,
        growth=early,
    )


def _with_control(found: Recommendation, summary: Summary, best: VariantResult) -> Recommendation:
    """What attention contributes on these images, among the reasons if that may be nothing; and what it can cost."""
    controls = [v for v in summary.variants if v.control and v.best and not v.diverged]
    if not controls:
        return found
    control, merit = max(controls, key=_score), summary.merit
    limit = _speed_limit(control, summary)
    reached = f"the control, {control.label}, has {_number(control, summary)}"
    if control.id not in summary.worth:
        gain = f"{merit.plain(_score(best) - _score(control))} {merit.unit}"
        seeds = _seeds(control, summary)
        return replace(found, attention_worth=f"In {seeds}, attention contributed {gain}: {reached}.{limit}")
    gain, low, high = map(merit.plain, summary.worth[control.id])
    if control.standing.shown and summary.worth[control.id][1] <= 0:
        text = f"Attention hardly matters on these images: {reached}, {best.label} {_number(best, summary)}."
        return replace(found, why=f"{found.why} {text}")
    worth = f"Attention contributes {gain} {merit.unit} (95 %: {low} to {high}): {reached}.{limit}"
    return replace(found, attention_worth=worth)


def _speed_limit(control: VariantResult, summary: Summary) -> str:
    """A control costs next to nothing: no attention can gain much more than it does, where nothing is faster."""
    speeds = [v.get("inference_vs_softmax") or 0.0 for v in summary.variants]
    ratio = control.get("inference_vs_softmax")
    if ratio is None or ratio < max(speeds):
        return ""
    if ratio < TIE:
        return " It is no faster than softmax: in this model attention takes next to no time."
    return f" It is {ratio:.2g}× as fast as softmax: no attention can make this model much faster than that."


def _score(variant: VariantResult) -> float:
    return sum(variant.scores.values()) / len(variant.scores) if variant.scores else -math.inf


def _number(variant: VariantResult, summary: Summary, other: VariantResult | None = None) -> str:
    """Its mean; with another variant, over the seeds that both have."""
    if other is None or set(other.scores) == set(variant.scores):
        return summary.merit.show(variant.best and variant.best.mean)
    shared = [variant.scores[run] for run in variant.scores if run in other.scores]
    return summary.merit.show(summary.merit.sign * sum(shared) / len(shared) if shared else None)


def _score_of(variant: VariantResult, summary: Summary, other: VariantResult | None = None) -> str:
    return summary.merit.says.format(_number(variant, summary, other))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _seeds(variant: VariantResult, summary: Summary) -> str:
    return summary.repeated(variant.seeds)


def _and(names: Iterable[str]) -> str:
    *most, last = list(names) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _speed(variant: VariantResult) -> str:
    """Its speed relative to softmax, to end a sentence; empty if it was not measured, and for the baseline itself."""
    ratio = variant.get("inference_vs_softmax")
    if ratio is None or variant.baseline:
        return ""
    return ", as fast as softmax" if 1 / TIE < ratio < TIE else f", {ratio:.2g}× as fast as softmax"


def _use(chosen: VariantResult, best: VariantResult, speed: str | None, summary: Summary) -> str:
    if chosen.baseline and speed:
        return f"{chosen.label}: nothing faster is shown to lose less than {summary.merit.amount(summary.margin)}."
    return f"{chosen.label}{_speed(chosen) or f': {_is_best(summary)}' * (chosen is best)}."


def _is_best(summary: Summary) -> str:
    return f"it {'needs' if summary.merit is BITS else 'is'} the {summary.merit.best}"


def _accuracy(chosen: VariantResult, best: VariantResult, summary: Summary) -> str:
    behind, merit = chosen.standing.behind, summary.merit
    lead = _sentence(_score_of(chosen, summary, best))
    if chosen is best or behind is None:
        others = (v for v in summary.variants if v is not chosen and v.best and not v.diverged)
        usual = next((v for v in others if v.baseline), None)
        which = f" ({usual.label}: {_number(usual, summary, chosen)})" if usual else ""
        extreme = "lowest" if merit is BITS else "highest"
        return f"{lead}{which}, the {extreme} of all variants{_aside(chosen, summary)}."
    other = f"{best.label}, the {merit.best} ({_number(best, summary, chosen)})"
    level = round(merit.scale * behind, merit.digits) == 0
    return f"{lead}, {f'the same as {other}' if level else f'{merit.plain(-behind)} {merit.unit} behind {other}'}."


def _confidence(chosen: VariantResult, summary: Summary) -> str:
    lead, loss = "With 95\N{NO-BREAK SPACE}% confidence,", chosen.standing.loses_at_most or 0.0
    aside = _aside(chosen, summary)
    if loss <= 0:
        return f"{lead} it is {summary.merit.more} than every other variant{aside}."
    rounded = min(summary.margin, math.ceil(1000 * loss - 1e-9) / 1000)
    return f"{lead} no other variant{aside} is better by {summary.merit.amount(rounded)} or more."


def _aside(chosen: VariantResult, summary: Summary) -> str:
    """Controls are compared with, but are no candidates."""
    controls = (v for v in summary.variants if v.control and v.best and not v.diverged)
    return " (controls aside)" if any(_score(v) > _score(chosen) for v in controls) else ""


def _over(summary: Summary) -> str:
    """What the confidence is of."""
    over = "seeds and test images" if summary.sampled else f"seeds, on these {summary.images:,} test images"
    if summary.folds:
        over = f"{summary.repeated(summary.seeds)} and their test images, corrected for shared training images"
        over = over if summary.sampled else f"{summary.repeated(summary.seeds)}, corrected for shared images"
    if summary.untrained:
        over = "test images; nothing was trained, so there are no seeds"
    return f"Confidence is over {over}."


def _reason(speed: str | None, shown: int, summary: Summary) -> str:
    margin = summary.merit.amount(summary.margin)
    rule = f"Of the variants that are shown to lose less than {margin} to every other"
    if shown == 1:
        text = f"It is the only variant that is shown to lose less than {margin} to every other."
    elif speed is None:
        text = f"{rule}, the best is chosen; no speed was measured."
    else:
        near = f"of those within 5\N{NO-BREAK SPACE}% of it, the {summary.merit.more} one"
        text = f"{rule}, the one with the highest {SPEEDS[speed]} is chosen; {near}."
    return f"{text} {_over(summary)}"
