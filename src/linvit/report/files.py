"""results.csv and report.md: the page's numbers for programs and for a repository."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from linvit.files import write_atomically
from linvit.report.recommendation import Recommendation
from linvit.report.summary import Summary, Variant

NUMBERS = {  # column → metric
    "train_step_s": "train_step",
    "train_step_vs_softmax": "train_step_vs_softmax",
    "inference_images_per_s": "inference_throughput",
    "inference_vs_softmax": "inference_vs_softmax",
    "inference_vs_identity": "inference_vs_identity",
    "peak_memory_bytes": "peak_memory",
    "parameters": "parameters",
    "macs": "macs",
    "attention_error": "attention_error",
}
MORE = {
    "train_step_vs_identity": "train_step_vs_identity",
    "inference_latency_s": "inference_latency",
    "latency_vs_softmax": "latency_vs_softmax",
    "latency_vs_identity": "latency_vs_identity",
    "attention_error_uniform": "attention_error_uniform",
    "attention_entropy": "attention_entropy",
    "break_even_tokens": "break_even_tokens",
}


def row(variant: Variant) -> dict[str, object]:
    best, final = variant.best, variant.final
    cells: dict[str, object] = {
        "attention": variant.attention,
        "test_accuracy": best and best.mean,
        "test_accuracy_low": best and best.low,
        "test_accuracy_high": best and best.high,
        "seeds": best.n if best else 0,
        "final_accuracy": final and final.mean,
    }
    cells |= {column: variant.get(metric) for column, metric in NUMBERS.items()}
    cells["verdict"] = variant.verdict
    cells |= {column: variant.get(metric) for column, metric in MORE.items()}
    cells |= dict(zip(("behind_best", "p"), variant.behind or (None, None), strict=True))
    cells["diverged"] = "; ".join(variant.diverged)
    return cells


def write_csv(summary: Summary, path: Path) -> None:
    """One row per variant. A text that a spreadsheet would run as a formula gets a leading apostrophe."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    rows = [row(variant) for variant in summary.variants]
    writer.writerow(rows[0] if rows else row(Variant("", 0)))
    writer.writerows([_cell(value) for value in cells.values()] for cells in rows)
    write_atomically(path, file.getvalue())


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) >= 2 else f"{value:.10g}"
    text = str(value)
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def points(variant: Variant, which: str = "best") -> str:
    """`97.8 ± 0.4 %`, the sign never alone on a line."""
    found = variant.best if which == "best" else variant.final
    if found is None:
        return "–"
    half = ""
    if found.low is not None and found.high is not None:  # the interval is cut at 0 and 1; show the wider side
        half = f" ± {100 * max(found.high - found.mean, found.mean - found.low):.1f}"
    return f"{100 * found.mean:.1f}{half}\N{NO-BREAK SPACE}%"


def behind(variant: Variant) -> str:
    """`−2.6 points, p 0.01`: the difference to the most accurate, seed by seed."""
    if variant.behind is None:
        return ""
    difference, p = variant.behind
    return f"{100 * difference:+.1f} points, p {'< 0.001' if p < 0.001 else format(p, '.2g')}".replace("-", "−")


def count(value: float | None) -> str:
    return _scaled(value, 1000, ("", " k", " M", " G", " T"))


def size(value: float | None) -> str:
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float | None, base: int, units: tuple[str, ...]) -> str:
    if value is None:
        return "–"
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{value:.3g}{unit}" if abs(value) < 100 else f"{value:.0f}{unit}"
        value /= base
    return f"{value:.3g}{units[-1]}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def escape(text: object) -> str:
    """User text for Markdown: nothing of it is markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", " ".join(str(text).split()))


def write_markdown(
    summary: Summary, advice: Recommendation, path: Path, figures: list[tuple[str, str]], facts: list[tuple[str, str]]
) -> None:
    study, data = summary.study, summary.study.dataset
    lines = [f"# Which attention for {escape(data.get('name', 'these images'))}?", ""]
    lines += [escape(" ".join(advice.sentences)), "", f"*{escape(advice.confidence)}.* {escape(advice.reason)}", ""]
    if summary.warnings:
        lines += ["## Where this comparison is weak", "", *(f"- {escape(text)}" for text in summary.warnings), ""]
    head = ("attention", "test accuracy", "final epoch", "seeds", "training step", "inference", "beside softmax",
            "peak memory", "parameters", "MACs", "verdict")  # fmt: skip
    lines += ["## Results", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for v in summary.variants:
        speed = v.get("inference_throughput")
        cells = (escape(v.attention), points(v), points(v, "final"), v.best.n if v.best else 0,
                 seconds(v.get("train_step")), f"{speed:,.0f} img/s" if speed else "–",
                 ratio(v.get("inference_vs_softmax")), size(v.get("peak_memory")), count(v.get("parameters")),
                 count(v.get("macs")), v.verdict)  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Mean and 95 % t-interval over seeds; verdicts are against the most accurate.", ""]
    lines += [f"![{title}](figures/{name}.svg)\n" for name, title in figures]
    lines += ["## What was run", "", *(f"- {name}: {escape(text)}" for name, text in facts), ""]
    if study.info.get("commands"):
        fence = [line.replace("`", "'") for command in study.info["commands"] for line in str(command).splitlines()]
        lines += ["## Run it again", "", "```", *fence, "```", ""]
    write_atomically(path, "\n".join(lines))
