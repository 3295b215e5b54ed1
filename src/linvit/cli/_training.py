"""What `linvit train` shows: images being decoded, steps being made, and in the end what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from linvit.cli._output import duration, progress
from linvit.progress import Progress as Decoding
from linvit.progress import ignore

if TYPE_CHECKING:
    from linvit.train import Event, Trained


class Watch:
    """Counts the events of a training, and passes on what it has to say; subclasses show the rest."""

    def __init__(self) -> None:
        self.events = 0

    def __call__(self, event: Event) -> None:
        self.events += 1
        if not event.message:
            self.show(event)
        elif not event.message.startswith("diverged"):  # which is explained in the end
            self.say(event.message)

    def say(self, message: str) -> None:
        """Nothing: quiet."""

    def show(self, event: Event) -> None:
        """Nothing: quiet."""


class Lines(Watch):
    """One plain line per epoch, and one every half minute of a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = time.monotonic()

    def say(self, message: str) -> None:
        print(f"linvit: {message}", file=sys.stderr, flush=True)

    def show(self, event: Event) -> None:
        if event.row is None and time.monotonic() - self.last < 30:
            return
        self.last = time.monotonic()
        row = event.row or {"train_loss": event.loss, "train_accuracy": event.accuracy}
        validation = f"validation accuracy {row['validation_accuracy']:.4f}, " if event.row else ""
        print(
            f"epoch {_epochs(event)}, step {event.step}/{event.total}, loss {row['train_loss']:.4f}, "
            f"accuracy {row['train_accuracy']:.4f}, {validation}{event.images_per_second:.0f} images/s, "
            f"{duration(event.eta)} left",
            file=sys.stderr,
            flush=True,
        )


class Bar(Watch):
    """A live line: the bar, and the numbers of the running epoch."""

    def __init__(self, live: Any):
        super().__init__()
        self.live, self.task, self.validation = live, None, ""

    def say(self, message: str) -> None:
        self.live.console.print(f"linvit: {message}", markup=False, highlight=False)

    def show(self, event: Event) -> None:
        if event.row is not None:
            self.validation = f", val {event.row['validation_accuracy']:.3f}"
        numbers = (  # fits 80 columns
            f"epoch {_epochs(event)}, {event.step}/{event.total}, {duration(event.eta)} left, loss {event.loss:.3f}, "
            f"acc {event.accuracy:.3f}{self.validation}, {event.images_per_second:.0f} img/s"
        )
        if self.task is None:
            self.task = self.live.add_task("", numbers=numbers)
        self.live.update(self.task, completed=event.step, total=event.total, numbers=numbers)


def _epochs(event: Event) -> str:
    return f"{event.epoch:.4g}/{event.epochs:.4g}" if event.row else f"{int(event.epoch) + 1}/{event.epochs:.4g}"


@contextmanager
def shown(quiet: bool) -> Iterator[tuple[Watch, Decoding]]:
    """(called with every event of the training, called while images are decoded)."""
    if quiet:
        yield Watch(), ignore
    elif not sys.stderr.isatty():
        with progress("decoding") as lines:
            yield Lines(), lines
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        numbers = TextColumn("{task.fields[numbers]}")
        with Progress(BarColumn(8), numbers, console=Console(stderr=True), transient=True) as live:
            tasks: list[Any] = []

            def decode(done: int, total: int, what: str) -> None:
                if not tasks:
                    tasks.append(live.add_task("", numbers=""))
                text = f"decoding {what}, {done:,} of {total:,}"
                live.update(tasks[0], completed=done, total=total, numbers=text, visible=done < total)

            yield Bar(live), decode


def summary(trained: Trained) -> dict[str, Any]:
    import json

    return {
        "folder": str(trained.folder),
        "test_accuracy": trained.test_accuracy,
        "test_accuracy_final": trained.value("test_accuracy", "final"),
        "validation_accuracy": trained.value("validation_accuracy"),
        "diverged": trained.diverged or None,
        "skipped": trained.data.skipped,
        "records": [json.loads(record.line()) for record in trained.records],
    }


def print_summary(trained: Trained, already: bool) -> None:
    from linvit.measure.accuracy import wilson

    folder = trained.folder
    if already:
        print(f"{folder}: this experiment is finished; nothing was left to do")
    if trained.data.skipped:
        print(f"skipped        {trained.data.skipped} unreadable images")
    best, final = trained.find("test_accuracy", "best"), trained.find("test_accuracy", "final")
    if best is None or final is None or best.value is None:
        return
    low, high = wilson(best.value, best.n)
    print(f"test accuracy  {best.value:.4f} [{low:.4f}, {high:.4f}], n = {best.n}, one seed: best on validation")
    print(f"               {final.value:.4f}: after the last step")
    seconds = duration(trained.value("train_seconds") or 0)
    print(f"model          {best.tags['attention']}, {trained.value('parameters'):,} parameters, trained in {seconds}")
    print(f"folder         {folder} (the model: {folder / 'best'})")
    print(f"use it         linvit predict IMAGE --model {folder}")
    print(f"               linvit evaluate {folder} · linvit.load('{folder}') in Python")


def explain_divergence(trained: Trained) -> int:
    """What to try, and the exit code."""
    step = trained.value("diverged")
    kept = f"the best model until then is in {trained.folder / 'best'}" if trained.model else "no epoch was finished"
    print(
        f"linvit: diverged at step {step:.0f}: {trained.diverged} is not finite; {kept}. "
        "Try a lower --lr, --set warmup=0.3, --set clip_norm=0.5 or an attention with qk_norm=true; and another --out",
        file=sys.stderr,
    )
    return 1


def settings(pairs: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """`key=value` texts beside the flags; a value with commas is a list. What they mean is checked by the library."""
    chosen = dict(flags)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not (key and equals and value):
            raise ValueError(f"--set {pair}: write KEY=VALUE, e.g. --set dropout=0.1")
        if key in ELSEWHERE:
            raise ValueError(f"--set {pair}: use --{key.replace('_', '-')}")
        if key in NOT_OPTIONS:
            raise ValueError(f"unknown option '{key}'")
        if key in chosen:
            raise ValueError(f"--set {pair}: {key} is given twice")
        chosen[key] = [part for part in value.split(",") if part] if "," in value else value
    return chosen


ELSEWHERE = (
    "data", "attention", "attentions", "seed", "seeds", "image_size", "limit", "skip_bad", "out", "device", "data_root",
    "budget", "match",
)  # fmt: skip
NOT_OPTIONS = ("progress", "decode_progress", "checkpoint_seconds", "command", "watch", "decoding")  # of the functions
