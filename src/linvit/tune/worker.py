"""A worker: it takes trials until there are none left, and trains each in this process. A trial is one training, or one
for each fold.

`python -m linvit.tune` is one that reads from stdin what to work on and answers with lines of JSON. It ends when
its input does; a training under way is saved first.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from linvit.files import read_lines, slug
from linvit.locks import locked
from linvit.metrics import percent
from linvit.progress import Progress
from linvit.records import Record
from linvit.study.jobs import WAIT, Job
from linvit.study.protocol import Protocol
from linvit.train import Event
from linvit.train.events import Noted, Stepped, Validated
from linvit.train.trackers import Tracker, tracking
from linvit.tune.design import Points, Search
from linvit.tune.leases import Leases, Lost
from linvit.tune.space import Point
from linvit.tune.storage import in_reach, needed, open_storage
from linvit.tune.trials import Claim, Trials

POLL = 1.0  # seconds between two looks for something to do
OFTEN = 0.5  # seconds between two words on how far a trial is
Say = Callable[[str], None]


class Score(NamedTuple):
    """Of images that were held out."""

    images: int
    accuracy: float
    loss: float


def _together(scores: Sequence[Score]) -> Score:
    """Over all their images."""
    images = sum(score.images for score in scores)
    right = sum(round(score.accuracy * score.images) for score in scores)
    return Score(images, right / images, sum(score.loss * score.images for score in scores) / images)


class Pruned(Exception):
    """The trial is not worth going on with."""


@dataclass
class Worker:
    search: Search
    folder: Path
    trials: Trials
    device: torch.device
    threads: int
    say: Say
    progress: Progress
    track: Sequence[type[Tracker]] = ()
    far: tuple[int, int] = (0, 1)  # what is done of what there is to do, when that was last asked

    def run(self) -> None:
        """Until every trial is finished; what another worker leaves is waited for."""
        with self.trials.leases(self.folder) as leases:
            while not self.trials.over():
                self.far = self.trials.progress()
                try:
                    if (trial := self.taken(leases)) is not None:
                        trial.finish(*trial.train())
                    else:
                        time.sleep(POLL)
                except Lost:
                    leases.release()

    def taken(self, leases: Leases, wait: float = WAIT) -> Trial | None:
        """A trial to do; None: there is none at the moment. `wait`: seconds for others to leave its folders."""
        while (claim := self.trials.claim(leases)) is not None:
            live, point = self.trials.opened(claim)
            try:
                jobs = self._jobs(claim, point)
            except ValueError as error:
                self.trials.void(leases, str(error))
                self.trials.check_possible(claim.variant, str(error))
                continue
            try:
                for place in (Path(job.folder) for job in jobs):
                    with locked(place, wait) if place.exists() else nullcontext():
                        pass
            except ValueError:  # a worker that was taken for dead still has the folder
                leases.release()
                return None
            return Trial(self, claim, leases, live, point, jobs, dict(claim.trial.intermediate_values))
        return None

    def _jobs(self, claim: Claim, point: Point) -> list[Job]:
        """What a job tests is its fold; of the set's test images its data has none then, and without folds none is
        looked at."""
        found, folds = [], self.search.folds
        for index, experiment in enumerate(self.trials.points.experiments(claim.variant, point)):
            run = f"trial{claim.number}-{f'fold{index}-' if folds else ''}{experiment.id[:6]}"
            found.append(Job(
                number=claim.number, jobs=self.search.trials or 0, variant=claim.variant.id,
                fold=index if folds else None, experiment=experiment,
                folder=str(self.folder / f"{slug(claim.variant.id)}-{run}"), device=str(self.device),
                threads=self.threads, test=folds is not None,
            ))  # fmt: skip
        return found


@dataclass
class Trial:
    """One trial in a worker's hands."""

    worker: Worker
    claim: Claim
    leases: Leases
    live: Any  # Optuna's
    point: Point
    jobs: list[Job]  # one for each fold
    reported: dict[int, float]  # validation, or fold from 1 → accuracy, as the storage has them
    at: int = 0  # the job under way
    held_out: list[Score] = field(default_factory=list)  # of the folds that are done
    told: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    trackers: dict[int, list[Tracker]] = field(default_factory=dict)  # by job

    @property
    def name(self) -> str:
        return f"{self.claim.variant.label} trial {self.claim.number}"

    @property
    def folds(self) -> int | None:
        return self.worker.search.folds

    @property
    def job(self) -> Job:
        return self.jobs[self.at]

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """A line for each validation of the training, whoever did it."""
        return [row for row in read_lines(Path(job.folder) / "log.jsonl") if row["step"]]

    def train(self) -> tuple[str, str]:
        """Here; how it ended, and why."""
        course, datasets = self.course(), self.worker.trials.points.protocol.datasets
        try:
            job = next(course)
            while True:
                try:
                    records = job.do(datasets[job.experiment.data.identity], [self.listen])
                except (RuntimeError, MemoryError) as error:  # out of memory, as a rule
                    records = job.failed(str(error).strip().partition("\n")[0] or type(error).__name__)
                job = course.send(records)
        except StopIteration as end:
            return end.value
        except Pruned:
            return "pruned", ""
        except needed().exceptions.UpdateFinishedTrialError:
            raise Lost from None

    def course(self) -> Generator[Job, list[Record], tuple[str, str]]:
        """Its jobs, each of which is answered with its records; at the end how it ended, and why."""
        if why := self.worker.trials.given_up(self.claim, self.leases):
            return "failed", why
        for index, job in enumerate(self.jobs):
            self.at = index
            if self._is_hopeless():  # after a fold; or a worker was killed before it could say so
                return "pruned", ""
            records = job.finished() or (yield job)
            self._report_all(records)
            for how, tag in (("failed", "why"), ("diverged", "layer")):
                if found := [str(r.tags[tag]) for r in records if r.metric == how]:
                    return how, found[0]
        return "complete", ""

    def listen(self, event: Event) -> None:
        self.leases.check()
        if self.at not in self.trackers:
            place, home = Path(self.job.folder), self.worker.folder
            self.trackers[self.at] = [kind(self.job.experiment, place, home) for kind in self.worker.track]
        for tracker in self.trackers[self.at]:
            tracker(event)
        if isinstance(event, Validated) and self.folds:  # a part of one fold is not compared with another's
            self.live.set_user_attr("reached", [self.at, event.step])
        elif isinstance(event, Validated):
            self._report_row(event.row)
            if self._is_hopeless():
                raise Pruned
        if isinstance(event, Noted):
            self.worker.say(f"{self.name}: {event.text}")
        elif isinstance(event, Stepped) and time.monotonic() - self.told > OFTEN:
            self.told = time.monotonic()
            fold = f"fold {self.at + 1} of {self.folds}, " if self.folds else ""
            far = f"{self.name}: {fold}epoch {event.epoch:.3g} of {event.epochs:.3g}"
            self.worker.progress(*self.worker.far, far)

    def _report_all(self, records: list[Record]) -> None:
        """Of a job that is done; a kill may have come between a validation and its report."""
        if not self.folds:
            for row in self.rows(self.job):
                self._report_row(row)
            return
        found = {r.metric: r for r in records if r.tags.get("selection") == "best"}
        if "test_accuracy" in found:  # else there is no model to judge by
            accuracy, loss = (found[name].value or 0.0 for name in ("test_accuracy", "test_loss"))
            self.held_out.append(Score(found["test_accuracy"].n, accuracy, loss))
            self._report(self.at + 1, _together(self.held_out).accuracy)

    def _report_row(self, row: dict[str, Any]) -> None:
        self._report(math.ceil(row["epoch"]), row["validation_accuracy"])

    def _report(self, number: int, accuracy: float) -> None:
        if number not in self.reported:
            self.live.report(accuracy, number)
            self.reported[number] = accuracy

    def _is_hopeless(self) -> bool:
        """What is over anyway is not pruned."""
        return 0 < max(self.reported, default=0) < self.worker.search.reports and self.live.should_prune()

    def finish(self, how: str, why: str) -> None:
        """Into the storage, then into the records."""
        states, reported = self.worker.trials.states, self.reported
        state = {"complete": states.COMPLETE, "failed": states.FAIL}.get(how, states.PRUNED)
        last = reported[max(reported)] if reported else None
        best = last if self.folds else max(reported.values(), default=None)
        value = best if how == "complete" else last
        records = self.records(how, why, best)
        facts = {"seconds": records[1].value, "how": how, "records": [json.loads(r.line()) for r in records]}
        for tracker in (one for every in self.trackers.values() for one in every):
            tracker.give_up()
        self.leases.finish(state, None if how == "failed" or value is None else [value], **facts)
        self.worker.trials.write_records(self.worker.folder)
        for job in self.jobs:
            for name in ("last",) if how == "complete" else ("last", "best"):
                shutil.rmtree(Path(job.folder) / name, ignore_errors=True)
        shown = "no validation" if best is None else percent(best)
        self.worker.say(f"{self.name}: {how}, {shown}" + (f" ({why})" if why else ""))

    def records(self, how: str, why: str, best: float | None) -> list[Record]:
        """What is known of it: how right it was, for how long it was trained."""
        every = [self.rows(job) for job in self.jobs]
        lasts = [rows[-1] for rows in every if rows]
        base = self.job.experiment.record(self.worker.device)
        base = base.tagged(variant=self.claim.variant.id, trial=self.claim.number)
        base = replace(base, threads=self.worker.threads)
        if self.folds:
            base = replace(base, experiment="").tagged(folds=self.folds)
            found = _together(self.held_out) if self.held_out else None
            images, loss = (found.images, found.loss) if found else (0, None)
        else:
            top = max(every[0], key=lambda row: (row["validation_accuracy"], -row["validation_loss"]), default={})
            images, loss = len(self.worker.trials.points.protocol.dataset.validation), top.get("validation_loss")
        # One that diverges at once has no validation, but costs time as well: else a budget would never be spent.
        seconds = sum(row["seconds"] for row in lasts) or time.monotonic() - self.begun
        accuracy = replace(base, metric="trial_accuracy", value=best, unit="fraction", n=images)
        return [
            accuracy.tagged(how=how, why=why or None, loss=loss, options=json.dumps(self.point)),
            replace(base, metric="trial_seconds", value=seconds, unit="s"),
            replace(base, metric="trial_steps", value=sum(row["step"] for row in lasts), unit="count"),
        ]  # fmt: skip


def built(asked: dict[str, Any], say: Say, progress: Progress) -> Worker:
    """From what another process tells of a search."""
    search = Search.model_validate(asked["search"])
    assert search.source is not None
    dataset = search.source.open()
    if dataset.identity != search.dataset.identity:
        raise ValueError(f"{search.source.data} has changed since the search began")
    protocol = Protocol(dataset, search.source, search.seed, search.options, search.match, search.start,
                        search.folds, spare_test=True)  # fmt: skip
    trials = Trials(search, Points(search, protocol), open_storage(asked["storage"]))
    device = torch.device(asked["device"])
    return Worker(
        search, Path(asked["folder"]), trials, device, asked["threads"], say, progress, tracking(asked["track"])
    )


def main() -> int:
    """A worker process: 0 when every trial is finished."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    asked = json.loads(sys.stdin.readline())

    def answer(**row: Any) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more: `leave` sees to it
            answers.write(json.dumps(row) + "\n")
            answers.flush()

    def leave() -> None:
        while os.read(0, 4096):  # not sys.stdin: whoever waits there keeps a process from ending
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    def stop(number: int, frame: Any) -> None:  # a training under way has a handler of its own, and saves first
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning: the search heeds it, or a training
    threading.Thread(target=leave, daemon=True).start()
    try:
        with in_reach(asked["storage"]):
            built(asked, lambda text: answer(say=text), lambda *far: answer(progress=far)).run()
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    except (ValueError, OSError) as error:
        answer(error=str(error))
        return 2
    return 0
