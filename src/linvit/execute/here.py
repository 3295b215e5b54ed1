"""One piece of work after the other, in this process: `submit` returns when it is done."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from linvit.execute.base import EXECUTORS, Executor
from linvit.execute.work import OnEvent, StopWork, Work


@EXECUTORS.register("here")
class Here(Executor):
    def submit(self, work: Work, on_event: OnEvent = lambda event: None) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work.run(self.datasets, on_event))
        except (ValueError, OSError, RuntimeError, MemoryError, StopWork) as error:
            future.set_exception(error)
        return future
