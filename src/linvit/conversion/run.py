"""A conversion from beginning to end: a list of steps, each of which is made once.

A step is done if the folder's ledger holds its record, or its folder holds weights. So a conversion that was killed at
any moment resumes, and ends with the same weights.

    DIR/convert.json  records.jsonl
    DIR/teacher  zero-shot                     the model for these images; the same with the new attention
    DIR/stage-1  stage-2                       trainings: attention by attention, then all blocks
    DIR/mix  stage-2-mix                       with max_drop: the mix of layers that the search found, and stage 2 again
    DIR/stage-3                                a training on the labels
    DIR/mix-decided                            with max_drop: another mix, if that was chosen
    DIR/best                                   the chosen model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linvit import metrics
from linvit.conversion.context import Context, StageResult
from linvit.conversion.images import few_images
from linvit.conversion.kernels import COUNT_IMAGES, FIT_IMAGES, feature_counts, fit_kernels
from linvit.conversion.measuring import measure_growth, measure_speeds
from linvit.conversion.mixing import FIRST_MIX, LayerSearch
from linvit.conversion.search import Drop
from linvit.conversion.stages import plan_steps, train_stage
from linvit.conversion.student import make_student
from linvit.files import write_atomically
from linvit.ledger import key_of
from linvit.models import VisionTransformer
from linvit.records import Record
from linvit.registry import join_layers, parse
from linvit.training.card import card
from linvit.training.checkpoint import load, save_config, save_model


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    folder: Path
    stages: Sequence[StageResult]  # the teacher first
    chosen: StageResult
    model: VisionTransformer  # of DIR/best
    records: Sequence[Record]

    def test_accuracy(self, model: str = "student") -> float:
        """Of the chosen student, or of the "teacher"."""
        tested = [r for r in self.records if r.metric == "conversion_accuracy" and r.tags.get("split") == "test"]
        return next(float(r.value or 0) for r in tested if r.tags.get("model") == model)


def run(c: Context) -> Converted:
    stages = c.conversion.stages
    c.result("teacher", c.store("teacher", lambda: c.teacher))
    c.ledger.once(key_of("conversion_depth"), lambda: [c.record("conversion_depth", c.config.depth)])
    layers = choose_layers(c)
    results = [c.result("zero-shot", c.store("zero-shot", lambda: zero_shot(c, layers)))]
    plan_steps(c, layers, results[0].folder)
    for stage in (1, 2):
        if stage in stages:
            results.append(train_stage(c, f"stage {stage}", layers, results[-1].folder))
    if c.conversion.max_drop is not None:
        chosen = search_layers(c, layers, results[-1].folder)
    else:
        if 3 in stages:
            results.append(train_stage(c, "stage 3", layers, results[-1].folder))
        chosen = max(results, key=lambda result: (result.accuracy, result.agreement))
    publish(c, chosen)
    test_once(c, chosen)
    write_atomically(c.folder / "best" / "README.md", model_card(c, chosen))
    measure_speeds(c, chosen.attention)
    measure_growth(c, chosen.attention)
    c.progress(1, 1, "converted")
    return Converted(c.folder, c.results, chosen, load(c.folder / "best"), list(c.ledger))


def choose_layers(c: Context) -> str:
    """The spec of all layers. Where a search chooses among them, each layer gets as many features as it needs."""
    spec = c.conversion.to
    if c.conversion.max_drop is None or set(spec) & set("+@"):
        return spec

    def counted() -> list[Record]:
        x = few_images(c.images.dataset.train, c.stored.about, COUNT_IMAGES).to(c.device)
        chosen = feature_counts(c.teacher, parse(spec), x)
        return [c.record("conversion_layers", len(chosen), attention=join_layers(chosen))]

    return str(c.ledger.once(key_of("conversion_layers"), counted).tags["attention"])


def zero_shot(c: Context, layers: str) -> VisionTransformer:
    """The student before any stage."""
    model = make_student(c.teacher, layers, c.conversion.inherit, c.conversion.seed).to(c.device)
    if c.conversion.inherit == "all":  # otherwise its q and k are not the teacher's
        x = few_images(c.images.dataset.train, c.stored.about, FIT_IMAGES).to(c.device)
        fit_kernels(model, c.teacher, x, c.progress)
    return model


def search_layers(c: Context, layers: str, student: Path) -> StageResult:
    """Search which layers can be linear, train that mix further, and decide between all mixes and stages."""
    search = LayerSearch(c, layers, student)
    results = [search.result(FIRST_MIX, search.first)]
    del search  # with its models, while others are trained
    for stage, name in ((2, "mix, stage 2"), (3, "stage 3")):
        if stage in c.conversion.stages and results[0].linear:
            results.append(train_stage(c, name, results[0].attention, results[-1].folder))
    return LayerSearch(c, layers, student).decide(results)


def publish(c: Context, chosen: StageResult) -> None:
    """Store the chosen model as DIR/best."""
    model, best, steps = load(chosen.folder), c.folder / "best", total_steps(c)
    save_config(best, model.config, c.images.dataset)
    scores = {"validation_accuracy": chosen.accuracy, "agreement": chosen.agreement}
    save_model(best, model, **scores, step=steps, stage=chosen.name)


def test_once(c: Context, chosen: StageResult) -> None:
    """Teacher and student on the test images, which are read here alone."""

    def tested() -> list[Record]:
        teacher, first = c.scored("teacher", c.folder / "teacher", "test", c.config.attention)
        student, second = c.scored("student", c.folder / "best", "test", chosen.attention)
        drop = Drop.between(*(one.predictions == one.labels for one in (teacher, student)))
        low, high = drop.interval()
        lost = c.record("conversion_lost", drop.value, drop.n, low=low, high=high)
        return [*first, *(record.tagged(stage=chosen.name) for record in second), lost]

    c.ledger.once(key_of("conversion_lost"), tested)


def total_steps(c: Context) -> int:
    return sum(result.steps for result in c.results)


def model_card(c: Context, chosen: StageResult) -> str:
    percent, teacher = metrics.percent, c.results[0]
    table = {
        "layers with linear attention": f"{chosen.linear} of {c.config.depth}",
        "validation accuracy": f"{percent(chosen.accuracy)} (teacher {percent(teacher.accuracy)})",
        "agreement with the teacher": percent(chosen.agreement),
        "chosen": chosen.name,
        "steps of all stages": total_steps(c),
    }
    for record in c.ledger.find("conversion_accuracy", split="test"):
        table[f"test accuracy, {record.tags['model']}"] = percent(record.value or 0.0)
    title = f"{c.conversion.data.name}: vision transformer with {chosen.attention}"
    return card(title, table, f"Converted from a model with {c.config.attention} by `linvit convert`.")
