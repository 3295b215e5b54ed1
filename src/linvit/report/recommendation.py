"""Which attention to use: the fastest of those that are shown to lose less than the margin to any other."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from linvit.files import slug
from linvit.report import statistics
from linvit.report.growth import GAIN, Growth, growth
from linvit.report.merit import ACCURACY, Merit
from linvit.report.statistics import ENOUGH, MOST
from linvit.report.summary import Result, Summary

TIE = 1.05  # a speed difference below 5 % is no reason

SPEEDS = {"inference_vs_softmax": "inference throughput beside softmax", "inference_throughput": "inference throughput"}
LOOKS = {"uniform": "which mixes tokens without looking", "identity": "which mixes no tokens"}


@dataclass(frozen=True)
class Recommendation:
    variant: str | None  # its id
    headline: str
    sentences: tuple[str, ...]  # what to do, why, and what is open
    confidence: str
    reason: str  # the rule that led there
    command: str = ""  # what would settle what is open
    attention_worth: str = ""  # on these images, beside a control
    growth: Growth | None = None  # how accuracy grows with training, if it is too early to tell


def recommend(summary: Summary) -> Recommendation:
    able = {v.id: v for v in summary.variants
            if v.best and not v.diverged and not v.control and v.column != "published"}  # fmt: skip
    if not able:
        nothing = f"no {summary.merit.title.lower()} was measured"
        why = "every variant diverged" if any(v.diverged for v in summary.variants) else nothing
        return Recommendation(
            None, "Nothing to recommend",
            (f"No attention can be recommended: {why}.", "Run the comparison to its end, then rebuild this page."),
            "nothing to judge", "A recommendation needs at least one variant that trained to its end.",
        )  # fmt: skip
    verdicts = summary.verdicts
    best = able[verdicts.best] if verdicts.best in able else max(able.values(), key=_score)
    speed = next((m for m in SPEEDS if all(v.get(m) for v in able.values())), None)
    found = _advice(summary, able, best, speed)
    if early := growth(summary, best, _deciding(able, best, found.variant, speed)):
        found = _too_early(summary, best, early)
    return _with_control(found, summary, best)


def _advice(summary: Summary, able: dict[str, Result], best: Result, speed: str | None) -> Recommendation:
    if len(able) == 1 and any(not (v.best or v.diverged or v.failed or v.control) for v in summary.variants):
        return Recommendation(
            None, "Not finished",
            (f"Only {best.label} is trained so far: it is {_right(best, summary)} in {_seeds(best, summary)}.",
             "The others are not: run the rest, then rebuild this page."),
            "not compared", "It is the only variant that was trained.",
        )  # fmt: skip
    if len(able) == 1:
        beside = "Beside it there were only controls and runs that diverged" if len(summary.variants) > 1 else ""
        return Recommendation(
            best.id, "The only one that can be used",
            (f"{best.label} is {_right(best, summary)}{_speed(best)}.",
             f"{beside or 'No other variant was trained'}: it was compared with none."),
            "not compared", "It is the only variant that can be recommended.",
        )  # fmt: skip
    lead = (f"{best.label} {_has_best(summary)} so far, {_right(best, summary)} in {_seeds(best, summary)}"
            f"{_speed(best)}.")  # fmt: skip
    few = [v for v in able.values() if v.verdict == statistics.UNKNOWN]
    if few or len(best.scores) < ENOUGH:
        who = able.values() if len(best.scores) < ENOUGH else [best, *few]
        what = "folds" if summary.folds else "seeds"
        return Recommendation(
            best.id, f"{summary.merit.best.capitalize()} so far",
            (lead,
             f"Whether another is as good cannot be told yet: every variant needs the same three {what} or more."),
            statistics.UNKNOWN,
            f"With fewer than three shared {what} the best is named, and nothing is claimed of the others.",
            again(summary, who, _in_seeds(max(ENOUGH, *(len(v.scores) for v in who)), summary)),
        )  # fmt: skip
    shown = [v for v in able.values() if v.standing.shown]
    chosen = _fastest(shown, speed) if shown else best
    faster = [v for v in able.values() if v.standing.undecided and v is not chosen and _is_faster(v, chosen, speed)]
    if shown:
        open_ones, text, command = _undecided(summary, faster, [])
        sentences = (_what(chosen, best, summary), _how_sure(chosen, summary), *open_ones, *text)
        return Recommendation(chosen.id, "Recommendation", sentences, summary.merit.within(summary.margin),
                              _reason(speed, len(shown), summary), command)  # fmt: skip
    open_ones, text, command = _undecided(summary, faster, [best])
    margin = summary.merit.amount(summary.margin)
    return Recommendation(
        best.id, f"{summary.merit.best.capitalize()} so far",
        (lead, *(open_ones or (f"It may still lose {margin} or more to another.",)), *text),
        statistics.OPEN, f"None is shown to lose less than {margin} to every other, so the best is named.",
        command,
    )  # fmt: skip


def _fastest(variants: Sequence[Result], speed: str | None) -> Result:
    """Of those within 5 % of the fastest, the best."""
    top = max(v.numbers[speed] for v in variants) if speed else 0.0
    return max((v for v in variants if not speed or v.numbers[speed] * TIE >= top), key=_score)


def _is_faster(variant: Result, than: Result, speed: str | None) -> bool:
    return speed is None or variant.numbers[speed] > TIE * than.numbers[speed]


def _deciding(able: dict[str, Result], best: Result, chosen: str | None, speed: str | None) -> list[Result]:
    """Whose difference to the best the choice rests on."""
    ruled_out = [v for v in able.values() if v.verdict == statistics.WORSE and _is_faster(v, best, speed)]
    return [*([able[chosen]] if chosen and chosen != best.id else []), *ruled_out]


def _undecided(
    summary: Summary, faster: Sequence[Result], also: Sequence[Result]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Who is open, what would settle it, and the command for that."""
    seeds, who, times = summary.verdicts.settle(v.id for v in [*faster, *also])
    if not who:
        return (), (), ""
    best = summary[summary.verdicts.best or who[0]]
    are = "is faster, but it is" if len(faster) == 1 else "are faster, but it is"
    whether = "loses" if len(faster) == 1 else "lose"
    margin = summary.merit.amount(summary.margin)
    names = _and(f"{v.label} ({_behind(v, best, summary.merit)})" for v in faster)
    lead = (f"{names} {are} undecided whether {'it' if len(faster) == 1 else 'they'} {whether} {margin} or more.",)
    lead = lead if faster else ()
    if len(summary.study.info.get("commands") or []) > 1 and summary.seeds > (1 if summary.folds else ENOUGH):
        return lead, (f"The difference lies too near {margin} for these seeds; `--margin` asks with another one.",), ""
    if math.isfinite(seeds):
        runs, count = [summary[name] for name in who], _in_seeds(seeds, summary)
        each = f", {summary.folds} folds each," if summary.folds else ""
        return lead, (f"About {count} seeds{each} would settle it:",), again(summary, runs, count)
    if math.isfinite(times) and times > 0:
        images = _rounded(max(1.1, times) * summary.images)
        return lead, (f"These {summary.images:,} test images cannot settle it; about {images:,} could.",), ""
    return lead, (f"Not even {_in_seeds(MOST, summary)} seeds would settle it: they differ too much.",), ""


def _in_seeds(runs: float, summary: Summary) -> int:
    """How many seeds are at least so many runs of a variant."""
    return math.ceil(runs / max(1, summary.folds))


def _behind(variant: Result, best: Result, merit: Merit) -> str:
    return f"{merit.signed(merit.sign * (_score(variant) - _score(best)))} {merit.unit}"


def _rounded(value: float) -> int:
    """Up, to two digits."""
    unit = 10 ** (math.floor(math.log10(value)) - 1)
    return int(math.ceil(value / unit) * unit)


def _too_early(summary: Summary, best: Result, early: Growth) -> Recommendation:
    info, words = summary.study.info, _words(summary)
    times = "twice the training" if early.doublings == 1 else f"{2**early.doublings} times the training"
    times = f"more than {times}" if early.more else times
    time = f" (about {early.budget} here)" if early.budget else ""
    if info.get("budget"):
        name, value = "budget", early.budget or info["budget"]
    else:
        name = "steps" if any(word.startswith("steps=") for word in words) else "epochs"
        value = f"{(info.get(name) or 1) * 2**early.doublings:g}"
    if words:
        out = next((b for a, b in pairwise(words) if a == "--out"), "")
        out = out or f"runs/compare-{slug(str(summary.study.dataset.get('name', 'images')))}"
        words = [f"steps={value}" if word.startswith("steps=") else word for word in words]
        option = [] if name == "steps" else [f"--{name}", value]
        command = _joined(_without(words, ("--out", "--budget", "--epochs")), [*option, "--out", f"{out}-longer"])
    else:
        quote = '"' if name == "budget" else ""
        command = f'linvit.compare(…, {name}={quote}{value}{quote}, out="…")'
    return Recommendation(
        None, "Too early to tell", (early.why, f"Try {times}{time} before choosing:"), "too early",
        f"A choice is made only when the best gains at most {summary.merit.amount(GAIN)} from twice the training, and "
        "differences that decide stay as they are.", command, growth=early,
    )  # fmt: skip


def _with_control(found: Recommendation, summary: Summary, best: Result) -> Recommendation:
    """What attention is worth on these images; said first if that is next to nothing."""
    controls = [v for v in summary.variants if v.control and v.best and not v.diverged]
    if not controls:
        return found
    control, merit = max(controls, key=_score), summary.merit
    name = control.attention.partition(":")[0]
    on = "on" if merit is ACCURACY else "at"
    is_ = f"is {'right ' * (merit is ACCURACY)}{on} {_number(control, summary)}"
    what = f"{control.label}, {LOOKS.get(name, 'a control')}, {is_}"
    if control.id not in summary.worth:
        gain = f"{merit.plain(_score(best) - _score(control))} {merit.unit}"
        return replace(
            found, attention_worth=f"In {_seeds(control, summary)}, attention was worth {gain} here: {what}."
        )
    gain, low, high = map(merit.plain, summary.worth[control.id])
    if control.standing.shown:
        text = f"These images hardly need attention: {what}, {best.label} {on} {_number(best, summary)}."
        return replace(found, sentences=(text, *found.sentences))
    worth = f"Attention is worth {gain} {merit.unit} here ({low} to {high}): {what}."
    return replace(found, attention_worth=worth)


def _words(summary: Summary) -> list[str]:
    """The first command of the study, as a shell takes it; none if it was a Python call."""
    try:
        return shlex.split((summary.study.info.get("commands") or [""])[0])
    except ValueError:
        return []


def _without(words: Iterable[str], valued: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip or word in flags or word in valued or word.partition("=")[0] in valued:
            skip = not skip and word in valued
            continue
        kept.append(word)
    return kept


def _joined(words: Sequence[str], more: Sequence[str]) -> str:
    """Options after `linvit compare`, before the data."""
    return shlex.join([*words[:2], *more, *words[2:]])


def again(summary: Summary, variants: Iterable[Result], seeds: int) -> str:
    """What trains these variants, and no other, with so many seeds."""
    specs = {v.id: v.attention for v in variants}
    words = _words(summary)
    names = [name.removesuffix(", next-pixel").partition(", from ")[0] for name in specs]
    usual = names == list(specs.values())  # start and task are the command's own
    if not words or not usual:
        what = "attentions" if all(name == spec for name, spec in specs.items()) else "variants"
        quoted = ", ".join(f'"{name}"' for name in specs)
        return f'linvit.compare(…, {what}=[{quoted}], seeds={seeds}, controls=False, out="…")'
    words = _without(words, ("-a", "--attention", "--seeds", "--jobs"), ("--controls", "--no-controls", "--dry-run"))
    chosen = [word for spec in dict.fromkeys(specs.values()) for word in ("-a", spec)]
    return _joined(words, [*chosen, "--seeds", str(seeds), "--no-controls"])


def _score(variant: Result) -> float:
    return sum(variant.scores.values()) / len(variant.scores) if variant.scores else -math.inf


def _number(variant: Result, summary: Summary) -> str:
    return summary.merit.show(variant.best and variant.best.mean)


def _right(variant: Result, summary: Summary) -> str:
    return summary.merit.says.format(_number(variant, summary))


def _has_best(summary: Summary) -> str:
    """The verb for the one that is best."""
    return f"{'is' if summary.merit is ACCURACY else 'needs'} the {summary.merit.best}"


def _seeds(variant: Result, summary: Summary) -> str:
    return summary.repeated(variant.seeds)


def _and(names: Iterable[str]) -> str:
    *most, last = list(names) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _speed(variant: Result) -> str:
    """Its speed beside softmax, to end a sentence; empty where that was not measured or is softmax itself."""
    ratio = variant.get("inference_vs_softmax")
    if ratio is None or variant.attention == "softmax":
        return ""
    return ", at softmax's speed" if 1 / TIE < ratio < TIE else f", at {ratio:.2g}× softmax's speed"


def _what(chosen: Result, best: Result, summary: Summary) -> str:
    behind, merit = chosen.standing.behind, summary.merit
    mine = f"Use {chosen.label}: {_right(chosen, summary)}"
    if chosen is best or behind is None:
        return f"{mine}, {'more' if merit is ACCURACY else 'fewer'} than any other{_speed(chosen)}."
    other = f"the {merit.best}, {best.label} ({_number(best, summary)})"
    level = round(merit.scale * behind, merit.digits) == 0
    near = f"as many as {other}" if level else f"{merit.plain(-behind)} {merit.unit} behind {other}"
    return f"{mine}, {near}{_speed(chosen)}."


def _how_sure(chosen: Result, summary: Summary) -> str:
    over = "over seeds and test images" if summary.sampled else f"over seeds, on these {summary.images:,} test images"
    over = f"over {summary.repeated(summary.seeds)}, corrected for the images they share" if summary.folds else over
    sure = f"At 95\N{NO-BREAK SPACE}% confidence ({over})"
    loss = chosen.standing.loses_at_most or 0.0
    if loss <= 0:
        return f"{sure} it is {summary.merit.more} than every other."
    rounded = min(summary.margin, math.ceil(1000 * loss - 1e-9) / 1000)
    return f"{sure} it loses less than {summary.merit.amount(rounded)} to any other."


def _reason(speed: str | None, shown: int, summary: Summary) -> str:
    margin = summary.merit.amount(summary.margin)
    if shown == 1:
        return f"It is the only one that is shown to lose less than {margin} to every other."
    rule = f"Among the variants that are shown to lose less than {margin} to every other"
    if speed is None:
        return f"{rule}, the best; there was no speed to decide between them."
    near = f"within 5\N{NO-BREAK SPACE}% of it, the {summary.merit.more}"
    return f"{rule}, the one with the highest {SPEEDS[speed]}; {near}."
