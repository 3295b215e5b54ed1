"""Jobs side by side, each in a process of its own with threads of its own.

A worker gets jobs as lines of JSON and answers with lines of JSON: events, then records. It ends when its input does,
so none outlives a killed study; a training under way is saved first. Workers are in sessions of their own: Ctrl-C
reaches the study, which then closes their inputs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from pydantic import ValidationError

from linvit.data import Dataset
from linvit.errors import REQUEUE, Evicted, clear
from linvit.records import Record
from linvit.study.jobs import Hear, Job, Shelf
from linvit.study.runners import RUNNERS, Runner
from linvit.train.events import Event, Stepped, from_json, to_json
from linvit.train.loop import Rate

OFTEN = 0.2  # seconds between two events of one worker that only say how far it is
LINES = 5  # of a dead worker's last words


class Worker:
    """The study's end of one worker process, which runs a module."""

    def __init__(self, answers: queue.Queue[tuple[Worker, dict[str, Any] | None]], module: str = __name__):
        self.job: Job | None = None
        self.words = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}  # what can be imported here can be there
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words,
            env=os.environ | paths, text=True, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=[answers], daemon=True).start()

    def _listen(self, answers: queue.Queue[tuple[Worker, dict[str, Any] | None]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # cut short by a kill: its end comes next
                answers.put((self, json.loads(line)))
        answers.put((self, None))

    def send(self, job: Job, **more: Any) -> None:
        assert self.process.stdin is not None
        self.job = job
        with contextlib.suppress(BrokenPipeError):  # it has died: its end is on its way
            self.process.stdin.write(json.dumps({"job": job.model_dump(mode="json")} | more) + "\n")
            self.process.stdin.flush()

    def last_words(self) -> str:
        code = self.process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self.words.seek(0)
        lines = [line.strip() for line in self.words.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join([f"its process {how}", *lines[-LINES:]])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]


@RUNNERS.register("processes")
class Processes(Runner):
    opens = True

    def __init__(self, jobs: int | None, datasets: Mapping[str, Dataset], where: str = ""):
        super().__init__(jobs, datasets, where)
        self.answers: queue.Queue[tuple[Worker, dict[str, Any] | None]] = queue.Queue()
        self.workers: list[Worker] = []

    def _idle(self, wanted: int) -> Iterator[Worker]:
        """Workers without a job, started as they are needed."""
        self.workers = [worker for worker in self.workers if worker.job or worker.process.poll() is None]
        self.workers += [Worker(self.answers) for _ in range(min(wanted, self.jobs) - len(self.workers))]
        return (worker for worker in self.workers if worker.job is None)

    def run(self, jobs: Sequence[Job], hear: Hear) -> Iterator[tuple[Job, list[Record]]]:
        waiting, done = list(jobs), {}
        for job in jobs:
            while job.number not in done:
                for worker in self._idle(len(waiting)):
                    if waiting:
                        worker.send(waiting.pop(0))
                number, records = self._answer(hear)
                done |= {number: records} if records is not None else {}
            yield job, done.pop(job.number)

    def _answer(self, hear: Hear) -> tuple[int, list[Record] | None]:
        """Wait for one answer of any worker: the number of its job, and its records if it is done."""
        worker, answer = self.answers.get()
        job = worker.job
        if job is None or worker not in self.workers:  # an idle one has ended, and another has taken its place
            return -1, None
        if answer is None:
            self.workers.remove(worker)
            if worker.process.wait() == REQUEUE:
                raise Evicted("a worker was told to leave")
            return job.number, job.failed(worker.last_words())
        if "event" in answer:
            hear(job, from_json(answer))
            return job.number, None
        worker.job = None
        if "error" in answer:
            raise ValueError(answer["error"])
        return job.number, [Record.of(row) for row in answer["records"]]

    def check(self, jobs: Sequence[Job]) -> None:
        """What a worker does not know, registered only here, is an error before it is chosen."""
        for job in jobs:
            self._asked(job, 0.0)

    def rate(self, job: Job, seconds: float) -> Rate:
        """All workers at once; each begins when all are there."""
        self._asked(job, 0.0)
        return min(self._asked(job, seconds))

    def _asked(self, job: Job, seconds: float) -> list[Rate]:
        crew = list(self._idle(self.jobs))
        for worker in crew:
            worker.send(job, seconds=seconds)
        return [self._rate() for _ in crew]

    def _rate(self) -> Rate:
        worker, answer = self.answers.get()
        worker.job = None
        if answer is None or "error" in answer:
            raise ValueError(answer["error"] if answer else f"a worker could not be started: {worker.last_words()}")
        return Rate(*answer["rate"])

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(60)
        self.workers = []


def main() -> None:
    """A worker: jobs from stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning: the study heeds it, or a training
    jobs: queue.Queue[str | None] = queue.Queue()
    busy, ended = threading.Event(), threading.Event()

    def read(source: IO[str]) -> None:
        for line in source:
            jobs.put(line)
        ended.set()
        jobs.put(None)
        if busy.is_set():  # the study is gone, or wants to end: save what is under way
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, args=[sys.stdin], daemon=True).start()
    shelf = Shelf()

    def answer(row: dict[str, Any]) -> None:
        try:
            answers.write(json.dumps(row) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody listens any more: the reader of jobs sees to it
            time.sleep(0.1)

    while (line := jobs.get()) is not None:
        busy.set()
        if ended.is_set():  # the study has gone before this was begun
            break
        asked = json.loads(line)
        try:
            job = Job.model_validate(asked["job"])
        except ValidationError as error:
            answer({"error": f"a worker cannot do this job: {clear(error)}"})
        else:
            _do(job, shelf, answer, asked.get("seconds"))
        busy.clear()


def _do(job: Job, shelf: Shelf, answer: Any, seconds: float | None) -> None:
    """The job; or, if seconds are given, how fast it gets on for so long."""
    last = 0.0

    def hear(event: Event) -> None:
        nonlocal last
        now = time.monotonic()
        if type(event) is not Stepped or now - last > OFTEN:
            last = now
            answer(to_json(event))

    try:
        dataset = shelf.find(job.experiment)
        if seconds is not None:
            answer({"rate": job.rate(dataset, seconds) if seconds else [0.0, 0.0]})
            return
        records = job.do(dataset, [hear])
    except KeyboardInterrupt:
        os._exit(REQUEUE)
    except (ValueError, OSError) as error:
        answer({"error": str(error)})
    else:
        answer({"records": [json.loads(record.line()) for record in records]})


if __name__ == "__main__":
    main()
