"""Search spaces: the options that a search may set, and to what; one for all variants, from a small TOML file.

    [options]                                        # of the model and the recipe
    lr = { low = 1e-4, high = 1e-2, log = true }
    depth = { low = 1, high = 4 }
    optimizer = ["muon", "adamw"]
    [attention]                                      # of the attentions that have them
    m = [16, 32, 64]
    [fixed]                                          # the same in every trial
    size = "nano"

What a command or a spec sets stays as it is set. Names and values are checked against the options that exist.
"""

from __future__ import annotations

import inspect
import itertools
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from linvit.attention import attention_options
from linvit.errors import choices
from linvit.registry import Spec, check_options, parse
from linvit.requests import TuneRequest
from linvit.schemas.experiment import Experiment
from linvit.schemas.model import DATA_OPTIONS, ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.schemas.search import Range, SearchSpace, Values
from linvit.toml import parse_toml
from linvit.training.recipe import create_recipe

HOME = Path(__file__).parent / "spaces"
FIELDS = ModelConfig.model_fields | Recipe.model_fields
NOT_SEARCHED = {  # options of model and recipe, and why not
    **dict.fromkeys(DATA_OPTIONS, "it comes from the data"),
    **dict.fromkeys(("epochs", "steps"), "all trials have the same length: give --epochs"),
    "attention": "put its options under [attention]",
    "seed": "a seed is not tuned: give --seed",
    **dict.fromkeys(("amp", "compile"), "it changes speed only: use --set"),
}
OF_ATTENTION = "attention."  # prefix of an attention's options in a point
Point = dict[str, Any]  # a value for each searched option


def shipped_spaces() -> list[str]:
    return sorted(path.stem for path in HOME.glob("*.toml"))


def read_space(place: str | Path) -> SearchSpace:
    """One that ships with linvit, by name, or a TOML file."""
    path = HOME / f"{place}.toml" if str(place) in shipped_spaces() else Path(place)
    if not path.is_file():
        raise ValueError(f"space '{place}' is neither a file nor a known name" + choices(str(place), shipped_spaces()))
    try:
        found = parse_toml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML ({error})") from None
    tables = [name for name in SearchSpace.model_fields if name != "name"]
    for name in found:
        if name not in tables:
            raise ValueError(f"space {path}: unknown table '{name}'" + choices(name, tables))
    try:
        space = SearchSpace(name=path.stem, **found)
    except ValidationError as error:
        what = ".".join(str(part) for part in error.errors()[0]["loc"][:2])
        raise ValueError(f"space {path}: {what} must be a list of values or {{ low = …, high = … }}") from None
    _check_space(space, str(place))
    return space


def _check_space(space: SearchSpace, place: str) -> None:
    if not space.options and not space.attention:
        raise ValueError(f"space {place} is empty: it needs [options] or [attention]")
    for name, values in space.options.items():
        where = f"space {place}: {name}"
        if name in space.fixed:
            raise ValueError(f"{where} is in [options] and in [fixed]: leave one of them out")
        if name in NOT_SEARCHED:
            raise ValueError(f"{where} cannot be searched: {NOT_SEARCHED[name]}")
        if name not in FIELDS:
            raise ValueError(f"space {place}: unknown option '{name}'" + choices(name, set(FIELDS) - set(NOT_SEARCHED)))
        _check_values(where, values, FIELDS[name].annotation, partial(_check_option, name))
    for name, values in space.attention.items():
        _check_values(f"space {place}: {OF_ATTENTION}{name}", values, Any, lambda value: None)


def check_attentions(space: SearchSpace, specs: Sequence[str]) -> None:
    """A ValueError unless each option of attentions belongs to a variant that leaves it open and takes these values."""
    options = {part.name: attention_options(part.name) for spec in specs for part in _parts(spec)}
    for name, values in space.attention.items():
        where = f"space {space.name}: {OF_ATTENTION}{name}"
        owners = [owner for owner, mine in options.items() if name in mine]
        if not owners:
            known = sorted({option for mine in options.values() for option in mine})
            raise ValueError(f"{where}: none of {', '.join(specs)} has this option" + choices(name, known))
        for owner in owners:
            _check_values(where, values, options[owner][name].annotation, partial(_check_attention, owner, name))
        if not any(OF_ATTENTION + name in variant_space(space, spec) for spec in specs):
            raise ValueError(f"{where}: every spec that has this option sets it already: leave it out here or there")


def variant_space(space: SearchSpace, spec: str) -> dict[str, Values]:
    """What is searched for this variant: the options, and those of its attention that its spec leaves open."""
    mine = {name: values for name, values in space.attention.items() if _open_parameters(spec, name)}
    return space.options | {OF_ATTENTION + name: values for name, values in mine.items()}


def _open_parameters(spec: str, name: str) -> list[inspect.Parameter]:
    """An option as the attentions of a spec declare it that do not set it."""
    return [
        attention_options(p.name)[name] for p in _parts(spec) if name in {*attention_options(p.name)} - {*p.options}
    ]


def is_integer(name: str, spec: str) -> bool:
    """Whether an option takes integers only."""
    if not name.startswith(OF_ATTENTION):
        return _integral(FIELDS[name].annotation)
    return all(_integral(p.annotation) for p in _open_parameters(spec, name.removeprefix(OF_ATTENTION)))


def option_value(experiment: Experiment, name: str) -> Any:
    """An option of the model or the recipe as an experiment has it, in a form that TOML has."""
    value = getattr(experiment.recipe if name in Recipe.model_fields else experiment.model, name)
    return list(value) if isinstance(value, tuple) else value


def default_value(base: Experiment, spec: str, name: str) -> Any:
    """The value of an option that nobody sets."""
    if name.startswith(OF_ATTENTION):
        return _open_parameters(spec, name.removeprefix(OF_ATTENTION))[0].default
    return option_value(base, name)


def suggested_point(space: SearchSpace, spec: str, trial: Any) -> Point:
    """The point of a trial of Optuna's: as it was enqueued, or as its sampler draws it."""

    def suggest(name: str, values: Values) -> Any:
        if isinstance(values, list):
            return values[labels(values).index(trial.suggest_categorical(name, labels(values)))]
        if is_integer(name, spec):
            return trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
        return trial.suggest_float(name, float(values.low), float(values.high), log=values.log)

    return {name: suggest(name, values) for name, values in variant_space(space, spec).items()}


def grid_points(space: SearchSpace, spec: str) -> Iterator[Point]:
    """All points of lists."""
    mine = variant_space(space, spec)
    for name, values in mine.items():
        if isinstance(values, Range):
            raise ValueError(f"space {space.name}: a grid needs lists, but {name} is a range: list its values")
    return (dict(zip(mine, values, strict=True)) for values in itertools.product(*mine.values()))


def apply_point(spec: str, point: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The spec and the options of model and recipe at a point."""
    mine = {name.removeprefix(OF_ATTENTION): v for name, v in point.items() if name.startswith(OF_ATTENTION)}
    options = {name: value for name, value in point.items() if not name.startswith(OF_ATTENTION)}
    parts = []
    for text in spec.split("+"):
        one, at, count = text.partition("@")
        found = parse(one)
        taken = {name: v for name, v in mine.items() if name in attention_options(found.name)}
        parts.append(f"{Spec(found.name, taken | dict(found.options))}{at}{count}")
    return "+".join(parts), options


def labels(values: Sequence[Any]) -> list[Any]:
    """Values of a list as a storage takes them: those that are lists themselves become text."""
    return [json.dumps(value) if isinstance(value, list) else value for value in values]


def _parts(spec: str) -> list[Spec]:
    return [parse(text.partition("@")[0]) for text in spec.split("+")]


def _check_values(where: str, values: Values, annotation: Any, check: Callable[[Any], Any]) -> None:
    """A ValueError unless there are some, of the right type, and the option takes them."""
    if isinstance(values, list):
        if not values:
            raise ValueError(f"{where} is empty: list at least one value")
        for value in values:
            if labels(values).count(labels([value])[0]) > 1:
                raise ValueError(f"{where} lists {value} twice")
    elif values.low >= values.high:
        raise ValueError(f"{where} is empty: low={values.low} is not below high={values.high}")
    elif values.log and values.low <= 0:
        raise ValueError(f"{where}: low={values.low} must be above 0 where log = true")
    elif annotation is not Any and not _types(annotation) & {int, float}:
        raise ValueError(f"{where} is not a number: list its values")
    for value in values if isinstance(values, list) else (values.low, values.high):
        try:
            check(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _check_option(name: str, value: Any) -> None:
    value = TuneRequest.checked_option(name, value)
    if name in Recipe.model_fields:
        create_recipe(**{name: value})


def _check_attention(attention: str, name: str, value: Any) -> None:
    check_options(Spec(attention, {name: value}), attention_options(attention))


def _types(annotation: Any) -> set[Any]:
    return {annotation, *typing.get_args(annotation)}


def _integral(annotation: Any) -> bool:
    return int in _types(annotation) and float not in _types(annotation)
