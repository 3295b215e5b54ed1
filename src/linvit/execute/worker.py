"""A worker process: work from stdin as lines of JSON, events and results to stdout, until its input ends.

`linvit.execute.processes` starts it. When its input ends, the caller has ended or wants it to: a training under way is
saved first, so that no worker outlives a killed study.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from typing import Any

from linvit.execute.work import DatasetCache, StopWork, perform, thinned
from linvit.machine import keep_freed_memory
from linvit.signals import EVICTIONS, REQUEUE
from linvit.training.events import ASKING, Event, to_json

EVENT_SECONDS = 0.2  # between two events that only say how far a training is


class Caller:
    """The process that asks for work, through this worker's stdin and stdout."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a library prints is no answer
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        self.busy, self.ended = threading.Event(), threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as lines:  # sys.stdin would hold a lock while this thread waits
            for line in lines:
                self.lines.put(line)
        self.ended.set()
        self.lines.put(None)
        if self.busy.is_set():
            stop_training()

    def receive(self) -> bytes | None:
        line = self.lines.get()
        if line is None:
            self.lines.put(None)  # for whoever asks next
        return line

    def send(self, row: dict[str, Any]) -> None:
        try:
            self.answers.write(json.dumps(row) + "\n")
            self.answers.flush()
        except BrokenPipeError:  # the caller has ended: the end of the input follows
            time.sleep(0.1)

    def on_event(self, event: Event) -> None:
        """The caller decides whether to continue: a trial is pruned, or a plan made again, right there."""
        self.send(to_json(event))
        if isinstance(event, ASKING) and json.loads(self.receive() or b"{}").get("stop"):
            raise StopWork


def stop_training() -> None:
    """It saves itself first."""
    if os.name == "nt":  # where `kill` would end the process at once
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    for number in EVICTIONS[1:]:
        signal.signal(number, signal.SIG_IGN)  # a scheduler's warning, which the caller handles
    keep_freed_memory()
    caller, datasets = Caller(), DatasetCache()
    while (line := caller.receive()) is not None:
        caller.busy.set()
        if caller.ended.is_set():  # before this was begun
            break
        try:
            caller.send(perform(line.decode(), datasets, thinned(caller.on_event, EVENT_SECONDS)))
        except KeyboardInterrupt:
            os._exit(REQUEUE)
        caller.busy.clear()


if __name__ == "__main__":
    main()
