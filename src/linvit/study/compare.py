"""`compare`: variants × seeds under one protocol, measured on this machine, reported on one page.

One data order and split for all; equal steps; parameters matched to softmax's by the width of the MLP. A finished part
is never run twice: the same call again goes on where it stopped, and a new variant or seed runs only what is new.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from linvit import metrics, report
from linvit.data import Dataset
from linvit.errors import clear
from linvit.files import remove_parts, slug
from linvit.locks import claimed, locked
from linvit.measure.models import side_by_side
from linvit.measure.provenance import machine
from linvit.measure.race import ROUNDS
from linvit.models import ModelConfig, VisionTransformer, match_parameters
from linvit.progress import Progress, ignore
from linvit.records import Record, Records, Tag
from linvit.registry import parse_layers
from linvit.study.design import OURS, Facts, Placing, Study, Variant, named
from linvit.study.jobs import Hear, Job
from linvit.study.measuring import Measuring
from linvit.study.runners import RUNNERS, Runner
from linvit.train import Experiment, Source, design, open_data, pick_device
from linvit.train.defaults import defaults
from linvit.train.tasks import TASKS

ATTENTIONS = ("softmax", "performer-exp:m=32", "performer-relu:m=32", "performer-theta:m=32", "linformer:k=16")
CONTROL = "uniform"
PER_VARIANT, PAGE = 8.0, 12.0  # seconds of a budget kept for each variant's memory and curves, and for the page
PROBE = 1.5  # seconds for which each way to place jobs is tried


def compare(
    data: str | Path | Dataset = "digits",
    *,
    attentions: Sequence[str] | None = None,
    variants: Sequence[Variant] = (),
    controls: bool = True,
    seeds: int = 3,
    seed: int = 0,
    epochs: float | None = None,
    budget: str | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    runner: str | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    data_root: str | Path | None = None,
    image_size: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    match: bool = True,
    command: str = "",
    hear: Hear = lambda job, event: None,
    progress: Progress = ignore,
    **options: Any,
) -> Path:
    """Train and measure every variant with every seed, write the report; the study's folder.

    attentions: one variant each; variants: whatever differs in more. controls: `uniform` is trained beside them. jobs:
    how many trainings at a time, each in a process with `threads` threads (1), or as another registered `runner` has
    it; without any of them the machine's faster way is measured. hear(job, event) is told of every training,
    progress(done, total, what) of all else.
    """
    begun = time.perf_counter()
    _check(seeds, epochs, budget, jobs, options)
    wanted = [Variant(attention=spec) for spec in attentions or (() if variants else ATTENTIONS)]
    wanted += variants
    if controls and not any(variant.control for variant in wanted):
        wanted.append(Variant(attention=CONTROL))
    place = pick_device(device)
    asked = {"root": data_root, "image_size": image_size, "limit": limit, "skip_bad": skip_bad}
    dataset, source = open_data(data, progress, **asked, patch_size=options.get("patch_size"))
    protocol = Protocol(dataset, source, seed, options | ({"epochs": epochs} if epochs is not None else {}), match)
    study = Study(
        commands=[command] if command else [], started=time.time(), dataset=Facts.of(dataset), source=source,
        variants=named(wanted), seeds=list(range(seed, seed + seeds)), model=protocol.base.model,
        recipe=protocol.base.recipe, match=match, budget=budget, machine=machine(),
    )  # fmt: skip
    for variant in study.variants:
        TASKS[variant.task]
        protocol.config(variant)  # a bad option is an error before anything is written
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(dataset.name)}"
    study = _with_earlier(folder, study)
    crew, before = Crew(protocol, study, place, runner, jobs, threads), torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)  # for what is measured here, too
        if study.steps is None:
            study.steps = protocol.base.length(len(dataset.train)).total
            if budget is not None:
                study.steps = _steps_within(budget, begun, protocol, study, crew.speedup(progress), place, progress)
        study.epochs = round(study.steps / protocol.base.length(len(dataset.train)).per_epoch, 3)
        with locked(folder):
            study = _with_earlier(folder, study)  # again: another process may have come first
            remove_parts(folder, folder / "figures")
            records, every = Records(folder / "records.jsonl"), protocol.jobs(study, folder, place)
            if any(not job.finished() for job in every):
                study.placing = crew.placing(progress)
            study.save(folder)
            _train(records, every, crew, hear)
            _measure(folder, records, study, protocol, every, place, progress, limit)
            report.build(folder)
    finally:
        crew.close()
        torch.set_num_threads(before)
    return folder


def _check(seeds: int, epochs: float | None, budget: str | None, jobs: int | None, options: dict[str, Any]) -> None:
    if seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if epochs is not None and budget is not None:
        raise ValueError("give epochs or a budget, not both")
    if budget is not None and options.get("steps") is not None:
        raise ValueError("give steps or a budget, not both")
    if budget is not None:
        seconds(budget)  # a wrong one is an error before anything is done


def _with_earlier(folder: Path, study: Study) -> Study:
    """The folder's own study with these variants and seeds added, or this one."""
    earlier = claimed(folder / "study.json", study, OURS)
    return study if earlier is None else earlier.extended(study)


@dataclass
class Protocol:
    """What makes variants comparable: the same images, order, steps and, if `match`, number of parameters."""

    dataset: Dataset
    source: Source | None
    seed: int
    options: dict[str, Any]
    match: bool

    @cached_property
    def base(self) -> Experiment:
        return design(self.dataset, "softmax", self.seed, source=self.source, **self.options)

    @cached_property
    def opened(self) -> dict[Source, Dataset]:
        """Of variants that want other images than the base."""
        return {}

    @property
    def datasets(self) -> dict[str, Dataset]:
        return {data.identity: data for data in (self.dataset, *self.opened.values())}

    def config(self, variant: Variant) -> ModelConfig:
        return self.experiment(variant).model

    def experiment(self, variant: Variant) -> Experiment:
        """The variant with the first seed; built once, so that a bad option is an error before anything is trained."""
        dataset, source = self._images(variant)
        found = design(
            dataset,
            variant.attention,
            self.seed,
            source=source,
            start=variant.start,
            task=variant.task,
            **self.options | variant.options,
        )
        parse_layers(variant.attention, found.model.depth)
        if self.match and variant.column == "fair" and variant.start is None and variant.attention != "softmax":
            rest = {key: value for key, value in variant.options.items() if key != "mlp_dim"}
            like = design(dataset, "softmax", self.seed, **self.options | rest).model
            model = match_parameters(found.model, VisionTransformer(like).parameter_count())
        else:
            model = VisionTransformer(found.model).config
        return found.model_copy(update={"model": model, "label": variant.label or variant.attention})

    def _images(self, variant: Variant) -> tuple[Dataset, Source | None]:
        if not variant.data:
            return self.dataset, self.source
        if self.source is None:
            raise ValueError(f"variant '{variant.id}' wants data options, but the images were given as they are")
        try:
            source = Source(**self.source.model_dump() | variant.data)
        except ValidationError as error:
            raise clear(error) from None
        if source not in self.opened:
            self.opened[source] = source.open()
        return self.opened[source], source

    def jobs(self, study: Study, folder: Path, device: torch.device) -> list[Job]:
        """One for each variant and seed, each in a folder of its own."""
        first = {variant.id: self.experiment(variant) for variant in study.variants if not variant.published}
        runs, found = study.runs(), []
        for number, (variant, seed) in enumerate(runs):
            experiment = first[variant.id]
            changes: dict[str, Any] = {"seed": seed, "model": experiment.model.model_copy(update={"seed": seed})}
            if study.budget is not None:
                changes["recipe"] = experiment.recipe.model_copy(update={"steps": study.steps})
            experiment = experiment.model_copy(update=changes)
            place = folder / f"{slug(variant.id)}-seed{seed}-{experiment.id[:6]}"
            found.append(Job(number=number, jobs=len(runs), variant=variant.id, experiment=experiment,
                             folder=str(place), device=str(device)))  # fmt: skip
        return found


class Crew:
    """Who does the jobs: as asked, or as an earlier call found to be faster, or as is found when there is work."""

    def __init__(
        self, protocol: Protocol, study: Study, device: torch.device, runner: str | None, jobs: int | None,
        threads: int | None,
    ):  # fmt: skip
        self.protocol, self.device, self.study = protocol, device, study
        self.runner: Runner | None = None
        whole = threads or torch.get_num_threads()
        if runner is None and jobs is not None and jobs > 1:
            runner = "processes"
        if runner == "here" and jobs not in (None, 1):
            raise ValueError(f"jobs={jobs} cannot be done at a time by the runner 'here'")
        if runner not in (None, "here") and protocol.source is None:
            raise ValueError(f"jobs={jobs} needs images that workers can find: give a name or a path, not a Dataset")
        if runner is not None and RUNNERS[runner] is not RUNNERS["here"]:
            self.known: Placing | None = Placing(runner=runner, jobs=jobs or 1, threads=threads or 1)
        elif runner or jobs == 1 or threads is not None or protocol.source is None or device.type != "cpu":
            self.known = Placing(runner="here", threads=whole)
        else:
            self.known = study.placing

    def placing(self, progress: Progress) -> Placing:
        """Where jobs run; the runner stands ready."""
        if self.known is None:
            self.known = self._measured(progress)
        if self.runner is None:
            self.runner = RUNNERS[self.known.runner](self.known.jobs, self.protocol.datasets)
        return self.known

    def _measured(self, progress: Progress) -> Placing:
        """One job on all cores, or as many at a time as there are cores and runs: whichever trains faster. What workers
        cannot do, such as an attention that only this process knows, is done here."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        whole, jobs, every = torch.get_num_threads(), min(cores, len(self.study.runs())), self.study.variants
        if jobs == 1:
            return Placing(runner="here", threads=whole)
        able = [self.protocol.experiment(variant) for variant in every if not variant.published]
        tries = [Job(number=0, jobs=1, variant="", experiment=one, folder="") for one in [self.protocol.base, *able]]
        here, self.runner = (
            RUNNERS["here"](1, self.protocol.datasets),
            RUNNERS["processes"](jobs, self.protocol.datasets),
        )
        progress(0, 2, "trying one training at a time")
        measured = {"here": round(here.steps_per_second(tries[0].model_copy(update={"threads": whole}), PROBE), 2)}
        progress(1, 2, f"trying {jobs} trainings at a time")
        try:
            measured["processes"] = round(self.runner.steps_per_second(tries[0], PROBE, tries[1:]), 2)
        except ValueError:
            measured["processes"] = 0.0
        progress(2, 2, "done")
        if measured["here"] < measured["processes"]:
            return Placing(runner="processes", jobs=jobs, threads=1, measured=measured)
        self.close()
        return Placing(runner="here", threads=whole, measured=measured)

    def speedup(self, progress: Progress) -> float:
        """How much faster jobs get on than one at a time on all cores; 1 where that was not measured."""
        found = self.placing(progress)
        return found.measured["processes"] / found.measured["here"] if found.jobs > 1 and found.measured else 1.0

    def run(self, jobs: list[Job], hear: Hear) -> Iterator[tuple[Job, list[Record]]]:
        """Each job with its records, in order; what is finished needs nobody."""
        done = {job.number: job.finished() for job in jobs}
        left = [
            job.model_copy(update={"threads": self.known.threads})
            for job in jobs
            if self.known and not done[job.number]
        ]
        work = self.runner.run(left, hear) if self.runner else iter(())
        for job in jobs:
            yield (job, found) if (found := done[job.number]) else next(work)

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = None


def _train(records: Records, jobs: list[Job], crew: Crew, hear: Hear) -> None:
    """Do the jobs, and copy their records into the study's, once; what they name lies in their folders."""
    there = {(record.experiment, *metrics.key(record)) for record in records if record.metric != "failed"}
    for job, found in crew.run(jobs, hear):
        place = Path(job.folder).name
        mine = [
            replace(r, artefact=f"{place}/{r.artefact}" if r.artefact else "").tagged(variant=job.variant)
            for r in found
        ]
        records.append(r for r in mine if (r.experiment, *metrics.key(r)) not in there)  # a kill may have cut the last
    crew.close()


def _measure(
    folder: Path, records: Records, study: Study, protocol: Protocol, jobs: list[Job], device: torch.device,
    progress: Progress, limit: int | None,
) -> None:  # fmt: skip
    """Everything beside accuracy, and what the page says of the whole."""
    start, before = time.perf_counter(), records.path.stat().st_size if records.path.exists() else 0
    there = {metrics.key(record) for record in records}
    records.append(r for r in _published(study) if metrics.key(r) not in there)
    failed = Measuring(folder, records, protocol.dataset, study, jobs, protocol.base, device, progress).all()
    study.seconds = study.seconds | {
        "measuring": study.seconds.get("measuring", 0.0) + round(time.perf_counter() - start, 1)
    }
    if study.finished is None or records.path.stat().st_size != before:
        study.finished = time.time()
    study.warnings = _warnings(study, protocol, limit) + failed
    study.save(folder)


def _published(study: Study) -> list[Record]:
    tags: dict[str, Tag] = {"dataset": study.dataset.name}
    best: dict[str, Tag] = {"selection": "best"}
    return [
        Record(metric, value, (known := metrics.METRICS[metric]).unit,
               tags=tags | {"variant": v.id, "attention": v.attention} | (best if "selection" in known.per else {}))
        for v in study.variants for metric, value in v.published.items()
    ]  # fmt: skip


def seconds(text: str) -> float:
    """`90s`, `10m`, `1.5h` or plain seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise ValueError(f"budget '{text}' is not a duration: write 90s, 10m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _steps_within(
    budget: str, begun: float, protocol: Protocol, study: Study, faster: float, device: torch.device, progress: Progress
) -> int:
    """Equal steps for every run that fit what is left of the budget beside testing, measuring and the page; from
    measured times, stored before training."""
    data, base = protocol.dataset, protocol.base
    batch, per_epoch, _ = base.length(len(data.train))
    configs = {variant.id: protocol.config(variant) for variant in study.variants if not variant.published}
    baselines = Measuring.baselines(base)
    found = side_by_side(
        configs | baselines, baselines=baselines, device=device, batch=batch, rounds=3,
        optimizer=Measuring.optimizer(base), by="wall",
        progress=lambda done, total, what: progress(done, total, "how many steps fit the budget"),
    )  # fmt: skip
    of = {(r.metric, r.tags["variant"]): float(r.value or 0) for r in found}
    seeds = len(study.seeds)
    step = sum(of["train_step", name] for name in configs) * seeds / faster
    image = sum(1 / of["inference_throughput", name] for name in configs) * seeds / faster  # without a backward pass
    validation, test = image * len(data.validation), image * len(data.test)
    timing = sum(of["train_step", name] + of["inference_latency", name] + batch / of["inference_throughput", name]
                 for name in configs | baselines)  # fmt: skip
    one_each = 1.1 * step + validation / per_epoch  # augmentation; a validation after each epoch
    fixed = time.perf_counter() - begun + validation + 2 * test + ROUNDS * timing + PER_VARIANT * len(configs) + PAGE
    steps = int((seconds(budget) - fixed) / one_each)
    if steps < 1:
        need = math.ceil(one_each + fixed)
        raise ValueError(f"budget {budget} is too small for one step of each run: at least {need}s are needed")
    return steps


def _warnings(study: Study, protocol: Protocol, limit: int | None) -> list[str]:
    """What a reader must know before trusting the comparison, and the records cannot tell."""
    found, whole, data, recipe = [], defaults(protocol.dataset).get("epochs"), protocol.dataset, study.recipe
    done = study.epochs or 0.0
    if done < 1:
        found.append(f"{study.steps} steps are {done:.2g} of an epoch: nobody has learned much yet.")
    elif whole and done < whole:
        found.append(f"{done:g} of the recipe's {whole:g} epochs: more training may change the order.")
    if limit is not None:
        found.append(f"At most {limit:,} images of each split were used: more may change the order.")
    if recipe.patience:
        found.append("Early stopping (patience) lets variants differ in their number of steps.")
    if recipe.amp != "off" or recipe.compile:
        found.append("Speeds and memory are of float32 models that are not compiled; the training was otherwise.")
    if len(data.test) < 500:
        found.append(f"Only {len(data.test)} test images: one of them is {1 / max(1, len(data.test)):.1%} of accuracy.")
    return found
