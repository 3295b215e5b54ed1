"""`linvit list`: what there is to choose from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from linvit.cli import _options as options

HEADS, HEAD_DIM, TOKENS, GRID = 8, 64, 1024, (32, 32)  # the site for which costs are stated
COSTS = (
    f"MACs: all heads, for heads={HEADS}, head_dim={HEAD_DIM}, N={TOKENS} and the default options. break-even: tokens "
    "above which it takes fewer MACs than softmax (for time, see linvit bench speed)."
)
AUTOMATIC = "Options in brackets choose for themselves."


def run(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="attentions, kernels, datasets, formats, sizes, spaces or metrics.")
    ],
    json: options.Json = False,
) -> None:
    """Show what there is: attentions, kernels, datasets, formats, sizes, spaces, metrics.

    Examples:

        linvit list attentions
        linvit list kernels --json
        linvit list datasets
    """
    from linvit.cli._output import print_json, print_table
    from linvit.errors import choices

    if what not in KINDS:
        raise ValueError(f"nothing to list under '{what}'" + choices(what, KINDS))
    rows, notes = KINDS[what]()
    if json:
        print_json(rows)
    else:
        shown = [{key.replace("_", " "): _cell(value) for key, value in row.items()} for row in rows]
        print_table(shown, notes=notes, right=("MACs", "break-even"))


def attentions() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.attention import ATTENTIONS, PERFORMER, Switches, attention_names, attention_options, create_attention
    from linvit.kernels import KERNELS
    from linvit.measure.cost import macs_formula
    from linvit.registry import signature_options

    switches = signature_options(Switches)
    rows = []
    for name in attention_names():
        kernel = KERNELS[name.removeprefix(PERFORMER)] if name.startswith(PERFORMER) else None
        what = ATTENTIONS[name] if kernel is None else kernel
        attention = create_attention(name, heads=HEADS, head_dim=HEAD_DIM, tokens=TOKENS, grid=GRID)
        own = {key: value for key, value in attention_options(name).items() if key not in switches}
        rows.append(
            {
                "name": name,
                "formula": what.formula if kernel is None else f"φ(x) = {what.formula}",
                "estimates": what.estimates,
                "MACs/head": macs_formula(name),
                "MACs": attention.macs(TOKENS),
                "break-even": attention.break_even(),
                "options": _defaults(own),
            }
        )
    notes = [
        "performer-<kernel> is φ(q)[φ(k)ᵀv] / φ(q)[φ(k)ᵀ1] with x = q·d^-¼ and y = k·d^-¼.",
        COSTS,
        f"Every attention also takes: {_cell(_defaults(switches))}. {AUTOMATIC}",
    ]
    return rows, notes


def kernels() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.attention import PERFORMER, create_attention
    from linvit.kernels import KERNELS
    from linvit.measure.cost import macs_formula
    from linvit.registry import signature_options

    rows = []
    for name, kernel in KERNELS.items():
        performer = create_attention(PERFORMER + name, heads=HEADS, head_dim=HEAD_DIM, tokens=TOKENS)
        rows.append(
            {
                "name": name,
                "φ(x)": kernel.formula,
                "φ(x)·φ(y) estimates": kernel.estimates,
                "features": performer.get_submodule("kernel").width,
                "MACs/head": macs_formula(PERFORMER + name),
                "MACs": performer.macs(TOKENS),
                "break-even": performer.break_even(),
                "options": _defaults(signature_options(kernel)),
            }
        )
    return rows, ["Use one as performer-<name>, with x = q·d^-¼ and y = k·d^-¼.", COSTS, AUTOMATIC]


def datasets() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.data import DATASETS
    from linvit.registry import signature_options

    rows = [
        {"name": name, "what": _first_line(read), "options": _defaults(signature_options(read))}
        for name, read in DATASETS.items()
    ]
    return rows, ["Or the path of a folder of images, an .npz or a Parquet file: see linvit list formats."]


def formats() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.data import FORMATS

    return [{"name": name, "what": _first_line(read)} for name, read in FORMATS.items()], []


def sizes() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.models import SIZES

    rows = [{"name": name, "what": ", ".join(f"{k}={v}" for k, v in size.items())} for name, size in SIZES.items()]
    return rows, ["Names with numbers are the source reports' models. Use one with --size NAME."]


def spaces() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.tune.space import Range, Space, shipped

    def words(values: Any) -> str:
        if isinstance(values, Range):
            return f"{values.low:g} … {values.high:g}" + " (log)" * values.log
        return " ".join(map(str, values))

    rows = []
    for name in shipped():
        space = Space.read(name)
        searched = space.options | {f"attention.{key}": values for key, values in space.attention.items()}
        rows.append({"name": name, "what": "; ".join(f"{key} {words(values)}" for key, values in searched.items())})
    return rows, ["Names with numbers are the source reports'. Use one, or a TOML file of your own, with tune --space."]


def metrics() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.metrics import TABLE

    rows = [
        {"name": metric.name, "unit": metric.unit or None, "per": " ".join(dict.fromkeys(metric.per)) or "study",
         "what": metric.what, "column": metric.column or None}
        for metric in TABLE
    ]  # fmt: skip
    return rows, ["per: the tags that tell one measurement from another. column: of results.csv, where it has its own."]


KINDS = {
    "attentions": attentions, "kernels": kernels, "datasets": datasets, "formats": formats, "sizes": sizes,
    "spaces": spaces, "metrics": metrics,
}  # fmt: skip


def _first_line(thing: Any) -> str:
    text = inspect.getdoc(thing) or inspect.getdoc(inspect.getmodule(thing)) or ""
    return text.partition("\n")[0]


def _defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in parameters.items()}


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        given = [f"{key}={str(v).lower()}" for key, v in value.items() if v is not None]
        automatic = " ".join(key for key, v in value.items() if v is None)
        return " ".join(given + ([f"[{automatic}]"] if automatic else []))
    if isinstance(value, int):
        return f"{value / 1e6:,.1f} M" if value >= 1e5 else f"{value:,}"
    return "–" if value is None else str(value)
