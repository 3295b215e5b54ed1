"""The command line: `linvit VERB …`, where a verb is one library call.

A verb is a file `cli/<verb>.py` with a function `run(request)`, and a request class with that verb in
`linvit.requests`, from which its options and help text derive. A verb with verbs of its own (`bench speed`) has
one file for all of them. A file whose name starts with `_` is not a verb: `_parser.py` makes options, `_display.py`
shows progress, `_output.py` prints tables and JSON. Heavy imports go inside `run`: help must not load torch.

Errors: a verb lets ValueError and OSError with a file name rise; `main` prints one line, `linvit: error: …`, and
returns 2. LINVIT_TRACEBACK=1 shows where it came from. A KeyboardInterrupt becomes one line and 130; SIGTERM and
SIGUSR1 become one line and 75, which tells a scheduler to start the same command again. Anything else is a bug and
keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from linvit.errors import choices
from linvit.machine import keep_freed_memory
from linvit.signals import EVICTIONS, REQUEUE, Evicted

if TYPE_CHECKING:
    from linvit.requests import Request

HELP = """usage: linvit VERB [OPTIONS]

Which attention should my vision transformer use? Train, convert, measure and compare them on your images.

Examples:

    linvit compare digits
    linvit compare path/to/images --budget 30m
    linvit advise path/to/images
    linvit list attentions
    linvit bench speed --tokens 1024 --attention performer-exp:m=128

A spec is name[:key=value,…], e.g. performer-relu:m=64,projection=none; `linvit list attentions` shows them all.

Verbs:
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0, 1 if a training diverged, 2 for a user's error, 130 when
    interrupted, 75 when evicted."""
    words = [*(sys.argv[1:] if args is None else args)]
    request = None
    keep_freed_memory()
    try:
        with _heeding_schedulers():
            if not words or words[0] in ("-h", "--help"):
                code = _print_help()
            elif words[0] == "--version":
                code = _print_version()
            else:
                request, run = parse(words)
                code = run(request)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SystemExit as done:  # argparse's --help
        return int(done.code or 0)
    except KeyboardInterrupt as stop:
        return _interrupted(stop, request)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        unnamed = isinstance(error, OSError) and error.filename is None
        if unnamed or os.environ.get("LINVIT_TRACEBACK", "") not in ("", "0"):
            raise
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return _fail(f"error: {text or type(error).__name__}", 2)


def verbs() -> list[str]:
    from linvit.requests import BY_VERB

    return sorted({name.partition(" ")[0] for name in BY_VERB})


def parse(words: Sequence[str]) -> tuple[Request, Callable[[Any], Any]]:
    """The request that the words make, and the function that carries it out."""
    verb, rest = words[0], [*words[1:]]  # `list` is a verb here
    if verb not in verbs():
        raise ValueError(f"unknown verb '{verb}'" + choices(verb, verbs()))
    if verb != "train" and (others := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"WORLD_SIZE={others}: only `linvit train` can be shared by processes that torchrun starts")
    module = importlib.import_module(f"{__name__}.{verb}")
    from linvit.cli._parser import parse_request, print_group_help
    from linvit.requests import BY_VERB

    if verb not in BY_VERB:
        inner = [name.partition(" ")[2] for name in BY_VERB if name.startswith(f"{verb} ")]
        if not rest or rest[0] in ("-h", "--help"):
            print_group_help(verb, module.__doc__ or "", inner)
            raise SystemExit(0)
        if rest[0] not in inner:
            raise ValueError(f"unknown verb '{verb} {rest[0]}'" + choices(rest[0], inner))
        verb = f"{verb} {rest.pop(0)}"
    return parse_request(BY_VERB[verb], rest), module.run


def _print_help() -> int:
    from linvit.cli._parser import first_lines

    print(HELP + "\n".join(f"    {verb:<10} {line}" for verb, line in first_lines(verbs()).items()))
    print("\n`linvit VERB --help` shows the options of a verb, `linvit --version` the version.")
    return 0


def _print_version() -> int:
    from linvit import __version__

    print(f"linvit {__version__}")
    return 0


def _interrupted(stop: BaseException, request: Request | None) -> int:
    text = "nothing that was trained is lost" if request is not None and request.resumes else str(stop)
    resume = f"; resume with: {request.command()}" if text and request is not None else ""
    return _fail(f"interrupted{': ' * bool(text)}{text}{resume}", REQUEUE if isinstance(stop, Evicted) else 130)


@contextmanager
def _heeding_schedulers() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise Evicted wherever they arrive; a training defers them until its step is complete."""

    def leave(number: int, frame: Any) -> None:
        raise Evicted

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, leave) for number in EVICTIONS}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        old[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    """Ctrl-C. Not every package survives one in the middle of its import, or lets it through: there, exit at once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            if os.isatty(2):  # a progress bar may have hidden the cursor
                os.write(2, b"\r\x1b[2K\x1b[?25h")
            os.write(2, b"linvit: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    print(f"linvit: {line}", file=sys.stderr)  # what a file or a name holds cannot control the terminal
    return code
