"""The result of a conversion: what another attention costs in accuracy, and what it gains in speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from linvit.durations import duration
from linvit.metrics import METRICS, percent
from linvit.records import Record
from linvit.registry import parse_layers
from linvit.report import target
from linvit.report.evidence import Evidence, read
from linvit.report.result import NOTHING, Cell, Facts, Result, Section, Table, commands, facts
from linvit.requests import EvaluateRequest
from linvit.schemas.conversion import Conversion
from linvit.schemas.pixels import scaled

FEW = 500  # images below which one of them is worth a fifth of a point or more
INHERITED = {"all": "all weights", "not-qk": "all but q and k", "mlp": "all but attention"}
UNTOUCHED = "on which nothing was trained here"
show = METRICS["conversion_accuracy"].show


@dataclass(frozen=True)
class Step:
    """One model between teacher and student."""

    model: str
    attention: str
    replaced_layers: int
    validation_accuracy: float | None
    agreement: float | None  # with the teacher
    steps: int
    kept: int | None  # the step whose model was kept
    seconds: float
    test_accuracy: float | None
    images_per_s: float | None
    speed_vs_teacher: float | None
    chosen: bool


@dataclass(frozen=True)
class ConversionEvidence(Evidence[Conversion]):
    @property
    def here(self) -> dict[str, Any]:
        """Tags of what was measured with the student's images and patches."""
        return {"image_size": self.document.image_size, "patch_size": self.student.tags.get("patch_size")}

    @cached_property
    def student(self) -> Record:
        return self.of("conversion_accuracy", split="test", model="student")[-1]

    @cached_property
    def teacher(self) -> Record:
        return self.of("conversion_accuracy", split="test", model="teacher")[-1]

    @property
    def validated(self) -> int:
        """Validation images."""
        return self.of("conversion_accuracy", split="validation", model="teacher")[-1].n

    @property
    def layers(self) -> list[str]:
        """The attention of each layer of the student."""
        depth = int(self.value("conversion_depth") or 0)
        return [str(spec) for spec in parse_layers(str(self.student.tags["attention"]), depth)]

    @cached_property
    def steps(self) -> list[Step]:
        return [self._step(r) for r in self.of("conversion_seconds")]

    def _step(self, time: Record) -> Step:
        name = str(time.tags["model"])
        accuracy = self.of("conversion_accuracy", model=name, split="validation", **self.here)[-1]
        trained = self.of("conversion_steps", model=name)[-1]
        chosen, attention = self.student.tags.get("stage") == name, str(accuracy.tags["attention"])
        kept = trained.tags.get("kept")
        return Step(
            name,
            attention,
            int(accuracy.tags["replaced"] or 0),
            accuracy.value,
            self.value("conversion_agreement", model=name, split="validation", **self.here),
            int(trained.value or 0),
            None if kept is None else int(kept),
            float(time.value or 0),
            self.teacher.value if name == "teacher" else self.student.value if chosen else None,
            self.value("conversion_speed", model=attention, **self.here),
            self.value("conversion_vs_teacher", model=attention, **self.here),
            chosen,
        )


@dataclass(frozen=True, kw_only=True)
class ConversionResult(Result):
    kind = "conversion"

    evidence: ConversionEvidence

    def rows(self) -> list[dict[str, Any]]:
        return [vars(step) for step in self.evidence.steps]

    def numbers(self) -> dict[str, Any]:
        student, teacher = self.evidence.student, self.evidence.teacher
        accuracies = {"teacher_accuracy": teacher.value, "test_accuracy": student.value}
        return {"attention": student.tags["attention"], **accuracies, "rows": self.rows()}

    def sections(self) -> dict[str, Section]:
        from linvit.report import conversion_charts  # altair takes a second to import

        return conversion_charts.build(self.evidence)

    def context(self) -> dict[str, Any]:
        kinds = {} if target.kept(self.evidence) else dict.fromkeys(self.evidence.layers)
        return {"kinds": {spec: i for i, spec in enumerate(kinds)}}


def conversion_result(folder: Path | str, out: Path | None = None) -> ConversionResult:
    """Result of a conversion; nothing is written. `out`: the folder of the page."""
    folder = Path(folder)
    found = read(Conversion, folder)
    if not found.of("conversion_accuracy", split="test", model="student"):
        raise ValueError(f"{folder}: this conversion has not finished: run its command again")
    evidence = ConversionEvidence(found.document, found.records, found.warnings)
    conversion = evidence.document
    source = conversion.source
    images = {"data": source.data, "data_root": source.root, "limit": source.limit} if source else {}
    kept = bool(target.kept(evidence))
    sentences = [f"The layers are {evidence.student.tags['attention']}.", _lost(evidence), _chosen_on(evidence)]
    tables = [_table(evidence), *target.table(evidence)]
    if kept:  # of the stages, which are shown folded if there were any
        stages = [replace(tables[0], title="Stages")] if len(evidence.steps) > 1 else []
        tables = [replace(tables[1], title=""), *stages]
    return ConversionResult(
        title=f"{conversion.data.name} converted",
        headline=target.headline(evidence) if kept else _headline(evidence),
        sentences=target.sentences(evidence) if kept else sentences,
        limitations=[*found.warnings, *_limitations(evidence)],
        table=tables[0],
        details=[*tables[1:], *_decision(evidence)],
        facts=_facts(evidence),
        commands=commands([conversion.request] if conversion.request else []),
        suggested=target.suggested(evidence) if kept else [EvaluateRequest.of(model=folder, **images).command()],
        page=(out or folder) / "report.html",
        evidence=evidence,
    )


def _headline(evidence: ConversionEvidence) -> str:
    reached, had = (float(r.value or 0) for r in (evidence.student, evidence.teacher))
    share = "all" if reached >= had else percent(reached / had)
    kept = f"{share} of the accuracy kept" if had else "no accuracy to keep"
    size, attention = evidence.document.image_size, evidence.student.tags["attention"]
    fast = {
        side: evidence.value("conversion_vs_teacher", model=attention, **evidence.here | {"image_size": side})
        for side in (size, scaled(size, 2))
    }
    speeds = ", ".join(f"{value:.1f}\N{NO-BREAK SPACE}× at {side} px" for side, value in fast.items() if value)
    replaced = f"{evidence.student.tags['replaced']} of {len(evidence.layers)} layers replaced"
    return f"{replaced}, {kept}, {speeds.replace(' at', ' as fast at', 1)}".rstrip(", ")


def _lost(evidence: ConversionEvidence) -> str:
    """What the student lost, with its interval over test images."""
    reached, had = (percent(float(r.value or 0)) for r in (evidence.student, evidence.teacher))
    lead = f"Test accuracy {reached} (teacher: {had}) on {evidence.student.n:,} images"
    found = evidence.of("conversion_lost")
    if not found:
        return f"{lead}."
    low, high = (points(float(found[-1].tags[end] or 0)) for end in ("low", "high"))
    return f"{lead}: {points(found[-1].value)} points lost (95 %: {low} to {high})."


def _chosen_on(evidence: ConversionEvidence) -> str:
    """Which images the student was chosen on."""
    split, lead = evidence.document.decided_on, f"It was chosen on {evidence.validated:,} validation images"
    return lead + (f", its layers on other {split} images, {UNTOUCHED}." if split else ".")


def _limitations(evidence: ConversionEvidence) -> list[str]:
    found, taught, data = [], evidence.document.trained_on, evidence.document.data.name
    if taught == "":
        found.append(
            f"It is not known what the teacher was trained on: if that includes images of {data}, its accuracy and the "
            "loss differ on new images."
        )
    elif taught and taught != data and taught.partition(":")[0] == data.partition(":")[0]:
        found.append(f"The teacher was trained on {taught}, which may include images of {data}.")
    if evidence.student.tags.get("stage") == "stage 3":
        rows = [step for step in evidence.steps if step.model not in ("teacher", "stage 3")]
        before = f" Before that, it had {show(rows[-1].validation_accuracy)} on validation images." if rows else ""
        found.append(
            "The student was also trained on the labels, the teacher was not trained further: this gain hides part of "
            f"the loss.{before}"
        )
    for split, count in (("test", evidence.student.n), ("validation", evidence.validated)):
        if count < FEW:
            found.append(f"{count:,} {split} images: each is worth {100 / count:.2g} points.")
    speeds = evidence.of("conversion_vs_teacher", model=evidence.student.tags["attention"], **evidence.here)
    if speeds and float(speeds[-1].tags.get("high") or 1) < 1:  # in three of four rounds
        found.append(
            f"At {evidence.document.image_size} px the student is slower than the teacher: this attention needs more "
            "tokens (larger images or smaller patches; `linvit advise` shows how many)."
        )
    return found


def _table(evidence: ConversionEvidence) -> Table:
    rows = [
        {
            "Model": step.model,
            "Replaced layers": str(step.replaced_layers),
            "Validation": show(step.validation_accuracy),
            "Agreement": show(step.agreement),
            "Steps": _steps(step),
            "Time": duration(step.seconds),
            "Test": show(step.test_accuracy),
            "Inference": METRICS["conversion_speed"].show(step.images_per_s),
            "Speed": METRICS["conversion_vs_teacher"].show(step.speed_vs_teacher),
            "Verdict": Cell("chosen", look="good") if step.chosen else Cell(),
        }
        for step in evidence.steps
    ]
    chosen = next((i for i, step in enumerate(evidence.steps) if step.chosen), None)
    note = (
        "Models between teacher and student, evaluated on validation images. Agreement: images whose prediction is "
        "the teacher's. Speed: relative to the teacher; above 1× is faster."
    )
    return Table.of(rows, ["Verdict"], chosen=chosen, note=note)


def _steps(step: Step) -> str:
    """How many there were, and which model was kept if it is not the last."""
    return f"{step.steps:,}" + (
        f", kept after {step.kept:,}" if step.kept is not None and step.kept < step.steps else ""
    )


def _decision(evidence: ConversionEvidence) -> list[Table]:
    """What was examined on the images that decide, in this order."""
    rows = []
    for r in evidence.of("conversion_drop"):
        bound, risk, passed = float(r.tags["bound"] or 0), float(r.tags["risk"] or 0), bool(r.tags["passed"])
        verdict = Cell("passed" if passed else "not shown", look="good" if passed else "bad")
        drop = {"Drop, points": points(r.value), "Upper bound": points(bound), "Risk": f"{100 * risk:.2g} %"}
        rows.append({"Layers": str(r.tags["model"])} | drop | {"Verdict": verdict})
    if not rows:
        return []
    count, split = evidence.of("conversion_drop")[0].n, evidence.document.decided_on or "held-out"
    allowed = f"{100 * (evidence.document.max_drop or 0):g} %"
    note = (
        f"On {count:,} {split} images, {UNTOUCHED} and which did not guide the search. A mix passes if the upper bound "
        f"of its drop is within {allowed} of the teacher's accuracy. All share the risk: in at most 5 % of conversions "
        "one passes that loses more. The fastest that passed was chosen."
    )
    return [Table.of(rows, ["Verdict"], title="Choice of the layers", note=note)]


def points(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f}".replace("-", "−")


def _facts(evidence: ConversionEvidence) -> Facts:
    conversion, drop = evidence.document, evidence.document.max_drop
    found = {
        "Teacher": f"{Path(conversion.teacher.folder).name}, weights {conversion.teacher.sha256[:12]}",
        "Data": f"{conversion.data.name}, {conversion.image_size} px",
        "Patches": f"{conversion.patch_size} px" if conversion.patch_size else "",
        "Requested": "" if conversion.auto else ", ".join(conversion.to),
        "Stages": ", ".join(map(str, conversion.stages)) or "none",
        "Inherited": INHERITED[conversion.inherit],
        "Drop allowed": f"{100 * drop:g} % of the teacher's accuracy" if drop else "",
        "Steps": ", ".join(f"{name} {count}" for name, count in conversion.steps.items()),
        "Options": ", ".join(f"{name} {value}" for name, value in conversion.options.items()),
        "Seed": str(conversion.seed),
        "Test images": f"{evidence.student.n:,}, evaluated once with each of the two",
    }
    return facts(evidence, found, started=conversion.started)
