"""Speed and memory of every system of a report at the report's own tokens, widths, heads and batch; nothing is trained.

`linvit reproduce 001-sizes`: about 40 minutes on two cores on which nothing else runs, `000-sizes` 30, `002-sizes` 10.
These decide what the reports claim of speed and memory: a study at scale `cpu` may have a narrower model. Expected:
with 25 to 65 tokens no Performer trains faster than softmax, with 144 some do, with 257 those with 16 or 32 features;
memory grows with the number of features.

A race is of one table of the report: models of one shape, in random order, relative to softmax in the same shape. The
batch is the report's, or the largest power of two whose training step takes less than a third of the free memory; on a
CPU at most 64 of its images are timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import torch

from linvit.attention import BASELINE
from linvit.devices import amp_dtype, pick_device
from linvit.measure.memory import free_memory
from linvit.measure.models import side_by_side
from linvit.measure.timing import Timing
from linvit.models import ModelConfig
from linvit.pipeline.design import DataShape, resolve
from linvit.records import Record
from linvit.registry import Spec, parse
from linvit.report.vega import Series, data, panels, tooltips, x_axis, y_names
from linvit.schemas.recipe import Recipe
from linvit.studies.declaration import STUDIES, Figure, Options, PublishedStudy, Row, register
from linvit.studies.quiet import marked
from linvit.studies.run import Reproduction
from linvit.training.memory import peak_memory
from linvit.training.optimizers import make_optimizer

SHAPES = {"mnist": (28, 1, 10), "cifar10": (32, 3, 10), "tiny-imagenet": (64, 3, 200)}
SHARE = 3  # of the free memory: one part of so many is for a step
RACE_SECONDS = 180.0  # after which a race has no further rounds, once it has had the fewest
FEW = 4  # images by which the memory of more is foretold
SHOWN = {
    "train_step_vs_softmax": "training step",
    "inference_vs_softmax": "inference",
    "latency_vs_softmax": "one image",
    "peak_memory": "memory",
}


class System(NamedTuple):
    model: ModelConfig
    recipe: Recipe


@dataclass(frozen=True)
class Race:
    """Systems of one shape, by the names of their rows."""

    name: str  # a study's, and what else distinguishes it
    systems: Mapping[str, System]
    baseline: System  # softmax in the same shape

    @property
    def batch(self) -> int:
        return self.baseline.recipe.batch_size


def exact(spec: str) -> str:
    """Without the emulation of half precision, whose roundings take time that no GPU would."""
    found = parse(spec)
    return str(Spec(found.name, {key: value for key, value in found.options.items() if key != "half"}))


def system(study: PublishedStudy, row: Row, spec: str | None = None, own: bool = True, **more: Any) -> System:
    """A row of the literal column at the report's size; own: with the row's own options, else in the column's shape."""
    side, channels, classes = SHAPES[study.data]
    side = (row.literal_data.get("image_size") if own else None) or study.rerun("literal").image_size or side
    options = study.options("literal", "full") | (study.row_options("literal", "full", row) if own else {}) | more
    shape = DataShape(study.data, side, channels, classes)
    return System(*resolve(shape, exact(spec or row.literal or row.attention), 0, options))


def once(study: PublishedStudy) -> list[Row]:
    """Rows of the literal column that are another system, not only another training of one."""
    rows: dict[tuple[str, str], Row] = {}
    for row in study.rows_of("literal"):
        if not row.checkpoint and row.times == 1:
            rows.setdefault((row.literal or row.attention, str(row.literal_options)), row)
    return list(rows.values())


def table(name: str) -> PublishedStudy:
    found = STUDIES[name]
    assert isinstance(found, PublishedStudy)
    return found


def of_000() -> Iterator[Race]:
    """All systems in the Transformer's shape, and the Keras models in theirs."""
    for study in (table("000-mnist"), table("000-cifar10")):
        rows = once(study)
        own = [row for row in rows if row.literal_options]
        systems = {row.name: system(study, row, own=False) for row in rows}
        yield Race(study.name, systems, systems["transformer"])
        keras = {row.name: system(study, row) for row in own}
        yield Race(f"{study.name}, Keras", keras, system(study, own[0], BASELINE))


def of_001() -> Iterator[Race]:
    """Experiments I to IX. I to III have one ViT, with which their Performers are raced together."""
    for number in ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"):
        study = table(f"001-{number}")
        systems = {row.name: system(study, row) for row in once(study)}
        yield Race(study.name, systems, systems["ViT"])


def of_002() -> Iterator[Race]:
    """Each of its models as it is, relative to softmax in the same; and its kernels in one shape with 64 tokens."""
    for name in ("vit", "relu", *(f"elu-{i}" for i in (1, 2, 3, 4)), "gelu-4", "exp", "theta-mixture", "theta-mlp"):
        study = table(f"002-{name}")
        rows = [row for row in once(study) if "dropout" not in row.options]
        systems = {row.name: system(study, row) for row in rows}
        yield Race(study.name, systems, system(study, rows[0], BASELINE))
    study = table("002-relu")
    shape: dict[str, Any] = {"stem": "conv", "dim": 768, "depth": 1, "positions": "learned"}
    kernels = {name.upper(): f"literal:f={name},m=128" for name in ("relu", "elu", "gelu", "exp")}
    systems = {name: system(study, study.rows[0], spec, **shape) for name, spec in kernels.items()}
    yield Race("002, one shape", systems, system(study, study.rows[0], BASELINE, **shape))


RACES = {"000": of_000, "001": of_001, "002": of_002}


def largest_batch(race: Race, device: torch.device, wanted: int) -> int:
    """The report's batch, or the largest power of two that takes less than a share of the free memory."""
    systems = [race.baseline, *race.systems.values()]
    few = min(FEW, wanted)
    each = max(int(peak_memory(*one, device, few).value or 0) for one in systems) / few
    able = max(1, int(free_memory(device) / SHARE / max(each, 1.0)))
    return wanted if able >= wanted else 1 << able.bit_length() - 1


def measured(race: Race, size: Options, run: Reproduction) -> Iterator[Record]:
    """Times and memory, with one image and with the report's batch as far as memory allows, of which at most
    size["timed"] images are timed: more make no image faster on a CPU. variant: race: row."""
    device = pick_device(run.request.device)
    wanted = min(race.batch, size["batch"] or race.batch)
    largest = largest_batch(race, device, wanted) if wanted > 1 else 1
    for whole in dict.fromkeys((largest, 1)):
        batch, ending = min(whole, size["timed"] or whole), "" if whole > 1 or wanted == 1 else ", batch 1"
        names = {f"{race.name}: {row}{ending}": one for row, one in race.systems.items()}
        timing = Timing(batch=batch, rounds=size["rounds"], device=device, dtype=amp_dtype("auto", device))
        recipe = race.baseline.recipe.model_copy(update={"lr": 1e-12})
        yield from side_by_side(
            {name: one.model for name, one in names.items()},
            baselines={BASELINE: race.baseline.model},
            timing=timing,
            optimizer=lambda model, recipe=recipe: make_optimizer(recipe, model),
            progress=run.progress,
            deadline=time.monotonic() + RACE_SECONDS,
        )
        for name, one in {**names, f"{race.name}: {BASELINE}{ending}": race.baseline}.items():
            found = peak_memory(*one, device, whole)
            yield replace(found, tags={**found.tags, "variant": name})


def shrunk(one: System) -> System:
    """For scale smoke."""
    small: dict[str, Any] = {"depth": min(1, one.model.depth), "dim": 32, "heads": 2, "head_dim": 16}
    if one.model.block == "standard":
        small["mlp_dim"] = 16
    if one.model.stem != "patch":
        small["trunk"] = (4, 8)
    return System(ModelConfig(**one.model.model_dump() | small), one.recipe)


def measure(report: str, size: Options, run: Reproduction) -> Iterator[Record]:
    for race in RACES[report]():
        if size["small"]:
            first = dict(list(race.systems.items())[:2])
            race = Race(race.name, {row: shrunk(one) for row, one in first.items()}, shrunk(race.baseline))
        yield from marked(partial(measured, race, size, run))
        if size["small"]:
            return


def draw(records: Sequence[Record], folder: Path) -> alt.HConcatChart:
    memory = {str(r.tags["variant"]): r.value for r in records if r.metric == "peak_memory" and r.value}
    rows = []
    for record in records:
        name = str(record.tags["variant"])
        if record.metric not in SHOWN or not record.value or name.endswith(", batch 1"):
            continue
        race, value = name.partition(": ")[0], record.value
        if record.metric == "peak_memory":
            value = value / memory[f"{race}: {BASELINE}"]
        rows.append({"system": name, "race": race, "metric": record.metric, "at": value, "shown": f"{value:.2f}×"})
    series = Series(list(dict.fromkeys(row["race"] for row in rows)), "race")
    names = list(dict.fromkeys(row["system"] for row in rows))
    x, tips = x_axis("at", "relative to softmax", log=True, base=2), tooltips("system", "shown")
    charts = {}
    for metric, title in SHOWN.items():
        here = data([row for row in rows if row["metric"] == metric])
        points = here.mark_point(size=60, filled=True, opacity=0.9)
        charts[title] = points.encode(x=x, y=y_names("system", names), tooltip=tips, **series("color"))
    note = "Speeds above 1 are faster than softmax in the same shape; memory below 1 is less."
    return panels(charts, "Speed and memory at the report's own sizes", note, width=170, height=14 * len(names))


def sizes(report: str, what: str) -> Figure:
    large: dict[str, Any] = {"rounds": 15, "batch": None, "timed": None, "small": False}
    return Figure(
        f"{report}-sizes",
        title=f"Speed and memory at the sizes of report {report}",
        about=f"""{what}, at the report's tokens, widths, heads and batch (as far as memory allows), without training:
        a training step, inference, one image, and peak memory, relative to softmax in the same shape. Run it on quiet
        cores: what was measured on busy ones is marked and decides nothing. Expected: with few tokens nothing is faster
        than softmax, and memory grows with the number of features.""",
        durations={"full": "minutes on a GPU", "cpu": "an hour", "smoke": "a minute"},
        measure=lambda size, folder, run: measure(report, size, run),
        draw=draw,
        scales={
            "full": large,
            "cpu": large | {"timed": 64},
            "smoke": {"rounds": 2, "batch": 1, "timed": 1, "small": True},
        },
        reduced={
            "cpu": "batches limited by memory, times with at most 64 images",
            "smoke": "one table, one narrow layer, one image",
        },
    )


register(
    sizes("000", "Every system in the Transformer's shape (16 and 144 tokens) and in the Keras model's"),
    sizes("001", "ViT and the three Performers of all nine experiments"),
    sizes("002", "Every model, and its kernels in one shape with 64 tokens"),
)
