"""`linvit advise`: which attention, from what can be measured in half a minute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit.cli._output import print_json, print_table, working
from linvit.metrics import percent
from linvit.records import unverified
from linvit.requests import AdviseRequest

if TYPE_CHECKING:
    from linvit.study.advising import Advice
    from linvit.study.earlier import EarlierStudy

LAUNCH_BOUND = "The device waits for operations to be launched: a larger batch or CUDA graphs help more there."
BUSY = 0.15  # spread between quartiles of rounds that points to other load
HEADINGS = {"latency": "one image", "inference": "inference", "training": "training"}


def run(request: AdviseRequest) -> None:
    from linvit.study import advising

    out = request.out
    if out is not None and out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    if request.hardware is not None:
        run_forecast(request)
        return
    with working(request) as display:
        advice = advising.run(request, progress=display.progress)
    written = [] if out is None else write(advice, out)
    if request.as_json:
        print_json(advice.summary())
    elif request.quiet:
        print(advice.choice)
    else:
        show_advice(advice)
        if written:
            print("wrote " + ", ".join(map(str, written)))


def run_forecast(request: AdviseRequest) -> None:
    """For a device that is not here."""
    from linvit.cli._forecast import show_forecast, write_forecast
    from linvit.study import forecasting

    with working(request) as display:
        advice = forecasting.run(request, progress=display.progress)
    written = [] if request.out is None else write_forecast(advice, request.out, HEADINGS)
    if request.as_json:
        print_json(advice.summary())
    elif request.quiet:
        print(advice.choice)
    else:
        show_forecast(advice, HEADINGS)
        if written:
            print("wrote " + ", ".join(map(str, written)))


def show_advice(advice: Advice) -> None:
    from linvit.study.advising import count_of

    site, depth = advice.model.loads["latency"].site, advice.question.config.depth
    layers = f"{count_of(depth, 'layer')}, {count_of(site.heads, 'head')} of {site.head_dim}"
    print(f"{advice.question.text}: {count_of(site.tokens, 'token')}, {layers}\n")
    show_speeds(advice)
    show_features(advice)
    for study in advice.studies:
        show_study(study)
    print(f"{'Stay with softmax' if advice.choice not in advice.specs else 'Try ' + advice.choice}: {advice.reason}")
    print(f"  {advice.command}")


def show_speeds(advice: Advice) -> None:
    from linvit.cli._bench import break_even_text

    model, (low, high) = advice.model, advice.model.known.lengths
    tasks = {t: name if t == "latency" else f"{name} ({model.loads[t].batch})" for t, name in HEADINGS.items()}
    limits: list[dict[str, Any]] = [
        {"": "attention's share of the time with softmax"} | {tasks[t]: percent(model.share(t)) for t in tasks},
        {"": "the most that any attention could gain"} | {tasks[t]: times(model.speed("identity", t)) for t in tasks},
    ]
    print_table(limits, right=[*tasks.values()])
    rows = [
        {"attention": spec}
        | {name: times(model.speed(spec, task)) for task, name in tasks.items()}
        | {
            f"{name} from N": break_even_text(model.break_even(spec, task), model.lengths(spec)[0])
            for task, name in HEADINGS.items()
        }
        for spec in advice.specs
    ]
    busy = "; the machine was busy, --fresh measures again" if model.known.spread > BUSY else ""
    how = "its layers timed at this size" if model.measured else "forecast"
    through = " through the times at this size" if model.measured and model.tokens >= low else ""
    notes = [
        f"×: the whole model relative to softmax ({how}). from N: tokens from which the attention layer is faster, "
        f"forecast from {low:,} to {high:,} tokens{through} (–: beyond; median leave-one-out error "
        f"{model.known.error:.0%}).",
        f"{model.known.records[0].where}; rounds differ by {model.known.spread:.0%}{busy}.",
        *([f"launch-bound: {', '.join(model.launch_bound)}. {LAUNCH_BOUND}"] if model.launch_bound else []),
        *([f"{caveat}."] if (caveat := unverified(model.known.records[0].device)) else []),
        "",
    ]
    print()
    print_table(rows, right=list(rows[0])[1:], notes=notes)


def show_features(advice: Advice) -> None:
    for one in advice.enough:
        useless = ", no closer than uniform" if one.error >= advice.uniform else ""
        found = f"more than {one.features:,} features (m = {one.tried}: {one.error:.2f}{useless})"
        if one.spec is not None:
            speed = f"{HEADINGS[advice.task]} then {times(advice.model.speed(one.spec, advice.task))}"
            found = f"{one.features:,} features (m = {one.count}: {one.error:.2f}; {speed})"
        print(f"{one.kind} needs {found} for a distance of {advice.target:g} from softmax")
    print(f"  total variation; uniform attention has {advice.uniform:.2f}; q and k {advice.origin}\n")


def show_study(study: EarlierStudy) -> None:
    from linvit.study.advising import count_of

    rows = [
        {"attention": finding.attention, "accuracy": percent(finding.accuracy), "verdict": finding.verdict}
        | {name: times(finding.speeds.get(task)) for task, name in HEADINGS.items()}
        for finding in study.findings
    ]
    place = f"on another machine ({study.machine})" if study.machine else "on this machine"
    print(f"Earlier study {place}: {study.folder}, {study.data}, {count_of(study.tokens, 'token')}")
    print_table(rows, right=["accuracy", *HEADINGS.values()])
    print()


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def write(advice: Advice, out: Path) -> list[Path]:
    """advice.json, the records and the chart."""
    from linvit.files import write_atomically
    from linvit.report import benchmarks

    paths = [out / "advice.json", out / "records.jsonl"]
    write_atomically(paths[0], json.dumps(advice.summary(), ensure_ascii=False, indent=1) + "\n")
    write_atomically(paths[1], "".join(record.line() + "\n" for record in advice.records))
    return [*paths, *benchmarks.save(chart(advice), out / "advice")]


def chart(advice: Advice) -> Any:
    """How many times faster than softmax a layer is, over the number of tokens."""
    from linvit.report import benchmarks
    from linvit.study.advising import count_of

    model, site = advice.model, advice.model.loads["latency"].site
    lines, dots = {}, {}
    for task, load in model.loads.items():
        title = HEADINGS[task] + ("" if task == "latency" else f", batch of {model.batch}")
        lines[title] = [
            {"attention": spec, "tokens": n, "ratio": model.ratio(spec, task, n)}
            for spec in advice.specs
            for n in sorted({model.tokens, *model.lengths(spec)})
        ]
        dots[title] = [
            {"attention": spec, "tokens": site.tokens, "ratio": model.ratio(spec, task)}
            for spec in advice.specs
            if (spec, load) in model.measured
        ]
    measured = ", through the dots: measured" * any(dots.values())
    return benchmarks.advice(
        lines,
        dots,
        advice.specs,
        site.tokens,
        f"Softmax's time / its time, {site.heads} heads of {site.head_dim}: {advice.question.text} "
        f"(dashed: {count_of(site.tokens, 'token')}).",
        f"Lines: forecast from {len(model.known.records)} timings{measured}.",
        model.known.records[0].where,
    )
