"""Request: everything that a command was asked for, as one frozen, validated object.

A field is declared once, with `option(default, help, …)`. The command line, `--set`, `--print-config`, the stored
command and the commands that a page suggests all derive from it. Options of the model and of the recipe are not
repeated here: they are checked against ModelConfig and Recipe, and those in `shortcuts` get a flag of their own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from linvit.durations import seconds
from linvit.errors import choices, clear
from linvit.schemas.model import DATA_OPTIONS, ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.schemas.sizes import SIZES

SIZE = FieldInfo(annotation=str, default=None, description="A model size by name; see `linvit list sizes`.")


@dataclass(frozen=True)
class Flag:
    """How a field appears on the command line."""

    name: str = ""  # e.g. --from; empty: made from the field's name
    short: str = ""
    metavar: str = ""
    argument: bool = False  # positional
    separator: str = ""  # between several values of one flag; empty: the flag is repeated
    transient: bool = False  # says how to show or stop, not what to do: never part of a stored command
    secret: bool = False  # may hold a password
    hidden: bool = False  # for Python only


def option(default: Any, help: str = "", *, flag: str = "", **details: Any) -> Any:
    """A field of a request. details: the other fields of Flag; ge, gt, le and the like, as pydantic's Field takes
    them."""
    own = {name: details.pop(name) for name in [f.name for f in fields(Flag)] if name in details}
    field: FieldInfo = Field(default, description=help, **details)
    field.metadata.append(Flag(flag, **own))
    return field


def flag_of(field: FieldInfo) -> Flag:
    return next((part for part in field.metadata if isinstance(part, Flag)), Flag())


def _check_duration(text: str) -> str:
    seconds(text)
    return text


def _share(value: Any) -> Any:
    """`1%` is 0.01."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(value.strip().removesuffix("%")) / 100
    return value


def _parts(value: Any) -> Any:
    """`1,2` is (1, 2), and none is ()."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip() not in ("none", "0", "")]
        value = [int(part) if part.isdecimal() else part for part in parts]
    return tuple(sorted(set(value), key=str)) if isinstance(value, (list, tuple)) else value


Text = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
Duration = Annotated[str, AfterValidator(_check_duration)]  # 90s, 10m, 2h
Share = Annotated[float, BeforeValidator(_share)]  # 0.01 or 1%
Several = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)  # one, or several
Listed = BeforeValidator(_parts)  # 1,2 or none


BY_VERB: dict[str, type[Request]] = {}


def read_request(stored: Mapping[str, Any]) -> Request:
    """The request that a document stores."""
    values = dict(stored)
    return BY_VERB[values.pop("verb")].of(**values)


class Request(BaseModel):
    """The docstring of a subclass is the help text of its command: one line, details, examples."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    verb: ClassVar[str]
    shortcuts: ClassVar[tuple[str, ...]] = ()  # options of model and recipe with a flag of their own
    resumes: ClassVar[bool] = False  # the same command resumes it, whenever it was interrupted
    takes: ClassVar[tuple[type[BaseModel], ...]] = (ModelConfig, Recipe)  # what `options` may set

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "verb" in vars(cls):
            BY_VERB[cls.verb] = cls

    @classmethod
    def of(cls, **keywords: Any) -> Self:
        """From Python keywords: those that are no fields are options of the model and the recipe."""
        fields = cls.model_fields
        mine = {name: value for name, value in keywords.items() if name in fields}
        rest = {name: value for name, value in keywords.items() if name not in fields and value is not None}
        if rest and "options" not in fields:
            name = next(iter(rest))
            raise ValueError(f"unknown option '{name}'" + choices(name, fields))
        if rest:
            mine["options"] = {**mine.get("options", {}), **rest}
        try:
            return cls(**{name: value for name, value in mine.items() if value is not None})
        except ValidationError as error:
            raise clear(error) from None

    def replaced(self, **changes: Any) -> Self:
        """The same request with other values; options of model and recipe by their names."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).of(**own | changes)

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("options"):
            checked = {name: cls.checked_option(name, value) for name, value in values["options"].items()}
            return {**values, "options": {name: value for name, value in checked.items() if value is not None}}
        return values

    @classmethod
    def settable(cls) -> dict[str, FieldInfo]:
        """Options of the model and the recipe that a user may set."""
        fields = {"size": SIZE} if ModelConfig in cls.takes else {}
        for schema in cls.takes:
            fields |= schema.model_fields
        own = {name.removesuffix("s") for name in cls.model_fields} | set(cls.model_fields)
        return {name: field for name, field in fields.items() if name not in own and name not in DATA_OPTIONS}

    @classmethod
    def checked_option(cls, name: str, value: Any) -> Any:
        """The value in the option's type, or a ValueError."""
        if name in cls.model_fields or f"{name}s" in cls.model_fields:
            field = cls.model_fields.get(name) or cls.model_fields[f"{name}s"]
            raise ValueError(f"--set {name}: use {flag_of(field).name or flag_name(name)}")
        if name in DATA_OPTIONS:
            raise ValueError(f"{name} comes from the data, it cannot be set")
        if name not in (fields := cls.settable()):
            raise ValueError(f"unknown option '{name}'" + choices(name, fields))
        if value is None:
            return None
        if name == "size":
            if value not in SIZES:
                raise ValueError(f"unknown size '{value}'" + choices(str(value), SIZES))
            return value
        try:
            return TypeAdapter(cast(Any, Annotated)[fields[name].annotation, fields[name]]).validate_python(value)
        except ValidationError as error:
            raise clear(error, name) from None

    def stored(self) -> dict[str, Any]:
        """Plain data from which `linvit.requests.read_request` makes it again; without secrets and defaults."""
        found = self.model_dump(mode="json", exclude_defaults=True)
        for name, field in type(self).model_fields.items():
            if name in found and flag_of(field).transient:
                del found[name]
            elif name in found and flag_of(field).secret:
                found[name] = without_password(found[name])
        return {"verb": self.verb} | found

    def command(self) -> str:
        """The command line that asks for this, without what only concerns display."""
        words: list[str] = []
        arguments: list[str] = []
        for name, field in type(self).model_fields.items():
            flag, value = flag_of(field), getattr(self, name)
            is_default = value == field.get_default(call_default_factory=True)
            if flag.transient or flag.hidden or value is None or (is_default and not flag.argument):
                continue
            if name == "options":
                for key, one in value.items():
                    if key in self.shortcuts:
                        words += _words(flag_name(key), one, ",")
                    else:
                        words += ["--set", f"{key}={_word(one)}"]
            elif flag.argument:
                arguments += [_word(one) for one in (value if isinstance(value, tuple) else [value])]
            else:
                shown = without_password(value) if flag.secret else value
                words += _words(flag.short or flag_name(name, flag), shown, flag.separator)
        dashed = any(word.startswith("-") for word in arguments)
        return shlex.join(
            ["linvit", *self.verb.split(), *([*words, "--", *arguments] if dashed else arguments + words)]
        )


def flag_name(field: str, flag: Flag = Flag()) -> str:
    return flag.name or "--" + field.replace("_", "-")


def without_password(text: str) -> str:
    """A URL as it may be shown."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    rest, question, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    name, colon, _ = user.partition(":")
    query = re.sub(r"(?i)([^&=]*(?:pass|secret|token|key)[^&=]*=)[^&]*", r"\1***", query)
    return f"{scheme}://{name}{':***' if colon else ''}{at}{host}{slash}{path}{question}{query}"


def _words(flag: str, value: Any, separator: str) -> list[str]:
    """A flag with its value; without a separator between several values it is repeated."""
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    values = value if isinstance(value, tuple) and not separator else [value]
    return [word for one in values for word in (flag, _word(one, separator))]


def _word(value: Any, separator: str = ",") -> str:
    if isinstance(value, (list, tuple)):
        return separator.join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
