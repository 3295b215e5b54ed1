"""Work: what an executor can run anywhere, since it can be rebuilt from JSON. A Job is one training."""

from __future__ import annotations

import importlib
import json
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import TypeAdapter

from linvit.data import Dataset, folded
from linvit.ledger import open_ledger
from linvit.measure.threads import use_threads
from linvit.models.config import checked
from linvit.progress import Progress, ignore
from linvit.records import Record
from linvit.schemas.base import Frozen
from linvit.schemas.experiment import Experiment, Fold, Source
from linvit.training.events import Event, Progressed, Stepped
from linvit.training.experiment import record_of
from linvit.training.loop import Rate, Training
from linvit.training.run import run
from linvit.training.source import open_source
from linvit.training.trackers import Tracker, tracking

LOCK_SECONDS = 30.0  # for which the process of a killed study may still be saving
OnEvent = Callable[[Event], None]  # may raise StopWork


class StopWork(Exception):
    """Raised by `on_event` to stop work that is running; its future then has this exception."""


class WorkerDied(Exception):
    """The process that did the work ended before it did; the message says how."""


class DatasetCache:
    """The images that this process has opened; folds share one copy."""

    def __init__(self) -> None:
        self._opened: dict[tuple[Source | None, Fold | None], Dataset] = {}
        self._by_identity: dict[str, Dataset] = {}

    def add(self, dataset: Dataset, source: Source | None = None, fold: Fold | None = None) -> None:
        """Images that are open already."""
        self._opened[source, fold] = self._by_identity[dataset.identity] = dataset

    def open(self, source: Source | None, fold: Fold | None, progress: Progress = ignore) -> Dataset:
        """The images of a source with this fold held out; without a source, those that were added without one."""
        if (source, fold) not in self._opened:
            if fold is not None:
                found = folded(self.open(source, None, progress), fold)
            else:
                assert source is not None
                found = open_source(source, progress)
            self.add(found, source, fold)
        return self._opened[source, fold]

    def find(self, experiment: Experiment, progress: Progress = ignore) -> Dataset:
        """The images of an experiment; a ValueError if they are no longer the same."""
        identity, source = experiment.data.identity, experiment.source
        if identity not in self._by_identity:
            if source is None:
                raise ValueError(f"the images of {experiment.data.name} exist only in the process that made them")
            if self.open(source.folded(None), source.fold, progress).identity != identity:
                raise ValueError(f"{source.data} has changed since the study was started")
        return self._by_identity[identity]


class Work(Frozen):
    """Something that an executor can run anywhere. Subclasses must be importable by name."""

    result_type: ClassVar[TypeAdapter[Any]]  # how results cross a process boundary as JSON
    experiment: Experiment  # determines the images
    device: str = "cpu"
    threads: int | None = 1  # None: PyTorch's choice, or all CPUs of the node on which it is measured

    @abstractmethod
    def run(self, datasets: DatasetCache, on_event: OnEvent) -> Any:
        """Run in this process; the result must match `result_type`."""

    @property
    def storage(self) -> Path | None:
        """The folder that workers must share with this process; None if there are no result files."""
        return None

    def absolute(self) -> Self:
        """The same with absolute paths."""
        return self

    def to_json(self) -> str:
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        return json.dumps({"work": name, "fields": self.model_dump(mode="json")})


class Job(Work):
    """One experiment and the folder in which it is trained."""

    result_type = TypeAdapter(list[Record])
    folder: str
    test: bool = True
    checkpoint_seconds: float = 30.0
    begin_by: float | None = None  # Unix time after which it is not started

    def run(self, datasets: DatasetCache, on_event: OnEvent) -> list[Record]:
        """Its records, from this run or an earlier one; none if it is too late to start."""
        if self.begin_by is not None and time.time() > self.begin_by:
            return self.finished()
        with use_threads(self.threads):
            return run(
                self.experiment,
                datasets.find(self.experiment),
                Path(self.folder),
                device=torch.device(self.device),
                listeners=[on_event],
                test=self.test,
                wait=LOCK_SECONDS,
                checkpoint_seconds=self.checkpoint_seconds,
            )

    @property
    def storage(self) -> Path:
        return Path(self.folder).parent

    def absolute(self) -> Self:
        return self.model_copy(update={"folder": str(Path(self.folder).absolute())})

    def finished(self) -> list[Record]:
        """Its records, if it is finished."""
        records = list(open_ledger(Path(self.folder)))
        last = {"test_seconds", "diverged"} if self.test else {"learning_curve"}
        mine = [r for r in records if r.metric in last and r.experiment == self.experiment.id]
        return records if mine else []

    def failed(self, why: str) -> list[Record]:
        """Records of a job whose process ended early."""
        base = record_of(self.experiment, torch.device(self.device))
        return [Record("failed", None, experiment=base.experiment, device=base.device, tags=base.tags | {"why": why})]


class Tracking:
    """The trackers of several jobs, with one store for all of them in `home`."""

    def __init__(self, names: Sequence[str], home: Path):
        self.kinds, self.home = tracking(names), home
        self.trackers: dict[str, list[Tracker]] = {}

    def __call__(self, job: Job, event: Event) -> None:
        if job.folder not in self.trackers:
            self.trackers[job.folder] = [kind(job.experiment, Path(job.folder), self.home) for kind in self.kinds]
        for tracker in self.trackers[job.folder]:
            tracker(event)

    def give_up(self, job: Job) -> None:
        """No event will end it."""
        for tracker in self.trackers.get(job.folder, ()):
            tracker.give_up()


class Probe(Work):
    """How fast an experiment trains, from a few seconds of real steps that leave nothing behind; 0 seconds: only
    whether it can be built there."""

    result_type = TypeAdapter(Rate)
    seconds: float

    def run(self, datasets: DatasetCache, on_event: OnEvent) -> Rate:
        dataset = datasets.find(self.experiment)
        if not self.seconds:
            checked(self.experiment.model)
            return Rate(0.0, 0.0)
        with use_threads(self.threads):
            return Training(self.experiment, dataset, torch.device(self.device), []).rate(self.seconds)


def first_line(error: BaseException) -> str:
    """What went wrong, briefly."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def perform(text: str, datasets: DatasetCache, on_event: OnEvent) -> dict[str, Any]:
    """In a worker: do what `Work.to_json` describes; its result, or how it ended, as plain data."""
    try:
        row = json.loads(text)
        module, _, name = row["work"].partition(":")
        kind: type[Work] = reduce(getattr, name.split("."), importlib.import_module(module))  # type: ignore[arg-type]
        work = kind.model_validate(row["fields"])
        return {"result": kind.result_type.dump_python(work.run(datasets, on_event), mode="json")}
    except StopWork:
        return {"stopped": True}
    except (ValueError, OSError) as error:
        message = str(error)
        if message.startswith("unknown "):  # registered by the caller's script alone
            message = f"{message.partition(';')[0]}: a worker knows only what linvit and LINVIT_PLUGINS register"
        return {"error": message}
    except (RuntimeError, MemoryError) as error:  # out of memory, as a rule
        return {"failed": first_line(error)}
    except Exception:
        return {"bug": traceback.format_exc()}


def outcome(work: Work, answer: dict[str, Any]) -> Any:
    """What `perform` answered, as a result or an exception."""
    if "error" in answer:
        raise ValueError(answer["error"])
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    if "stopped" in answer:
        raise StopWork
    if "bug" in answer:
        raise AssertionError(f"in a worker:\n{answer['bug']}")
    return work.result_type.validate_python(answer["result"])


def thinned(on_event: OnEvent, seconds: float) -> OnEvent:
    """Events that only say how far work is at most once in this many seconds; all others at once."""
    last = 0.0

    def pass_on(event: Event) -> None:
        nonlocal last
        now = time.monotonic()
        if type(event) not in (Stepped, Progressed) or now - last > seconds:
            last = now
            on_event(event)

    return pass_on
