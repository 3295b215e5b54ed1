"""`tune`: the same search for every variant; its trials, the best of each, and a page.

Every variant gets as many trials, or as many seconds of training, from one space. Validation images decide; the test
images are never read. A finished trial is never run twice: the same call again goes on where it stopped, and several
processes can work on one search.
"""

from __future__ import annotations

import json
import math
import queue
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from linvit import metrics
from linvit.data import Dataset, Fold, Survey, folded, folder_of, survey
from linvit.errors import choices
from linvit.files import slug
from linvit.locks import apart, claimed, locked
from linvit.measure.provenance import machine
from linvit.models import ModelConfig
from linvit.progress import Progress, duration, ignore, repeated, seconds
from linvit.records import Record, Tag
from linvit.report import tuning
from linvit.study.compare import ATTENTIONS
from linvit.study.crew import cores
from linvit.study.design import Facts, Variant, named
from linvit.study.jobs import Job
from linvit.study.protocol import Protocol
from linvit.study.runners import processes, runner_of
from linvit.study.runners.cluster import Cluster
from linvit.toml import to_toml
from linvit.train import Experiment, Recipe, architecture, backbones, open_data, pick_device
from linvit.train.trackers import tracking
from linvit.tune.best import Best, Winner
from linvit.tune.cluster import Dispatcher
from linvit.tune.design import OURS, PRUNERS, SAMPLERS, Points, Search
from linvit.tune.space import Space
from linvit.tune.storage import hidden, in_reach, needed, open_storage, sqlite
from linvit.tune.trials import Trials, agree
from linvit.tune.worker import Say, Worker

TRIALS = 20  # of every variant, if nothing is said
KEPT = 0.95  # of a budget is planned with
PROBE = 1.0  # seconds for which each variant is timed
FEWEST = 8  # finished trials from which importance is told
MOST_JOBS = 8  # trainings at a time, if nothing is said
SHAPELESS = ("dropout", "emb_dropout", "drop_path")  # options of a model that any weights go with
DEATHS = 5  # workers in a row that may die without a word


def tune(
    data: str | Path | Dataset = "digits",
    *,
    attentions: Sequence[str] | None = None,
    trials: int | None = None,
    budget: str | None = None,
    space: str | Path | Space = "default",
    sampler: str = "tpe",
    pruner: str = "median",
    storage: str | None = None,
    join: bool = False,
    start: str | Path | None = None,
    epochs: float | None = None,
    seed: int = 0,
    folds: int | None = None,
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
    track: Sequence[str] = (),
    command: str = "",
    say: Say = lambda text: None,
    progress: Progress = ignore,
    **options: Any,
) -> Path:
    """Search the options of every variant alike, write best.toml and the page; the search's folder.

    trials: of every variant (20), or budget: time for all of it, e.g. "2h", of which each variant gets an equal part.
    space: the name of one that ships, or a TOML file. sampler: "tpe", "random" or "grid" (all points of lists). pruner:
    "median", "hyperband" or "none". storage: an URL of Optuna's or the path of a journal; else an SQLite file in the
    folder. join: work together with other processes that do the same. epochs and options hold for every trial. folds:
    every trial is trained so many times, each time with another part of the images held out, the test images aside; it
    is judged by what is said of them then, and may be pruned after each. jobs: trainings at a time, each in a process
    with `threads` threads; by default one for each core. runner: "ray" or "ray://HOST:PORT", a cluster on which they
    run instead, by default as many as it has processors for. `say` is told of every trial, and of the plan, at which
    dry_run ends; or, with print_config, of the whole configuration as TOML. track: "tensorboard" or "mlflow", which are
    told of every trial's training.
    """
    needed()
    kinds = tracking(track)
    _check(trials, budget, jobs, sampler, pruner)
    found = space if isinstance(space, Space) else Space.read(space)
    wanted = [Variant(attention=spec) for spec in attentions or ATTENTIONS]
    found.check_attention([variant.attention for variant in wanted])
    chosen = found.fixed | {name: value for name, value in options.items() if value is not None}
    for name in found.options:
        if name in options:
            raise ValueError(f"{name} is set, but space {found.name} searches it: leave one of them out")
    place, room = (pick_device(device), None) if runner is None else _reached(runner, device, threads)
    if isinstance(data, Dataset):
        images = Survey.of(data if folds is None else folded(data, Fold(0, folds, seed, spare_test=True)))
    else:
        images = survey(data, data_root, limit, folds=folds, spare_test=True)
    shaped = {name: value for name, value in (chosen | found.options).items() if name not in SHAPELESS}
    starts = backbones.chosen(start, [variant.attention for variant in wanted], images, image_size, shaped)
    begin = backbones.first(starts)
    like = architecture(begin)
    dataset, source = open_data(
        data, progress, root=data_root, image_size=image_size or (like and like.image_size), limit=limit,
        channels=like and like.channels, skip_bad=skip_bad, patch_size=chosen.get("patch_size"),
    )  # fmt: skip
    chosen |= {} if epochs is None else {"epochs": epochs}
    protocol = Protocol(dataset, source, seed, chosen, match, begin, folds, spare_test=True)
    if protocol.base.recipe.steps is not None:
        raise ValueError("a search compares after equal epochs, whatever the batch: give epochs, not steps")
    every = named([variant.model_copy(update={"start": starts.get(variant.attention)}) for variant in wanted])
    folder = Path(out) if out is not None else Path("runs") / f"tune-{slug(images.name)}"
    apart(folder, folder_of(data))
    where = storage or sqlite(folder)
    search = Search(
        name=folder.resolve().name, commands=[command.replace(where, hidden(where))] if command else [],
        started=time.time(), dataset=Facts.of(dataset), source=source, variants=every, space=found, sampler=sampler,
        pruner=pruner, trials=TRIALS if trials is None and budget is None and sampler != "grid" else trials,
        budget=budget, seed=seed, folds=folds, match=match, options=json.loads(json.dumps(chosen)),
        model=protocol.base.model, recipe=protocol.base.recipe, start=begin, storage=hidden(where), machine=machine(),
    )  # fmt: skip
    points = Points(search, protocol)
    points.check()
    search.defaults = sampler != "grid" and all(points.default(variant) is not None for variant in every)
    at_a_time = _at_a_time(jobs, threads, place, source, search.trials and search.trials * len(every), room)
    with _connected(runner, protocol) as cluster:
        claimed(folder / "search.json", search, OURS)
        if print_config:
            say(to_toml(search.model_dump(mode="json", exclude={"started", "finished", "expected", "machine"})).strip())
            return folder
        if dry_run or budget is not None:
            search.expected = _expected(points, place, at_a_time, cluster, progress)
        if budget is not None:
            search.share = KEPT * seconds(budget) * at_a_time[0] / len(every)
            if (most := max(search.expected.values())) > search.share:
                need = duration(math.ceil(most * len(every) / at_a_time[0] / KEPT))
                raise ValueError(f"budget {budget} is too small for a trial of each variant: {need} would do")
        for line in _plan(search, points, at_a_time[0]) if dry_run or budget is not None else ():
            say(line)
        if dry_run:
            return folder
        kept = None if storage is None else open_storage(storage)
        if kept is not None:  # what cannot be reached, or is another's, leaves no folder behind
            agree(kept, search)
        with in_reach(where), nullcontext() if join else locked(folder):
            folder.mkdir(parents=True, exist_ok=True)
            there = claimed(folder / "search.json", search, OURS)
            search = search if there is None else there.extended(search)
            studies = Trials(search, Points(search, protocol), kept or open_storage(where))
            search.save(folder)
            worker = Worker(search, folder, studies, place, at_a_time[1], say, progress, kinds)
            if cluster is not None:
                Dispatcher(worker, cluster, at_a_time[0]).run()
            elif at_a_time[0] == 1:
                worker.run()
            else:
                asked = {"search": search.model_dump(mode="json"), "storage": where, "folder": str(folder.resolve()),
                         "device": str(place), "threads": at_a_time[1], "track": list(track)}  # fmt: skip
                Crew(asked, at_a_time[0], say, progress).run()
            with repeated(progress) as tell:
                tell(0, 1, "writing the page")
                _finish(search, studies, folder)
        return folder


@contextmanager
def _connected(runner: str | None, protocol: Protocol) -> Iterator[Cluster | None]:
    """While it lasts; None: trials run here."""
    cluster = None if runner is None else Cluster(None, protocol.datasets, runner)
    try:
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()


def _reached(runner: str, device: str, threads: int | None) -> tuple[torch.device, int]:
    """A cluster's: the device that trials have there, and how many run at a time."""
    there = runner_of(runner).reach(runner, device, threads)
    if there is None:
        raise ValueError(f"on={runner}: a search runs here or on a cluster: give ray or ray://HOST:PORT, or nothing")
    return there


def _check(trials: int | None, budget: str | None, jobs: int | None, sampler: str, pruner: str) -> None:
    for name, value, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
        if value not in known:
            raise ValueError(f"unknown {name} '{value}'" + choices(value, known))
    if trials is not None and budget is not None:
        raise ValueError("give trials or a budget, not both")
    if trials is not None and trials < 1:
        raise ValueError(f"trials={trials} must be at least 1")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    if budget is not None:
        seconds(budget)  # a wrong one is an error before anything is done


def _at_a_time(
    jobs: int | None, threads: int | None, device: torch.device, source: object, most: int | None, room: int | None
) -> tuple[int, int]:
    """Trainings, and threads of each; `room`: of a cluster. Images that were given as they are cannot be found by
    another process, unless they are sent to it."""
    if room is not None:
        return min(jobs or room, most or jobs or room), threads or 1
    if source is None and jobs not in (None, 1):
        raise ValueError(f"jobs={jobs} needs images that workers can find: give a name or a path, not a Dataset")
    count = jobs or (min(MOST_JOBS, cores()) if device.type == "cpu" and source is not None else 1)
    count = min(count, most or count)
    return count, threads or (1 if count > 1 else torch.get_num_threads())


def _expected(
    points: Points, device: torch.device, at_a_time: tuple[int, int], cluster: Cluster | None, progress: Progress
) -> dict[str, float]:
    """Seconds of a whole trial of each variant, with its defaults."""
    if cluster is not None:
        cluster.jobs = at_a_time[0]
    found, every, data = {}, points.search.variants, points.protocol.dataset
    for i, variant in enumerate(every):
        progress(i, len(every), f"timing {variant.label}")
        experiment = points.protocol.experiment(variant)
        job = Job(number=0, jobs=1, variant=variant.id, experiment=experiment, folder="", device=str(device),
                  threads=at_a_time[1], test=False)  # fmt: skip
        rate = job.rate(data, PROBE) if cluster is None else cluster.rate(job, PROBE)
        steps, folds = experiment.length(len(data.train)).total, points.search.folds
        looks = points.search.validations * len(data.validation) + (2 * len(data.test) if folds else 0)
        found[variant.id] = (folds or 1) * (steps / rate.steps + looks / rate.images)
    progress(len(every), len(every), "timed")
    return found


def _plan(search: Search, points: Points, jobs: int) -> list[str]:
    """The plan, for a person."""
    each = search.trials if points.most is None else min(points.most, search.trials or points.most)
    whole = sum(search.expected.values())
    if search.share is not None:
        least = {name: int(search.share // one) for name, one in search.expected.items()}
        count = f"{duration(search.share)} of training each, that is {min(least.values())} whole trials or more"
        most = seconds(search.budget or "")
    else:
        count, most = f"{each} trials each, {len(search.variants) * (each or 0)} in all", (each or 0) * whole / jobs
    names = ", ".join(search.space.options | search.space.attention)
    one = ", ".join(f"{duration(search.expected[v.id])} {v.label}" for v in search.variants)
    training = f"{search.recipe.epochs:g} epochs"
    decide = "validation images decide"
    if search.folds:
        training, decide = f"{search.folds} folds of {training}", f"{search.folds}-fold cross-validation decides"
    pruning = "none are ended early" if search.pruner == "none" else f"{search.pruner} pruning ends the hopeless early"
    return [
        f"plan of a search, {jobs if jobs > 1 else 'one'} training{'s' * (jobs > 1)} at a time",
        f"  variants {', '.join(v.label for v in search.variants)}",
        f"  space    {search.space.name}: {names}",
        f"  trials   {count}; sampler {search.sampler}, {pruning}",
        f"  a trial  {training}, about {one} with the defaults",
        f"  time     at most about {duration(most)}; {decide}, test images are not read",
    ]


class Crew:
    """Worker processes of this machine. One that dies is replaced; its trial goes on."""

    def __init__(self, asked: dict[str, Any], jobs: int, say: Say, progress: Progress):
        self.asked, self.say, self.progress = asked, say, progress
        self.answers: queue.Queue[tuple[processes.Worker, dict[str, Any] | None]] = queue.Queue()
        self.workers = [self._start() for _ in range(jobs)]

    def _start(self) -> processes.Worker:
        worker = processes.Worker(self.answers, "linvit.tune")
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError):  # its end is on its way
            worker.process.stdin.write(json.dumps(self.asked) + "\n")
            worker.process.stdin.flush()
        return worker

    def run(self) -> None:
        """Until every trial is finished."""
        deaths = 0
        try:
            while self.workers:
                worker, answer = self.answers.get()
                if answer is not None:
                    deaths = 0
                    self._hear(answer)
                    continue
                self.workers.remove(worker)
                if worker.process.wait() == 0:
                    continue
                deaths += 1
                if deaths > DEATHS:
                    raise ValueError(f"{DEATHS} workers died without a word, the last one: {worker.last_words()}")
                self.say(f"a worker was lost ({worker.last_words()}); another one goes on")
                self.workers.append(self._start())
        finally:
            self.close()

    def _hear(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise ValueError(answer["error"])
        if "say" in answer:
            self.say(answer["say"])
        else:
            self.progress(*answer["progress"])

    def close(self) -> None:
        """End what is left; trials under way are saved first."""
        for worker in self.workers:
            worker.close()
        for worker in self.workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(60)


def _finish(search: Search, trials: Trials, folder: Path) -> None:
    """What was found, for train, compare and a person."""
    records = trials.write_records(folder)
    known = {(metrics.key(record), record.value) for record in records}
    records.append(r for r in _importance(search, trials) if (metrics.key(r), r.value) not in known)
    every = list(records)
    if (best := best_of(search, trials.points, every)) is not None:
        about, images = f"The best of {best.trials} trials of each variant", search.dataset
        judged = f"on {images.validation:,} validation images"
        if search.folds:
            judged = f"by {search.folds}-fold cross-validation on {images.train + images.validation:,} images"
        best.write(folder / "best.toml", f"{about}, {judged} of {images.name}; one seed.")
    search.finished = max((record.time for record in every), default=None)
    search.save(folder)
    shutil.rmtree(folder / ".workers", ignore_errors=True)
    tuning.build(folder)


def _importance(search: Search, trials: Trials) -> list[Record]:
    """Of each variant's options, where enough trials were trained to the end to tell anything."""
    optuna, found = needed(), []
    for variant in search.variants:
        whole = [trial.value for trial in trials.all(variant) if trial.state == trials.states.COMPLETE]
        if len(whole) < FEWEST or len({*whole}) < 2:
            continue
        study = optuna.load_study(study_name=trials.name(variant), storage=trials.storage)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=search.seed)
        for option, share in optuna.importance.get_param_importances(study, evaluator=evaluator).items():
            tags: dict[str, Tag] = {"variant": variant.id, "option": option, "dataset": search.dataset.name}
            found.append(Record("option_importance", float(share), "fraction", n=len(whole), tags=tags))
    return found


def best_of(search: Search, points: Points, records: Sequence[Record]) -> Best | None:
    """The best trial of each variant; None if none was trained to the end."""
    winners, usual = [], points.protocol.base.model.mlp_dim
    for variant in search.variants:
        if (top := tuning.best(tuning.trials(records, variant.id))) is None:
            continue
        experiment = points.experiment(variant, top.options)
        names = {*search.options, *top.options} & ({"size"} | {*ModelConfig.model_fields, *Recipe.model_fields})
        options = {name: _plain(experiment, name, search.options) for name in sorted(names - {"epochs"})}
        if experiment.model.mlp_dim != usual:  # as it was matched, too
            options["mlp_dim"] = experiment.model.mlp_dim
        winners.append(Winner(variant=variant.attention, attention=experiment.model.attention, trial=top.number,
                              validation_accuracy=top.accuracy or 0.0, options=options))  # fmt: skip
    if not winners:
        return None
    winners.sort(key=lambda winner: -winner.validation_accuracy)
    most = max(len(tuning.trials(records, variant.id)) for variant in search.variants)
    start = search.start and (backbones.NAME if search.start.name == backbones.NAME else search.start.folder)
    return Best(data=search.dataset.name, epochs=search.recipe.epochs, trials=most, seed=search.seed, start=start,
                folds=search.folds, winner=winners)  # fmt: skip


def _plain(experiment: Experiment, name: str, given: dict[str, Any]) -> Any:
    """An option as it was taken, in a form that TOML has."""
    if name == "size":
        return given[name]
    value = getattr(experiment.recipe if name in Recipe.model_fields else experiment.model, name)
    return list(value) if isinstance(value, tuple) else value
