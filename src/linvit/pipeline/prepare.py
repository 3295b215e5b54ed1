"""Prepare: the data surveyed and opened once, each start read once, each variant designed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from linvit.attention import attention_options
from linvit.data import Dataset, Fold, Survey, folded, folder_of, survey
from linvit.devices import pick_device, places
from linvit.execute import Executor, executor_type
from linvit.execute.work import DatasetCache
from linvit.files import slug
from linvit.locks import require_outside
from linvit.pipeline.design import Designer
from linvit.pipeline.plan import Planner, choose_plan
from linvit.progress import Progress, ignore
from linvit.registry import parse
from linvit.requests import CompareRequest, ConvertRequest, TrainRequest, TuneRequest
from linvit.schemas.experiment import Source, Start
from linvit.schemas.study import Placement, Plan, Study, Variant, name_variants
from linvit.training import backbones
from linvit.training.source import open_source, source_of
from linvit.training.start import architecture, check_folds, stored_of
from linvit.training.tasks import TASKS

SHAPELESS = ("dropout", "emb_dropout", "drop_path")  # options of a model that do not change the shape of its weights


@dataclass(frozen=True)
class Prepared:
    """All that a verb needs to begin."""

    survey: Survey
    dataset: Dataset  # whole, before any fold is held out
    source: Source | None
    variants: list[Variant]  # named, with what they start from
    start: Start | None  # the one that gives all variants their shape
    starts: Mapping[str, Start]  # by attention
    device: torch.device
    slots: int | None  # of an executor on other machines
    designer: Designer
    planner: Planner | None = None
    plan: Plan | None = None


Trainable = TrainRequest | CompareRequest | TuneRequest


def prepare(
    request: Trainable,
    variants: Sequence[Variant],
    *,
    dataset: Dataset | None = None,
    earlier: Study | None = None,
    searched: Sequence[str] = (),
    progress: Progress = ignore,
) -> Prepared:
    """dataset: given by a Python caller instead of a name. earlier: the study that the folder holds. searched: options
    that a search will vary."""
    task = variants[0].task
    check_task(request, variants)
    for variant in variants:
        check_names(variant.attention)
    device, slots = locate(request)
    spare_test = isinstance(request, TuneRequest)
    images = survey_images(request, dataset, spare_test)
    TASKS[task].check_labels(images.several)
    starts = choose_starts(request, variants, images, earlier, searched)
    start = backbones.first(starts)
    check_folds(start, images.name, request.folds)
    like = architecture(start)
    if like is not None:
        images = replace(images, channels=like.channels)  # grey or coloured, as the start was trained
    variants = with_starts(variants, starts, isinstance(request, CompareRequest) and request.with_scratch)
    planner, plan, variants = choose_plan(
        request, images, variants, like, device, slots, earlier, dataset is None, progress
    )
    side = request.image_size or (plan.image_size if plan else like and like.image_size)
    source = None
    if dataset is not None:
        check_given(request)
    else:
        source = source_of(
            request.data,
            request.data_root,
            request.options.get("patch_size"),
            image_size=side,
            channels=like and like.channels,
            limit=(plan and plan.limit) or request.limit,
            skip_bad=request.skip_bad,
            resize=request.resize or (stored_of(start).about["resize"] if start else "crop"),
        )
        dataset = open_source(source, progress, images.listing)
    images = replace(images, listing=None)  # it may hold all images
    designer = Designer(
        dataset,
        source,
        request.seed,
        (plan.options if plan else {}) | request.options,
        not isinstance(request, TrainRequest) and request.match,
        start,
        request.folds,
        task,
        spare_test,
    )
    return Prepared(
        images, dataset, source, name_variants(variants), start, starts, device, slots, designer, planner, plan
    )


def with_limit(prepared: Prepared, limit: int) -> Prepared:
    """The same with at most this many images of each split; images that were given as a Dataset stay as they are."""
    if prepared.source is None:
        return prepared
    source = prepared.source.model_copy(update={"limit": limit})
    dataset = open_source(source)
    designer = replace(prepared.designer, whole=dataset, origin=source, datasets=DatasetCache())
    return replace(prepared, dataset=dataset, source=source, designer=designer)


def check_given(request: Trainable | ConvertRequest) -> None:
    """Options of how images are read have no effect on images that are given as a Dataset."""
    for name in ("image_size", "resize", "limit", "skip_bad", "data_root"):
        if value := getattr(request, name):
            raise ValueError(f"{name}={value} has no effect on images that are given as a Dataset: leave it out")


def check_names(attention: str) -> None:
    """An unknown attention is an error before any image is read."""
    for part in attention.split("+"):
        attention_options(parse(part.partition("@")[0]).name)


def check_task(request: Trainable, variants: Sequence[Variant]) -> None:
    """What one task measures cannot be compared with what another does."""
    task = variants[0].task
    kinds = {v.task: (TASKS[v.task].stem, TASKS[v.task].several) for v in variants if not v.published}
    kind = TASKS[task].stem, TASKS[task].several
    if others := [name for name, other in kinds.items() if other != kind]:
        raise ValueError(f"variants of the tasks {task} and {others[0]} cannot be compared: make a study of each")
    for name, why in (
        ("folds", "folds are stratified, and scored, by class"),
        ("budget", "plans are for classification: give epochs or steps"),
    ):
        if any(kind) and getattr(request, name, None) is not None:
            raise ValueError(f"{name}={getattr(request, name)} cannot be combined with task {task}: {why}")


def locate(request: Trainable) -> tuple[torch.device, int | None]:
    """The device of trainings, and how many run at a time if they run on other machines."""
    runner = getattr(request, "runner", None)
    remote = executor_type(runner).locate(runner, request.device, request.threads) if runner else None
    return remote or (pick_device(request.device), None)


def requested_placement(request: CompareRequest | TuneRequest, prepared: Prepared) -> Placement | None:
    """Where trainings run, if the request, the images or the device decide it."""
    runner, jobs, in_memory = request.runner, request.jobs, prepared.source is None
    if runner is None and jobs is not None and jobs > 1:
        runner = "processes"
    if runner == "here" and jobs not in (None, 1):
        raise ValueError(f"jobs={jobs}: the executor 'here' runs one training at a time")
    if runner is not None and executor_type(runner).opens_data and in_memory:
        raise ValueError(f"the executor '{runner}' needs images that workers can open: give a name or a path")
    if runner not in (None, "here"):
        slots = jobs or prepared.slots or places(prepared.device)
        return Placement(executor=runner, jobs=slots, threads=request.threads or 1)
    accelerator = prepared.device.type != "cpu"
    if runner or jobs == 1 or in_memory or (accelerator and places(prepared.device) == 1):
        return Placement(executor="here", threads=request.threads or torch.get_num_threads())
    if accelerator:  # several: one training on each
        return Placement(executor="processes", jobs=places(prepared.device), threads=request.threads or 1)
    return None


def start_executor(placement: Placement, designer: Designer) -> Executor:
    kind = executor_type(placement.executor)
    return kind(placement.jobs, placement.threads, designer.datasets, placement.executor)


def survey_images(request: Trainable, dataset: Dataset | None, spare_test: bool) -> Survey:
    folds = request.folds
    if dataset is None:
        return survey(request.data, request.data_root, request.limit, folds=folds, spare_test=spare_test)
    return Survey.of(dataset if folds is None else folded(dataset, Fold(0, folds, request.seed, spare_test)))


def choose_starts(
    request: Trainable, variants: Sequence[Variant], images: Survey, earlier: Study | None, searched: Sequence[str]
) -> dict[str, Start]:
    """What each attention starts from, by request or by default for such images; empty: from scratch."""
    attentions = list(dict.fromkeys(v.attention for v in variants if v.start is None and not v.published))
    start = request.start or (backbones.SCRATCH if TASKS[variants[0].task].stem else None)
    shaped = {**request.options, **dict.fromkeys(searched, True)}
    for variant in variants:
        shaped |= variant.options
    if searched:
        shaped = {name: value for name, value in shaped.items() if name not in SHAPELESS}
    known = [(v.attention, v.start) for v in earlier.variants if v.start] if earlier else []
    return backbones.chosen(start, attentions, images, request.image_size, shaped, known)


def with_starts(variants: Sequence[Variant], starts: Mapping[str, Start], with_scratch: bool) -> list[Variant]:
    """Each with its attention's start, unless it has one of its own; and once more from scratch, if asked."""
    if not starts:
        if with_scratch:
            raise ValueError("with_scratch has no effect without a start: name a trained model, or leave it out")
        return list(variants)
    bare = [v for v in variants if v.start is None and not v.published]
    started = [v.model_copy(update={"start": starts[v.attention]}) if v in bare else v for v in variants]
    return started + (bare if with_scratch else [])


def result_folder(request: Trainable | ConvertRequest, default: str, dataset: Dataset | None) -> Path:
    """Where results go, which must not be among the images."""
    folder = request.out if request.out is not None else Path("runs") / slug(default)
    require_outside(folder, None if dataset is not None else folder_of(request.data))
    return folder
