"""A worker: it takes trials until there are none left, and trains each in this process.

`python -m linvit.tune.worker` is one that reads from stdin what to work on and answers with lines of JSON. It ends when
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from linvit.data import Dataset
from linvit.files import read_lines, slug
from linvit.locks import locked
from linvit.metrics import percent
from linvit.progress import Progress
from linvit.records import Record
from linvit.study.jobs import WAIT, Job
from linvit.study.protocol import Protocol
from linvit.train import Event
from linvit.train.events import Noted, Stepped, Validated
from linvit.tune.design import Points, Search
from linvit.tune.leases import Leases, Lost
from linvit.tune.space import Point
from linvit.tune.storage import needed, open_storage
from linvit.tune.trials import Claim, Trials

POLL = 1.0  # seconds between two looks for something to do
OFTEN = 0.5  # seconds between two words on how far a trial is
Say = Callable[[str], None]


class Pruned(Exception):
    """The trial is not worth going on with."""


@dataclass
class Worker:
    search: Search
    dataset: Dataset
    folder: Path
    trials: Trials
    device: torch.device
    threads: int
    say: Say
    progress: Progress
    far: tuple[int, int] = (0, 1)  # what is done of what there is to do, when that was last asked

    def run(self) -> None:
        """Until every trial is finished; what another worker leaves is waited for."""
        with self.trials.leases(self.folder) as leases:
            while not self.trials.over():
                self.far = self.trials.progress()
                try:
                    if (claim := self.trials.claim(leases)) is not None:
                        self._do(claim, leases)
                    else:
                        time.sleep(POLL)
                except Lost:
                    leases.release()

    def _do(self, claim: Claim, leases: Leases) -> None:
        live, point = self.trials.opened(claim)
        try:
            experiment = self.trials.points.experiment(claim.variant, point)
        except ValueError as error:
            self.trials.void(leases, str(error))
            self.trials.check_possible(claim.variant, str(error))
            return
        place = self.folder / f"{slug(claim.variant.id)}-trial{claim.number}-{experiment.id[:6]}"
        job = Job(
            number=claim.number, jobs=self.search.trials or 0, variant=claim.variant.id, experiment=experiment,
            folder=str(place), device=str(self.device), threads=self.threads, test=False,
        )  # fmt: skip
        try:
            with locked(place, WAIT):
                pass
        except ValueError:  # a worker that was taken for dead still has the folder
            leases.release()
            return
        trial = Trial(self, claim, leases, live, point, job, dict(claim.trial.intermediate_values))
        trial.finish(*trial.train())


@dataclass
class Trial:
    """One trial in a worker's hands."""

    worker: Worker
    claim: Claim
    leases: Leases
    live: Any  # Optuna's
    point: Point
    job: Job
    reported: dict[int, float]  # validation → accuracy, as the storage has them
    told: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.claim.variant.label} trial {self.claim.number}"

    def rows(self) -> list[dict[str, Any]]:
        """A line for each validation of the training, whoever did it."""
        return [row for row in read_lines(Path(self.job.folder) / "log.jsonl") if row["step"]]

    def train(self) -> tuple[str, str]:
        """How it ended, and why."""
        if why := self.worker.trials.given_up(self.claim, self.leases):
            return "failed", why
        try:
            if self._is_hopeless():  # a worker was killed before it could say so
                return "pruned", ""
            records = self.job.do(self.worker.dataset, [self.listen])
        except Pruned:
            return "pruned", ""
        except needed().exceptions.UpdateFinishedTrialError:
            raise Lost from None
        except (RuntimeError, MemoryError) as error:  # out of memory, as a rule
            return "failed", str(error).strip().partition("\n")[0] or type(error).__name__
        for row in self.rows():  # a kill may have come between a validation and its report
            self._report(row)
        where = next((str(r.tags["layer"]) for r in records if r.metric == "diverged"), "")
        return ("diverged", where) if where else ("complete", "")

    def listen(self, event: Event) -> None:
        self.leases.check()
        if isinstance(event, Validated):
            self._report(event.row)
            if self._is_hopeless():
                raise Pruned
        if isinstance(event, Noted):
            self.worker.say(f"{self.name}: {event.text}")
        elif isinstance(event, Stepped) and time.monotonic() - self.told > OFTEN:
            self.told = time.monotonic()
            self.worker.progress(*self.worker.far, f"{self.name}: epoch {event.epoch:.3g} of {event.epochs:.3g}")

    def _report(self, row: dict[str, Any]) -> None:
        number = math.ceil(row["epoch"])
        if number not in self.reported:
            self.live.report(row["validation_accuracy"], number)
            self.reported[number] = row["validation_accuracy"]

    def _is_hopeless(self) -> bool:
        """What is over anyway is not pruned."""
        return 0 < max(self.reported, default=0) < self.worker.search.validations and self.live.should_prune()

    def finish(self, how: str, why: str) -> None:
        """Into the storage, then into the records."""
        states, reported = self.worker.trials.states, self.reported
        state = {"complete": states.COMPLETE, "failed": states.FAIL}.get(how, states.PRUNED)
        best = max(reported.values(), default=None)
        last = reported[max(reported)] if reported else None
        value = best if how == "complete" else last
        records = self.records(how, why, best)
        facts = {"seconds": records[1].value, "how": how, "records": [json.loads(r.line()) for r in records]}
        self.leases.finish(state, None if how == "failed" or value is None else [value], **facts)
        self.worker.trials.write_records(self.worker.folder)
        for name in ("last",) if how == "complete" else ("last", "best"):
            shutil.rmtree(Path(self.job.folder) / name, ignore_errors=True)
        shown = "no validation" if best is None else percent(best)
        self.worker.say(f"{self.name}: {how}, {shown}" + (f" ({why})" if why else ""))

    def records(self, how: str, why: str, best: float | None) -> list[Record]:
        """What is known of it: how right it was, for how long it was trained."""
        rows, experiment = self.rows(), self.job.experiment
        top = max(rows, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]), default={})
        last = rows[-1] if rows else {}
        base = experiment.record(self.worker.device).tagged(variant=self.claim.variant.id, trial=self.claim.number)
        base = replace(base, threads=self.worker.threads)
        images = len(self.worker.dataset.validation)
        accuracy = replace(base, metric="trial_accuracy", value=best, unit="fraction", n=images)
        return [
            accuracy.tagged(how=how, why=why or None, loss=top.get("validation_loss"), options=json.dumps(self.point)),
            replace(base, metric="trial_seconds", value=last.get("seconds", 0.0), unit="s"),
            replace(base, metric="trial_steps", value=last.get("step", 0), unit="count"),
        ]  # fmt: skip


def built(asked: dict[str, Any], say: Say, progress: Progress) -> Worker:
    """From what another process tells of a search."""
    search = Search.model_validate(asked["search"])
    assert search.source is not None
    dataset = search.source.open()
    if dataset.identity != search.dataset.identity:
        raise ValueError(f"{search.source.data} has changed since the search began")
    protocol = Protocol(dataset, search.source, search.seed, search.options, search.match, search.start)
    trials = Trials(search, Points(search, protocol), open_storage(asked["storage"]))
    device = torch.device(asked["device"])
    return Worker(search, dataset, Path(asked["folder"]), trials, device, asked["threads"], say, progress)


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
        built(asked, lambda text: answer(say=text), lambda *far: answer(progress=far)).run()
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    except (ValueError, OSError) as error:
        answer(error=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
