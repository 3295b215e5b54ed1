"""What verbs print: tables and JSON on stdout, warnings on stderr. In a pipe they are plain text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linvit.cli._display import Display
    from linvit.records import Record
    from linvit.report import Result


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Records as their lines have them."""
    return [json.loads(record.line()) for record in records]


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
        box=box.SIMPLE_HEAD if live else None,
        title=title or None,
        title_justify="left",
        title_style="bold",
        show_lines=False,
        pad_edge=live,
        padding=(0, 1) if live else (0, 2, 0, 0),
    )
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
def working(request: Any) -> Iterator[Display]:
    """Carry out a request: with its threads, a display of its progress, and warnings as one line each."""
    from linvit.cli._display import Display
    from linvit.measure.threads import use_threads

    with use_threads(request.threads), Display(request.quiet) as display, warnings_in_one_line():
        yield display


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
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata of images; the pixels are what counts
        warnings.showwarning = print_line
        yield


def carry_out(kind: Callable[..., Any], request: Any, on_event: str = "") -> None:
    """A study, search or conversion, and what its page says. on_event: the method of the display for its events."""
    planned = request.dry_run or request.print_config or getattr(request, "jobs_file", False)
    with working(request) as display:
        listener = {"on_event": getattr(display, on_event)} if on_event else {}
        result = kind(request, log=print if planned else display.log, progress=display.progress, **listener).run()
    if result is not None:
        show(result, request)


def show(result: Result, request: Any) -> None:
    """What a study, search or conversion shows, as its page does; `quiet` leaves the table out."""
    if request.as_json:
        print_json(result.json())
        return
    if not request.quiet:
        print_table(result.table.texts, right=result.table.right)
    for line in (*closing(result), f"Report: {result.page}", *answer_lines(result)):
        print(line)


def closing(result: Result) -> list[str]:
    """What is said below the table, without the answer."""
    if result.answer:
        return [" ".join(result.sentences)] if result.sentences else []
    return [f"{result.headline}. {' '.join(result.sentences)}", *(f"  {command}" for command in result.suggested)]


def answer_lines(result: Result) -> list[str]:
    """One line each, what to run next at the end of the last."""
    if not result.answer:
        return []
    width = max(len(name) for name, _ in result.answer) + 2
    *lines, last = [f"{name:<{width}}{text}" for name, text in result.answer]
    return ["", *lines, " ".join([last, *result.suggested])]
