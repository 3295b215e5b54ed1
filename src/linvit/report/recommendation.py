"""Which attention to use: the fastest of those that are shown to lose less than the margin to any other."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

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
            if v.best and not v.diverged and v.judged}  # fmt: skip
    if not able:
        nothing = f"no {summary.merit.title.lower()} was measured"
        real = [v for v in summary.variants if v.judged]
        why = "every variant diverged" if real and all(v.diverged for v in real) else nothing
        return Recommendation(
            None, "Nothing to recommend",
            (f"No attention can be recommended: {why}.", "Run the comparison to its end, then rebuild this page."),
            "nothing to judge", "A recommendation needs at least one variant that trained to its end.",
        )  # fmt: skip
    verdicts = summary.verdicts
    best = able[verdicts.best] if verdicts.best in able else max(able.values(), key=_score)
    open_to = [v for v in able.values() if v is best or v.standing.shown or v.standing.undecided]
    speed = next((m for m in SPEEDS if all(v.get(m) for v in open_to)), None)
    found = _advice(summary, able, best, speed)
    if early := growth(summary, best, list(able.values()), *_deciding(able, best, found.variant, speed)):
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
        beside = (
            "Beside it there were only controls, other lengths of training and runs that diverged"
            if len(summary.variants) > 1
            else ""
        )
        return Recommendation(
            best.id, "The only one that can be used",
            (f"{best.label} is {_right(best, summary)}{_speed(best)}.",
             f"{beside or 'No other variant was trained'}: it was compared with none."),
            "not compared", "It is the only variant that can be recommended.",
        )  # fmt: skip
    lead = (f"{best.label} {_has_best(summary)} so far, {_right(best, summary)} in {_seeds(best, summary)}"
            f"{_speed(best)}.")  # fmt: skip
    few = [v for v in able.values() if v.verdict == statistics.UNKNOWN and v.id in summary.verdicts.names]
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
    chosen = _fastest(summary, shown, speed) if shown else best
    faster = [v for v in able.values() if v.standing.undecided and v is not chosen and _is_faster(v, chosen, speed)]
    if shown:
        open_ones, text, command = _undecided(summary, faster, [], speed)
        sentences = (_what(chosen, best, summary), _how_sure(chosen, summary), *open_ones, *text)
        return Recommendation(chosen.id, "Recommendation", sentences, summary.merit.within(summary.margin),
                              _reason(speed, len(shown), summary), command)  # fmt: skip
    open_ones, text, command = _undecided(summary, faster, [best], speed)
    margin = summary.merit.amount(summary.margin)
    return Recommendation(
        best.id, f"{summary.merit.best.capitalize()} so far",
        (lead, *(open_ones or (f"It may still lose {margin} or more to another.",)), *text),
        statistics.OPEN, f"None is shown to lose less than {margin} to every other, so the best is named.",
        command,
    )  # fmt: skip


def _fastest(summary: Summary, variants: Sequence[Result], speed: str | None) -> Result:
    """Of those within 5 % of the fastest, the best, over the seeds that they share."""
    top = max(v.numbers[speed] for v in variants) if speed else 0.0
    near = [v for v in variants if not speed or v.numbers[speed] * TIE >= top]
    ahead = summary.verdicts.ahead
    return max(near, key=lambda v: min((ahead(v.id, other.id) for other in near if other is not v), default=0.0))


def _is_faster(variant: Result, than: Result, speed: str | None) -> bool:
    """Or may be, where that was not measured."""
    mine, its = (None if speed is None else v.get(speed) for v in (variant, than))
    return mine is None or its is None or mine > TIE * its


def _deciding(
    able: dict[str, Result], best: Result, chosen: str | None, speed: str | None
) -> tuple[list[Result], list[Result]]:
    """Whose difference to the best the choice rests on; and the others, who would matter if they went on to pass."""
    known = [v for v in able.values() if v is not best and v.verdict != statistics.UNKNOWN]
    decide = [v for v in known if v.id == chosen or (v.verdict == statistics.WORSE and _is_faster(v, best, speed))]
    return decide, [v for v in known if v not in decide]


def _undecided(
    summary: Summary, faster: Sequence[Result], also: Sequence[Result], speed: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Who is open, what would settle it, and the command for that."""
    seeds, who, times = summary.verdicts.settle(v.id for v in [*faster, *also])
    if not who:
        return (), (), ""
    one, margin = len(faster) == 1, summary.merit.amount(summary.margin)
    are = ("is" if one else "are") + " faster" if speed else "may be faster, which was not timed"
    names = _and(f"{v.label} ({_behind(v, summary.merit)})" for v in faster)
    whether = "it loses" if one else "they lose"
    lead = (f"{names} {are}, but it is undecided whether {whether} {margin} or more.",) if faster else ()
    runs = [summary[name] for name in who]
    if missing := [v for v in runs if v.missing]:
        what = f"{sum(v.missing for v in missing)} runs of this study are missing, of {_and(v.label for v in missing)}"
        return lead, (f"{what}: the same command makes them.",), _last(summary)
    if summary.looks(who) > 1:
        text = f"After a second look it is still open: the truth lies near {margin}, or these images are too few"
        return lead, (f"{text}; `--margin` asks with another one.",), ""
    if math.isfinite(seeds):
        count = _in_seeds(seeds, summary)
        each = f", {summary.folds} folds each," if summary.folds else ""
        return lead, (f"About {count} seeds{each} would settle it:",), again(summary, runs, count)
    if math.isfinite(times) and times > 0:
        images = _rounded(max(1.1, times) * summary.images)
        return lead, (f"These {summary.images:,} test images cannot settle it; about {images:,} could.",), ""
    if summary.verdicts.too_few_images:
        text = f"These {summary.images:,} test images cannot settle it, whatever the seeds, and seeds differ much, too."
        return lead, (text,), ""
    return lead, (f"Not even {_in_seeds(MOST, summary)} seeds would settle it: they differ too much.",), ""


def _last(summary: Summary) -> str:
    return (summary.study.info.get("commands") or [""])[-1]


def _in_seeds(runs: float, summary: Summary) -> int:
    """How many seeds are at least so many runs of a variant."""
    return math.ceil(runs / max(1, summary.folds))


def _behind(variant: Result, merit: Merit) -> str:
    """The best, over the seeds that both have."""
    return f"{merit.signed(merit.sign * (variant.standing.behind or 0.0))} {merit.unit}"


def _rounded(value: float) -> int:
    """Up, to two digits."""
    unit = 10 ** (math.floor(math.log10(value)) - 1)
    return int(math.ceil(value / unit) * unit)


def _too_early(summary: Summary, best: Result, early: Growth) -> Recommendation:
    times = "twice the training" if early.doublings == 1 else f"{2**early.doublings} times the training"
    times = f"more than {times}" if early.more else times
    time = f" (about {early.budget} here)" if early.budget else ""
    return Recommendation(
        None, "Too early to tell", (early.why, f"Try {times}{time} before choosing:"), "too early",
        f"A choice is made only when the best gains at most {summary.merit.amount(GAIN)} from twice the training, and "
        "differences that decide stay as they are.", longer(summary, 2**early.doublings), growth=early,
    )  # fmt: skip


def longer(summary: Summary, times: int) -> str:
    """The same study with so many times the training, in a folder of its own. What a budget chose is kept: a larger
    one would buy a larger model and more seeds before it bought training."""
    info, words = summary.study.info, _words(summary)
    if words[1:2] == ["reproduce"]:  # whose lengths are its scales
        return _joined(_without(words, ("--scale",)), ["--scale", "full"])
    in_steps = any(word.startswith("steps=") for word in words)
    length = {"steps": times * int(info.get("steps") or 1)} if in_steps else {
        "epochs": f"{times * float(info.get('epochs') or 1):.4g}"
    }  # fmt: skip
    plan: dict[str, Any] = info.get("plan") or {} if info.get("budget") else {}
    kept = {"image_size": plan["image_size"], "seeds": plan["seeds"], **plan["options"]} if plan else {}
    if not words:
        return f'linvit.compare(…, {", ".join(f"{key}={value}" for key, value in {**kept, **length}.items())}, out="…")'
    flags = {"--image-size": kept.pop("image_size", None), "--seeds": kept.pop("seeds", None),
             "--epochs": length.pop("epochs", None)}  # fmt: skip
    out = next((b for a, b in pairwise(words) if a == "--out"), "")
    out = out or f"runs/compare-{slug(str(summary.study.dataset.get('name', 'images')))}"
    words = _without(words, ("--out", "--budget", "--epochs", *(flag for flag in flags if flags[flag])))
    words = _unset(words, ("epochs", "steps", *kept))
    more = [word for flag, value in flags.items() if value for word in (flag, str(value))]
    for key, value in {**kept, **length}.items():
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        more += ["--set", f"{key}={text}"]
    return _joined(words, [*more, "--out", f"{out}-longer"])


def _unset(words: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Without the `--set KEY=…` of these."""
    gone = {i for i, word in enumerate(words) if i and words[i - 1] == "--set" and word.partition("=")[0] in keys}
    return [word for i, word in enumerate(words) if i not in gone and i + 1 not in gone]


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
    """What trains these variants with so many seeds, and no other if that can be said in a command."""
    specs = {v.id: v.attention for v in variants}
    words = _words(summary)
    names = [name.removesuffix(", next-pixel").partition(", from ")[0] for name in specs]
    usual = names == list(specs.values()) and "--config" not in words  # start and task are the command's own
    margin = summary.margin != (summary.study.info.get("margin") or statistics.MARGIN)
    if not words:
        quoted = ", ".join(f'"{name}"' for name in specs)
        which = f"attentions=[{quoted}], " if all(name == spec for name, spec in specs.items()) else ""
        return f'linvit.compare(…, {which}seeds={seeds}{", controls=False" * bool(which)}, out="…")'
    more = ["--seeds", str(seeds), *(["--margin", f"{100 * summary.margin:g}"] if margin else [])]
    words = _without(words, ("--seeds", "--jobs", *(["--margin"] if margin else [])), ("--dry-run",))
    if not usual:
        return _joined(words, more)
    controls = all(len(v.scores) >= ENOUGH or v.diverged for v in summary.variants if v.control)
    words = _without(words, ("-a", "--attention"), ("--controls", "--no-controls") if controls else ())
    chosen = [word for spec in dict.fromkeys(specs.values()) for word in ("-a", spec)]
    return _joined(words, [*chosen, *more, *(["--no-controls"] if controls else [])])


def _score(variant: Result) -> float:
    return sum(variant.scores.values()) / len(variant.scores) if variant.scores else -math.inf


def _number(variant: Result, summary: Summary, beside: Result | None = None) -> str:
    """Its mean; beside another, over the seeds that both have."""
    if beside is None or set(beside.scores) == set(variant.scores):
        return summary.merit.show(variant.best and variant.best.mean)
    shared = [variant.scores[run] for run in variant.scores if run in beside.scores]
    return summary.merit.show(summary.merit.sign * sum(shared) / len(shared) if shared else None)


def _right(variant: Result, summary: Summary, beside: Result | None = None) -> str:
    return summary.merit.says.format(_number(variant, summary, beside))


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
    mine = f"Use {chosen.label}: {_right(chosen, summary, best)}"
    if chosen is best or behind is None:
        return f"{mine}, {'more' if merit is ACCURACY else 'fewer'} than any other{_speed(chosen)}."
    other = f"the {merit.best}, {best.label} ({_number(best, summary, chosen)})"
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
