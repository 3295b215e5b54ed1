"""How a conversion that names no attention chose one: its candidates, and why softmax was kept if it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linvit.durations import duration
from linvit.metrics import METRICS, percent
from linvit.registry import parse_layers
from linvit.report.result import Cell, Table, last_request
from linvit.requests import ConvertRequest
from linvit.schemas.conversion import MIN_SPEED, fast_enough
from linvit.schemas.pixels import ImageSize, parse_size, scaled, sides

if TYPE_CHECKING:
    from linvit.report.conversion import ConversionEvidence

NBSP = "\N{NO-BREAK SPACE}"
GAIN = f"{100 * (MIN_SPEED - 1):.0f}{NBSP}%"  # how much faster a candidate must be
show_speed, show_accuracy = METRICS["conversion_candidate"].show, METRICS["conversion_accuracy"].show


@dataclass(frozen=True)
class CandidateRow:
    """An attention in all layers that have softmax."""

    name: str
    layers: str
    speed: float | None  # relative to the teacher
    low: float | None
    high: float | None
    accuracy: float | None  # on the images of the search, nothing trained
    agreement: float | None
    images: int
    refused: str  # why it is not a candidate
    pays_from: ImageSize | None  # size of images from which it is fast enough, by forecast
    doubled: float | None  # its speed at twice the size, by forecast
    seconds: float | None  # of finding the target there
    limit: bool  # no attention at all


def candidates(evidence: ConversionEvidence) -> list[CandidateRow]:
    """The fastest first."""
    found = []
    for r in evidence.of("conversion_candidate"):
        layers = str(r.tags["model"])
        here = {"split": "candidates", "model": layers}
        pays = evidence.of("conversion_pays", model=layers)
        later: dict[str, Any] = pays[-1].tags if pays else {}
        accuracy = evidence.of("conversion_accuracy", **here)
        found.append(
            CandidateRow(
                short(layers),
                layers,
                None if r.value is None else float(r.value),
                r.tags.get("low"),  # type: ignore[arg-type]
                r.tags.get("high"),  # type: ignore[arg-type]
                accuracy[-1].value if accuracy else None,
                evidence.value("conversion_agreement", **here),
                accuracy[-1].n if accuracy else 0,
                str(r.tags.get("refused") or ""),
                parse_size(later.get("shape") or pays[-1].value) if pays and pays[-1].value else None,
                later.get("doubled"),
                later.get("seconds"),
                bool(r.tags.get("limit")),
            )
        )
    return sorted(found, key=lambda one: -(one.speed or 0.0))


def short(layers: str) -> str:
    """The spec of one layer, if all layers have the same."""
    parts = {part.partition("@")[0] for part in layers.split("+")}
    return parts.pop() if len(parts) == 1 else layers


def kept(evidence: ConversionEvidence) -> str:
    """Why the teacher is the result; empty if it is not."""
    found = evidence.of("conversion_kept")
    return str(found[-1].tags.get("why") or "") if found else ""


def mixed(evidence: ConversionEvidence) -> list[str]:
    """The attentions that were mixed with softmax."""
    found = evidence.of("conversion_target")
    return str(found[-1].tags.get("kinds") or "").split() if found else []


def headline(evidence: ConversionEvidence) -> str:
    """Where softmax was kept."""
    side, drop = evidence.document.image_size, 100 * (evidence.document.max_drop or 0)
    if kept(evidence) == "speed":
        return f"Keep softmax: at {side}{NBSP}px no other attention makes this model {GAIN} faster"
    lost = f"is shown to lose at most {drop:g}{NBSP}% of the accuracy"
    return f"Keep softmax: at {side}{NBSP}px no faster attention {lost}"


def sentences(evidence: ConversionEvidence) -> list[str]:
    """Where softmax was kept: the figures, and the image size at which that would change."""
    every = candidates(evidence)
    real = [one for one in every if one.speed is not None and not one.limit]
    found = []
    if kept(evidence) == "speed":
        if real:
            fastest = f"{real[0].name}, the fastest of {len(real)} candidates, runs at"
            found.append(f"{fastest} {show_speed(real[0].speed)} the speed of softmax.")
        found += [f"Without attention, the model runs at {show_speed(one.speed)}." for one in every if one.limit]
    else:
        found += _lost(evidence)
    if at := where(evidence):
        text = f"Forecast: {at.name} is {GAIN} faster than softmax from {at.pays_from} px"
        text += f", and {at.doubled:.1f}× as fast at {scaled(evidence.document.image_size, 2)} px" if at.doubled else ""
        takes = f"Converting at {at.pays_from} px takes up to about {duration(at.seconds or 0.0)}"
        found.append(f"{text}. {takes}.")
    elif kept(evidence) == "speed":
        found.append(f"Forecast: none is {GAIN} faster with images of up to 4 times this size.")
    accuracy = f"{show_accuracy(evidence.teacher.value)} on {evidence.teacher.n:,} test images"
    found.append(f"best/ is the teacher, with an accuracy of {accuracy}.")
    return found


def most_accurate(evidence: ConversionEvidence) -> CandidateRow | None:
    """Of the candidates that are fast enough."""
    fast = [one for one in candidates(evidence) if fast_enough(one.speed or 0.0) and one.accuracy is not None]
    return max(fast, key=lambda one: one.accuracy or 0.0, default=None)


def _lost(evidence: ConversionEvidence) -> list[str]:
    """What the candidates lose that are fast enough, and the best mix of them if one was decided on."""
    had = evidence.value("conversion_accuracy", split="candidates", model=teacher_layers(evidence)) or 0.0
    best, found = most_accurate(evidence), []
    if best and had:
        found.append(
            f"In all layers and without training, {best.name} is {show_speed(best.speed)} as fast as softmax and keeps "
            f"{percent((best.accuracy or 0.0) / had)} of its accuracy ({best.images:,} images); training may help."
        )
    decided = evidence.of("conversion_drop")
    if decided:
        r = min(decided, key=lambda one: float(one.tags["bound"] or 0.0))
        drop, bound, allowed = (
            100 * x
            for x in (
                float(r.value or 0),
                float(r.tags["bound"] or 0),
                (evidence.document.max_drop or 0.0) * float(r.tags["of"] or 0),
            )
        )
        found.append(
            f"The best mix with softmax lost {drop:.2f} points on {r.n:,} images, with an upper bound of {bound:.2f}; "
            f"{allowed:.2f} are allowed."
        )
    return found


def teacher_layers(evidence: ConversionEvidence) -> str:
    return str(evidence.teacher.tags["attention"])


def where(evidence: ConversionEvidence) -> CandidateRow | None:
    """The candidate that is fast enough at the smallest image size. Those within max_drop without training come first,
    and those that are exact softmax here, then those that keep half of the accuracy."""
    later = [one for one in candidates(evidence) if one.pays_from]
    had = evidence.value("conversion_accuracy", split="candidates", model=teacher_layers(evidence)) or 0.0

    def keeping(share: float) -> list[CandidateRow]:
        return [one for one in later if one.accuracy is None or one.accuracy >= share * had]

    best = keeping(1 - (evidence.document.max_drop or 0.0)) or keeping(0.5) or later
    return min(best, key=lambda one: (sides(one.pays_from or 0), -(one.doubled or 0.0)), default=None)


def suggested(evidence: ConversionEvidence) -> list[str]:
    """Commands where softmax was kept: to train the most accurate candidate that is fast enough, and to convert at the
    image size from which one is."""
    request = last_request([evidence.document.request])
    if not isinstance(request, ConvertRequest):
        return []
    found, at = [], where(evidence)
    if best := most_accurate(evidence):
        trained = {"to": (best.name,), "max_drop": evidence.document.max_drop, "stages": (1, 2), "budget": "30m"}
        found.append(request.replaced(out=None, **trained).command())
    if at is not None:
        found.append(request.replaced(image_size=at.pays_from, out=None).command())
    return found


def verdict(evidence: ConversionEvidence, one: CandidateRow) -> Cell:
    if one.limit:
        return Cell("limit", look="open")
    if one.refused:
        return Cell("not tested", (one.refused,), "open")
    if not fast_enough(one.speed or 0.0):
        return Cell("too slow", look="warn")
    chosen = {str(spec) for spec in evidence.layers}
    if not kept(evidence) and chosen & {str(spec) for spec in parse_layers(one.layers, len(evidence.layers))}:
        return Cell("chosen", look="good")
    had = evidence.value("conversion_accuracy", split="candidates", model=teacher_layers(evidence)) or 0.0
    least = (1 - (evidence.document.max_drop or 0.0)) * had
    if one.layers in mixed(evidence) and kept(evidence):
        return Cell("not shown", look="bad")
    return Cell("not needed", look="open") if (one.accuracy or 0.0) >= least else Cell("loses too much", look="bad")


def table(evidence: ConversionEvidence) -> list[Table]:
    """Of the candidates; none if the attention was named."""
    every = candidates(evidence)
    if not evidence.document.auto or not every:
        return []
    teacher = teacher_layers(evidence)
    base = {"split": "candidates", "model": teacher}
    accuracy, agreement = (evidence.value(f"conversion_{what}", **base) for what in ("accuracy", "agreement"))
    rows = [_row("teacher: " + short(teacher), "1.00×", "", accuracy, agreement, None, Cell())]
    for one in every:
        name = "no attention" if one.limit else one.name
        spread = "" if one.low is None or one.high is None else f"{one.low:.2f} to {one.high:.2f}"
        speed = show_speed(one.speed)
        rows.append(_row(name, speed, spread, one.accuracy, one.agreement, one.pays_from, verdict(evidence, one)))
    count = next((one.images for one in every if one.images), 0)
    note = (
        "Each attention in all layers that have softmax, with the teacher's weights and without training. Speed: "
        "inference of the whole model relative to the teacher, measured side by side on this machine; "
        f"{GAIN} faster is required."
    )
    if count:
        note += f" Accuracy and agreement with the teacher: on {count:,} images that guide the search."
    if any(one.pays_from for one in every):
        note += f" Fast from: the image size from which it is {GAIN} faster, by forecast."
    return [Table.of(rows, ["Verdict"], title="How the attention was chosen", note=note, open=True)]


def _row(
    name: str,
    speed: str,
    spread: str,
    accuracy: float | None,
    agreement: float | None,
    size: ImageSize | None,
    said: Cell,
) -> dict[str, Cell | str]:
    return {
        "Attention": name,
        "Speed": Cell(speed, (spread,) if spread else ()),
        "Accuracy, untrained": show_accuracy(accuracy),
        "Agreement": show_accuracy(agreement),
        "Fast from": f"{size} px" if size else "",
        "Verdict": said,
    }
