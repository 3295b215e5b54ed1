"""`linvit advise`: which attention, from what can be measured in half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from linvit.cli import _options as options

if TYPE_CHECKING:
    from linvit.study.advising import Advice, Earlier

BUSY = 0.15  # between quartiles of rounds
HEADINGS = {"latency": "one image", "inference": "inference", "training": "training"}


def run(
    about: Annotated[str, typer.Argument(
        metavar="DATA|N|MODEL", help="A data set's name or path, a number of tokens, or a trained model's folder.")],
    image_size: options.ImageSize = None,
    patch: Annotated[int | None, typer.Option(metavar="PIXELS", help="Side of a patch.")] = None,
    size: options.Size = None,
    attention: Annotated[list[str] | None, typer.Option(
        "--attention", "-a", metavar="SPEC", help="What softmax is compared with; repeat it. "
        "Default: performer-exp, -relu and -theta with m=32, linformer:k=16.")] = None,
    data: Annotated[str | None, typer.Option(
        metavar="DATA", help="With MODEL: images whose q and k are looked at.")] = None,
    task: Annotated[Literal["latency", "inference", "training"], typer.Option(
        "--for", help="What decides: one image at a time, batches, or training.")] = "inference",
    batch: Annotated[int | None, typer.Option(help="Images per batch. [default: what takes a moment]")] = None,
    error: Annotated[float, typer.Option(
        help="Target distance from softmax (total variation) for which features are counted.")] = 0.2,
    sigma: Annotated[float, typer.Option(help="Deviation of q and k where no model has any.")] = 1.0,
    runs: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Where earlier studies lie. [default: runs, if there is one]")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure this machine again.")] = False,
    device: options.Device = "auto",
    data_root: options.DataRoot = None,
    threads: options.Threads = 0,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Say when linear attention pays here, and which to try, without training anything.

    Half a minute of measuring tells from how many tokens on each attention is faster than softmax on this machine, how
    much of the model's time attention takes, and how many features a target error needs; it is kept for the next time.
    Earlier studies below --runs say what is known of accuracy. For what is not, it gives the command.

    Examples:

        linvit advise 1024

        linvit advise path/to/images --image-size 128 --patch 8

        linvit advise runs/model --data path/to/images --error 0.1

        linvit advise path/to/huggingface-vit --image-size 512 --for latency --out runs/advice
    """
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.study.advising import advise

    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file: name a folder")
    with Display(quiet or json) as display, _output.warnings_in_one_line():
        advice = advise(
            about, attentions=attention, data=data, image_size=image_size, patch=patch, size=size, task=task,
            batch=batch, target=error, sigma=sigma, runs=runs, fresh=fresh, device=device, data_root=data_root,
            progress=display.progress,
        )  # fmt: skip
    written = [] if out is None else _write(advice, out)
    if json:
        _output.print_json(advice.summary())
    elif quiet:
        print(advice.choice)
    else:
        _show(advice)
        if written:
            print("wrote " + ", ".join(map(str, written)))


def _show(advice: Advice) -> None:
    from linvit.cli._bench import even
    from linvit.cli._output import print_table
    from linvit.metrics import percent
    from linvit.study.advising import many

    model, config = advice.model, advice.question.config
    shapes, (low, high) = model.shapes, model.known.lengths
    shape = shapes["latency"]
    tasks = {task: name if task == "latency" else f"{name} ({shapes[task].batch})" for task, name in HEADINGS.items()}
    layers = f"{many(config.depth, 'layer')}, {many(shape.heads, 'head')} of {shape.head_dim}"
    print(f"{advice.question.text}: {many(shape.tokens, 'token')}, {layers}\n")
    rows: list[dict[str, Any]] = [
        {"": "attention's share of the time with softmax"} | {tasks[t]: percent(model.share(t)) for t in tasks},
        {"": "no attention could make it faster than"} | {tasks[t]: _times(model.speed("identity", t)) for t in tasks},
    ]
    print_table(rows, right=[*tasks.values()])
    rows = [
        {"attention": spec}
        | {name: _times(model.speed(spec, task)) for task, name in tasks.items()}
        | {
            f"{name} from N": even(model.break_even(spec, task), model.lengths(spec)[0])
            for task, name in HEADINGS.items()
        }
        for spec in advice.specs
    ]
    busy = ", the machine was busy: --fresh measures again" if model.known.spread > BUSY else ""
    how = "its layers timed at this size" if model.measured else "forecast"
    through = " through the times at this size" if model.measured and model.tokens >= low else ""
    print()
    print_table(rows, right=list(rows[0])[1:], notes=[
        f"×: the whole model beside softmax ({how}). from N: tokens from which the attention layer is faster, forecast "
        f"from {low:,} to {high:,} tokens{through} (– is beyond; median error of shapes left out "
        f"{model.known.error:.0%}).",
        f"{model.known.records[0].where}; rounds differ by {model.known.spread:.0%}{busy}.", "",
    ])  # fmt: skip
    for one in advice.enough:
        vain = ", no nearer than uniform" if one.error >= advice.uniform else ""
        found = f"more than {one.features:,} features (m = {one.tried}: {one.error:.2f}{vain})"
        if one.spec is not None:
            speed = _times(model.speed(one.spec, advice.task))
            found = (
                f"{one.features:,} features (m = {one.count}: {one.error:.2f}; {HEADINGS[advice.task]} then {speed})"
            )
        print(f"{one.kind} needs {found} for a distance of {advice.target:g} from softmax")
    print(f"  total variation; uniform attention has {advice.uniform:.2f}; q and k {advice.origin}\n")
    for study in advice.studies:
        _show_study(study)
    print(f"{'Stay with softmax' if advice.choice == 'softmax' else 'Try ' + advice.choice}: {advice.reason}")
    print(f"  {advice.command}")


def _show_study(study: Earlier) -> None:
    from linvit.cli._output import print_table
    from linvit.metrics import percent
    from linvit.study.advising import many

    rows = [
        {"attention": trial.attention, "accuracy": percent(trial.accuracy), "verdict": trial.verdict}
        | {name: _times(trial.speeds.get(task)) for task, name in HEADINGS.items()}
        for trial in study.trials
    ]
    place = f"on another machine ({study.machine})" if study.machine else "on this machine"
    print(f"Studied {place}: {study.folder}, {study.data}, {many(study.tokens, 'token')}")
    print_table(rows, right=["accuracy", *HEADINGS.values()])
    print()


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _write(advice: Advice, out: Path) -> list[Path]:
    """advice.json, the records and the chart."""
    import json

    from linvit.files import write_atomically
    from linvit.report.benchmarks import save

    paths = [out / "advice.json", out / "records.jsonl"]
    write_atomically(paths[0], json.dumps(advice.summary(), ensure_ascii=False, indent=1) + "\n")
    write_atomically(paths[1], "".join(record.line() + "\n" for record in advice.records))
    return [*paths, *save(chart(advice), out / "advice")]


def chart(advice: Advice) -> Any:
    """Over the number of tokens, how many times faster than softmax a layer is: lines as forecast, dots as measured."""
    import altair as alt

    from linvit.report import theme
    from linvit.study.advising import many

    model, specs, one = advice.model, list(advice.specs), advice.model.shapes["latency"]
    lines, dots = _curves(advice)
    ratios = [row["ratio"] for rows in (*lines.values(), *dots.values()) for row in rows]
    span = [min([*ratios, 0.5]) / 1.1, max([*ratios, 2.0]) * 1.1]
    reach = [end([*model.known.lengths, model.tokens]) for end in (min, max)]
    palette = [theme.PALETTE[i % len(theme.PALETTE)] for i in range(len(specs))]
    powers = [2.0**i for i in range(-8, 11)]
    encoding = {
        "x": alt.X("tokens:Q", title="tokens", scale=alt.Scale(type="log", domain=reach, nice=False),
                   axis=alt.Axis(values=[1, 4, 16, 64, 256, 1024, 4096])),
        "y": alt.Y("ratio:Q", title=None, scale=alt.Scale(type="log", domain=span, nice=False),
                   axis=alt.Axis(values=[power for power in powers if span[0] <= power <= span[1]], format="~g")),
        "color": alt.Color("attention:N", scale=alt.Scale(domain=specs, range=palette)),
        "tooltip": ["attention:N", "tokens:Q", alt.Tooltip("ratio:Q", format=".3g")],
    }  # fmt: skip
    panels = []
    for task, name in HEADINGS.items():
        batch = "" if task == "latency" else f", batch of {model.batch}"
        layers = [
            _values([{"ratio": 1}]).mark_rule(strokeWidth=1.5).encode(y="ratio:Q"),
            _values([{"tokens": one.tokens}]).mark_rule(strokeDash=[4, 3], clip=True).encode(x="tokens:Q"),
            _values(lines[task]).mark_line(strokeWidth=2).encode(**encoding),
            _values(dots[task]).mark_point(filled=True, size=70, opacity=1, clip=True).encode(**encoding),
        ]
        title = alt.TitleParams(f"{name}{batch}", frame="group", fontSize=12)
        panels.append(alt.layer(*layers).properties(width=230, height=230, title=title))
    subtitle = [
        f"Softmax's time / its time, {one.heads} heads of {one.head_dim}: {advice.question.text} (dashed: "
        f"{many(one.tokens, 'token')}).",
        f"Lines: forecast from {len(model.known.records)} timings"
        + ", through the dots: measured" * any(dots.values())
        + ".",
        model.known.records[0].where,
    ]
    title = alt.TitleParams(
        "From how many tokens on an attention layer is faster than fused softmax", subtitle=subtitle
    )
    return alt.hconcat(*panels, spacing=20, title=title)


def _values(rows: list[dict[str, Any]]) -> Any:
    import altair as alt

    return alt.Chart(alt.InlineData(values=rows))


def _curves(advice: Advice) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """By task: forecasts at every length, and what was measured of the model's own layers."""
    model, lines, dots = advice.model, {}, {}
    for task, shape in model.shapes.items():
        lines[task] = [
            {"attention": spec, "tokens": n, "ratio": model.ratio(spec, task, n)}
            for spec in advice.specs for n in sorted({model.tokens, *model.lengths(spec)})
        ]  # fmt: skip
        dots[task] = [
            {"attention": spec, "tokens": shape.tokens, "ratio": model.ratio(spec, task)}
            for spec in advice.specs if (spec, shape) in model.measured
        ]  # fmt: skip
    return lines, dots
