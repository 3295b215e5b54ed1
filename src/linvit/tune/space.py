"""Space: the options that a search may set, and to what; one for all variants, from a small TOML file.

    [options]                                        # of the model and the recipe
    lr = { low = 1e-4, high = 1e-2, log = true }
    depth = { low = 1, high = 4 }
    optimizer = ["muon", "adamw"]
    [attention]                                      # of attentions, where they have them
    m = [16, 32, 64]
    [fixed]                                          # the same in every trial
    size = "nano"

What a command or a spec sets stays as it is set. Names and values are checked against the options that exist.
"""

from __future__ import annotations

import itertools
import json
import random
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from linvit.attention import attention_options
from linvit.errors import choices, clear
from linvit.models import ModelConfig
from linvit.registry import Spec, check_options, parse
from linvit.train.experiment import FROM_DATA
from linvit.train.recipe import Recipe, create_recipe

HOME = Path(__file__).parent / "spaces"
NEVER = {  # options of model and recipe that are no one's to search
    **dict.fromkeys(FROM_DATA, "it comes from the data"),
    **dict.fromkeys(("epochs", "steps"), "every trial trains for as long: give --epochs"),
    "attention": "its options stand under [attention]",
    "seed": "luck is not tuned: give --seed",
    **dict.fromkeys(("amp", "compile"), "it is for speed: use --set"),
}
OF_ATTENTION = "attention."  # before the names of an attention's options, among a point's
Point = dict[str, Any]  # name → value, one of each


class Range(BaseModel):
    """All numbers from low to high; whole ones if the option is one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    low: int | float
    high: int | float
    log: bool = False  # as many between 1 and 10 as between 10 and 100

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


Values = Range | list[Any]


class Space(BaseModel):
    """What is searched, by option."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    options: dict[str, Values] = Field(default_factory=dict)
    attention: dict[str, Values] = Field(default_factory=dict)
    fixed: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def read(cls, place: str | Path) -> Self:
        """One that ships, by name, or a TOML file of one's own."""
        path = HOME / f"{place}.toml" if str(place) in shipped() else Path(place)
        if not path.is_file():
            raise ValueError(f"space '{place}' is no file and no name" + choices(str(place), shipped()))
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not TOML ({error})") from None
        tables = [key for key in cls.model_fields if key != "name"]
        for key in found:
            if key not in tables:
                raise ValueError(f"space {path}: unknown table '{key}'" + choices(key, tables))
        try:
            return cls(name=path.stem, **found)._checked(str(place))
        except ValidationError as error:
            where = error.errors()[0]["loc"]
            what = ".".join(str(part) for part in where[:2])
            raise ValueError(f"space {path}: {what} must be a list of values or {{ low = …, high = … }}") from None

    def _checked(self, place: str) -> Self:
        if not self.options and not self.attention:
            raise ValueError(f"space {place} is empty: it needs [options] or [attention]")
        fields = ModelConfig.model_fields | Recipe.model_fields
        known = sorted(set(fields) - set(NEVER))
        for name, values in self.options.items():
            where = f"space {place}: {name}"
            if name in self.fixed:
                raise ValueError(f"{where} is in [options] and in [fixed]: leave one of them out")
            if name in NEVER:
                raise ValueError(f"{where} cannot be searched: {NEVER[name]}")
            if name not in fields:
                raise ValueError(f"space {place}: unknown option '{name}'" + choices(name, known))
            _check(where, values, fields[name].annotation, partial(_accept, name))
        for name, values in self.attention.items():
            _check(f"space {place}: {OF_ATTENTION}{name}", values, Any, lambda value: None)
        return self

    def check_attention(self, specs: Sequence[str]) -> None:
        """That each option of attentions is one of some variant's, which leaves it open, and may have these values."""
        every = {part.name: attention_options(part.name) for spec in specs for part in _parts(spec)}
        for name, values in self.attention.items():
            where = f"space {self.name}: {OF_ATTENTION}{name}"
            owners = [owner for owner, options in every.items() if name in options]
            if not owners:
                known = sorted({option for options in every.values() for option in options})
                raise ValueError(f"{where}: none of {', '.join(specs)} has such an option" + choices(name, known))
            for owner in owners:
                _check(where, values, every[owner][name].annotation, partial(_accept_of, owner, name))
            if not any(OF_ATTENTION + name in self.of(spec) for spec in specs):
                raise ValueError(f"{where}: every spec that has it sets it already: leave it out here or there")

    def of(self, spec: str) -> dict[str, Values]:
        """What is searched for this variant: the options, and those of its attention that its spec leaves open."""
        free = [{*attention_options(part.name)} - {*part.options} for part in _parts(spec)]
        mine = {name: values for name, values in self.attention.items() if any(name in open for open in free)}
        return self.options | {OF_ATTENTION + name: values for name, values in mine.items()}

    def whole(self, name: str, spec: str) -> bool:
        """Whether an option takes whole numbers only."""
        if not name.startswith(OF_ATTENTION):
            return _is_whole((ModelConfig.model_fields | Recipe.model_fields)[name].annotation)
        bare = name.removeprefix(OF_ATTENTION)
        found = [attention_options(part.name).get(bare) for part in _parts(spec)]
        return all(_is_whole(parameter.annotation) for parameter in found if parameter is not None)

    def random(self, spec: str, dice: random.Random) -> Point:
        """Any point; for a look at what is possible."""
        return {name: _drawn(values, self.whole(name, spec), dice) for name, values in self.of(spec).items()}

    def grid(self, spec: str) -> Iterator[Point]:
        """All points, of lists alone."""
        mine = self.of(spec)
        for name, values in mine.items():
            if isinstance(values, Range):
                raise ValueError(f"space {self.name}: a grid needs lists, but {name} is a range: list its values")
        return (dict(zip(mine, values, strict=True)) for values in itertools.product(*mine.values()))


def shipped() -> list[str]:
    return sorted(path.stem for path in HOME.glob("*.toml"))


def labels(values: Sequence[Any]) -> list[Any]:
    """Values of a list as a storage takes them: those that are lists themselves become text."""
    return [json.dumps(value) if isinstance(value, list) else value for value in values]


def applied(spec: str, point: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The spec and the options of model and recipe that a point makes."""
    mine = {name.removeprefix(OF_ATTENTION): v for name, v in point.items() if name.startswith(OF_ATTENTION)}
    options = {name: value for name, value in point.items() if not name.startswith(OF_ATTENTION)}
    parts = []
    for text in spec.split("+"):
        one, at, count = text.partition("@")
        found = parse(one)
        open = {name: v for name, v in mine.items() if name in attention_options(found.name)}
        parts.append(f"{Spec(found.name, open | dict(found.options))}{at}{count}")
    return "+".join(parts), options


def _parts(spec: str) -> list[Spec]:
    return [parse(text.partition("@")[0]) for text in spec.split("+")]


def _check(where: str, values: Values, annotation: Any, accept: Callable[[Any], None]) -> None:
    """That there are some, of the right kind, and that the option takes them."""
    if isinstance(values, list):
        if not values:
            raise ValueError(f"{where} is empty: list at least one value")
        for value in values:
            if labels(values).count(labels([value])[0]) > 1:
                raise ValueError(f"{where} lists {value} twice")
    else:
        if values.low >= values.high:
            raise ValueError(f"{where} is empty: low={values.low} is not below high={values.high}")
        if values.log and values.low <= 0:
            raise ValueError(f"{where}: low={values.low} must be above 0 where log = true")
        if annotation is not Any and not _kinds(annotation) & {int, float}:
            raise ValueError(f"{where} is no number: list its values")
    for value in values if isinstance(values, list) else (values.low, values.high):
        try:
            accept(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _accept(name: str, value: Any) -> None:
    """A ValueError if an option of the model or the recipe cannot have this value, whatever the others are."""
    try:
        if name in Recipe.model_fields:
            create_recipe(**{name: value})
        else:
            field = ModelConfig.model_fields[name]
            TypeAdapter(typing.cast(Any, Annotated)[field.annotation, field]).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}={value!r}: {str(clear(error)).rpartition(': ')[2]}") from None


def _accept_of(attention: str, name: str, value: Any) -> None:
    """The same of an attention's option."""
    check_options(Spec(attention, {name: value}), attention_options(attention))


def _kinds(annotation: Any) -> set[Any]:
    return {annotation, *typing.get_args(annotation)}


def _is_whole(annotation: Any) -> bool:
    return int in _kinds(annotation) and float not in _kinds(annotation)


def _drawn(values: Values, whole: bool, dice: random.Random) -> Any:
    if isinstance(values, list):
        return dice.choice(values)
    if whole:
        return dice.randint(int(values.low), int(values.high))
    return dice.uniform(values.low, values.high)
