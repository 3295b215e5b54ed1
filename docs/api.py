"""Writes docs/api.md from the docstrings, signatures and fields of the public names: `make docs`."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import linvit

PUBLIC = f"""linvit: {" ".join(name for name in linvit.__all__ if name != "__version__")}
linvit.requests: TrainRequest CompareRequest TuneRequest ConvertRequest
linvit.pipeline.train: Trained
linvit.conversion.run: Converted
linvit.conversion.linearize: Linearized
linvit.schemas.model: ModelConfig
linvit.schemas.recipe: Recipe
linvit.schemas.experiment: Experiment Source Start
linvit.schemas.study: Study Variant
linvit.schemas.search: SearchSpace Range Search Best Winner
linvit.schemas.conversion: Conversion
linvit.pipeline.design: Designer
linvit.execute: Executor Work Job
linvit.training.run: run
linvit.training.events: Began Noted Stepped Validated Diverged Tested
linvit.training.tasks: Task
linvit.training.trackers: Tracker
linvit.attention: Attention Switches Site attentions
linvit.kernels: FeatureMap
linvit.models: Cost estimate
linvit.data: load_data Dataset Split Augment
linvit.records: Record Records
linvit.ledger: Ledger
linvit.report: build study_result search_result conversion_result Result Table StudyResult Recommendation
linvit.metrics: Metric"""


def text() -> str:
    parts = ["# API", "The public names, from their docstrings (`make docs` writes this page)."]
    for home, names in re.findall("(.+): (.+)", PUBLIC):
        parts += [f"## {home}", words(module := import_module(home)).partition("\n\n")[0]]
        parts += [part for name in names.split() for part in entry(name, getattr(module, name))]
    rows = [[f"`{m.name}`", m.unit, ", ".join(dict.fromkeys(m.per)), m.what, m.column] for m in linvit.metrics.TABLE]
    parts += ["### TABLE", table(["metric", "unit", "per", "what", "column of results.csv"], rows)]
    return "\n\n".join(filter(None, parts)) + "\n"


def entry(name: str, thing: Any) -> list[str]:
    fields = getattr(thing, "model_fields", None) or getattr(thing, "__dataclass_fields__", {})
    rows = [field(thing, *item) for item in fields.items()]
    parts = [f"### {name}", "" if rows else f"```python\n{name}{signature(thing)}\n```", words(thing)]
    methods = [method(*item) for item in vars(thing).items() if inspect.isclass(thing) and item[0][0] != "_"]
    return [*parts, table(["field", "type", "default", ""], rows) if rows else "", "\n".join(filter(None, methods))]


def words(thing: Any) -> str:
    """Its own docstring, not an inherited one, nor what a dataclass writes for itself."""
    found = inspect.cleandoc((vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or "")
    return "" if found.startswith(f"{thing.__name__}(") else found


def field(owner: type, name: str, about: Any) -> list[str]:
    """Type as the source has it, the default as it is (… is one that is made), and what the field says of itself."""
    source = "\n".join(inspect.getsource(one) for one in owner.__mro__ if one.__module__.startswith("linvit"))
    kind, comment = re.findall(rf"^    {name}: (.+?)(?: = .+?)?(?:  # (.+))?$", source, re.M)[0]
    default = "…" if callable(about.default_factory) else repr(about.default)
    return [
        f"`{name}`",
        f"`{kind}`",
        "" if re.search("MISSING|Undefined", default) else f"`{default}`",
        getattr(about, "description", None) or comment,
    ]


def method(name: str, value: Any) -> str:
    value, gets = getattr(value, "__func__", value), isinstance(value, property)
    what = " ".join(words(value.fget if gets else value).split()) if gets or inspect.isfunction(value) else ""
    return what and f"- `{name}{'' if gets else signature(value, 999)}`: {what}"


def signature(thing: Any, longest: int = 100) -> str:
    """Annotations without quotes, functions by name; a line for each argument if there are many."""
    found = re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(inspect.signature(thing)))
    found = re.sub(r"<function <?(\w+)>? at \w+>|linvit[\w.]*\.|(?<=\()(?:self|cls)(?:, )?", r"\1", found)
    return found if len(found) < longest else re.sub(r"(\(|, )(?=\w+: |\*)", lambda m: m[0].strip() + "\n    ", found)


def table(head: list[str], rows: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *([re.sub(r"([|<])", r"\\\1", cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(text(), encoding="utf-8")
