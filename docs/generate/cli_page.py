"""The command line, from the request classes and the parsers made from them."""

from __future__ import annotations

import inspect
from argparse import Action

from md import page, table

from linvit.cli._parser import OPTION, request_parser
from linvit.requests import BY_VERB, Request

INTRODUCTION = """`linvit VERB --help` prints the same. `linvit list WHAT` shows what can be named: attentions, kernels,
data sets, file formats, model sizes, search spaces, metrics.

In Python the verbs `train`, `compare`, `tune`, `convert`, `export` and `sample` are functions of `linvit`, and the
options are their keywords. The second column has the keyword where it is not the option's name: `--from` is `start`.
`--set KEY=VALUE` takes any option of [ModelConfig](api.md#modelconfig) and [Recipe](api.md#recipe).

| exit code | |
|---|---|
| 0 | success |
| 1 | a training diverged |
| 2 | wrong input: one line on stderr |
| 75 | stopped by SIGTERM or SIGUSR1, and saved; start the same command again |
| 130 | interrupted |

| environment | |
|---|---|
| `LINVIT_DATA` | folder of the named data sets |
| `LINVIT_CACHE` | cache folder; without it `$XDG_CACHE_HOME/linvit` |
| `LINVIT_PLUGINS` | files or folders to import, separated like `PATH` |
| `LINVIT_DEBUG=1` | name the input of an attention that holds a NaN |
| `LINVIT_TRACEBACK=1` | show the traceback of an error |"""


def cli_page() -> str:
    verbs = sorted(BY_VERB)
    index = table(["verb", ""], [[f"[{verb}](#linvit-{verb.replace(' ', '-')})", _first_line(verb)] for verb in verbs])
    return page("Command line", INTRODUCTION, index, *(_verb(BY_VERB[verb]) for verb in verbs))


def _first_line(verb: str) -> str:
    return inspect.cleandoc(BY_VERB[verb].__doc__ or "").partition("\n")[0]


def _verb(kind: type[Request]) -> str:
    """Its arguments, then its own options, then those that other verbs have too."""
    actions = [action for action in request_parser(kind)._actions if action.dest != "help"]
    arguments = [action for action in actions if not action.option_strings]
    options = [action for action in actions if action.option_strings]
    options.sort(key=lambda action: (action.dest not in kind.__annotations__, not action.dest.startswith(OPTION)))
    usage = " ".join(["linvit", kind.verb, *map(_usage, arguments), "[OPTIONS]"])
    text = inspect.cleandoc(kind.__doc__ or "")
    rows = [_row(action) for action in [*arguments, *options]]
    return "\n\n".join(
        [f"## linvit {kind.verb}", f"```text\n{usage}\n```", text, table(["option", "keyword", ""], rows)]
    )


def _usage(action: Action) -> str:
    name = str(action.metavar)
    return {"+": f"{name}…", "*": f"[{name}…]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _row(action: Action) -> list[str]:
    flags, keyword = action.option_strings, action.dest.removeprefix(OPTION)
    words = [flag for flag in flags if not flag.startswith("--no-")]
    if len(words) < len(flags):  # on, unless --no-… is given
        words = [f"--[no-]{words[0].removeprefix('--')}"]
    shown = ", ".join(words) + ("" if action.nargs == 0 else f" {action.metavar}") if flags else str(action.metavar)
    usual = flags[0].removeprefix("--").replace("-", "_") if flags else ""
    return [f"`{shown}`", "" if keyword == usual else f"`{keyword}`", (action.help or "").replace("%%", "%")]
