"""The command line: `linvit VERB …`, where a verb is one library call.

To add a verb, write one file `cli/<verb>.py` with a function `run`; nothing else changes:

    from typing import Annotated
    import typer
    from linvit.cli import _options as options

    def run(
        data: Annotated[str, typer.Argument(help="A data set's name or a path.")] = "digits",
        seed: options.Seed = 0,
        quiet: options.Quiet = False,
    ) -> None:
        '''One line for `linvit --help`.

        Examples:

            linvit verb digits --seed 1
        '''
        from linvit.train import train      # heavy imports go inside: help must not load torch

        train(data, seed=seed)

A verb with verbs of its own defines `app = typer.Typer()` instead of `run` (see bench.py). A hyphen in a verb's name is
an underscore in its file's. A file whose name starts with `_` is no verb: `_options.py` has the options that verbs
share, `_output.py` progress, tables and JSON.

Errors: a verb lets ValueError (and its kin) and OSError with a file name rise; `main` prints one line,
`linvit: error: …`, and returns 2. LINVIT_TRACEBACK=1 shows where it came from. A KeyboardInterrupt becomes one line and
130, SIGTERM and SIGUSR1 become one line and 75, which tells a scheduler to start the same command again; the message,
if there is one, says how to go on. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from linvit.errors import REQUEUE, Evicted, choices

HELP = """Which attention should my vision transformer use? Train, measure and compare softmax, Performers, Linformers.

Examples:

    linvit compare digits
    linvit compare path/to/images --budget 30m
    linvit advise path/to/images
    linvit list attentions
    linvit bench speed --tokens 1024 --attention performer-exp:m=128

A spec is name[:key=value,…], e.g. performer-relu:m=64,projection=none; `linvit list attentions` shows them all.
"""


class Verbs(TyperGroup):
    """The verbs are the modules beside this one. A module is imported when its verb runs, or for help."""

    def list_commands(self, ctx: Any) -> list[str]:
        found = [module.name for module in pkgutil.iter_modules(__path__)]
        return sorted(name.replace("_", "-") for name in found if not name.startswith("_"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name.replace('-', '_')}")
        return verb(cmd_name, module)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            raise ValueError(f"unknown verb '{args[0]}'" + choices(args[0], self.list_commands(ctx)))
        if args[:1] != ["train"] and (others := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ValueError(f"WORLD_SIZE={others}: only `linvit train` is shared by processes that torchrun starts")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:  # before typer turns it into a silent exit
            raise _Interrupted(str(stop)) from stop


class _Interrupted(Exception):
    pass


def verb(name: str, module: types.ModuleType) -> Any:
    """A verb's module → its command."""
    if (inner := getattr(module, "app", None)) is None:
        inner = typer.Typer(add_completion=False, rich_markup_mode=None)
        inner.command(name)(module.run)
    command = typer.main.get_command(inner)
    command.name = name
    return _keep_examples(command)


def _keep_examples(command: Any) -> Any:
    """Mark the indented paragraphs of help texts, so that their lines are not joined."""
    if command.help:
        command.help = re.sub(r"\n\n(?= )", "\n\n\b\n", inspect.cleandoc(command.help))
    for inner in getattr(command, "commands", {}).values():
        _keep_examples(inner)
    return command


app = typer.Typer(cls=Verbs, add_completion=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from linvit import __version__

        print(f"linvit {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _linvit(
    version: Annotated[bool, typer.Option(
        "--version", help="Show the version and exit.", callback=_print_version, is_eager=True)] = False,
) -> None: ...  # fmt: skip


_UsageError: Any = typer.BadParameter.__base__  # click's, which typer carries under names of its own


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0, 2 for a user's error, 130 when interrupted, 75 when told to
    leave."""
    words = [*(sys.argv[1:] if args is None else args)] or ["--help"]  # `list` is a verb here
    try:
        with _heeding_schedulers():
            code = _keep_examples(typer.main.get_command(app)).main(words, prog_name="linvit", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (_Interrupted, KeyboardInterrupt) as stop:
        return _fail("interrupted" + (f": {stop}" if str(stop) else ""), REQUEUE if _was_evicted(stop) else 130)
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx else "linvit"
        return _fail(f"error: {error.format_message().rstrip('.')} (see {where} --help)", 2)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        unnamed = isinstance(error, OSError) and error.filename is None
        if unnamed or os.environ.get("LINVIT_TRACEBACK", "") not in ("", "0"):
            raise
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return _fail(f"error: {text or type(error).__name__}", 2)


@contextmanager
def _heeding_schedulers() -> Iterator[None]:
    """SIGTERM and SIGUSR1 are an Evicted, wherever they come; a training holds them back until its step is whole."""

    def leave(number: int, frame: Any) -> None:
        raise Evicted

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        old[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    """Ctrl-C. Not every package survives one in the middle of its import, or lets it through: there it ends at once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.isatty(2):  # a progress bar had hidden the cursor
                os.write(2, b"\r\x1b[2K\x1b[?25h")
            os.write(2, b"linvit: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _was_evicted(stop: BaseException | None) -> bool:
    return stop is not None and (isinstance(stop, Evicted) or _was_evicted(stop.__cause__))


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    print("linvit: " + " ".join(message.split()), file=sys.stderr)
    return code
