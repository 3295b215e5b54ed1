"""`tune`: the same search for every variant; its trials, the best of each, and a report.

One process asks for trials, submits their trainings to an executor, and reports and prunes them. A finished trial is
never run twice: the same call resumes an interrupted search, and more trials or variants run only what is new.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from linvit import metrics, report
from linvit.data import Dataset
from linvit.durations import duration, seconds
from linvit.execute import Executor, Job, StopWork, Tracking, job_records
from linvit.files import slug
from linvit.ledger import open_ledger
from linvit.locks import claim_folder, locked
from linvit.machine import cpu_count
from linvit.measure.provenance import machine
from linvit.metrics import percent
from linvit.pipeline.prepare import prepare, requested_placement, result_folder, start_executor
from linvit.progress import Progress, ignore, repeated
from linvit.requests import TuneRequest
from linvit.requests.base import without_password
from linvit.schemas.search import Search
from linvit.schemas.study import Placement, Variant
from linvit.toml import to_toml
from linvit.training.defaults import ATTENTIONS
from linvit.training.events import Event, Noted, Stepped
from linvit.training.trackers import tracking
from linvit.tuning.outcome import best_of, importance
from linvit.tuning.points import Points
from linvit.tuning.space import check_attentions, read_space
from linvit.tuning.storage import import_optuna, open_storage, sqlite_url, storage_errors
from linvit.tuning.trial import Trial
from linvit.tuning.trials import Opened, Trials, check_storage

OWN_FILES = ("study.json", "experiment.json", "convert.json", "records.jsonl", "report.html")
DEFAULT_TRIALS = 20
BUDGET_SHARE = 0.95  # of a budget that is planned with
PROBE_SECONDS = 1.0  # for which each variant is timed
MAX_JOBS = 8  # trainings at a time, unless a number is given
PROGRESS_SECONDS = 0.5

Log = Callable[[str], None]
Course = Generator[Future[Any], Any, None]  # is sent each future when it is done


def tune(
    data: str | Path | Dataset = "digits",
    *,
    log: Log = lambda text: None,
    progress: Progress = ignore,
    **keywords: Any,
) -> Path:
    """Tune every variant with the same effort, write best.toml and the report, and return the search's folder.

    keywords: the fields of `linvit.requests.TuneRequest` (attentions, trials, budget, space, sampler, pruner, storage,
    folds, out, jobs, …) and any option of ModelConfig and Recipe for all trials, e.g. epochs=2.
    log: called with lines of text, such as the plan and the result of each trial. progress(done, total, what):
    called for everything else.
    """
    dataset = data if isinstance(data, Dataset) else None
    request = TuneRequest.of(data=dataset.name if dataset else data, **keywords)
    tuning = Tuning(request, dataset, log, progress)
    tuning.run()
    return tuning.folder


@dataclass
class Tuning:
    """One request being carried out: prepare → plan → trials → report."""

    request: TuneRequest
    dataset: Dataset | None = None
    log: Log = lambda text: None
    progress: Progress = ignore
    folder: Path = Path()
    lock: threading.RLock = field(default_factory=threading.RLock)  # events come from other threads
    told: float = 0.0  # when progress was last told

    def run(self) -> report.Result | None:
        """The report's result; None if the request was only for a plan."""
        import_optuna()
        tracking(self.request.track)  # a missing package is an error before any image is read
        self.prepare()
        self.trackers = Tracking(self.request.track, self.folder)
        request, search = self.request, self.search
        claim_folder(Search.path(self.folder), search, OWN_FILES)
        if request.print_config:
            derived = {"started", "finished", "expected", "machine"}
            return self.log(to_toml(search.model_dump(mode="json", exclude=derived)).strip())
        with self.start_executor() as self.executor, storage_errors(self.where):
            if request.dry_run or request.budget is not None:
                self.plan()
            if request.dry_run:
                return None
            storage = None if request.storage is None else open_storage(self.where)
            if storage is not None:  # an error leaves no folder behind
                check_storage(storage, search, self.folder)
            with locked(self.folder):
                stored = claim_folder(Search.path(self.folder), search, OWN_FILES)
                self.search = search = search if stored is None else stored.extended(search)
                self.points = Points(search, self.prepared.designer)
                self.trials = Trials(search, self.points, storage or open_storage(self.where), self.folder)
                search.save(self.folder)
                self.run_trials()
                return self.finish()

    def prepare(self) -> None:
        """The search, and everything it needs; a bad request is an error before anything is written."""
        request, space = self.request, read_space(self.request.space)
        attentions = request.attentions or ATTENTIONS
        check_attentions(space, attentions)
        for name in space.options:
            if name in request.options:
                raise ValueError(f"{name} is set, but space {space.name} searches it: leave one of them out")
        if request.config is not None:
            raise ValueError(f"config={request.config}: a search takes options from its space: leave it out")
        asked = request.replaced(options=space.fixed | request.options)
        variants = [Variant(attention=spec) for spec in attentions]
        searched = list(space.options)
        prepared = prepare(asked, variants, dataset=self.dataset, searched=searched, progress=self.progress)
        designer = prepared.designer
        if designer.base.recipe.steps is not None:
            raise ValueError("a search compares after equal epochs, whatever the batch size: give epochs, not steps")
        self.prepared = prepared
        self.folder = result_folder(request, f"tune-{prepared.survey.name}", self.dataset)
        self.where = request.storage or sqlite_url(self.folder)
        usual = DEFAULT_TRIALS if request.budget is None and request.sampler != "grid" else None
        self.search = Search(
            name=self.folder.resolve().name,
            requests=[request.stored()],
            started=time.time(),
            dataset=designer.facts(prepared.dataset),
            source=prepared.source,
            variants=prepared.variants,
            space=space,
            trials=request.trials or usual,
            options=json.loads(json.dumps(asked.options)),
            model=designer.base.model,
            recipe=designer.base.recipe,
            start=prepared.start,
            storage=without_password(self.where),
            machine=machine(),
            **{name: getattr(request, name) for name in ("sampler", "pruner", "budget", "seed", "folds", "match")},
        )
        self.points = Points(self.search, designer)
        self.points.check()
        defaults = [self.points.default(variant) for variant in prepared.variants]
        self.search.defaults = request.sampler != "grid" and None not in defaults

    def start_executor(self) -> Executor:
        """What workers cannot do, such as an attention that only this process knows, is done here unless a number of
        jobs was given."""
        request, designer, trials = self.request, self.prepared.designer, self.search.trials
        here = Placement(executor="here", threads=request.threads or torch.get_num_threads())
        place = requested_placement(request, self.prepared)
        is_free = place is None
        if place is None:
            place = Placement(executor="processes", jobs=min(MAX_JOBS, cpu_count()), threads=request.threads or 1)
        jobs = place.jobs if trials is None else min(place.jobs, trials * len(self.search.variants))
        self.placement = here if is_free and jobs == 1 else place.model_copy(update={"jobs": jobs})
        executor = start_executor(self.placement, designer)
        if self.placement.executor == "processes":
            try:
                for variant in self.search.variants:
                    executor.check(designer.experiment(variant), self.prepared.device)
            except ValueError:
                executor.shutdown()
                if not is_free:
                    raise
                self.placement = here
                return start_executor(here, designer)
        return executor

    def plan(self) -> None:
        """How long a trial takes; with a budget, the time of each variant."""
        search, jobs, variants = self.search, self.placement.jobs, self.search.variants
        for i, variant in enumerate(variants):
            self.progress(i, len(variants), f"timing {variant.label}")
            search.expected[variant.id] = self.expected_seconds(variant)
        self.progress(len(variants), len(variants), "timed")
        if search.budget is not None:
            search.share = BUDGET_SHARE * seconds(search.budget) * jobs / len(variants)
            if (longest := max(search.expected.values())) > search.share:
                need = duration(math.ceil(longest * len(variants) / jobs / BUDGET_SHARE))
                raise ValueError(
                    f"budget {search.budget} is too small for one trial of each variant: it takes about {need}"
                )
        for line in plan_lines(search, self.points, jobs):
            self.log(line)

    def expected_seconds(self, variant: Variant) -> float:
        """Of a full trial with default options."""
        experiment, folds = self.prepared.designer.experiment(variant), self.search.folds
        data = self.prepared.designer.dataset
        rate = self.executor.rate(experiment, PROBE_SECONDS, self.prepared.device)
        evaluated = self.search.validations * len(data.validation) + (2 * len(data.test) if folds else 0)
        steps = experiment.length(len(data.train)).total
        return (folds or 1) * (steps / rate.steps + evaluated / rate.images)

    def run_trials(self) -> None:
        """As many at a time as there are slots; a trial of several folds runs one after the other."""
        self.ledger = open_ledger(self.folder)
        self.ledger.append_new(self.trials.records())  # a kill may have come between the storage and this
        running: dict[Future[Any], Course] = {}

        def advance(course: Course, future: Future[Any] | None = None) -> None:
            with self.lock, suppress(StopIteration):
                running[course.send(future)] = course

        while True:
            while len(running) < self.executor.slots:
                with self.lock:
                    self.done, opened = self.trials.progress(), self.trials.open_next()
                if opened is None:
                    break
                advance(self.course(self.make_trial(opened)))
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                advance(running.pop(future), future)

    def course(self, trial: Trial) -> Course:
        """Submit the trial's jobs, each when the one before has ended, and store how it ends."""
        jobs = trial.course()
        try:
            job = next(jobs)
            while True:
                future = yield self.executor.submit(job, partial(self.on_event, trial))
                job = jobs.send(job_records(job, future))
        except StopIteration as end:
            self.end(trial, *end.value)
        except StopWork:
            self.end(trial, "pruned", "")

    def make_trial(self, opened: Opened) -> Trial:
        """Its jobs test the fold that is held out; without folds no image of the test split is read."""
        jobs, folds = [], self.search.folds
        for index, experiment in enumerate(opened.experiments):
            run = f"trial{opened.number}-{f'fold{index}-' if folds else ''}{experiment.id[:6]}"
            jobs.append(
                Job(
                    experiment=experiment,
                    folder=str(self.folder / f"{slug(opened.variant.id)}-{run}"),
                    device=str(self.prepared.device),
                    threads=self.placement.threads,
                    test=folds is not None,
                )
            )
        images = self.search.dataset.validation
        return Trial(self.search, opened, jobs, images)

    def on_event(self, trial: Trial, event: Event) -> None:
        with self.lock:
            if isinstance(event, Noted):
                self.log(f"{trial.name}: {event.text}")
            elif isinstance(event, Stepped) and time.monotonic() - self.told > PROGRESS_SECONDS:
                self.told = time.monotonic()
                fold = f"fold {trial.current + 1} of {self.search.folds}, " if self.search.folds else ""
                self.progress(*self.done, f"{trial.name}: {fold}epoch {event.epoch:.3g} of {event.epochs:.3g}")
            self.trackers(trial.job, event)
            trial.on_event(event)

    def end(self, trial: Trial, how: str, why: str) -> None:
        """Into the storage, then into the records."""
        records = trial.records(how, why)
        self.trials.finish(trial.opened, how, trial.accuracy, records)
        self.ledger.append_new(records)
        for job in trial.jobs:
            self.trackers.give_up(job)
            for name in ("last",) if how == "complete" else ("last", "best"):
                shutil.rmtree(Path(job.folder) / name, ignore_errors=True)
        shown = "no validation" if trial.accuracy is None else percent(trial.accuracy)
        self.log(f"{trial.name}: {how}, {shown}" + (f" ({why})" if why else ""))

    def finish(self) -> report.Result:
        """What was found, for train, compare and people."""
        search, ledger = self.search, self.ledger
        known = {(metrics.key(record), record.value) for record in ledger}
        ledger.append([r for r in importance(search, self.trials) if (metrics.key(r), r.value) not in known])
        best = best_of(search, self.points, ledger)
        if best is not None:
            data = search.dataset
            judged = f"on {data.validation:,} validation images"
            if search.folds:
                judged = f"by {search.folds}-fold cross-validation on {data.train + data.validation:,} images"
            comment = f"The best of {best.trials} trials of each variant, {judged} of {data.name}; one seed."
            best.write(self.folder / "best.toml", comment)
        search.finished = max((record.time for record in ledger), default=None)
        search.save(self.folder)
        with repeated(self.progress) as tell:
            tell(0, 1, "writing the report")
            return report.build(self.folder)


def plan_lines(search: Search, points: Points, jobs: int) -> list[str]:
    each = search.trials if points.max_trials is None else min(points.max_trials, search.trials or points.max_trials)
    if search.share is not None:
        fewest = min(int(search.share // one) for one in search.expected.values())
        count = f"{duration(search.share)} of training each, enough for {fewest} full trials or more"
        longest = seconds(search.budget or "")
    else:
        count = f"{each} trials each, {len(search.variants) * (each or 0)} in all"
        longest = (each or 0) * sum(search.expected.values()) / jobs
    one = ", ".join(f"{duration(search.expected[v.id])} {v.label}" for v in search.variants)
    training, decides = f"{search.recipe.epochs:g} epochs", "validation images decide"
    if search.folds:
        training, decides = f"{search.folds} folds of {training}", f"{search.folds}-fold cross-validation decides"
    pruning = "no pruning" if search.pruner == "none" else f"{search.pruner} pruning stops unpromising trials early"
    return [
        f"plan of a search, {jobs if jobs > 1 else 'one'} training{'s' * (jobs > 1)} at a time",
        f"  variants {', '.join(v.label for v in search.variants)}",
        f"  space    {search.space.name}: {', '.join(search.space.options | search.space.attention)}",
        f"  trials   {count}; sampler {search.sampler}, {pruning}",
        f"  a trial  {training}, about {one} with default options",
        f"  time     at most about {duration(longest)}; {decides}, test images are not read",
    ]
