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
from dataclasses import dataclass, replace
from pathlib import Path

from linvit import metrics
from linvit.conversion.candidates import race_kinds
from linvit.conversion.context import Context, StageResult
from linvit.conversion.images import few_images
from linvit.conversion.kernels import COUNT_IMAGES, feature_counts
from linvit.conversion.measuring import BATCH_TOKENS, measure_growth, measure_speeds
from linvit.conversion.mixing import FIRST_MIX, Kind, LayerSearch
from linvit.conversion.search import Drop
from linvit.conversion.stages import plan_steps, train_stage
from linvit.conversion.student import in_place_of_softmax, make_student, zero_shot
from linvit.conversion.target import find_target
from linvit.files import write_atomically
from linvit.ledger import key_of
from linvit.models import VisionTransformer
from linvit.records import Record
from linvit.registry import Spec, join_layers, parse
from linvit.training.card import card
from linvit.training.checkpoint import load, save_config, save_model

LOCAL = Spec("window", {"size": 7})  # local softmax: a kind that the search of one attention tries as well
MAX_LOCAL_COST = 0.98  # of the teacher's multiply–accumulates; above, local softmax is not worth trying
LEAST_GAIN = 0.01  # share of the teacher's time that a kind saves at least, for the search


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
    c.ledger.once(key_of("conversion_depth"), lambda: [c.record("conversion_depth", c.config.depth)])
    chosen = find_target(c) if c.conversion.auto else convert(c)
    publish(c, chosen)
    test_once(c, chosen)
    write_atomically(c.folder / "best" / "README.md", model_card(c, chosen))
    if chosen.name != "teacher":
        measure_speeds(c, chosen.attention)
        measure_growth(c, chosen.attention)
    c.progress(1, 1, "converted")
    return Converted(c.folder, c.results, chosen, load(c.folder / "best"), list(c.ledger))


def convert(c: Context) -> StageResult:
    """To the attention that was asked for."""
    stages = c.conversion.stages
    c.result("teacher", c.store("teacher", lambda: c.teacher))
    kinds = [choose_layers(c, spec) for spec in c.conversion.to]
    made = c.store("zero-shot", lambda: zero_shot(c, kinds[0], c.conversion.inherit))
    results = [c.result("zero-shot", made)]
    plan_steps(c, kinds[0], results[0].folder)
    for stage in (1, 2):
        if stage in stages:
            results.append(train_stage(c, f"stage {stage}", kinds[0], results[-1].folder))
    if c.conversion.max_drop is not None:
        return search_layers(c, kinds, results[-1].folder)
    if 3 in stages:
        results.append(train_stage(c, "stage 3", kinds[0], results[-1].folder))
    return max(results, key=lambda result: (result.accuracy, result.agreement))


def choose_layers(c: Context, spec: str) -> str:
    """The spec of all layers. Where a search chooses among them, each layer gets as many features as it needs."""
    if c.conversion.max_drop is None or set(spec) & set("+@"):
        return spec

    def counted() -> list[Record]:
        x = few_images(c.images.dataset.train, c.stored.about, COUNT_IMAGES).to(c.device)
        chosen = feature_counts(c.teacher, parse(spec), x)
        return [c.record("conversion_layers", len(chosen), attention=join_layers(chosen), model=spec)]

    return str(c.ledger.once(key_of("conversion_layers", model=spec), counted).tags["attention"])


def search_layers(c: Context, layers: Sequence[str], student: Path) -> StageResult:
    """Search which layers can be replaced, train that mix further, and decide between all mixes and stages. The first
    kind of layers is the trained student's; the others have the teacher's weights."""
    kinds = [Kind(layers[0], folder=student), *(Kind(one) for one in [*layers[1:], *local_kind(c, layers)])]
    if len(kinds) > 1:
        kinds = with_savings(c, kinds)
    search = LayerSearch(c, kinds)
    results = [search.result(FIRST_MIX, search.first)]
    del search  # with its models, while others are trained
    for stage, name in ((2, "mix, stage 2"), (3, "stage 3")):
        if stage in c.conversion.stages and results[0].replaced:
            results.append(train_stage(c, name, results[0].attention, results[-1].folder))
    return LayerSearch(c, kinds).decide(results) or c.results[0]


def local_kind(c: Context, layers: Sequence[str]) -> list[str]:
    """The teacher with local softmax, where that fits the grid, takes less work and is not among the kinds."""
    if len(layers) > 1 or any(spec.name == LOCAL.name for spec in c.specs(layers[0])):
        return []
    spec = join_layers(in_place_of_softmax(LOCAL, c.specs(c.config.attention)))
    try:
        model = make_student(c.teacher, spec, "all", c.conversion.seed)
    except ValueError:
        return []
    return [spec] if model.macs() < c.teacher.macs() * MAX_LOCAL_COST else []


def with_savings(c: Context, kinds: Sequence[Kind]) -> list[Kind]:
    """With the time that each saves, by a race of whole models, relative to the fastest. One that is not faster than
    the teacher saves next to nothing."""
    tokens = c.config.tokens
    speeds = race_kinds(c, list(dict.fromkeys(kind.layers for kind in kinds)), max(1, min(64, BATCH_TOKENS // tokens)))
    gains = [max(LEAST_GAIN, 1 - 1 / speeds[kind.layers]) for kind in kinds]
    return [replace(kind, saving=gain / max(gains)) for kind, gain in zip(kinds, gains, strict=True)]


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
        student, second = teacher, [record.tagged(model="student") for record in first]
        if chosen.name != "teacher":
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
        "replaced layers": f"{chosen.replaced} of {c.config.depth}",
        "validation accuracy": f"{percent(chosen.accuracy)} (teacher {percent(teacher.accuracy)})",
        "agreement with the teacher": percent(chosen.agreement),
        "chosen": chosen.name,
        "steps of all stages": total_steps(c),
    }
    for record in c.ledger.find("conversion_accuracy", split="test"):
        table[f"test accuracy, {record.tags['model']}"] = percent(record.value or 0.0)
    title = f"{c.conversion.data.name}: vision transformer with {chosen.attention}"
    return card(title, table, f"Converted from a model with {c.config.attention} by `linvit convert`.")
