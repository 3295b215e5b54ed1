"""The public names: docstrings, signatures and fields."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from md import comment, page, table, words

import linvit

PUBLIC = f"""linvit: {" ".join(name for name in linvit.__all__ if name != "__version__")}
linvit.pipeline.train: Trained
linvit.conversion.run: Converted
linvit.conversion.linearize: Linearized
linvit.schemas.model: ModelConfig
linvit.schemas.recipe: Recipe
linvit.schemas.study: Study Variant
linvit.schemas.experiment: Experiment Source Start
linvit.attention: Attention Switches Site Cost attentions
linvit.kernels: FeatureMap
linvit.data: load_data read_image normalise Dataset Split Augment
linvit.training.events: Began Noted Stepped Validated Diverged Tested
linvit.training.tasks: Task
linvit.training.trackers: Tracker
linvit.execute: Executor Work Job
linvit.models: VisionTransformer estimate
linvit.records: Record Records
linvit.report: build study_result search_result conversion_result Result Table StudyResult Recommendation
linvit.metrics: Metric"""

INTRODUCTION = """The public names, by module. Keywords of `train`, `compare`, `tune` and `convert` are the options
of the [command line](cli.md), under the names in its second column."""


def api_page() -> str:
    parts = [INTRODUCTION]
    for home, names in re.findall("(.+): (.+)", PUBLIC):
        parts += [f"## {home}", words(module := import_module(home)).partition("\n\n")[0]]
        parts += [part for name in names.split() for part in _entry(name, getattr(module, name))]
    return page("API", *parts)


def _entry(name: str, thing: Any) -> list[str]:
    fields = getattr(thing, "model_fields", None) or getattr(thing, "__dataclass_fields__", {})
    rows = [_field(thing, *item) for item in fields.items()]
    parts = [f"### {name}", "" if rows else f"```python\n{name}{_signature(thing)}\n```", words(thing)]
    methods = [_method(*item) for item in vars(thing).items() if inspect.isclass(thing) and item[0][0] != "_"]
    return [*parts, table(["field", "type", "default", ""], rows) if rows else "", "\n".join(filter(None, methods))]


def _field(owner: type, name: str, about: Any) -> list[str]:
    """Type as the source has it, the default as it is (… is one that is made), and what the field says of itself."""
    kind, beside = comment(owner, name)
    default = "…" if callable(about.default_factory) else repr(about.default)
    return [
        f"`{name}`",
        f"`{kind}`",
        "" if re.search("MISSING|Undefined", default) else f"`{default}`",
        getattr(about, "description", None) or beside,
    ]


def _method(name: str, value: Any) -> str:
    value, gets = getattr(value, "__func__", value), isinstance(value, property)
    what = " ".join(words(value.fget if gets else value).split()) if gets or inspect.isfunction(value) else ""
    return what and f"- `{name}{'' if gets else _signature(value, 999)}`: {what}"


def _signature(thing: Any, longest: int = 100) -> str:
    """Annotations without quotes, functions by name; a line for each argument if there are many."""
    found = re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(inspect.signature(thing)))
    found = re.sub(r"<function <?(\w+)>? at \w+>|linvit[\w.]*\.|(?<=\()(?:self|cls)(?:, )?", r"\1", found)
    return found if len(found) < longest else re.sub(r"(\(|, )(?=\w+: |\*)", lambda m: m[0].strip() + "\n    ", found)
