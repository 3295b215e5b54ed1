"""`compare`: variants × seeds under one protocol, measured on this machine, reported on one page.

One data order and split for all; equal steps; parameters matched to softmax's by the width of the MLP. A finished part
is never run twice: the same call again goes on where it stopped, and a new variant or seed runs only what is new.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from linvit import metrics, report
from linvit.attention import attention_options, create_attention
from linvit.data import Dataset, Fold, Survey, folded, folder_of, repeats, survey
from linvit.files import remove_parts, slug
from linvit.locks import apart, claimed, locked
from linvit.measure.provenance import machine
from linvit.measure.trained import redraws
from linvit.progress import Progress, ignore, repeated, seconds
from linvit.records import Record, Records, Tag
from linvit.registry import parse
from linvit.study import plan as planning
from linvit.study.array import key, known, of_all_folds, of_study, write_jobs
from linvit.study.crew import Crew, cores
from linvit.study.design import MARGIN, MOST, OURS, Facts, Study, Variant, named
from linvit.study.jobs import Hear, Job, tracked
from linvit.study.measuring import Measuring
from linvit.study.plan import Plan, Planner, Rung
from linvit.study.protocol import Protocol
from linvit.study.runners import runner_of
from linvit.toml import to_toml
from linvit.train import Start, architecture, backbones, open_data, pick_device
from linvit.train.defaults import OF_TASK, TUNED
from linvit.train.run import how_far
from linvit.train.start import check_folds
from linvit.train.tasks import TASKS
from linvit.train.trackers import tracking

ATTENTIONS = ("softmax", "performer-exp:m=32", "performer-relu:m=32", "performer-theta:m=32", "linformer:k=16")
CAUSAL_ATTENTIONS = ATTENTIONS[:4]  # a Linformer cannot be
CONTROL = "uniform"
SEEDS = 3
PAGE = 10.0  # seconds to write the report


def compare(
    data: str | Path | Dataset = "digits",
    *,
    attentions: Sequence[str] | None = None,
    variants: Sequence[Variant] = (),
    task: str | None = None,
    controls: bool = True,
    start: str | Path | None = None,
    with_scratch: bool = False,
    with_redrawn: int | None = None,
    seeds: int | None = None,
    folds: int | None = None,
    seed: int = 0,
    margin: float | None = None,
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
    dry_run: bool = False,
    print_config: bool = False,
    jobs_file: bool = False,
    measured: bool = True,
    track: Sequence[str] = (),
    command: str = "",
    say: planning.Say = lambda text: None,
    hear: Hear = lambda job, event: None,
    progress: Progress = ignore,
    **options: Any,
) -> Path:
    """Train and measure every variant with every seed, write the report; the study's folder.

    attentions: one variant each; variants: whatever differs in more. controls: `uniform` is trained beside them.
    task: what attentions learn, "classification" or "next-pixel" (default: what `variants` do); with the latter, the
    margin is in bits per dimension.
    start: a trained model's folder: every variant begins with its weights; "backbones": with those that ship, which is
    usual for photos; "scratch": with nothing. with_scratch: and once more without. with_redrawn: variants with random
    features once more, with new ones every so many steps.
    folds: every seed deals the images out into so many, and each is held out once (then one seed is usual).
    margin: accuracy that a faster variant may lose against the best (0.01). budget: time for all of it, e.g. "15m":
    what is not given (image size, model, batch, seeds, steps) is then chosen to fit, and `say` is told the plan;
    dry_run ends there, with how far each job is; print_config ends with the whole configuration as TOML. jobs: how many
    trainings at a time, each in a process with `threads` threads (1), or as another registered `runner` has it ("ray"
    and "ray://HOST:PORT": on a cluster); without any of them the machine's faster way is measured. jobs_file writes the
    jobs to jobs.jsonl instead, for a scheduler: `linvit job` does one, `linvit report` shows what is there, the same
    call without it measures the rest. measured=False leaves out all but accuracy, and figure files. hear(job, event) is
    told of every training, as are trackers (track: "tensorboard", "mlflow"), progress(done, total, what) of all else.
    """
    begun = time.perf_counter()
    _check(seeds, epochs, budget, jobs, margin, options)
    kinds = tracking(track)
    task = task or (variants[0].task if variants else "classification")
    causal = TASKS[task].causal
    usual = () if variants else CAUSAL_ATTENTIONS if causal else ATTENTIONS
    wanted = [Variant(attention=spec, task=task) for spec in attentions or usual]
    wanted += variants
    if controls and not any(variant.control for variant in wanted):
        wanted.append(Variant(attention=CONTROL, task=task))
    _check_task(task, wanted, folds, budget)
    if with_redrawn is not None:
        wanted += _redrawn(wanted, with_redrawn)
    for variant in wanted:
        for part in variant.attention.split("+"):
            attention_options(
                parse(part.partition("@")[0]).name
            )  # a name nobody knows is an error before anything is read
    there = runner_of(runner).reach(runner, device, threads) if runner else None
    place, at_once = there or (pick_device(device), None)
    if isinstance(data, Dataset):
        images = Survey.of(data if folds is None else folded(data, Fold(0, folds, seed)))
    else:
        images = survey(data, data_root, limit, folds=folds)
    bare = list(dict.fromkeys(v.attention for v in wanted if v.start is None and not v.published))
    shaped = {key: value for v in wanted for key, value in v.options.items()}  # other shapes have none
    folder = Path(out) if out is not None else Path("runs") / f"compare-{slug(images.name)}"
    apart(folder, folder_of(data))
    earlier = Study.read(folder / "study.json") if (folder / "study.json").exists() else None
    known = [(v.attention, v.start) for v in earlier.variants if v.start] if earlier else []
    begins = start or (backbones.SCRATCH if causal else None)
    starts = backbones.chosen(begins, bare, images, image_size, options | shaped, known)
    begin = backbones.first(starts)
    check_folds(begin, images.name, folds)
    like = architecture(begin)
    images = replace(images, channels=like.channels if like else images.channels)  # grey or coloured, as it is used to
    wanted = _with_starts(wanted, starts, with_scratch)
    if budget is None and epochs is None and options.get("steps") is None and not (causal or images.name in TUNED):
        budget = planning.BUDGET
    trained = sum(not v.published for v in wanted)
    at_once = at_once or (cores() if place.type == "cpu" else 1)
    near = pick_device() if there else place  # where steps are timed to choose a model
    ladder = Planner(images, trained, at_once, near, seeds, folds or 1, like=like)
    plan = earlier.plan if earlier and earlier.budget == budget else None  # what it chose stays chosen
    rung = None
    if budget is not None and plan is None:
        given = {key: value for key, value in options.items() if value is not None}
        specs = {v.attention for v in wanted if not v.published}
        ladder = ladder.with_rungs(given, image_size, not isinstance(data, Dataset), specs)
        ladder = ladder.timed(seconds(budget), progress)
        rung, count = ladder.choose(seconds(budget))
        plan = Plan(seconds=seconds(budget), image_size=rung.side, options=rung.options, seeds=count, folds=folds or 1)
    side = image_size or (plan.image_size if plan else like and like.image_size)
    asked = {"root": data_root, "image_size": side, "channels": like and like.channels, "limit": limit,
             "skip_bad": skip_bad}  # fmt: skip
    dataset, source = open_data(data, progress, **asked, patch_size=options.get("patch_size"))
    if jobs_file and source is None:
        raise ValueError("jobs_file needs images that other processes can find: give a name or a path, not a Dataset")
    chosen = (plan.options if plan else {}) | options | ({"epochs": epochs} if epochs is not None else {})
    protocol = Protocol(dataset, source, seed, chosen, match, begin, folds, task)
    facts, dataset = Facts.of(protocol.dataset).model_copy(update={"identity": dataset.identity}), protocol.dataset
    every = named(wanted)
    each = list(range(seed, seed + (seeds or (plan.seeds if plan else 1 if folds else SEEDS))))
    study = Study(
        commands=[command] if command else [], started=time.time(), dataset=facts, source=source, folds=folds,
        variants=every, seeds={v.id: _seeds(v, each) for v in every if not v.published}, margin=margin or MARGIN,
        plan=plan, model=protocol.base.model, recipe=protocol.base.recipe, start=begin, match=match, budget=budget,
        machine=machine(),
    )  # fmt: skip
    for variant in every:
        protocol.config(variant)  # a bad option is an error before anything is written
    study = _with_earlier(folder, study, margin)
    crew, before = Crew(protocol, study, place, runner, jobs, threads), torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)  # for what is measured here, too
        length = protocol.base.length(len(dataset.train))
        study.steps = study.steps or length.total
        if rung is not None and plan is not None:
            study.plan = plan = _settled(plan, rung, ladder, length.per_epoch, crew, begun, progress)
            study.steps = plan.steps
        study.epochs = round(study.steps / length.per_epoch, 3)
        if plan is not None and crew.known is not None and not print_config:
            for line in planning.lines(
                plan, images, protocol.base.model, len(study.seeds), study.epochs, crew.known.jobs, _start(starts)
            ):
                say(line)
        if print_config:
            say(to_toml(_configuration(study, protocol)).rstrip())
            return folder
        if dry_run:
            for job in protocol.jobs(study, folder, place):
                say(_job_line(job))
            return folder
        with locked(folder):
            study = _with_earlier(folder, study, margin)  # again: another process may have come first
            if jobs_file:
                study.save(folder)
                every_job = protocol.jobs(study, folder, place)
                file = write_jobs(folder, [job.model_copy(update={"threads": threads or 1}) for job in every_job])
                say(f"{file}: {len(every_job)} jobs; `linvit job {folder} N` does one of them")
                return folder
            remove_parts(folder, folder / "figures")
            records, jobs_left = Records(folder / "records.jsonl"), protocol.jobs(study, folder, place)
            if any(not job.finished() for job in jobs_left):
                study.placing = crew.placing(progress)
            study.save(folder)
            if plan is not None and study.finished is None:
                jobs_left = _with_deadline(jobs_left, plan, study, time.time() - (time.perf_counter() - begun))
            _train(records, jobs_left, crew, tracked(hear, kinds, folder))
            _measure(folder, records, study, protocol, jobs_left, crew, begun, progress, limit, measured)
            with repeated(progress) as tell:
                tell(0, 1, "writing the report")
                report.build(folder, figures=measured)
    finally:
        crew.close()
        torch.set_num_threads(before)
    return folder


def _start(starts: Mapping[str, Start]) -> str:
    """What variants begin with, for a person."""
    if not starts:
        return "from nothing"
    several = len({start.sha256 for start in starts.values()}) > 1
    one = next(iter(starts.values()))
    kind = "each attention's own" if several else Path(one.folder).name
    what = f"linvit's backbones ({kind})" if one.name == backbones.NAME else one.name
    return f"{what}; --from scratch for nothing"


def _with_starts(wanted: list[Variant], starts: Mapping[str, Start], with_scratch: bool) -> list[Variant]:
    """Each beginning with its attention's, unless it has one of its own; and without, if asked."""
    if not starts:
        if with_scratch:
            raise ValueError("with_scratch has no effect without a start: name a trained model, or leave it out")
        return wanted
    bare = [v for v in wanted if v.start is None and not v.published]
    begun = [v.model_copy(update={"start": starts[v.attention]}) if v in bare else v for v in wanted]
    return begun + (bare if with_scratch else [])


def _seeds(variant: Variant, each: list[int]) -> list[int]:
    """Those of the study's that the variant has something to begin with for."""
    found = [seed for seed in each if seed in (variant.starts or each)]
    if not found:
        raise ValueError(f"variant '{variant.id}' has no start for any of the seeds {', '.join(map(str, each))}")
    return found


def _redrawn(wanted: list[Variant], every: int) -> list[Variant]:
    """Those with random features, with new ones every so many steps."""
    if every < 1:
        raise ValueError(f"with_redrawn={every} must be at least 1 step")
    found = [v for v in wanted if not v.published and any(map(_has_draws, v.attention.split("+")))]
    if not found:
        raise ValueError(f"with_redrawn={every} has no effect: none of these attentions has random features")
    return [v.model_copy(update={"id": "", "label": "", "options": v.options | {"redraw": every}}) for v in found]


def _has_draws(part: str) -> bool:
    site = {"heads": 1, "head_dim": 8, "tokens": 4097, "grid": (64, 64), "prefix": 1}
    return redraws(create_attention(part.partition("@")[0], **site))


def _check(
    seeds: int | None, epochs: float | None, budget: str | None, jobs: int | None, margin: float | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if margin is not None and not 0 < margin <= MOST:
        raise ValueError(f"margin={margin} must be above 0 and at most {MOST}, as a fraction of the images")
    if epochs is not None and budget is not None:
        raise ValueError("give epochs or a budget, not both")
    if budget is not None and options.get("steps") is not None:
        raise ValueError("give steps or a budget, not both")
    if budget is not None:
        seconds(budget)  # a wrong one is an error before anything is done


def _check_task(task: str, wanted: Sequence[Variant], folds: int | None, budget: str | None) -> None:
    """What one task measures cannot be held against what another does."""
    causal = TASKS[task].causal
    if others := [v.task for v in wanted if not v.published and TASKS[v.task].causal != causal]:
        raise ValueError(f"variants of the tasks {task} and {others[0]} cannot be compared: make a study of each")
    for name, value, why in (
        ("folds", folds, "folds are dealt, and scored, by class"),
        ("budget", budget, "its plans are for classification: give epochs, or steps"),
    ):
        if causal and value is not None:
            raise ValueError(f"{name}={value} does not go with task {task}: {why}")


def _settled(
    plan: Plan, rung: Rung, ladder: Planner, per_epoch: int, crew: Crew, begun: float, progress: Progress
) -> Plan:
    """With the steps that fit, from the time that each variant's own take where they will be taken."""
    budget = plan.seconds
    left = min(planning.LONGEST, planning.TIMING * budget) / 2
    rates = crew.rates(left, progress)
    jobs = crew.placing(progress).jobs
    most = max(2, round(planning.WHOLE * ladder.enough * per_epoch))
    spent = time.perf_counter() - begun
    runs = plan.seeds * plan.folds
    steps, expected = planning.fitting(budget, spent, rates, ladder.images, per_epoch, runs, jobs, most)
    if steps < most:
        ladder = replace(ladder, correction=ladder.epochs(rung, plan.seeds, budget) / (steps / per_epoch))
    mine = ladder.described(budget, rung, plan.seeds, steps / per_epoch)
    changes = {"steps": steps, "expected": expected, "offers": [mine, *ladder.larger(budget)]}
    return plan.model_copy(update=changes)


def _with_deadline(jobs: list[Job], plan: Plan, study: Study, begun: float) -> list[Job]:
    """Runs of half the steps, which come last, are not begun when they would end after the budget: a machine that has
    become slower costs the check of whether it is too early to tell, which the same command makes up for."""
    at_a_time = study.placing.jobs if study.placing else 1
    runs = len(study.seeds) * (plan.seeds * plan.folds + 0.5)  # as many whole ones
    half = plan.expected.get("training", 0.0) * at_a_time / runs / 2
    late = begun + plan.seconds - planning.measuring(plan.seconds) / 2 - half
    return [job.model_copy(update={"begin_by": late}) if job.half else job for job in jobs]


def _with_earlier(folder: Path, study: Study, margin: float | None) -> Study:
    """The folder's own study with these variants and seeds added, or this one."""
    earlier = claimed(folder / "study.json", study, OURS)
    if earlier is None:
        return study
    return earlier.extended(study).model_copy(update={"margin": margin or earlier.margin})


def _train(records: Records, jobs: list[Job], crew: Crew, hear: Hear) -> None:
    """Do the jobs, and copy their records into the study's, once; what they name lies in their folders."""
    there = known(records)
    for job, found in crew.run(jobs, hear):
        mine = of_study(found, Path(job.folder).name, job.variant, job.half, job.fold)
        records.append(record for record in mine if key(record) not in there)  # a kill may have cut the last
    whole = of_all_folds(records, records.path.parent, len({job.fold for job in jobs}))
    records.append(record for record in whole if key(record) not in there)


def _job_line(job: Job) -> str:
    state = how_far(job.experiment, Path(job.folder))
    return f"job {job.number + 1} of {job.jobs}: {job.name}: {state}"


def _configuration(study: Study, protocol: Protocol) -> dict[str, Any]:
    """All that decides the study, defaults too: what holds for all of it, and each variant's experiment."""
    found = study.model_dump(mode="json", exclude={"variants", "commands", "started", "finished", "placing", "machine",
                                                   "warnings", "seconds", "looks", "format"})  # fmt: skip
    every = [variant.model_dump(mode="json", exclude={"published", "place"}) | {
        "experiment": protocol.experiment(variant).model_dump(mode="json", include={"model", "recipe", "task", "start"})
    } for variant in study.variants if not variant.published]  # fmt: skip
    return found | {"variants": every}


def _measure(
    folder: Path, records: Records, study: Study, protocol: Protocol, jobs: list[Job], crew: Crew,
    begun: float, progress: Progress, limit: int | None, measured: bool,
) -> None:  # fmt: skip
    """Everything beside accuracy, and what the page says of the whole."""
    start, before = time.perf_counter(), records.path.stat().st_size if records.path.exists() else 0
    there = {metrics.key(record) for record in records}
    records.append(r for r in _published(study) if metrics.key(r) not in there)
    deadline = None
    if study.plan and study.finished is None:  # what is done beyond the plan is not held to it
        left = begun + study.plan.seconds - start - PAGE
        deadline = time.monotonic() + max(planning.measuring(study.plan.seconds) / 4, left)
    work = Measuring(folder, records, protocol.dataset, study, jobs, protocol.base, crew.device, progress, deadline)
    failed, elsewhere = crew.measure(work) if measured else ([], {})
    study.machine = elsewhere or study.machine
    if study.finished is None or records.path.stat().st_size != before:
        study.finished, now = time.time(), time.perf_counter()
        for what, since in (("measuring", start), ("all", begun)):
            study.seconds[what] = round(study.seconds.get(what, 0.0) + now - since, 1)
    late = sum(job.begin_by is not None and not job.finished() for job in jobs)
    if late:
        failed.append(f"The time was up before {late} of the runs with half the steps: the same command makes them.")
    study.warnings = _warnings(study, protocol, jobs, limit) + failed
    seen = {name: len(seeds) for name, seeds in study.seeds.items()}
    if seen not in study.looks and all(job.half or job.finished() for job in jobs):
        study.looks.append(seen)
    study.save(folder)


def _published(study: Study) -> list[Record]:
    tags: dict[str, Tag] = {"dataset": study.dataset.name}
    best: dict[str, Tag] = {"selection": "best"}
    return [
        Record(metric, value, (known := metrics.METRICS[metric]).unit,
               tags=tags | {"variant": v.id, "attention": v.attention} | (best if "selection" in known.per else {}))
        for v in study.variants for metric, value in v.published.items()
    ]  # fmt: skip


def _warnings(study: Study, protocol: Protocol, jobs: list[Job], limit: int | None) -> list[str]:
    """What a reader must know before trusting the comparison, and the records cannot tell."""
    found, data, recipe = [], protocol.dataset, study.recipe
    causal = study.model.causal
    whole = (OF_TASK["next-pixel"] if causal else TUNED.get(data.name, {})).get("epochs")
    done = study.epochs or 0.0
    if done < 1:
        found.append(f"{study.steps} steps are {done:.2g} of an epoch: nobody has learned much yet.")
    elif whole and done < whole:
        found.append(f"{done:g} of the recipe's {whole:g} epochs: more training may change the order.")
    if limit is not None:
        found.append(f"At most {limit:,} images of each split were used: more may change the order.")
    steps = {job.variant: job.experiment.length(len(protocol.datasets[job.experiment.data.identity].train)).total
             for job in jobs if not job.half}  # fmt: skip
    usual = statistics.mode(steps.values()) if steps else 0
    for other in sorted({*steps.values()} - {usual}):
        names = ", ".join(v.label for v in study.variants if steps.get(v.id) == other)
        found.append(f"{names} had {other:,} steps, the others {usual:,}: a difference is not the attention's alone.")
    if recipe.patience:
        found.append("Early stopping (patience) lets variants differ in their number of steps.")
    if recipe.amp != "off" or recipe.compile:
        found.append("Speeds and memory are of float32 models that are not compiled; the training was otherwise.")
    if known := repeats(data):
        share = f"{known:,} of {len(data.test):,} test images ({known / len(data.test):.1%})"
        found.append(f"{share} repeat training images: {'bits are too few' if causal else 'accuracies are too high'}.")
    if not causal and (tested := len(data.test) * (study.folds or 1)) < 500:
        found.append(f"Only {tested} test images: one of them is {1 / max(1, tested):.1%} of accuracy.")
    return found
