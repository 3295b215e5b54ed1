"""The tables of `linvit bench`: values by attention (down) and by one tag of their records (across)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from linvit.attention import CONTROL
from linvit.cli._output import print_table
from linvit.measure.error import oddities
from linvit.metrics import FORMS
from linvit.records import Record, Tag


def break_even_text(tokens: float | None, least: int) -> str:
    """A break-even: two digits, which are all that is known of it; at the shortest length it may be before that."""
    return "–" if tokens is None else f"≤ {least:,}" if tokens <= least else f"≈ {float(f'{tokens:.2g}'):,.0f}"


def _plain(record: Record) -> str:
    return f"{record.value:.3g}" if record.unit in ("", "nat", "fraction") else FORMS[record.unit](record.value)


def _even(record: Record) -> str:
    return break_even_text(record.value, int(record.tags["from"] or 0))


def _spread(record: Record) -> str:
    return f"{record.value:.2f} ±{0.5 * (float(record.tags['high'] or 0) - float(record.tags['low'] or 0)):.2f}"


def _interval(record: Record) -> str:
    ends = f" ({record.tags['low']:.4g} – {record.tags['high']:.4g})" if "low" in record.tags else ""
    return f"{record.value:.4g}{ends}"


@dataclass(frozen=True)
class Layout:
    metric: str
    title: str
    across: str
    down: tuple[str, ...] = ("attention",)
    each: str = ""  # a table for each value of this tag
    starred: bool = False  # * where it is not lower than uniform attention's
    whole: bool = False  # only rows with a value in every column
    text: Callable[[Record], str] = _plain


def _errors(across: str) -> tuple[Layout, ...]:
    return (
        Layout("attention_error", f"Total variation to softmax, mean over rows, by {across}", across, starred=True),
        Layout("attention_entropy", f"Entropy of rows in nats, by {across}", across),
        Layout("output_error", f"Relative error of the output, by {across}", across),
    )


LAYOUTS = {
    "error": _errors("sigma"),
    "layers": _errors("layer"),
    "features": (
        Layout("output_mse", "Mean squared error of the output, by features", "features", ("family",), "sigma", True),
        Layout("attention_error", "Total variation to softmax, by features", "features", ("family",), starred=True),
    ),
    "angle": (
        Layout(
            "mse_ratio",
            "MSE of trigonometric over MSE of positive features, with as many rows of Ω",
            "by",
            ("length", "angle"),
            whole=True,
            text=_interval,
        ),
    ),
    "depth": (Layout("depth_error", "‖h − h_softmax‖ / ‖h_softmax‖ of the tokens, by layer", "layer"),),
    "maps": (
        Layout("map_entropy", "Entropy of rows in nats, by head", "head", ("attention", "layer")),
        Layout("map_error", "Total variation to the model's own, by head", "head", ("attention", "layer")),
    ),
    "speed": (
        Layout("attention_time", "Time by tokens", "tokens", each="mode"),
        Layout("attention_vs_softmax", "Times faster than fused softmax", "tokens", each="mode", text=_spread),
        Layout("break_even_tokens", "Faster than fused softmax from N", "mode", text=_even),
    ),
    "memory": (
        Layout("attention_memory", "Peak memory of one call besides q, k and v, by tokens", "tokens", each="mode"),
        Layout("memory_vs_softmax", "Relative to fused softmax", "tokens", each="mode"),
        Layout("largest_tokens", "Tokens that would fit the limit, if memory grows as it last did", "mode"),
    ),
}


def print_tables(name: str, records: Sequence[Record], own: str = "") -> None:
    """own: the attention that a model was trained with."""
    for layout in LAYOUTS[name]:
        kept = [r for r in records if r.metric == layout.metric and _belongs(layout, r)]
        for value in dict.fromkeys(r.tags.get(layout.each) for r in kept):
            mine = [r for r in kept if r.tags.get(layout.each) == value]
            _print(layout, mine, layout.title if value is None else f"{layout.title}, {layout.each} {_word(value)}")
    odd = _odd(records, own) if name in ("error", "layers") else ()
    print_table([], notes=[*_refused(records), *odd, *_common(records)])


def _belongs(layout: Layout, record: Record) -> bool:
    """Means over layers stand next to the layers where these are columns; elsewhere they stand for them."""
    used = {layout.across, layout.each, *layout.down}
    return "layer" not in record.tags or "layer" in used


def _print(layout: Layout, records: list[Record], title: str) -> None:
    found = {(_place(layout, r), r.tags.get(layout.across)): r for r in records}
    columns = list(dict.fromkeys(across for _, across in found if across is not None))
    if all(isinstance(column, (int, float)) for column in columns):
        columns.sort()  # type: ignore[type-var]
    if layout.across == "layer" and any(across is None for _, across in found):
        columns = [None, *columns]
    rows = list(dict.fromkeys(place for place, _ in found))
    if layout.whole:
        rows = [place for place in rows if all((place, column) in found for column in columns)]
    if layout.starred:
        rows.sort(key=lambda place: found.get((place, columns[0]), records[-1]).value or 0.0)
    table: list[dict[str, str]] = []
    for place in rows:
        row = dict(zip(layout.down, map(_word, place), strict=True))
        for column in columns:
            control = found.get(((CONTROL,), column)) or found.get(((CONTROL,), None))  # which has no features
            record = found.get((place, column)) or (control if place == (CONTROL,) else None)
            row["mean" if column is None else _word(column)] = _cell(layout, record, control)
        table.append(row)
    print(f"\n{title}")
    print_table(table, right=list(table[0])[len(layout.down) :])


def _place(layout: Layout, record: Record) -> tuple[Tag, ...]:
    return tuple(record.tags.get(tag) for tag in layout.down)


def _cell(layout: Layout, record: Record | None, control: Record | None) -> str:
    if record is None:
        return ""
    if "refused" in record.tags:
        return "refused"
    if record.value is None:
        return "–"
    other = control is not None and record.tags.get(layout.down[0]) != CONTROL
    worse = layout.starred and other and (record.value or 0.0) >= (control.value or 0.0)  # type: ignore[union-attr]
    return layout.text(record) + ("*" if worse else " " if layout.starred else "")


def _word(value: Tag) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _refused(records: Iterable[Record]) -> list[str]:
    """A line for each attention that was refused, at the shortest length and for each reason."""
    found: dict[tuple[Any, Any], Any] = {}
    for record in records:
        if why := record.tags.get("refused"):
            found.setdefault((record.tags["attention"], why), record.tags.get("tokens"))
    return [f"refused: {name} at N={n}: {why}" for (name, why), n in sorted(found.items(), key=str)]


def _odd(records: Sequence[Record], own: str) -> Iterator[str]:
    """What has to be said of those whose rows are no distributions, and of those with weights."""
    names = dict.fromkeys(str(r.tags["attention"]) for r in records if "refused" not in r.tags)
    found = {n: oddities(n, int(records[0].tags["head_dim"] or 1)) for n in names if not set(n) & set("+@")}
    if odd := [name for name, said in found.items() if said[0]]:
        yield f"Rows of {', '.join(odd)} do not sum to one or are signed: half the absolute difference may exceed 1."
    if untrained := [name for name, said in found.items() if said[1] and name != own]:
        yield f"The weights of {', '.join(untrained)} are untrained."


def _common(records: Sequence[Record]) -> Iterator[str]:
    """What a star means, and what all records share."""
    if any(CONTROL in r.tags.values() for r in records):
        yield "* not closer to softmax than uniform attention."
    kept = [r for r in records if "refused" not in r.tags]
    shared = {key: value for key, value in kept[0].tags.items() if all(r.tags.get(key) == value for r in kept)}
    counts = sorted({r.n for r in kept})
    n = f"n {counts[0]}" if len(counts) == 1 else f"n {counts[0]} to {counts[-1]}"
    yield ", ".join([*(f"{key} {_word(value)}" for key, value in shared.items()), n]) + f"; {kept[0].where}."
