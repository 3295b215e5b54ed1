"""The charts of a conversion's page."""

from __future__ import annotations

import math
from typing import Any

from linvit.metrics import METRICS
from linvit.records import Record
from linvit.report import target, vega
from linvit.report.conversion import ConversionEvidence, show
from linvit.report.result import Section
from linvit.schemas.conversion import MIN_SPEED
from linvit.schemas.pixels import parse_size, sides

VERDICTS = vega.Series(["teacher", "chosen", "loses too much", "too slow", "not shown", "not needed", "limit"], "kind")
KINDS = vega.Series(["teacher", "student"], "kind")


def build(evidence: ConversionEvidence) -> dict[str, Section]:
    accuracy, speed = (_growth(evidence, f"conversion_{name}", name.capitalize()) for name in ("accuracy", "speed"))
    scaled = "Validation images scaled to each size, or cut into smaller patches, with interpolated positions."
    timed = "Speed only: no model was trained or tested on larger images, as --image-size does."
    return {
        "front": Section("", [_candidates(evidence) or _stages(evidence)]),
        "mixes": Section("Replaced layers: accuracy and speed", [_by_layers(evidence), _by_speed(evidence)]),
        "growth": Section("More tokens", [accuracy, speed], scaled if accuracy else timed),
    }


def _stages(evidence: ConversionEvidence) -> vega.Chart:
    rows = [
        {
            "stage": step.model,
            "accuracy": step.validation_accuracy,
            "shown": show(step.validation_accuracy),
            "agreement": show(step.agreement),
            "kind": "teacher" if step.model == "teacher" else "student",
        }
        for step in evidence.steps
    ]
    tips = vega.tooltips("stage", ("shown", "validation accuracy"), ("agreement", "agreement with the teacher"))
    layers = vega.bars(rows, vega.x_axis("accuracy", domain=[0, 1.15], axis=False), KINDS, tips, "stage")
    return vega.Chart("stages", "Validation accuracy of each stage", vega.ROW * len(rows), layers, series=KINDS)


def _candidates(evidence: ConversionEvidence) -> vega.Chart | None:
    """The candidates' speed and accuracy, and the required speed."""
    raced = [one for one in target.candidates(evidence) if one.speed is not None]
    if not evidence.document.auto or not raced:
        return None
    had = evidence.value("conversion_accuracy", split="candidates", model=target.teacher_layers(evidence))
    points = [("teacher", "teacher", 1.0, had)]
    for one in raced:
        name = "no attention" if one.limit else one.name
        points.append((name, target.verdict(evidence, one).text, one.speed or 0.0, one.accuracy))
    rows: vega.Rows = [
        {"name": name, "kind": kind, "speed": speed, "accuracy": show(accuracy)}
        | {"shown": f"{speed:.2f}×" + ("" if accuracy is None else f", {show(accuracy)}")}
        for name, kind, speed, accuracy in sorted(points, key=lambda point: -point[2])
    ]
    x = vega.x_axis("speed", domain=[0, 1.6 * max(row["speed"] for row in rows)], axis=False)
    tips = vega.tooltips("name", ("kind", "verdict"), ("speed", "speed", ".2f"), "accuracy")
    layers = [*vega.bars(rows, x, VERDICTS, tips, "name", right=True), vega.threshold(MIN_SPEED, x)]
    note = f"Speed relative to the teacher and accuracy without training. Dashed: the required speed, {MIN_SPEED:g}×."
    if had is not None:
        least = (1 - (evidence.document.max_drop or 0.0)) * had
        note += f" Required accuracy: {show(least)}, which a mix with softmax or training may reach."
    return vega.Chart("candidates", "Candidates: speed and accuracy", vega.ROW * len(rows), layers, note, VERDICTS)


def _by_layers(evidence: ConversionEvidence) -> vega.Chart | None:
    picked, best = evidence.student.tags["attention"], dict[int, float]()
    rows = []
    for r in evidence.of("conversion_accuracy", split="search"):
        count, accuracy = int(r.tags["replaced"] or 0), float(r.value or 0)
        best[count] = max(accuracy, best.get(count, 0.0))
        about = {"shown": show(accuracy), "layers": r.tags["model"], "chosen": r.tags["model"] == picked}
        rows.append({"replaced": count, "accuracy": accuracy} | about)
    if not rows:
        return None
    counts = sorted(best)
    domain = [counts[0] - 0.4, counts[-1] + 0.4]
    x = vega.x_axis("replaced", "Replaced layers", domain=domain, values=counts, format="d", grid=False)
    y = vega.y_axis("accuracy", "Accuracy on the images of the search", format="~%", tickCount=6)
    base = vega.data(rows).encode(x=x, y=y, tooltip=vega.tooltips("layers", ("shown", "accuracy")))
    top = vega.data({"replaced": count, "accuracy": best[count]} for count in counts)
    layers = [
        top.mark_line(strokeWidth=2, color=vega.BLUE).encode(x=x, y=y),
        base.mark_point(filled=True, size=50, opacity=0.45, color=vega.BLUE),
        base.transform_filter("datum.chosen").mark_point(filled=False, size=260, strokeWidth=2, color=vega.ORANGE),
    ]
    note = "Every mix of layers that the search tried. Line: the best of each number. Ring: the chosen one."
    return vega.Chart("layers", "Accuracy and the number of replaced layers", 320, layers, note)


def _by_speed(evidence: ConversionEvidence) -> vega.Chart | None:
    ends = {one.tags["attention"]: one for one in (evidence.teacher, evidence.student)}
    rows: vega.Rows = []
    for r in evidence.of("conversion_speed", **evidence.here):
        spec = r.tags["model"]
        end = ends.get(spec)
        kind = str(end.tags["model"]) if end else "mix"
        accuracy = end.value if end else evidence.value("conversion_accuracy", split="search", model=spec)
        relative = evidence.value("conversion_vs_teacher", model=spec, **evidence.here)
        if accuracy is not None:
            shown = {"shown": show(accuracy), "pace": f"{r.value:,.0f}/s, {relative or 0:.2f}×", "layers": spec}
            rows.append({"kind": kind, "speed": r.value, "accuracy": accuracy} | shown)
    if len(rows) < 3:  # the table shows two
        return None
    speeds, top = (vega.padded(row[name] for row in rows) for name in ("speed", "accuracy"))
    x = vega.x_axis("speed", "Images per second (faster →)", domain=speeds, format="~s", tickCount=6)
    y = vega.y_axis("accuracy", "Accuracy", domain=[max(0, top[0]), top[1]], format="~%", tickCount=6)
    tips = vega.tooltips("kind", "layers", ("shown", "accuracy"), ("pace", "inference"))
    named = vega.data(row for row in rows if row["kind"] != "mix").encode(x=x, y=y)
    series = vega.Series([*KINDS.names, "mix"], "kind")
    layers = [
        vega.data(rows).mark_point(filled=True, size=130).encode(x=x, y=y, tooltip=tips, **series("color", "shape")),
        named.mark_text(dy=-14, style="quiet").encode(text="kind:N"),
    ]
    note = "Teacher and student: test images. Mixes: the images of the search, before they were trained as a whole."
    return vega.Chart("speed", "Accuracy and measured speed", 320, layers, note, series)


def _growth(evidence: ConversionEvidence, metric: str, title: str) -> vega.Chart | None:
    timed = metric == "conversion_speed"
    patches = len({r.tags.get("patch_size") for r in evidence.of("conversion_speed")}) > 1
    over = "Image tokens" if patches else "Height of the images in pixels"
    if isinstance(evidence.document.image_size, int) and not patches:
        over = "Side of the images in pixels"
    rows: vega.Rows = []
    for one in (evidence.teacher, evidence.student):
        kind = one.tags["model"]
        tags: dict[str, Any] = {"model": one.tags["attention"]} if timed else {"model": kind, "split": "growth"}
        for r in evidence.of(metric, **tags):
            size = _tokens(r) if patches else sides(parse_size(r.tags["image_size"]))[0]
            shown = {"shown": METRICS[metric].show(r.value), "times": _times(evidence, r) if timed else ""}
            rows.append({"kind": kind, "size": size, "value": r.value} | shown)
    sizes = sorted({row["size"] for row in rows})
    if len(sizes) < 2:
        return None
    x = vega.x_axis("size", over, values=sizes, grid=False)
    y = vega.y_axis(
        "value", "Images per second" if timed else title, zero=timed, format="~s" if timed else "~%", tickCount=6
    )
    layers = vega.lines(rows, x, y, KINDS, vega.tooltips("kind", ("size", "size", "d"), "shown"))
    if timed:
        student = vega.data(row for row in rows if row["kind"] == "student").encode(x=x, y=y)
        layers.append(student.mark_text(dy=-14, fontWeight=600).encode(text="times:N"))
    grown = "smaller patches" if patches else "larger images"
    return vega.Chart(f"growth-{title.lower()}", f"{title} with {grown}", 280, layers, series=KINDS)


def _times(evidence: ConversionEvidence, speed: Record) -> str:
    """The speed relative to the teacher's, on the same images."""
    same = {name: speed.tags.get(name) for name in ("model", "image_size", "patch_size")}
    found = evidence.value("conversion_vs_teacher", **same)
    return "" if found is None else f"{found:.1f} ×"


def _tokens(record: Record) -> int:
    patch = int(record.tags["patch_size"] or 1)
    return math.prod(side // patch for side in sides(parse_size(record.tags["image_size"])))
