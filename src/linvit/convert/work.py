"""A conversion being done: every step once, in a folder whose records say that it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linvit import metrics
from linvit.convert import kernels, measuring, plan
from linvit.convert.mixing import FIRST, Mixing
from linvit.convert.plan import TASKS, Conversion
from linvit.convert.search import Drop
from linvit.convert.student import Images, feature_counts, linear_layers, some_images, student_of
from linvit.files import slug, write_atomically
from linvit.measure.accuracy import Evaluation, evaluate
from linvit.measure.provenance import provenance
from linvit.models import VisionTransformer
from linvit.progress import Progress, seconds
from linvit.records import Record, Records
from linvit.registry import Spec, join_layers, parse, parse_layers
from linvit.train import Experiment, create_recipe, load, run, start_from
from linvit.train import experiment as experiments
from linvit.train.checkpoint import Stored, read_model, save_config, save_model
from linvit.train.events import Listener, Noted, tell
from linvit.train.files import load_tensors
from linvit.train.loop import Training

TRIED = 2.0  # seconds of steps from which a budget is made


@dataclass(frozen=True)
class Row:
    """One model on the way, on validation images."""

    name: str
    accuracy: float
    agreement: float  # share of the images to which it gives the teacher's class
    attention: str
    linear: int  # layers
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Converted:
    """What a conversion leaves."""

    folder: Path
    rows: list[Row]
    chosen: Row
    model: VisionTransformer
    records: list[Record]

    def test_accuracy(self, model: str = "student") -> float:
        """Of the chosen student, or of the "teacher"."""
        found = [r for r in self.records if r.metric == "conversion_accuracy" and r.tags.get("split") == "test"]
        return next(float(r.value or 0) for r in found if r.tags.get("model") == model)


class Work:
    """One conversion in its folder."""

    def __init__(
        self, plan: Conversion, stored: Stored, images: Images, teacher: VisionTransformer, folder: Path,
        device: torch.device, listeners: Sequence[Listener], progress: Progress, checkpoint_seconds: float,
    ):  # fmt: skip
        self.plan, self.stored, self.images, self.folder, self.device = plan, stored, images, folder, device
        self.teacher, self.config = teacher.to(device), teacher.config  # for these images
        self.listeners, self.progress, self.checkpoint_seconds = listeners, progress, checkpoint_seconds
        self.records = Records(folder / "records.jsonl")
        base = {"dataset": plan.data.name, "seed": plan.seed}
        self.base = Record("", None, experiment=plan.id, **provenance(device, torch.float32), tags=base)
        self.rows: list[Row] = []
        self.said: dict[str, np.ndarray] = {}  # what the teacher says of the images of a split

    def all(self) -> Converted:
        self.row("teacher", self.write("teacher", lambda: self.teacher))
        if not self.of("conversion_depth"):
            self.keep([replace(self.base, metric="conversion_depth", value=self.config.depth, unit="count")])
        layers = self._layers()
        student = self.write("zero-shot", lambda: self._student(layers))
        rows = [self.row("zero-shot", student)]
        self._plan_steps(layers)
        for stage in (1, 2):
            if stage in self.plan.stages:
                rows.append(self._stage(f"stage {stage}", layers, student))
                student = self.model_folder(rows[-1])
        chosen = self._found(rows, layers, student) if self.plan.max_drop is None else self._mixed(layers, student)
        self._publish(chosen)
        self._test(chosen)
        measuring.speeds(self, chosen.attention)
        measuring.growth(self, chosen.attention)
        self.progress(1, 1, "converted")
        return Converted(self.folder, self.rows, chosen, load(self.folder / "best"), list(self.records))

    def _found(self, rows: list[Row], layers: str, student: Path) -> Row:
        """The most accurate on validation images of all that were made."""
        linear, done = linear_layers(self.specs(layers)), self.of("conversion_lost")
        if 3 in self.plan.stages and (linear or not done or self.of("conversion_seconds", model="stage 3")):
            rows.append(self._stage("stage 3", layers, student))
        return max(rows, key=lambda row: (row.accuracy, row.agreement))

    def _mixed(self, layers: str, student: Path) -> Row:
        """With max_drop: the search, what training makes of the mix that it finds, and the decision between them."""
        search = Mixing(self, layers, student)
        rows = [search.row(FIRST, search.first)]
        del search  # and its models, while others are trained
        for stage, name in ((2, "mix, stage 2"), (3, "stage 3")):
            if stage in self.plan.stages and rows[0].linear:
                rows.append(self._stage(name, rows[0].attention, self.model_folder(rows[-1])))
        return Mixing(self, layers, student).decide(rows)

    def specs(self, layers: str) -> list[Spec]:
        return parse_layers(layers, self.config.depth)

    def _student(self, layers: str) -> VisionTransformer:
        model = student_of(self.teacher, layers, self.plan.inherit, self.plan.seed).to(self.device)
        if self.plan.inherit == "all":  # else its q and k are not the teacher's
            images = some_images(self.images.data.train, self.stored.about, kernels.IMAGES).to(self.device)
            kernels.learn_kernels(model, self.teacher, images, self.progress)
        return model

    def _layers(self) -> str:
        """The spec with the number of features of each layer, where a search is to choose it."""
        spec = self.plan.to
        if self.plan.max_drop is None or set(spec) & set("+@"):
            return spec
        found = self.of("conversion_layers")
        if not found:
            chosen = feature_counts(self.teacher, parse(spec), self.images.data.train, self.stored.about)
            text = join_layers(chosen)
            row = replace(self.base, metric="conversion_layers", value=len(chosen), unit="count")
            self.keep([row.tagged(attention=text)])
            return text
        return str(found[-1].tags["attention"])

    def of(self, metric: str, **tags: Any) -> list[Record]:
        return [r for r in self.records if r.metric == metric and all(r.tags.get(k) == v for k, v in tags.items())]

    def keep(self, records: Sequence[Record]) -> None:
        self.records.append(records)

    def write(self, name: str, make: Callable[[], VisionTransformer]) -> Path:
        """A model's folder; the weights come last, so that a folder with weights is whole."""
        folder = self.folder / slug(name)
        if not (folder / "model.safetensors").exists():
            model = make()
            save_config(folder, model.config, self.images.data)
            save_model(folder, model)
        return folder

    def model_folder(self, row: Row) -> Path:
        return self._home(row.name) / "best" if row.name in TASKS else self.folder / slug(row.name)

    def _home(self, name: str) -> Path:
        """Of a training."""
        return self.folder / ("stage-2-mix" if name == "mix, stage 2" else slug(name))

    def evaluated(self, folder: Path, split: str) -> Evaluation:
        data, what = self.images.data, f"evaluating {folder.name} on {split} images"
        return evaluate(
            load(folder).to(self.device), self.images.part(split), data.classes, data.mean, data.std, self.device,
            batch=64, progress=lambda done, total, _: self.progress(done, total, what),
        )  # fmt: skip

    def _teacher_says(self, split: str) -> np.ndarray:
        if split not in self.said:
            self.said[split] = self.evaluated(self.folder / "teacher", split).predictions
        return self.said[split]

    def _measured(self, name: str, folder: Path, split: str, attention: str) -> tuple[Evaluation, list[Record]]:
        """With accuracy and agreement with the teacher."""
        found = self.evaluated(folder, split)
        if name == "teacher":
            self.said[split] = found.predictions
        agreement = float(np.mean(found.predictions == self._teacher_says(split)))
        tags = {"model": name, "split": split, "attention": attention, "linear": linear_layers(self.specs(attention))}
        row = replace(self.base, unit="fraction", n=len(found.labels)).tagged(**tags, **measuring.sizes(self.config))
        return found, [replace(row, metric="conversion_accuracy", value=found.accuracy),
                       replace(row, metric="conversion_agreement", value=agreement)]  # fmt: skip

    def row(self, name: str, folder: Path) -> Row:
        """One line of the result, measured on validation images unless it was before."""
        if not self.of("conversion_seconds", model=name):
            attention = read_model(folder).config.attention
            _, found = self._measured(name, folder, "validation", attention)
            steps, kept, spent = self._spent(name)
            mine = self.base.tagged(model=name)
            found += [replace(mine, metric="conversion_steps", value=steps, unit="count").tagged(kept=kept),
                      replace(mine, metric="conversion_seconds", value=spent, unit="s")]  # fmt: skip
            self.keep(found)
        where = {"model": name, "split": "validation", **measuring.sizes(self.config)}
        accuracy, agreement = (self.of(f"conversion_{what}", **where)[-1] for what in ("accuracy", "agreement"))
        steps, spent = (self.of(f"conversion_{what}", model=name)[-1].value for what in ("steps", "seconds"))
        tags = accuracy.tags
        row = Row(name, float(accuracy.value or 0), float(agreement.value or 0), str(tags["attention"]),
                  int(tags["linear"] or 0), int(steps or 0), float(spent or 0))  # fmt: skip
        self.rows.append(row)
        linear = f"{row.linear} of {self.config.depth} layers linear, " if name != "teacher" else ""
        text = f"{name}: {linear}{metrics.percent(row.accuracy)} on validation"
        tell(self.listeners, Noted(text + ("" if name == "teacher" else f", {metrics.percent(row.agreement)} as the "
                                           "teacher")))  # fmt: skip
        return row

    def _spent(self, name: str) -> tuple[int, int, float]:
        """Steps of a training, the one whose model was kept, and seconds."""
        if name not in TASKS:
            return 0, 0, 0.0
        folder = self._home(name)
        rows = {r.metric: r.value for r in Records(folder / "records.jsonl")}
        last, best = (load_tensors(folder / which / "model.safetensors")[1]["step"] for which in ("last", "best"))
        return last, best, float(rows.get("train_seconds") or 0.0)

    def _experiment(self, name: str, layers: str, start: Path, steps: int) -> Experiment:
        """One stage as a training."""
        task, options = TASKS[name], self.plan.options
        common = plan.common_recipe(self.stored, self.images.data, self.teacher.tokens, options)
        rate = options.get("lr", plan.rate(name, self.config.dim, common.batch_size))
        recipe = create_recipe(common, lr=rate, steps=steps)
        model = read_model(start).config
        return Experiment(
            data=experiments.Images(name=self.plan.data.name, identity=self.images.data.identity),
            model=model.model_copy(update={"attention": layers}), recipe=recipe, seed=self.plan.seed, task=task,
            start=start_from(start), label=name,
            teacher=None if task == "classification" else start_from(self.folder / "teacher"),
        )  # fmt: skip

    def _plan_steps(self, layers: str) -> None:
        """What a budget allows, from a few real steps of each stage."""
        shares = plan.shares(self.plan.stages, self.plan.max_drop is not None)
        if self.plan.steps or not self.plan.budget or not shares:
            return
        whole, steps, data = seconds(self.plan.budget), {}, self.images.data
        # evaluated whatever the length: teacher and student on both splits, and each stage where it begins and ends
        passes = len(data.validation) * (2 + 3 * len(shares)) + 2 * len(data.test)
        for name, share in shares.items():
            self.progress(len(steps), len(shares), f"timing {name}")
            experiment = self._experiment(name, layers, self.folder / "zero-shot", 1)
            training = Training(experiment, data, self.device, ())
            rate = training.rate(min(TRIED, whole / 50))
            validation = len(data.validation) / rate.images / training.per_epoch
            left = max(whole / 2, whole - passes / rate.images)
            steps[name] = max(1, int(share * left / (1 / rate.steps + validation)))
        self.plan = self.plan.model_copy(update={"steps": steps})
        self.plan.save(self.folder)

    def _stage(self, name: str, layers: str, start: Path) -> Row:
        folder = self._home(name)
        experiment = self._experiment(name, layers, start, self.plan.steps[name])
        found = run(experiment, self.images.data, folder, device=self.device, listeners=self.listeners,
                    checkpoint_seconds=self.checkpoint_seconds, test=False)  # fmt: skip
        if bad := next((r for r in found if r.metric == "diverged"), None):
            raise ValueError(f"{name} diverged at step {bad.value}, in {bad.tags.get('layer')}: choose a lower lr than "
                             f"{experiment.recipe.lr:g}, and another --out")  # fmt: skip
        return self.row(name, folder / "best")

    def _publish(self, row: Row) -> None:
        """The chosen model as DIR/best."""
        source, best = load(self.model_folder(row)), self.folder / "best"
        steps = sum(other.steps for other in self.rows)
        save_config(best, source.config, self.images.data)
        write_atomically(best / "README.md", measuring.card(self, row, steps))
        save_model(best, source, validation_accuracy=row.accuracy, agreement=row.agreement, step=steps, stage=row.name)

    def _test(self, row: Row) -> None:
        """Teacher and student on the test images, once."""
        if self.of("conversion_lost"):
            return
        teacher, first = self._measured("teacher", self.folder / "teacher", "test", self.config.attention)
        student, second = self._measured("student", self.folder / "best", "test", row.attention)
        drop = Drop.of(*(one.predictions == one.labels for one in (teacher, student)))
        low, high = drop.interval()
        lost = replace(self.base, metric="conversion_lost", value=drop.value, unit="fraction", n=drop.n)
        self.keep([*first, *(r.tagged(stage=row.name) for r in second), lost.tagged(low=low, high=high)])
        write_atomically(self.folder / "best" / "README.md", measuring.card(self, row, sum(r.steps for r in self.rows)))
