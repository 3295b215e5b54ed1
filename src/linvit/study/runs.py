"""The runs of a study: all of them, or as many as a budget allows, which is planned again where they turn out slower.

With a budget, frozen features come first. The steps of the trainings follow from the time that is left then, and from
how long the features took. If the runs that a study needs are going to be late, they are ended early and planned again:
with fewer images for frozen features, with fewer steps for trainings.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from linvit import metrics
from linvit.durations import duration
from linvit.execute import StopWork, Tracking
from linvit.ledger import Ledger
from linvit.pipeline.steps import measuring_seconds
from linvit.records import Record
from linvit.schemas.study import Study
from linvit.study.jobs import StudyJob, pooled_records, store_runs, study_jobs, study_records
from linvit.study.schedule import Schedule
from linvit.training.events import Event
from linvit.training.loop import Rate

if TYPE_CHECKING:
    from linvit.study.compare import Comparison

END_SHARE = 0.97  # of the budget, when measurements and the page must be done
MAX_REPLANS = 2

Found = list[tuple[StudyJob, list[Record]]]


class Runs:
    """Runs the jobs of a comparison, and copies their records into the study's ledger."""

    def __init__(self, comparison: Comparison, ledger: Ledger):
        self.comparison, self.ledger, self.clock = comparison, ledger, comparison.clock
        self.trackers = Tracking(comparison.request.track, comparison.folder)
        self.replans = 0
        self.late: list[StudyJob] = []

    @property
    def study(self) -> Study:
        return self.comparison.study

    def run(self) -> tuple[list[StudyJob], list[StudyJob]]:
        """All jobs of the study as it was finally planned, and those for which there was no time."""
        schedule = self._schedule()
        if schedule is None:
            for job, records in self._results(self._jobs(), None):
                store_runs(self.ledger, study_records(job, records))
        else:
            self._note("planning", self.comparison.started)
            begun = self.clock()
            if self.study.fitted:
                self._frozen(schedule)
                self._note("frozen features", begun)
            self._trainings(schedule)
        jobs = self._jobs()
        store_runs(self.ledger, pooled_records(self.ledger, self.comparison.folder, len({job.fold for job in jobs})))
        return jobs, self.late

    def _schedule(self) -> Schedule | None:
        """None without a budget, and for what is done beyond it."""
        study = self.study
        if study.plan is None or study.finished is not None:
            return None
        budget, slots = study.plan.seconds, study.placement.jobs if study.placement else 1
        end = self.comparison.started + END_SHARE * budget - measuring_seconds(budget)
        images = study.dataset
        features = images.train / max(1, images.train + images.validation + images.test)
        return Schedule(study.plan, slots, end, self.clock, self.comparison.prepared.planner is not None, features)

    def _jobs(self) -> list[StudyJob]:
        comparison = self.comparison
        return study_jobs(self.study, comparison.prepared.designer, comparison.folder, comparison.prepared.device)

    def _frozen(self, schedule: Schedule) -> None:
        """Features and heads of every variant, of fewer images if they turn out slow; then the steps of trainings."""
        while True:
            jobs = self._jobs()
            first = [job for job in jobs if job.frozen] or [job for job in jobs if job.full]
            found = self._attempt(first, len(first), schedule)
            if found is not None:
                break
            before = self.study.dataset.train
            self._replan(schedule, frozen=True)
            if (limit := self.study.plan and self.study.plan.limit) and self.study.dataset.train < before:
                self.comparison.log(f"features take longer than planned: at most {limit:,} images of each split")
        results = {job.variant: records for job, records in found if records}
        if not results:
            return
        self.comparison.log(frozen_line(results, self.study))
        if schedule.may_stop or self.replans:
            before = self.study.steps
            self._replan(schedule, frozen=False)
            self._say_steps(before)

    def _trainings(self, schedule: Schedule) -> None:
        while True:
            begun, jobs = self.clock(), self._jobs()
            frozen = [job for job in jobs if job.frozen]
            for job in frozen:
                store_runs(self.ledger, study_records(job, job.finished()))
            others = [job for job in jobs if not job.frozen]
            required = self.study.required_rounds * len(self.study.seeds)
            found = self._attempt(others, required, schedule)
            if found is not None:
                break
            before = self.study.steps
            self._replan(schedule, frozen=False)
            self._say_steps(before)
        for job, records in found:
            store_runs(self.ledger, study_records(job, records))
        self.late = [job for job, records in found if not records]
        if self.study.steps:
            self._note("training", begun)

    def _attempt(self, jobs: Sequence[StudyJob], required: int, schedule: Schedule) -> Found | None:
        """The jobs with their records; None if they were ended, since too few of them would end in time."""
        schedule.begin(jobs, required)
        schedule.may_stop = schedule.may_stop and self.replans < MAX_REPLANS
        try:
            return list(self._results(jobs, schedule))
        except StopWork:
            for job in jobs:
                self.trackers.give_up(job)
            return None

    def _results(self, jobs: Sequence[StudyJob], schedule: Schedule | None) -> Iterator[tuple[StudyJob, list[Record]]]:
        def on_event(job: StudyJob, event: Event) -> None:
            self.comparison.on_event(job, event)
            self.trackers(job, event)
            if schedule is not None:
                schedule.on_event(job, event)

        return self.comparison.placement.run(jobs, on_event, schedule)

    def _replan(self, schedule: Schedule, frozen: bool) -> None:
        """From the pace of what has run, and the time that is left. frozen: features are still to be computed."""
        comparison, study, pace = self.comparison, self.study, max(1.0, schedule.pace)
        planner, plan = comparison.prepared.planner, study.plan
        assert planner is not None
        assert plan is not None
        old = self._jobs()
        self.replans += schedule.stopped
        rates = {name: Rate(*(value / pace for value in rate)) for name, rate in comparison.rates.items()}
        spent = self.clock() - comparison.started
        comparison.rates = rates
        new = planner.settle(plan, rates, comparison.per_epoch, schedule.slots, spent, frozen)
        if new.limit != plan.limit and new.limit is not None:
            comparison.use_fewer(new.limit)
        comparison.settle(new)
        study.save(comparison.folder)
        kept = {job.folder for job in self._jobs()}
        for job in old:
            if job.folder not in kept and Path(job.folder).exists():
                shutil.rmtree(job.folder)
        schedule.plan, schedule.stopped = new, False

    def _say_steps(self, before: int | None) -> None:
        study = self.study
        if study.steps == before:
            return
        left = self.comparison.started + (study.plan.seconds if study.plan else 0.0) - self.clock()
        length = f"{study.steps:,} steps ({study.epochs:.3g} epochs)" if study.steps else "no training"
        self.comparison.log(f"{length} in the {duration(max(0.0, left))} that are left")

    def _note(self, what: str, since: float) -> None:
        seconds = self.study.seconds
        seconds[what] = round(seconds.get(what, 0.0) + self.clock() - since, 1)


def frozen_line(results: dict[str, list[Record]], study: Study) -> str:
    """What the variants reach without training, as soon as it is known."""
    show, found = metrics.METRICS["frozen_accuracy"].show, []
    for variant in study.variants:
        for record in results.get(variant.id, ()):
            if record.metric == "test_accuracy" and record.tags["selection"] == "best":
                found.append(f"{variant.label} {show(record.value)}")
    return "without training: " + ", ".join(found)
