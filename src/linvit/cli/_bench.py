"""The tables of `linvit bench`, each a function of its records."""

from __future__ import annotations

import math
from typing import Any

from linvit.cli._output import print_table
from linvit.metrics import size
from linvit.records import Record

MANY = 5  # lengths, beyond which a table has no ratios
HEADINGS = {"attention_error": "TV", "attention_entropy": "H", "output_error": "out"}
MEANING = (
    "TV: total variation to softmax, mean over rows. H: entropy of rows in nats. out: relative error of A·v. "
    "* not closer to softmax than uniform attention."
)


def error_table(records: list[Record]) -> None:
    notes = _refused(records)
    records = [r for r in records if "refused" not in r.tags]
    found = {(r.metric, r.tags["sigma"], r.tags["attention"]): r for r in records}
    sigmas = list(dict.fromkeys(r.tags["sigma"] for r in records))
    names = list(dict.fromkeys(str(r.tags["attention"]) for r in records))
    control = {sigma: found["attention_error", sigma, "uniform"].value for sigma in sigmas}
    rows = []
    for name in sorted(names, key=lambda name: found["attention_error", sigmas[len(sigmas) // 2], name].value or 0.0):
        row = {"attention": name}
        for sigma in sigmas:
            for metric, heading in HEADINGS.items():
                value = found[metric, sigma, name].value
                worse = metric == "attention_error" and name != "uniform" and (value or 0) >= (control[sigma] or 0)
                row[f"{heading} σ={sigma:g}"] = f"{value:.3f}" + ("*" if worse else " ")
        rows.append(row)
    first = records[0]
    notes += [
        MEANING,
        *_odd(names, first),
        f"{first.tags['tokens']} tokens, {first.tags['heads']} heads, head_dim {first.tags['head_dim']}, "
        f"{_draws(first.n)}, seed {first.tags['seed']}; {first.dtype}, {first.versions}.",
    ]
    print_table(rows, title="Distance from exact softmax", notes=notes, right=list(rows[0])[1:])


def _odd(names: list[str], like: Record, own: str = "") -> list[str]:
    """What has to be said of those whose rows are no distributions, and of those with weights."""
    from linvit.measure.error import oddities

    found = {name: oddities(name, int(like.tags["head_dim"] or 1)) for name in names}
    odd, untrained = ([name for name, said in found.items() if said[i] and not (i and name == own)] for i in (0, 1))
    notes = []
    if odd:
        notes.append(f"Rows of {', '.join(odd)} do not sum to one or are signed: TV is half the absolute difference, "
                     "which may exceed 1, and H is of |A| scaled to sum to one.")  # fmt: skip
    if untrained:
        notes.append(f"The weights of {', '.join(untrained)} are untrained.")
    return notes


def _draws(count: int) -> str:
    return f"mean of {count} draws" if count != 1 else "one draw"


def layers_table(records: list[Record], own: str = "softmax") -> None:
    """own: the model's attention."""
    notes = _refused(records)
    found = {(r.metric, r.tags["attention"], r.tags.get("layer")): r.value or 0.0 for r in records}
    kept = [r for r in records if r.metric == "attention_error" and "layer" not in r.tags and "refused" not in r.tags]
    layers = sorted({int(r.tags["layer"]) for r in records if "layer" in r.tags})  # type: ignore[arg-type]
    control = found["attention_error", "uniform", None]
    rows = []
    for record in sorted(kept, key=lambda r: r.value or 0.0):
        name, value = str(record.tags["attention"]), record.value or 0.0
        row = {"attention": name, "TV": f"{value:.3f}" + ("*" if name != "uniform" and value >= control else " "),
               "÷ uniform": f"{value / control:.2f}"}  # fmt: skip
        row |= {heading: f"{found[metric, name, None]:.3f}" for metric, heading in HEADINGS.items() if heading != "TV"}
        row |= {f"TV {layer}": f"{found['attention_error', name, layer]:.2f}" for layer in layers[:12]}
        rows.append(row)
    tags, names = kept[0].tags, [str(record.tags["attention"]) for record in kept]
    notes += [
        MEANING + " TV 1, 2, …: in each layer." + f" {own} is the model's own, as trained." * (own in names),
        *_odd([name for name in names if not set(name) & set("+@")], kept[0], own),
        f"q and k of {tags['model']}: {tags['images']} images, {tags['tokens']} tokens, {tags['heads']} heads, "
        f"head_dim {tags['head_dim']}, {_draws(max(record.n for record in kept))}, seed {tags['seed']}; "
        f"{kept[0].dtype}, {kept[0].versions}.",
    ]
    print_table(rows, title="Distance from exact softmax, on trained q and k", notes=notes, right=list(rows[0])[1:])


def features_table(records: list[Record]) -> None:
    notes = _refused(records)
    metric = "attention_error" if "model" in records[-1].tags else "output_mse"
    kept = [r for r in records if r.metric == metric and "layer" not in r.tags and "refused" not in r.tags]
    sizes = sorted({int(r.tags["features"]) for r in kept if r.tags["features"]})  # type: ignore[arg-type]
    for sigma in dict.fromkeys(r.tags.get("sigma") for r in kept):
        found = {(r.tags["family"], r.tags["features"]): r for r in kept if r.tags.get("sigma") == sigma}
        control = found["uniform", None].value or 0.0
        rows = []
        for family in dict.fromkeys(name for name, _ in found if name != "uniform"):
            values = {size: found[family, size].value or 0.0 for size in sizes}
            rows.append(
                {"attention": family}
                | {f"{size}": f"{v:.3g}" + ("*" if v >= control else " ") for size, v in values.items()}
            )
        rows.append({"attention": "uniform"} | dict.fromkeys(map(str, sizes), f"{control:.3g} "))
        word = "Total variation to softmax" if metric == "attention_error" else "Mean squared error of the output"
        title = f"{word}, by the number of features" + ("" if sigma is None else f", σ = {sigma:g}")
        print_table(rows, title=title, right=list(rows[0])[1:])
    tags = kept[0].tags
    who = f"q and k of {tags['model']}, {tags['images']} images, " if "model" in tags else ""
    notes += [
        "hyp and trig make two features of each row of Ω: with as many features they have half of the rows. "
        "* not better than uniform attention.",
        f"{who}{tags['tokens']} tokens, {tags['heads']} heads, head_dim {tags['head_dim']}, {_draws(kept[0].n)}, "
        f"seed {tags['seed']}; {kept[0].dtype}, {kept[0].versions}.",
    ]  # fmt: skip
    print_table([], notes=notes)


def angle_table(records: list[Record]) -> None:
    exact = {(r.tags["angle"], r.tags["length"]): r.value for r in records if r.tags["by"] == "closed form"}
    rows = [
        {"length": f"{r.tags['length']:g}", "φ/π": f"{float(r.tags['angle'] or 0) / math.pi:.3f}",
         "closed form": f"{exact[r.tags['angle'], r.tags['length']]:.4g}", "Monte Carlo": f"{r.value:.4g}",
         "95 % interval": f"{r.tags['low']:.4g} – {r.tags['high']:.4g}"}
        for r in records if r.tags["by"] == "Monte Carlo"
    ]  # fmt: skip
    notes = [
        "MSE of trigonometric / MSE of positive features with as many rows of Ω; above 1 positive ones are better.",
        f"With as many features it is twice that. {records[0].versions}.",
    ]
    print_table(rows, title="Trigonometric over positive features", notes=notes, right=list(rows[0])[1:])


def depth_table(records: list[Record]) -> None:
    found = {(r.tags["attention"], r.tags["layer"]): r.value or 0.0 for r in records}
    layers = sorted({int(r.tags["layer"]) for r in records})  # type: ignore[arg-type]
    names = sorted(dict.fromkeys(str(r.tags["attention"]) for r in records), key=lambda name: found[name, layers[-1]])
    rows = [{"attention": name} | {f"{layer}": f"{found[name, layer]:.3f}" for layer in layers} for name in names]
    tags = records[0].tags
    notes = [
        f"‖h − h_softmax‖ / ‖h_softmax‖ of the tokens after each layer; {tags['model']}, {tags['images']} images, "
        f"{tags['tokens']} tokens, {_draws(records[0].n)}, seed {tags['seed']}; {records[0].where}.",
    ]
    print_table(rows, title="Error after so many layers", notes=notes, right=list(rows[0])[1:])


def maps_table(records: list[Record]) -> None:
    found = {(r.metric, r.tags["attention"], r.tags.get("layer"), r.tags.get("head")): r.value for r in records}
    names = list(dict.fromkeys(str(r.tags["attention"]) for r in records))
    layers, heads = (sorted({int(r.tags[key]) for r in records if key in r.tags}) for key in ("layer", "head"))  # type: ignore[arg-type]
    for metric, title in (("map_entropy", "Entropy of rows, nat"), ("map_error", "Total variation to the model's own")):
        rows = []
        for name in names if metric == "map_entropy" else names[1:]:
            for layer in layers:
                row = {"attention": name, "layer": layer}
                rows.append(row | {f"head {head}": f"{found[metric, name, layer, head]:.3f}" for head in heads})
        if rows:
            print_table(rows, title=title, right=list(rows[0])[1:])
    tags = records[0].tags
    print_table(
        [], notes=[f"{tags['model']}, test image {tags['image']}, {records[0].n} tokens; {records[0].versions}."]
    )


def speed_tables(records: list[Record]) -> None:
    found = {(r.metric, r.tags["mode"], r.tags.get("tokens"), r.tags["attention"]): r for r in records}
    lengths = sorted({int(r.tags["tokens"]) for r in records if r.metric == "attention_time"})  # type: ignore[arg-type]
    names = list(dict.fromkeys(str(r.tags["attention"]) for r in records))
    first = records[0]
    for mode, title in (("forward", "Forward"), ("both", "Forward + backward")):
        rows = []
        for name in names:
            row = {"attention": name}
            for n in lengths:
                time = found["attention_time", mode, n, name]
                ratio = found.get(("attention_vs_softmax", mode, n, name))
                row[f"N={n} ms"] = "refused" if time.value is None else _short(1e3 * time.value)
                if len(lengths) <= MANY:
                    row["×softmax" + " " * lengths.index(n)] = f"{ratio.value:.2f} ±{_half(ratio):.2f}" if ratio else ""
            cross = found.get(("break_even_tokens", mode, None, name))
            row["faster from N"] = "" if cross is None else even(cross.value, int(cross.tags["from"] or 0))
            rows.append(row)
        print_table(rows, title=title, right=list(rows[0])[1:])
    clocks = {r.metric: str(r.tags["clock"]).replace("cpu", "CPU") for r in records if "clock" in r.tags}
    notes = _refused(records)
    rounds = sorted({r.n for r in records if r.metric == "attention_time" and r.value is not None}) or [first.n]
    count = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])
    notes += [
        f"×softmax: how many times faster than fused softmax, by {clocks['attention_vs_softmax']} time; "
        f"median ± half the interquartile range of {count} interleaved rounds. "
        f"ms: {clocks['attention_time']} time, median.",
        f"batch {first.tags['batch']}, {first.tags['heads']} heads, head_dim {first.tags['head_dim']}; {first.where}.",
    ]
    print_table([], notes=notes)


def even(tokens: float | None, least: int) -> str:
    """A break-even: two digits, which are all that is known of it; at the shortest length it may be before that."""
    return "–" if tokens is None else f"≤ {least:,}" if tokens <= least else f"≈ {float(f'{tokens:.2g}'):,.0f}"


def memory_tables(records: list[Record]) -> None:
    found = {(r.metric, r.tags["mode"], r.tags.get("tokens"), r.tags["attention"]): r.value for r in records}
    lengths = sorted({int(r.tags["tokens"]) for r in records if r.metric == "attention_memory"})  # type: ignore[arg-type]
    names = list(dict.fromkeys(str(r.tags["attention"]) for r in records))
    for mode, title in (("forward", "Forward"), ("both", "Forward + backward")):
        rows = []
        for name in names:
            row = {"attention": name}
            for n in lengths:
                taken, ratio = (
                    found.get((metric, mode, n, name)) for metric in ("attention_memory", "memory_vs_softmax")
                )
                row[f"N={n}"] = "refused" if taken is None else size(taken)
                if len(lengths) <= MANY:
                    row["÷softmax" + " " * lengths.index(n)] = "" if ratio is None else f"{ratio:.2f}"
            most = found.get(("largest_tokens", mode, None, name))
            rows.append(row | {"most tokens": "–" if most is None else f"{most:,.0f}"})
        print_table(rows, title=title, right=list(rows[0])[1:])
    first = records[0]
    limit = next((r.tags["limit"] for r in records if "limit" in r.tags), 0)
    notes = _refused(records)
    notes += [
        "Peak of one call beside q, k and v, in a fresh process each; ÷softmax: over fused softmax's. most tokens: "
        + (
            f"would fit {size(float(limit or 0))} with q, k and v, if memory grows as it last did."
            if limit
            else "nothing is known, as one length does not tell how memory grows: give --tokens twice."
        ),
        f"batch {first.tags['batch']}, {first.tags['heads']} heads, head_dim {first.tags['head_dim']}; {first.where}.",
    ]
    print_table([], notes=notes)


def _refused(records: list[Record]) -> list[str]:
    """A line for each attention and length that was refused, and why; of longer ones for the same reason none."""
    found: dict[tuple[Any, Any], Any] = {}
    for record in records:
        if why := record.tags.get("refused"):
            found.setdefault((record.tags["attention"], why), record.tags.get("tokens"))
    return [f"refused: {name} at N={n}: {why}" for (name, why), n in sorted(found.items(), key=str)]


def _half(record: Record) -> float:
    return 0.5 * (float(record.tags["high"] or 0) - float(record.tags["low"] or 0))


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
