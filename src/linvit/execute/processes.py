"""Several pieces of work at a time, each in a process with its own threads.

Each thread of a pool owns one worker process and waits for its answers. Workers are in sessions of their own: Ctrl-C
reaches this process, which then closes their inputs (see worker.py).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from linvit.execute.base import EXECUTORS, Executor
from linvit.execute.work import DatasetCache, OnEvent, Work, WorkerDied, outcome
from linvit.signals import REQUEUE, Evicted
from linvit.training.events import ASKING, from_json

LAST_LINES = 5  # of a dead worker's output that are reported
SAVE_SECONDS = 60.0  # after which a worker that was asked to end is killed


def gpu_environment(number: int, device: str) -> dict[str, str]:
    """With several GPUs and none of them named, each worker sees one, the next worker the next."""
    if device != "cuda" or (count := torch.cuda.device_count()) < 2:
        return {}
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": (names or [str(i) for i in range(count)])[number % count]}


class Worker:
    """One worker process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "linvit.execute.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},  # imports what this process can
            text=True,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has died or is being closed: `receive` returns None
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Its next answer; None when it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # cut short by a kill
                return json.loads(line)
        return None

    def last_words(self) -> str:
        code = self.process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self.output.seek(0)
        lines = [line.strip() for line in self.output.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join([f"its process {how}", *lines[-LAST_LINES:]])

    def close(self) -> None:
        """Ask it to save what it is doing, and to end."""
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]


@EXECUTORS.register("processes")
class Processes(Executor):
    opens_data = True

    def __init__(self, slots: int, threads: int, datasets: DatasetCache, address: str = ""):
        super().__init__(slots, threads, datasets, address)
        self.workers: list[Worker] = []
        self._open()

    def _open(self) -> None:
        self.pool, self.own = ThreadPoolExecutor(self.slots), threading.local()
        self.numbers = itertools.count()
        self.events, self.closing = threading.Lock(), threading.Event()

    def submit(self, work: Work, on_event: OnEvent = lambda event: None) -> Future[Any]:
        return self.pool.submit(self._run, work, on_event)

    def _worker(self, device: str) -> Worker:
        """This thread's."""
        worker: Worker | None = getattr(self.own, "worker", None)
        if worker is None or not worker.alive:
            if not hasattr(self.own, "number"):
                self.own.number = next(self.numbers)
            worker = self.own.worker = Worker(gpu_environment(self.own.number, device))
            self.workers.append(worker)
            if self.closing.is_set():
                worker.close()
        return worker

    def _run(self, work: Work, on_event: OnEvent) -> Any:
        worker, failure = self._worker(work.device), None
        worker.send(work.to_json())
        while (answer := worker.receive()) is not None and "event" in answer:
            event = from_json(answer)
            try:
                with self.events:
                    if failure is None:
                        on_event(event)
            except Exception as error:  # StopWork, as a rule
                failure = error
            if isinstance(event, ASKING):
                worker.send(json.dumps({"stop": failure is not None}))
        if failure is not None:
            raise failure
        if answer is None:
            if worker.process.wait() == REQUEUE:
                raise Evicted("a worker was asked to end")
            raise WorkerDied(worker.last_words())
        if "failed" in answer:  # what an error leaves of a device or of memory is not for the next one
            worker.close()
            worker.process.wait()
        return outcome(work, answer)

    def shutdown(self) -> None:
        self.closing.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.close()
        for worker in self.workers:
            try:
                worker.process.wait(SAVE_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
        self.pool.shutdown()
        self.workers = []
        self._open()
