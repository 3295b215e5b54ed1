"""What `linvit advise --for DEVICE` prints and writes. Everywhere it says that it is a forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit.cli._bench import break_even_text
from linvit.cli._output import print_table
from linvit.metrics import percent
from linvit.metrics import seconds as in_seconds

if TYPE_CHECKING:
    from linvit.study.forecasting import HardwareAdvice

BOUND = "launch-bound"


def show_forecast(advice: HardwareAdvice, headings: dict[str, str]) -> None:
    from linvit.study.advising import count_of

    config, site = advice.question.config, advice.question.config.site
    layers = f"{count_of(config.depth, 'layer')}, {count_of(site.heads, 'head')} of {site.head_dim}"
    print(advice.warning)
    print(f"{advice.question.text}: {count_of(advice.question.tokens, 'token')}, {layers}\n")
    show_speeds(advice, headings)
    print(f"{'Stay with softmax' if advice.choice not in advice.specs else 'Try ' + advice.choice}: {advice.reason}")
    print(f"  {advice.command}")


def show_speeds(advice: HardwareAdvice, headings: dict[str, str]) -> None:
    from linvit.study.forecasting import ACCURACY

    model = advice.model
    tasks = {t: name if t == "latency" else f"{name} ({model.batch})" for t, name in headings.items()}
    low, high = model.lengths("softmax")[0], model.longest

    def marked(text: str, spec: str, task: str) -> str:
        return f"{text}, {BOUND}" if model.model(spec, task).launch_bound else text

    def cells(value: Any) -> dict[str, str]:
        return {name: value(task) for task, name in tasks.items()}

    limits: list[dict[str, Any]] = [
        {"": "time with softmax"} | cells(lambda t: marked(in_seconds(model.model("softmax", t).total), "softmax", t)),
        {"": "attention's share of it"} | cells(lambda t: percent(model.share(t))),
        {"": "the most that any attention could gain"} | cells(lambda t: f"{model.speed('identity', t):.2f}×"),
    ]
    print_table(limits, right=[*tasks.values()])
    rows = []
    for spec in advice.specs:
        speeds = {name: marked(f"{model.speed(spec, task):.2f}×", spec, task) for task, name in tasks.items()}
        evens = {
            f"{name} from N": break_even_text(model.break_even(spec, task), model.lengths(spec)[0])
            for task, name in headings.items()
        }
        rows.append({"attention": spec} | speeds | evens)
    notes = [
        f"×: the whole model relative to softmax. from N: tokens from which the attention layer is faster, of {low:,} "
        f"to {high:,} tokens (–: beyond). {BOUND}: launching the operations takes the host longer than computing them "
        "takes the device.",
        f"{advice.assumptions} {ACCURACY}",
        "",
    ]
    print()
    print_table(rows, right=list(rows[0])[1:], notes=notes)


def write_forecast(advice: HardwareAdvice, out: Path, headings: dict[str, str]) -> list[Path]:
    """forecast.json and the chart, under names that nothing measured has."""
    from linvit.files import write_atomically
    from linvit.report import benchmarks

    path = out / "forecast.json"
    write_atomically(path, json.dumps(advice.summary(), ensure_ascii=False, indent=1) + "\n")
    return [path, *benchmarks.save(chart(advice, headings), out / "forecast")]


def chart(advice: HardwareAdvice, headings: dict[str, str]) -> Any:
    """How many times faster than softmax a layer would be, over the number of tokens."""
    from linvit.report import benchmarks
    from linvit.study.advising import count_of
    from linvit.study.forecasting import ACCURACY, launch_bound

    model, site = advice.model, advice.question.config.site
    titles = {t: name + ("" if t == "latency" else f", batch of {model.batch}") for t, name in headings.items()}
    lines = {
        title: [
            {"attention": spec, "tokens": n, "ratio": model.ratio(spec, task, n)}
            for spec in advice.specs
            for n in model.lengths(spec)
        ]
        for task, title in titles.items()
    }
    every = ["softmax", *advice.specs]
    bound = launch_bound(advice, every)
    what = benchmarks.ADVICE[0].lower() + benchmarks.ADVICE[1:]
    words = "; ".join(
        f"{headings[task]} with {'any' if specs == every else ', '.join(specs)}" for task, specs in bound.items()
    )
    return benchmarks.advice(
        lines,
        {title: [] for title in lines},
        advice.specs,
        model.tokens,
        advice.warning,
        f"Softmax's time / its time, {site.heads} heads of {site.head_dim}: {advice.question.text} "
        f"(dashed: {count_of(model.tokens, 'token')}).",
        *([f"The whole model is {BOUND} there: {words}."] if words else []),
        advice.assumptions,
        ACCURACY,
        title=f"Forecast for {advice.device.name}: {what if advice.device.fuses else what.replace('fused ', '')}",
    )
