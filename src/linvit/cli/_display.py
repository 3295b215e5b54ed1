"""What is shown during work: live rows on a terminal, plain lines in a pipe, nothing if quiet.

One display serves every verb. `progress` takes (done, total, what), `on_event` the events of one training,
`on_job_event` those of a study's jobs. Nothing is shown for work of less than two seconds.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from linvit.durations import duration

if TYPE_CHECKING:
    from linvit.study import StudyJob

PATIENCE = 2.0  # seconds before the first line
INTERVAL = 10.0  # seconds between plain lines


class Display:
    def __init__(self, quiet: bool = False):
        self.quiet, self.live, self.events = quiet, None, 0
        self.rows: dict[str, Any] = {}  # name → its row on a terminal
        self.begun = self.last_line = time.monotonic()
        self.clocks: dict[str, tuple[float, float, float]] = {}  # name → time and share at its first event, share now
        self.left: dict[int, float] = {}  # job → what is left of it, as a share of the study
        self.reached = 0.0  # where the last of them ends
        self.validation: dict[str, str] = {}

    def __enter__(self) -> Display:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self.live = Progress(
                BarColumn(8),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def progress(self, done: int, total: int, what: str) -> None:
        left = self._left(f"work of {total}", done / total if total else 0.0)
        self._show("progress", done, total, f"{what} ({done:,}/{total:,}{left})", ends=done >= total)

    def on_event(self, event: Any) -> None:
        """One training."""
        self.events += 1
        kind = type(event).__name__
        if kind in ("Began", "Noted"):
            self.log(f"linvit: {event.text}")
        elif kind == "Progressed":
            self.progress(event.done, event.total, event.what)
        elif kind in ("Stepped", "Validated"):
            if row := getattr(event, "row", None):
                self.validation[""] = f", val {row.get('validation_accuracy', row['validation_loss']):.3f}"
            epoch = f"{event.epoch:.4g}" if row else f"{int(event.epoch) + 1}"
            learned = f"loss {event.loss:.3f}, acc {event.accuracy:.3f}" if math.isfinite(event.loss) else ""
            parts = (  # fit 80 columns
                f"epoch {epoch}/{event.epochs:.4g}" if event.epochs >= 1 else "",
                f"{event.step}/{event.total}",
                f"{duration(event.seconds_left)} left",
                learned,
                self.validation.get("", ""),
                f"{event.images_per_second:.0f} img/s",
            )
            text = ", ".join(part.removeprefix(", ") for part in parts if part)
            self._show("training", event.step, event.total, text, always=bool(row))

    def on_job_event(self, job: StudyJob, event: Any) -> None:
        """One of a study's trainings."""
        self.events += 1
        name, kind = job.experiment.label, type(event).__name__
        who = f"{name} seed {job.experiment.seed}" + ("" if job.fold is None else f" fold {job.fold}")
        if kind == "Noted":
            self.log(f"{who}: {event.text}")
        elif kind == "Diverged":
            self.log(f"{who}: diverged at step {event.step}, in {event.layer}")
        elif kind == "Progressed":
            self._show(name, event.done, event.total, f"{who}: {event.what}, {event.done:,} of {event.total:,} images")
        elif kind in ("Stepped", "Validated"):
            step, total = event.step, event.total
            if row := getattr(event, "row", None):
                self.validation[name] = f", val {row.get('validation_accuracy', row['validation_loss']):.3f}"
            begins, ends = job.part
            self.left[job.number] = (1 - step / total) * (ends - begins)
            self.reached = max(self.reached, ends)
            done = self.reached - sum(self.left.values())  # a job without events was finished by an earlier call
            place = f"run {job.number + 1} of {job.jobs}{self._left('training', done)}"
            text = f"{who}: {step}/{total}{self.validation.get(name, '')}, {event.images_per_second:,.0f} img/s"
            self._show(name, step, total, f"{text} ({place})", always=bool(row) and step == total)

    def log(self, text: str) -> None:
        """Print a permanent line."""
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            self.last_line = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def _left(self, name: str, share: float) -> str:
        """Time left, from what was done since its first event: the rest was done by an earlier call."""
        now = time.monotonic()
        since, first, last = self.clocks.get(name, (now, share, share))
        if share < last:  # started again
            since, first = now, share
        self.clocks[name] = since, first, share
        if share - first < 0.005 or share >= 1:
            return ""
        return f", {duration((now - since) * (1 - share) / (share - first))} left"

    def _show(self, name: str, done: int, total: int, text: str, always: bool = False, ends: bool = False) -> None:
        if self.live is not None:
            if name not in self.rows:
                self.rows[name] = self.live.add_task("")
            self.live.update(self.rows[name], completed=done, total=total or None, description=text, visible=not ends)
            return
        wait = PATIENCE if self.last_line == self.begun else INTERVAL
        if always or (time.monotonic() - self.last_line >= wait and not ends):
            self.log(text)
