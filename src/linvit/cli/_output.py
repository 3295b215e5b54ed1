"""What verbs print: tables and JSON on stdout, progress on stderr. In a pipe both are plain text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from linvit.progress import Progress

PATIENCE = 2.0  # seconds before the first sign of life
INTERVAL = 5.0  # seconds between plain lines


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[Progress]:
    """A function to call as work gets done: a live bar with the time left, or a line now and then in a pipe."""
    if quiet:
        yield lambda done, total, what: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Live

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Live(*columns, TextColumn("{task.fields[what]}"), console=Console(stderr=True), transient=True) as live:
            task = live.add_task(title, total=None, what="")
            yield lambda done, total, what: live.update(task, completed=done, total=total, what=what)
    else:
        yield _Lines(title)


class _Lines:
    def __init__(self, title: str):
        self.title, self.start = title, time.monotonic()
        self.next = self.start + PATIENCE

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + INTERVAL
        left = f"{duration((now - self.start) * (total - done) / done)} left" if done else "starting"
        print(f"{self.title}: {done}/{total}, {left}, {what}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))


def print_table(
    rows: Sequence[Mapping[str, Any]], *, title: str = "", notes: Sequence[str] = (), right: Sequence[str] = ()
) -> None:
    """Rows with the same keys, which are the headings; the columns in `right` are aligned right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    live = sys.stdout.isatty()
    table = Table(
        box=box.SIMPLE_HEAD if live else None, title=title or None, title_justify="left", title_style="bold",
        show_lines=False, pad_edge=live, padding=(0, 1) if live else (0, 2, 0, 0),
    )  # fmt: skip
    for i, name in enumerate(rows[0] if rows else ()):
        whole = i == 0 or name in right  # names and numbers are never broken
        table.add_column(name, justify="right" if name in right else "left", no_wrap=whole or not live, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row.values()))
    console = Console() if live else Console(width=10_000, no_color=True)
    if live and len(right) == len(table.columns) - 1:  # numbers alone: rather a line too long than a number cut short
        console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    if rows and live:
        console.print(table)
    elif rows:
        with console.capture() as text:
            console.print(table)
        print("\n".join(line.rstrip() for line in text.get().splitlines()))
    for note in notes:
        console.print(Text(note), style="dim" if live else "", soft_wrap=not live)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """What the user is warned about, once and as one line each on stderr; warnings of other kinds as they come."""
    import warnings

    show, shown = warnings.showwarning, set()

    def print_line(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        text = " ".join(str(message).split())
        if category is not UserWarning:
            show(message, category, filename, lineno, file, line)
        elif text not in shown:
            shown.add(text)
            print(f"linvit: warning: {text}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning)
        warnings.showwarning = print_line
        yield
