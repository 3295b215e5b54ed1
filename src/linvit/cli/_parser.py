"""Command-line options made from request classes."""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from linvit.errors import choices
from linvit.requests import BY_VERB, Request
from linvit.requests.base import flag_name, flag_of

MARK = "\0"  # before words that follow --
OPTION = "options."  # before the names of options of model and recipe, among parsed values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"{missing[1]} is missing"
        raise ValueError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


class _Once(argparse.Action):
    """A value that may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise ValueError(f"{self.option_strings[0]} is given twice")
        setattr(namespace, self.dest, values)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)


def parse_request(kind: type[Request], words: Sequence[str]) -> Request:
    """A ValueError of one line for anything that is wrong."""
    parser = request_parser(kind)
    first = list(words).index("--") if "--" in words else len(words)
    marked = [MARK + word for word in words[first + 1 :]]  # intermixed parsing does not know --
    found, unknown = parser.parse_known_intermixed_args([*words[:first], *marked])
    if unknown:
        known = [text for action in parser._actions for text in action.option_strings]
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise ValueError(f"unexpected argument '{name}' (see {parser.prog} --help)")
        raise ValueError(f"no such option {name}" + choices(name, known))
    values = {name: _unmarked(value) for name, value in vars(found).items()}
    settings = read_settings(values.pop("options", []))
    for key in [key for key in values if key.startswith(OPTION)]:
        name = key.removeprefix(OPTION)
        if name in settings:
            raise ValueError(f"--set {name}: {name} is given twice")
        settings[name] = values.pop(key)
    try:
        return kind.of(**values, **({"options": settings} if settings else {}))
    except ValueError as error:
        raise ValueError(_with_flags(kind, str(error))) from None


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(one) for one in value]
    return value.removeprefix(MARK) if isinstance(value, str) else value


def _with_flags(kind: type[Request], message: str) -> str:
    """`seeds=0 must be …` as `--seeds 0 must be …`."""
    found = re.match(r"(\w+)(?:\.\d+)?[= ](.*)", message)  # .1: of several values
    name, rest = found.groups() if found else ("", "")
    if name in kind.model_fields and not flag_of(kind.model_fields[name]).argument:
        return f"{flag_name(name, flag_of(kind.model_fields[name]))} {rest}"
    return f"{flag_name(name)} {rest}" if name in kind.shortcuts else message


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """The texts of --set; a value with commas is a list."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not (key and equals and value):
            raise ValueError(f"--set {pair}: write KEY=VALUE, e.g. --set dropout=0.1")
        if key in found:
            raise ValueError(f"--set {pair}: {key} is given twice")
        found[key] = [part for part in value.split(",") if part] if "," in value else value
    return found


def request_parser(kind: type[Request]) -> argparse.ArgumentParser:
    parser = _Parser(
        f"linvit {kind.verb}",
        description=inspect.cleandoc(kind.__doc__ or ""),
        formatter_class=_Formatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    common, settable = parser.add_argument_group("common options"), kind.settable()
    for name, field in kind.model_fields.items():
        flag = flag_of(field)
        group = parser if name in kind.__annotations__ else common
        if flag.hidden:
            continue
        if flag.argument:
            metavar = flag.metavar or name.upper()
            parser.add_argument(name, nargs=_count(field), metavar=metavar, help=_help(field))
        elif name == "options":
            group.add_argument(flag.name, dest=name, action="append", metavar=flag.metavar, help=field.description)
        else:
            _add(group, name, flag_name(name, flag), field)
    for name in kind.shortcuts:
        _add(parser, OPTION + name, flag_name(name), settable[name])
    return parser


def _add(parser: argparse.ArgumentParser | argparse._ArgumentGroup, name: str, text: str, field: FieldInfo) -> None:
    flag = flag_of(field)
    names = [part for part in (text, flag.short) if part]
    if field.annotation is bool:
        action: Any = argparse.BooleanOptionalAction if field.default is True else "store_true"
        parser.add_argument(*names, dest=name, action=action, help=_help(field, name.startswith(OPTION)))
        return
    several = typing.get_origin(field.annotation) is tuple and not flag.separator and not name.startswith(OPTION)
    metavar = flag.metavar or _metavar(field.annotation)
    parser.add_argument(
        *names,
        dest=name,
        action="append" if several else _Once,
        metavar=metavar,
        help=_help(field, name.startswith(OPTION)),
    )


def _count(field: FieldInfo) -> Any:
    if typing.get_origin(field.annotation) is tuple:
        return "+" if field.is_required() else "*"
    return None if field.is_required() else "?"


def _metavar(annotation: Any) -> str:
    kinds = {annotation, *typing.get_args(annotation)}
    for kind in kinds:  # one of which may be None
        if typing.get_origin(kind) is typing.Literal:
            return "|".join(map(str, typing.get_args(kind)))
    return "N" if int in kinds else "X" if float in kinds else "TEXT"


def _help(field: FieldInfo, decided: bool = False) -> str:
    """With the default, unless the text states it, there is none, or the data decide (options of model and recipe)."""
    text = (field.description or "").replace("%", "%%")
    default = field.default
    plain = isinstance(default, (int, float, str)) and not isinstance(default, bool)
    return (
        f"{text} [default: {default}]" if plain and not decided and "[default" not in text and default != "" else text
    )


def first_lines(verbs: Sequence[str]) -> dict[str, str]:
    """What each verb does."""
    found = {}
    for verb in verbs:
        kinds = [kind for name, kind in BY_VERB.items() if name.partition(" ")[0] == verb]
        if len(kinds) == 1:
            found[verb] = inspect.cleandoc(kinds[0].__doc__ or "").partition("\n")[0]
        else:
            found[verb] = "Measure attentions: " + ", ".join(kind.verb.partition(" ")[2] for kind in kinds) + "."
    return found


def print_group_help(verb: str, text: str, inner: Sequence[str]) -> None:
    print(f"usage: linvit {verb} VERB [OPTIONS]\n\n{inspect.cleandoc(text)}\n\nVerbs:")
    for name in inner:
        line = inspect.cleandoc(BY_VERB[f"{verb} {name}"].__doc__ or "").partition("\n")[0]
        print(f"    {name:<10} {line}")
    print(f"\n`linvit {verb} VERB --help` shows the options of a verb.")
