"""`convert`: a trained vision transformer → the same with linear attention, stage by stage, each with its evidence.

A stage is an ordinary training in a folder of its own below the conversion's, so all that holds for trainings holds
here: killed at any moment, the same call goes on and ends with the same weights.

    DIR/convert.json  records.jsonl  report.html  report.md  results.csv
    DIR/teacher  DIR/zero-shot                       the model as it is for these images; with the new attention
    DIR/stage-1  DIR/stage-2                         trainings: attention by attention, then all blocks
    DIR/mix  DIR/stage-2-mix                         with max_drop: what the search chose, and stage 2 again
    DIR/stage-3                                      a training on the labels
    DIR/best/{config.json, model.safetensors, README.md}
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from linvit import metrics
from linvit.attention import ATTENTIONS
from linvit.convert import measuring
from linvit.convert.search import RISK, Blocks, Drop, Mix, Score, allowed, evaluations, greedy, images_needed
from linvit.convert.student import Images, Inherit, feature_counts, fitted, images_for, linear_layers, student_of
from linvit.data import Dataset
from linvit.errors import choices, clear
from linvit.files import remove_parts, slug, write_atomically
from linvit.locks import claimed, locked
from linvit.measure.accuracy import Evaluation, evaluate
from linvit.measure.provenance import pick_device, provenance
from linvit.models import ModelConfig, VisionTransformer
from linvit.progress import Progress, ignore, seconds
from linvit.records import Record, Records
from linvit.registry import Spec, join_layers, parse, parse_layers
from linvit.train import Experiment, Recipe, Source, Start, create_recipe, load, open_data, run, start_from
from linvit.train import experiment as experiments
from linvit.train.checkpoint import Stored, read_model, save_config, save_model
from linvit.train.defaults import tuned
from linvit.train.events import Listener, Noted, tell
from linvit.train.files import checksum, load_tensors
from linvit.train.loop import Training
from linvit.train.recipe import idle

FORMAT = 1  # of convert.json
OURS = ("experiment.json", "study.json", "records.jsonl", "report.html", "best")
TASKS = {"stage 1": "attention-matching", "stage 2": "distillation", "mix, stage 2": "distillation",
         "stage 3": "classification"}  # fmt: skip
SHARES = {"stage 1": 0.25, "stage 2": 0.5, "stage 3": 0.25}  # of all steps; two stages 2 have half of it each
RATES = {"stage 1": 0.2, "stage 2": 0.1, "mix, stage 2": 0.1, "stage 3": 0.02}  # over the width of the tokens
EPOCHS, STEPS = 4.0, 300  # of all stages together, if nothing else is asked for: the longer of the two
LOCAL = "window:size=7"  # a linear kind that the search tries too, where it is registered
DISCORDANT = 0.1  # share of the images, roughly, of which teacher and a mix may say different things by chance
TRIED = 2.0  # seconds of steps from which a budget is made


class Conversion(BaseModel):
    """All that decides a conversion; stored as convert.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    data: experiments.Images
    source: Source | None = None
    teacher: Start
    to: str  # the spec asked for
    stages: tuple[int, ...]
    inherit: Inherit = "all"
    max_drop: float | None = Field(None, gt=0, lt=1)  # share of the teacher's accuracy
    image_size: int
    seed: int = Field(0, ge=0)
    budget: str | None = None
    steps: dict[str, int] = Field(default_factory=dict)  # of each stage
    options: dict[str, Any] = Field(default_factory=dict)  # of the stages' recipes
    command: str = ""
    started: float = 0.0

    def settings(self) -> dict[str, Any]:
        """With a budget, the steps are what came of it."""
        derived = {"steps"} if self.budget else set()
        found = self.model_dump(mode="json", exclude={"source", "command", "started", *derived})
        return found | {"teacher": self.teacher.sha256}

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            found = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = clear(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path} is not a conversion of this linvit ({why}): choose another --out") from None
        if found.format != FORMAT:
            raise ValueError(f"{path} has format {found.format}, but this linvit reads {FORMAT}: choose another --out")
        return found

    def save(self, folder: Path) -> None:
        write_atomically(folder / "convert.json", self.model_dump_json(indent=1) + "\n")


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


def convert(
    model: str | Path,
    *,
    to: str,
    data: str | Path | Dataset,
    out: str | Path | None = None,
    stages: Sequence[int] = (1, 2, 3),
    inherit: Inherit = "all",
    max_drop: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    budget: str | None = None,
    seed: int = 0,
    device: str = "auto",
    data_root: str | Path | None = None,
    image_size: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    listeners: Sequence[Listener] = (),
    progress: Progress = ignore,
    checkpoint_seconds: float = 30.0,
    command: str = "",
    report: bool = True,
    **options: Any,
) -> Converted:
    """Turn a trained model into the same one with the attention `to`; the same call again goes on where it stopped.

    stages: 1, each attention matches the teacher's outputs; 2, all blocks match its features and classes; 3, labels.
    max_drop: share of the teacher's accuracy that may be lost, e.g. 0.01: as many layers are linear as that allows.
    epochs, steps or budget ("10m"): of all stages together. image_size: other than the teacher's, positions are
    interpolated. options: any of Recipe's. The test images are read once, at the end.
    """
    place, stored = pick_device(device), read_model(model)
    wanted = _stages(stages)
    if sum(length is not None for length in (epochs, steps, budget)) > 1:
        raise ValueError("give one of epochs, steps and budget")
    dataset, source = open_data(
        data, progress, root=data_root, image_size=image_size or stored.config.image_size, limit=limit,
        skip_bad=skip_bad,
    )  # fmt: skip
    images = images_for(dataset, stored.about, max_drop is not None, seed)
    for name in ("train", "validation", "test"):
        if not len(images.part(name)):
            raise ValueError(f"{dataset.name} has no {name} images, and a conversion needs some")
    if max_drop is not None and (left := len(images.decide)) < (fewest := images_needed(max_drop)):
        raise ValueError(
            f"max_drop={max_drop:g}: so small a drop can be shown on no fewer than {fewest:,} images, but "
            f"{dataset.name} leaves {left:,} of its training images to decide by"
        )
    config, tensors = fitted(stored, dataset)
    student_of(config, tensors, to, inherit, seed)  # what cannot be built is an error before anything is written
    recipe = _recipe(stored, images.data, options)
    known = {key: options[key] for key in sorted(options)}
    try:
        asked = Conversion(
            data=experiments.Images(name=dataset.name, identity=dataset.identity), source=source,
            teacher=Start(folder=str(stored.folder.resolve()), sha256=checksum(stored.tensors)), to=to, stages=wanted,
            inherit=inherit, max_drop=max_drop, image_size=dataset.image_size, seed=seed, budget=budget,
            steps={} if budget else _lengths(recipe, images.data, wanted, max_drop is not None, epochs, steps),
            options=known, command=command, started=time.time(),
        )  # fmt: skip
    except ValidationError as error:
        raise clear(error) from None
    if budget:
        seconds(budget)
    folder = Path(out) if out is not None else Path("runs") / f"{slug(dataset.name)}-convert-{asked.id}"
    with locked(folder):
        there = claimed(folder / "convert.json", asked, OURS)
        if there is None:
            asked.save(folder)
        remove_parts(folder, *(path for path in folder.iterdir() if path.is_dir()))
        work = Work(there or asked, stored, images, config, tensors, folder, place, listeners, progress,
                    checkpoint_seconds)  # fmt: skip
        found = work.all()
        if report:
            from linvit.report.conversion import build  # altair takes a second to import

            build(folder)
        return found


def _stages(stages: Sequence[int]) -> tuple[int, ...]:
    for stage in stages:
        if stage not in (1, 2, 3):
            raise ValueError(f"stage {stage} is not one of 1, 2, 3")
    return tuple(sorted(set(stages)))


def _names(stages: Sequence[int], search: bool) -> list[str]:
    """The trainings that there may be."""
    found = [f"stage {stage}" for stage in stages]
    return [*found, "mix, stage 2"] if search and 2 in stages else found


def _shares(stages: Sequence[int], search: bool) -> dict[str, float]:
    """Of the whole length, for each training."""
    found = {f"stage {stage}": SHARES[f"stage {stage}"] for stage in stages}
    total = sum(found.values())
    found = {name: share / total for name, share in found.items()}
    if search and "stage 2" in found:
        found["stage 2"] = found["mix, stage 2"] = found["stage 2"] / 2
    return found


def _recipe(stored: Stored, dataset: Dataset, options: dict[str, Any]) -> Recipe:
    """Of every stage, but for its rate and length: batches and augmentation as the teacher had them, or, where that is
    not known, as they suit the images."""
    for name in sorted(options):
        if name in ("epochs", "steps") or name not in Recipe.model_fields:
            known = [field for field in Recipe.model_fields if field not in ("epochs", "steps")]
            raise ValueError(f"a conversion has no option '{name}'" + choices(name, known))
    try:
        known = Experiment.read(stored.folder.parent / "experiment.json").recipe
        usual: dict[str, Any] = known.augmentation() | {"batch_size": known.batch_size}
    except ValueError:
        usual = tuned(dataset.name, dataset.image_size, dataset.channels)
        usual = {key: usual[key] for key in ("batch_size", "pad_crop", "flip") if key in usual}
        if dataset.image_size > 48:
            usual["batch_size"] = 64
    recipe = create_recipe(**usual | {"optimizer": "adamw", "redraw": 0, "weight_decay": 0.01} | options)
    for option, why in idle(recipe).items():
        if option in options:
            raise ValueError(f"{option}={options[option]} has no effect: {why}: leave it out")
    return recipe


def _lengths(
    recipe: Recipe, dataset: Dataset, stages: Sequence[int], search: bool, epochs: float | None, steps: int | None
) -> dict[str, int]:
    if epochs is not None and not epochs > 0:
        raise ValueError(f"epochs={epochs} must be more than 0")
    if steps is not None and steps < len(_names(stages, search)):
        raise ValueError(f"steps={steps} are too few for {len(_names(stages, search))} trainings")
    per_epoch = max(1, len(dataset.train) // recipe.batch_size)
    total = steps or max(1, round(epochs * per_epoch) if epochs else max(STEPS, round(EPOCHS * per_epoch)))
    return {name: max(1, round(share * total)) for name, share in _shares(stages, search).items()}


class Work:
    """A conversion being done in its folder: every step is done once, and its records say that it was."""

    def __init__(
        self, plan: Conversion, stored: Stored, images: Images, config: ModelConfig, tensors: dict[str, torch.Tensor],
        folder: Path, device: torch.device, listeners: Sequence[Listener], progress: Progress,
        checkpoint_seconds: float,
    ):  # fmt: skip
        self.plan, self.stored, self.images, self.config, self.tensors = plan, stored, images, config, tensors
        self.folder, self.device, self.listeners, self.progress = folder, device, listeners, progress
        self.checkpoint_seconds = checkpoint_seconds
        self.records = Records(folder / "records.jsonl")
        base = {"dataset": plan.data.name, "seed": plan.seed}
        self.base = Record("", None, experiment=plan.id, **provenance(device, torch.float32), tags=base)
        self.rows: list[Row] = []

    def all(self) -> Converted:
        plan = self.plan
        self._write("teacher", self._teacher)
        self._row("teacher", self.folder / "teacher")
        if not self.of("conversion_depth"):
            self._keep([replace(self.base, metric="conversion_depth", value=self.config.depth, unit="count")])
        layers = self._layers()
        self._write("zero-shot", lambda: student_of(self.config, self.tensors, layers, plan.inherit, plan.seed))
        self._row("zero-shot", self.folder / "zero-shot")
        self._plan_steps(layers)
        current, final = self.folder / "zero-shot", ["zero-shot"]
        for stage in (1, 2):
            if stage in plan.stages:
                current = self._stage(f"stage {stage}", layers, current)
                final.append(f"stage {stage}")
        if plan.max_drop is not None:
            mix = self._search(layers, current)
            layers, current, final = mix, self.folder / "mix", ["mix"]
            if 2 in plan.stages and linear_layers(self._specs(layers)):
                current = self._stage("mix, stage 2", layers, current)
                final.append("mix, stage 2")
        if 3 in plan.stages and linear_layers(self._specs(layers)):
            self._stage("stage 3", layers, current)
            final.append("stage 3")
        chosen = self._choose(final)
        self._publish(chosen)
        self._test(chosen)
        measuring.speeds(self, chosen.attention)
        measuring.growth(self, chosen.attention)
        self.progress(1, 1, "converted")
        return Converted(self.folder, self.rows, chosen, load(self.folder / "best"), list(self.records))

    def _specs(self, layers: str) -> list[Spec]:
        return parse_layers(layers, self.config.depth)

    @cached_property
    def exact(self) -> VisionTransformer:
        """The teacher."""
        return load(self.folder / "teacher").to(self.device)

    def _teacher(self) -> VisionTransformer:
        model = VisionTransformer(self.config)
        model.load_state_dict(self.tensors)
        return model

    def _layers(self) -> str:
        """The spec with the number of features of each layer, where a search is to choose it."""
        spec = self.plan.to
        if self.plan.max_drop is None or set(spec) & set("+@"):
            return spec
        found = self.of("conversion_layers")
        if not found:
            chosen = feature_counts(self.exact, parse(spec), self.images.data.train, self.stored.about)
            text = join_layers(chosen)
            self._keep([replace(self.base, metric="conversion_layers", value=len(chosen), unit="count").tagged(
                attention=text)])  # fmt: skip
            return text
        return str(found[-1].tags["attention"])

    def of(self, metric: str, **tags: Any) -> list[Record]:
        return [r for r in self.records if r.metric == metric and all(r.tags.get(k) == v for k, v in tags.items())]

    def _keep(self, records: Sequence[Record]) -> None:
        self.records.append(records)

    def _write(self, name: str, make: Any) -> None:
        """A model's folder; the weights come last, so that a folder with weights is whole."""
        folder = self.folder / name
        if not (folder / "model.safetensors").exists():
            model = make()
            save_config(folder, model.config, self.images.data)
            save_model(folder, model)

    def evaluated(self, folder: Path, split: str) -> Evaluation:
        data = self.images.data
        self.progress(0, 1, f"evaluating {folder.name} on {split} images")
        model = load(folder).to(self.device)
        return evaluate(model, self.images.part(split), data.classes, data.mean, data.std, self.device, batch=64)

    @cached_property
    def said(self) -> dict[str, np.ndarray]:
        """What the teacher says of the images of a split; filled as it is needed."""
        return {}

    def _teacher_says(self, split: str) -> np.ndarray:
        if split not in self.said:
            self.said[split] = self.evaluated(self.folder / "teacher", split).predictions
        return self.said[split]

    def _measured(self, name: str, folder: Path, split: str, attention: str) -> list[Record]:
        """Accuracy and agreement with the teacher."""
        found = self.evaluated(folder, split)
        if name == "teacher":
            self.said[split] = found.predictions
        agreement = float(np.mean(found.predictions == self._teacher_says(split)))
        tags = {"model": name, "split": split, "attention": attention, "image_size": self.config.image_size,
                "linear": linear_layers(self._specs(attention))}  # fmt: skip
        row = replace(self.base, unit="fraction", n=len(found.labels)).tagged(**tags)
        return [replace(row, metric="conversion_accuracy", value=found.accuracy),
                replace(row, metric="conversion_agreement", value=agreement)]  # fmt: skip

    def _row(self, name: str, folder: Path) -> Row:
        """One line of the result, measured on validation images unless it was before."""
        size = self.config.image_size
        if not self.of("conversion_seconds", model=name):
            attention = read_model(folder).config.attention
            found = self._measured(name, folder, "validation", attention)
            steps, spent = self._spent(name)
            mine = self.base.tagged(model=name)
            found += [replace(mine, metric="conversion_steps", value=steps, unit="count"),
                      replace(mine, metric="conversion_seconds", value=spent, unit="s")]  # fmt: skip
            self._keep(found)
        accuracy, agreement = (self.of(f"conversion_{what}", model=name, split="validation", image_size=size)[-1]
                               for what in ("accuracy", "agreement"))  # fmt: skip
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

    def _spent(self, name: str) -> tuple[int, float]:
        """Steps and seconds of a training."""
        if name not in TASKS:
            return 0, 0.0
        folder = self._home(name)
        rows = {r.metric: r.value for r in Records(folder / "records.jsonl")}
        return load_tensors(folder / "last" / "model.safetensors")[1]["step"], float(rows.get("train_seconds") or 0.0)

    def _home(self, name: str) -> Path:
        return self.folder / ("stage-2-mix" if name == "mix, stage 2" else slug(name))

    def _experiment(self, name: str, layers: str, start: Path, steps: int) -> Experiment:
        """One stage as a training."""
        task, plan = TASKS[name], self.plan
        rate = plan.options.get("lr", RATES[name] / self.config.dim)
        recipe = create_recipe(_recipe(self.stored, self.images.data, plan.options), lr=rate, steps=steps)
        model = read_model(start).config
        return Experiment(
            data=experiments.Images(name=plan.data.name, identity=self.images.data.identity),
            model=model.model_copy(update={"attention": layers}), recipe=recipe, seed=plan.seed, task=task,
            start=start_from(start), label=name,
            teacher=None if task == "classification" else start_from(self.folder / "teacher"),
        )  # fmt: skip

    def _plan_steps(self, layers: str) -> None:
        """What a budget allows, from a few real steps of each stage."""
        plan = self.plan
        shares = _shares(plan.stages, plan.max_drop is not None)
        if plan.steps or not plan.budget or not shares:
            return
        whole, steps = seconds(plan.budget), {}
        for name, share in shares.items():
            self.progress(len(steps), len(shares), f"timing {name}")
            experiment = self._experiment(name, layers, self.folder / "zero-shot", 1)
            training = Training(experiment, self.images.data, self.device, ())
            rate = training.rate(min(TRIED, whole / 50))
            validation = len(self.images.data.validation) / rate.images / training.per_epoch
            steps[name] = max(1, int(share * whole / (1 / rate.steps + validation)))
        self.plan = plan.model_copy(update={"steps": steps})
        self.plan.save(self.folder)

    def _stage(self, name: str, layers: str, start: Path) -> Path:
        folder = self._home(name)
        experiment = self._experiment(name, layers, start, self.plan.steps[name])
        found = run(experiment, self.images.data, folder, device=self.device, listeners=self.listeners,
                    checkpoint_seconds=self.checkpoint_seconds, test=False)  # fmt: skip
        if bad := next((r for r in found if r.metric == "diverged"), None):
            raise ValueError(f"{name} diverged at step {bad.value}, in {bad.tags.get('layer')}: choose a lower lr than "
                             f"{experiment.recipe.lr:g}, and another --out")  # fmt: skip
        self._row(name, folder / "best")
        return folder / "best"

    # The search of max_drop

    def _search(self, layers: str, student: Path) -> str:
        """The most linear mix of the student's and the teacher's blocks that is shown to stay within max_drop; written
        to DIR/mix."""
        linear = self._specs(layers)
        old = parse_layers(self.config.attention, self.config.depth)
        if not (self.folder / "mix" / "model.safetensors").exists():
            models, specs = [self.exact, load(student).to(self.device)], [old, linear]
            if (local := self._local()) is not None:
                models.append(local)
                specs.append([parse(LOCAL)] * len(old))
            mix = self._mix(models, specs)
            self._write("mix", lambda: self._mixed(mix, models, specs))
        self._row("mix", self.folder / "mix")
        return read_model(self.folder / "mix").config.attention

    def _local(self) -> VisionTransformer | None:
        """The teacher with local softmax, where there is one and it fits the grid."""
        if parse(LOCAL).name not in ATTENTIONS or parse(LOCAL).name in self.plan.to:
            return None
        try:
            return student_of(self.config, self.tensors, LOCAL, "all", self.plan.seed).to(self.device)
        except ValueError:
            return None

    def _mix(self, models: Sequence[VisionTransformer], specs: Sequence[Sequence[Spec]]) -> Mix:
        data, depth, kinds = self.images.data, self.config.depth, len(models) - 1
        blocks = Blocks(models, self.images.search, data.mean, data.std)

        def name(mix: Mix) -> str:
            return join_layers([specs[kind][i] for i, kind in enumerate(mix)])

        def scored(mixes: Sequence[Mix], found: Sequence[Score]) -> list[Record]:
            row = replace(self.base, metric="conversion_accuracy", unit="fraction", n=len(self.images.search))
            size = self.config.image_size
            return [replace(row, value=one.accuracy).tagged(
                        model=name(mix), split="search", image_size=size, loss=-one.likelihood,
                        linear=depth - mix.count(0))
                    for mix, one in zip(mixes, found, strict=True)]  # fmt: skip

        known: dict[str, Score] = {
            str(r.tags["model"]): Score(-float(r.tags["loss"] or 0), float(r.value or 0))
            for r in self.of("conversion_accuracy", split="search")
        }
        total = evaluations(depth, kinds)

        def scores(base: Mix, mixes: Sequence[Mix]) -> list[Score]:
            fresh = [mix for mix in dict.fromkeys(mixes) if name(mix) not in known]
            if fresh:
                self.progress(len(known), max(total, len(known) + 1), f"search: {name(base)}")
                found = blocks.scores(base, fresh)
                self._keep(scored(fresh, found))
                known.update({name(mix): score for mix, score in zip(fresh, found, strict=True)})
            return [known[name(mix)] for mix in mixes]

        exact, share = (0,) * depth, self.plan.max_drop or 0.0
        best = scores(exact, [exact])[0].accuracy
        slack = 2 * math.sqrt(DISCORDANT / len(self.images.search))
        candidates = greedy(depth, kinds, scores, enough=best, useless=best * (1 - share) - slack)
        deciding = Blocks(models, self.images.decide, data.mean, data.std)
        right = self._right(deciding, exact)

        def look(mix: Mix, risk: float) -> Drop:
            self.progress(total, total + 1, f"deciding: {name(mix)}")
            drop = Drop.of(right, self._right(deciding, mix))
            self._keep([self._dropped(drop, name(mix), risk)])
            return drop

        return allowed([found for linear, found in candidates.items() if linear], share, look) or exact

    def _dropped(self, drop: Drop, name: str, risk: float = RISK) -> Record:
        row = replace(self.base, metric="conversion_drop", value=drop.value, unit="fraction", n=drop.n)
        passed = drop.within(self.plan.max_drop or 0.0, risk)
        return row.tagged(model=name, bound=drop.bound(risk), risk=risk, of=drop.accuracy, passed=passed)

    def _right(self, blocks: Blocks, mix: Mix) -> np.ndarray:
        found = [(said[0].argmax(-1) == labels).cpu().numpy() for labels, said in blocks.logits(mix, [mix])]
        return np.concatenate(found)

    def _mixed(
        self, mix: Mix, models: Sequence[VisionTransformer], specs: Sequence[Sequence[Spec]]
    ) -> VisionTransformer:
        """One model with these blocks; the rest is the teacher's."""
        layers = join_layers([specs[kind][i] for i, kind in enumerate(mix)])
        model = student_of(self.config, self.tensors, layers, "all", self.plan.seed)
        states = [one.state_dict() for one in models]
        for key, value in model.state_dict().items():
            if key.startswith("blocks."):
                there = states[mix[int(key.split(".")[1])]]
                owners = [name for name in there if name.split(".")[2:] == key.split(".")[2:]]
                value.copy_(there[key if key in there else owners[0]])  # what layers share may get another owner
        return model

    # The result

    def _choose(self, names: Sequence[str]) -> Row:
        """The most accurate on validation images; with max_drop, of those that are shown to stay within it, if any."""
        rows = [row for row in self.rows if row.name in names]
        if self.plan.max_drop is not None and len(rows) > 1:
            rows = [row for row in rows if row.name == "mix" or self._stays(row)]
        return max(rows, key=lambda row: (row.accuracy, row.agreement))

    def _stays(self, row: Row) -> bool:
        name = f"{row.name}: {row.attention}"
        if not (found := self.of("conversion_drop", model=name)):
            labels = self.images.decide.labels
            right = [self.evaluated(folder, "decide").predictions == labels
                     for folder in (self.folder / "teacher", self._home(row.name) / "best")]  # fmt: skip
            self._keep([self._dropped(Drop.of(*right), name)])
            found = self.of("conversion_drop", model=name)
        return bool(found[-1].tags["passed"])

    def model_folder(self, row: Row) -> Path:
        return self._home(row.name) / "best" if row.name in TASKS else self.folder / row.name

    def _publish(self, row: Row) -> None:
        """The chosen model as DIR/best."""
        source, best = load(self.model_folder(row)), self.folder / "best"
        steps = sum(other.steps for other in self.rows)
        save_config(best, source.config, self.images.data)
        write_atomically(best / "README.md", measuring.card(self, row, steps))
        save_model(best, source, validation_accuracy=row.accuracy, agreement=row.agreement, step=steps, stage=row.name)

    def _test(self, row: Row) -> None:
        """Teacher and student on the test images, once."""
        if self.of("conversion_accuracy", split="test", model="student"):
            return
        self._keep([
            *self._measured("teacher", self.folder / "teacher", "test", self.config.attention),
            *(r.tagged(stage=row.name) for r in self._measured("student", self.folder / "best", "test", row.attention)),
        ])  # fmt: skip
        write_atomically(self.folder / "best" / "README.md", measuring.card(self, row, sum(r.steps for r in self.rows)))
