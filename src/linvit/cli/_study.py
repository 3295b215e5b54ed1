"""What `compare` shows while it runs (one live table of all variants, or lines in a pipe) and when it is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit.cli._output import duration, print_json, print_table
from linvit.progress import Progress, ignore

if TYPE_CHECKING:
    from linvit.report import Summary
    from linvit.study import StudyEvent

Watch = Callable[["StudyEvent"], None]


@contextmanager
def live(quiet: bool) -> Iterator[tuple[Watch, Progress]]:
    """(watch, decoding): what `compare` calls as it gets on."""
    if quiet:
        yield (lambda event: None), ignore
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        board = _Board()
        with Live(board.table(), console=Console(stderr=True), refresh_per_second=4, transient=True) as screen:

            def watch(event: StudyEvent) -> None:
                board.take(event)
                screen.update(board.table())

            yield watch, lambda done, total, what: screen.update(f"decoding {what}: {done:,}/{total:,}")
    else:
        lines = _Lines()
        yield lines.take, lines.decoding


class _Board:
    """One row per variant: seeds done, the epoch under way, its last validation accuracy."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}
        self.status, self.left = "", _Left()

    def take(self, event: StudyEvent) -> None:
        if event.stage == "train" and event.event is not None and not event.event.begins:
            row = self.rows.setdefault(event.attention, {})
            step = event.event
            row["seed"] = str(event.seed)
            row["step"] = f"{step.step}/{step.total}"
            row["loss"] = f"{step.loss:.3f}"
            row["images/s"] = f"{step.images_per_second:,.0f}"
            if step.row is not None:
                row["validation"] = f"{step.row['validation_accuracy']:.2%}"
            if step.message:
                row["validation"] = step.message
            self.status = f"run {event.run + 1} of {event.runs}{self.left(event)}"
        elif event.stage == "measure":
            self.status = f"measuring: {event.what} ({event.done}/{event.total})"

    def table(self) -> Any:
        from rich.table import Table

        table = Table(title=self.status, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in ("attention", "seed", "step", "loss", "images/s", "validation"):
            table.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
        for spec, row in self.rows.items():
            table.add_row(spec, *(row.get(key, "") for key in ("seed", "step", "loss", "images/s", "validation")))
        return table


class _Left:
    """Time left, from the share of all steps that was done since the first event: earlier ones were another day's."""

    def __init__(self) -> None:
        self.first, self.start = -1.0, time.monotonic()

    def __call__(self, event: StudyEvent) -> str:
        step = event.event
        if step is None or not step.total:
            return ""
        share = (event.run + step.step / step.total) / event.runs
        if self.first < 0:
            self.first, self.start = share, time.monotonic()
        if share - self.first < 0.005:
            return ""
        left = (time.monotonic() - self.start) * (1 - share) / (share - self.first)
        return f", {duration(left)} of training left"


class _Lines:
    """In a pipe: a line per finished run and per kind of measurement, and a sign of life every half minute."""

    def __init__(self) -> None:
        self.last, self.left = time.monotonic(), _Left()
        self.said = ""

    def take(self, event: StudyEvent) -> None:
        step = event.event
        if event.stage == "train" and step is not None and not step.begins:
            ended = step.step == step.total and step.row is not None
            if step.message:
                self._say(f"{event.attention} seed {event.seed}: {step.message}")
            elif ended and step.row is not None:
                accuracy = f"validation {step.row['validation_accuracy']:.2%}"
                place = f"run {event.run + 1} of {event.runs}{self.left(event)}"
                self._say(f"{event.attention} seed {event.seed}: {accuracy} ({place})")
            elif time.monotonic() - self.last > 30:
                place = f"step {step.step}/{step.total}, {step.images_per_second:,.0f} images/s"
                self._say(f"{event.attention} seed {event.seed}: {place}{self.left(event)}")
        elif event.stage == "measure":
            kind = event.what.split(" of ")[0].split(":")[0]
            if kind not in (self.said, "done"):
                self.said = kind
                self._say(f"measuring {kind}")

    def decoding(self, done: int, total: int, what: str) -> None:
        if time.monotonic() - self.last > 5:
            self._say(f"decoding {what}: {done:,}/{total:,}")

    def _say(self, text: str) -> None:
        self.last = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def show(summary: Summary, folder: Path, as_json: bool, quiet: bool) -> None:
    """The recommendation and the table, as the page has them."""
    from linvit import report

    advice = report.recommend(summary)
    page = folder / "report.html"
    if as_json:
        print_json({
            "recommendation": advice.attention, "confidence": advice.confidence, "sentences": list(advice.sentences),
            "report": str(page), "results": str(folder / "results.csv"),
        })  # fmt: skip
        return
    if not quiet:
        import csv

        with open(folder / "results.csv", newline="", encoding="utf-8") as file:
            rows = [_row(row) for row in csv.DictReader(file)]
        print_table(rows, right=[name for name in (rows[0] if rows else {}) if name not in ("attention", "verdict")])
    print(" ".join(advice.sentences))
    print(f"Report: {page}")


def _row(row: dict[str, str]) -> dict[str, str]:
    def number(key: str, form: str, scale: float = 1.0) -> str:
        return format(float(row[key]) * scale, form) if row.get(key) else "–"

    low, high = number("test_accuracy_low", ".2f", 100), number("test_accuracy_high", ".2f", 100)
    return {
        "attention": row["attention"].removeprefix("'"),
        "test %": number("test_accuracy", ".2f", 100),
        "95 % interval": f"{low} – {high}",
        "speed vs softmax": number("inference_vs_softmax", ".2f"),
        "training vs softmax": number("train_step_vs_softmax", ".2f"),
        "memory MiB": number("peak_memory_bytes", ".0f", 2**-20),
        "verdict": row["verdict"],
    }
