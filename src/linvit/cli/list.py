"""`linvit list`: what there is to choose from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from linvit.requests import ListRequest

COSTS = (
    "MACs: all heads, for heads=8, head_dim=64, N=1024 and the default options. break-even: tokens above which it "
    "takes fewer MACs than softmax (for time, see linvit bench speed)."
)
AUTOMATIC = "Options in brackets are chosen automatically."
# per head, the powers of N tokens, d head_dim, and m features (or k projected keys)
TERMS = {"N²d": (2, 1, 0), "Nmd": (1, 1, 1), "Nd²": (1, 2, 0), "Nm²": (1, 0, 2), "Nd": (1, 1, 0)}
POINTS = [(64, 16, 16), (64, 32, 16), (128, 16, 32), (96, 64, 64), (128, 32, 64), (64, 16, 32), (128, 64, 32)]


def run(request: ListRequest) -> None:
    from linvit.cli._output import print_json, print_table
    from linvit.errors import choices

    if request.what not in KINDS:
        raise ValueError(f"nothing to list under '{request.what}'" + choices(request.what, KINDS))
    rows, notes = KINDS[request.what]()
    if request.as_json:
        print_json(rows)
    else:
        shown = [{key.replace("_", " "): _cell(value) for key, value in row.items()} for row in rows]
        print_table(shown, notes=notes, right=("MACs", "break-even"))


def _costs(name: str) -> dict[str, Any]:
    """By arithmetic: nothing is built."""
    from linvit.attention import attention_cost, break_even
    from linvit.site import Site

    site = Site(8, 64, 1024, (32, 32))
    macs = attention_cost(name, site).macs
    per_head = macs_formula(name) or f"{macs / site.heads / 1e6:.1f} M"
    return {"MACs/head": per_head, "MACs": macs, "break-even": break_even(name, site)}


def macs_formula(name: str) -> str:
    """MACs per head, found by counting at a few sizes: `4Nmd`. Empty if it is no sum of the terms above, or not
    on a large grid."""
    import numpy as np

    from linvit.attention import attention_cost, size_option, with_size
    from linvit.site import Site

    counted = [attention_cost(with_size(name, m), Site(1, d, n)).macs for n, d, m in POINTS]
    terms = np.array([_terms(*point) for point in POINTS])
    found = np.linalg.lstsq(terms.astype(float), np.array(counted, float), rcond=None)[0].round().astype(int)
    large = attention_cost(with_size(name, 64), Site(1, 64, 1024, (32, 32))).macs
    if (terms @ found != counted).any() or abs(_terms(1024, 64, 64) @ found - large) > 0.05 * large:
        return ""
    parts = [("" if c == 1 else str(c)) + term for c, term in zip(found, TERMS, strict=True) if c]
    return " + ".join(parts).replace("m", size_option(name) or "m") or "0"


def _terms(n: int, d: int, m: int) -> Any:
    import numpy as np

    return np.prod(np.array([n, d, m]) ** np.array([*TERMS.values()]), axis=-1)


def attentions() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.attention import Switches, attention_names, attention_options, resolve
    from linvit.registry import signature_options

    switches = signature_options(Switches)
    rows = []
    for name in attention_names():
        kind, _, options = resolve(name)
        kernel = options.get("kernel")
        own = {key: value for key, value in attention_options(name).items() if key not in switches}
        rows.append(
            {
                "name": name,
                "formula": kind.formula if kernel is None else f"φ(x) = {kernel.formula}",
                "estimates": (kernel or kind).estimates,
                **_costs(name),
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
    from linvit.attention import PERFORMER, attention_cost
    from linvit.kernels import KERNELS
    from linvit.registry import signature_options
    from linvit.site import Site

    rows = [
        {
            "name": name,
            "φ(x)": kernel.formula,
            "φ(x)·φ(y) estimates": kernel.estimates,
            "features": attention_cost(PERFORMER + name, Site(8, 64, 1024)).features,
            **_costs(PERFORMER + name),
            "options": _defaults(signature_options(kernel)),
        }
        for name, kernel in KERNELS.items()
    ]
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
    from linvit.schemas.search import Range
    from linvit.tuning.space import read_space, shipped_spaces

    def words(values: Any) -> str:
        if isinstance(values, Range):
            return f"{values.low:g} … {values.high:g}" + " (log)" * values.log
        return " ".join(map(str, values))

    rows = []
    for name in shipped_spaces():
        space = read_space(name)
        searched = space.options | {f"attention.{key}": values for key, values in space.attention.items()}
        rows.append({"name": name, "what": "; ".join(f"{key} {words(values)}" for key, values in searched.items())})
    return rows, ["Names with numbers are the source reports'. Use one, or a TOML file of your own, with tune --space."]


def metrics() -> tuple[list[dict[str, Any]], list[str]]:
    from linvit.metrics import TABLE

    rows = [
        {
            "name": metric.name,
            "unit": metric.unit or None,
            "per": " ".join(dict.fromkeys(metric.per)) or "study",
            "what": metric.what,
            "column": metric.column or None,
        }
        for metric in TABLE
    ]
    return rows, [
        "per: the tags that distinguish one measurement from another. column: of results.csv, where it has its own."
    ]


KINDS = {
    "attentions": attentions,
    "kernels": kernels,
    "datasets": datasets,
    "formats": formats,
    "sizes": sizes,
    "spaces": spaces,
    "metrics": metrics,
}


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
