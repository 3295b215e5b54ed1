"""`linvit bench`: what each attention costs, and how far it is from softmax, on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from linvit.cli import _options as options

if TYPE_CHECKING:
    from linvit.records import Record

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Heads = Annotated[int, typer.Option(min=1)]
HeadDim = Annotated[int, typer.Option(min=1)]


@app.callback()
def bench() -> None:
    """Measure attentions here: distance from softmax, and speed.

    Examples:

        linvit bench error --out runs/error
        linvit bench speed --tokens 1024 --tokens 4096 -a performer-exp:m=128 -a linformer:k=64
    """
    # Before torch is imported: threads that wait must sleep, or CPU time counts them as work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@app.command()
def error(
    attention: options.Attentions = None,
    sigma: Annotated[list[float] | None, typer.Option(
        help="Deviation of q and k; repeat it. [default: 0.5 1 2]")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Sequence length N.")] = 256,
    heads: Heads = 4,
    head_dim: HeadDim = 64,
    draws: Annotated[int, typer.Option(min=1, help="How many times random features are drawn.")] = 4,
    seed: options.Seed = 0,
    threads: options.Threads = 0,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Distance from exact softmax for random q and k, with uniform attention as the control.

    Total variation of a row (0 equal, 1 disjoint), its entropy, and the relative error of the output. An attention
    further from softmax than `uniform` estimates nothing at that σ.

    Examples:

        linvit bench error
        linvit bench error -a performer-exp:m=64 -a performer-exp:m=256 -a performer-hyp --sigma 1 --out runs/error
    """
    from linvit.attention import attention_names
    from linvit.measure.error import measure

    work = partial(measure, attention or attention_names(), sigmas=sigma or (0.5, 1.0, 2.0), tokens=tokens, heads=heads,
                   head_dim=head_dim, draws=draws, seed=seed)  # fmt: skip
    _run("error", work, _error_table, out, json, quiet)


@app.command()
def speed(
    attention: options.Attentions = None,
    tokens: Annotated[list[int] | None, typer.Option(
        min=1, help="Sequence length N; repeat it. [default: 64 256 1024 4096]")] = None,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    prefix: Annotated[int, typer.Option(min=0, help="How many of the N tokens come before the image's (CLS).")] = 0,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; each times everything once.")] = 30,
    device: options.Device = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of q, k and v.")] = "float32",
    seed: options.Seed = 0,
    threads: options.Threads = 0,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Time of forward and forward+backward, as ratios to PyTorch's fused softmax in the same run.

    An attention whose output or gradients are wrong is not timed. softmax and identity (returns v, the speed limit)
    are always measured. With a prefix, lengths of a square and the prefix give `dwc` its grid.

    Examples:

        linvit bench speed --threads 2 --out runs/speed
        linvit bench speed --tokens 1024 --rounds 10 -a performer-relu:m=64 -a efficient
    """
    import torch

    from linvit.attention import attention_names
    from linvit.measure.provenance import pick_device
    from linvit.measure.speed import measure

    work = partial(measure, attention or attention_names(), tokens=tokens or (64, 256, 1024, 4096), heads=heads,
                   head_dim=head_dim, prefix=prefix, batch=batch, rounds=rounds, seed=seed, device=pick_device(device),
                   dtype=getattr(torch, dtype))  # fmt: skip
    _run("speed", work, _speed_tables, out, json, quiet)


def _run(
    name: str, work: Callable[..., Iterator[Record]], show: Callable[[list[Record]], None],
    out: Path | None, json: bool, quiet: bool,
) -> None:  # fmt: skip
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.records import Records

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # fails now rather than after minutes of work
    records: list[Record] = []
    with Display(quiet) as display:
        for record in work(progress=display.progress):
            records.append(record)
            if out is not None:
                Records(out / "records.jsonl").append([record])
    if json:
        _output.print_json(_output.rows(records))
    elif not quiet:
        show(records)
    if out is not None:
        from linvit.cli import _charts

        charts = _charts.save(getattr(_charts, name)(records), out / name)
        if not (json or quiet):
            print("wrote " + ", ".join(str(path) for path in [out / "records.jsonl", *charts]))


HEADINGS = {"attention_error": "TV", "attention_entropy": "H", "output_error": "out"}


def _error_table(records: list[Record]) -> None:
    from linvit.cli._output import print_table

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
    notes = [
        "TV: total variation to softmax, mean over rows. H: entropy of rows in nats. out: relative error of A·v. "
        "* not closer to softmax than uniform attention.",
        f"{first.tags['tokens']} tokens, {first.tags['heads']} heads, head_dim {first.tags['head_dim']}, "
        f"mean of {first.n} draws, seed {first.tags['seed']}; {first.versions}.",
    ]
    print_table(rows, title="Distance from exact softmax", notes=notes, right=list(rows[0])[1:])


def _speed_tables(records: list[Record]) -> None:
    from linvit.cli._output import print_table, where

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
                row["×softmax" + " " * lengths.index(n)] = f"{ratio.value:.2f} ±{_half(ratio):.2f}" if ratio else ""
            even = found.get(("break_even_tokens", mode, None, name))
            row["faster from N"] = "" if even is None else "–" if even.value is None else f"{even.value:.0f}"
            rows.append(row)
        print_table(rows, title=title, right=list(rows[0])[1:])
    refused = {(r.tags["attention"], r.tags["tokens"], r.tags["refused"]) for r in records if r.tags.get("refused")}
    clocks = {r.metric: str(r.tags["clock"]).replace("cpu", "CPU") for r in records if "clock" in r.tags}
    notes = [f"refused: {name} at N={n}: {why}" for name, n, why in sorted(refused, key=str)]
    notes += [
        f"×softmax: how many times faster than fused softmax, by {clocks['attention_vs_softmax']} time; "
        f"median ± half the interquartile range of {first.n} interleaved rounds. "
        f"ms: {clocks['attention_time']} time, median.",
        f"batch {first.tags['batch']}, {first.tags['heads']} heads, head_dim {first.tags['head_dim']}; {where(first)}.",
    ]
    print_table([], notes=notes)


def _half(record: Record) -> float:
    return 0.5 * (float(record.tags["high"] or 0) - float(record.tags["low"] or 0))


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
