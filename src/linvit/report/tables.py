"""results.csv and report.md: the page's numbers for programs and for a repository."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from linvit.files import write_atomically
from linvit.metrics import METRICS, TABLE, percent
from linvit.report.recommendation import Recommendation
from linvit.report.summary import Result, Summary

HEADINGS = {metric.heading: metric for metric in TABLE if metric.heading}


def row(variant: Result) -> dict[str, object]:
    best, final = variant.best, variant.final
    behind, p = variant.behind or (None, None)
    return {
        "attention": variant.attention, "test_accuracy": best and best.mean, "test_accuracy_low": best and best.low,
        "test_accuracy_high": best and best.high, "seeds": len(variant.scores),
        "final_accuracy": final and final.mean, "verdict": variant.verdict, "behind_best": behind, "p": p,
        **{metric.column: variant.get(metric.name) for metric in TABLE if metric.column},
        "variant": variant.id, "label": variant.label, "column": variant.column,
        "diverged": "; ".join(variant.diverged), "failed": "; ".join(variant.failed),
    }  # fmt: skip


def write_csv(summary: Summary, path: Path) -> None:
    """One row per variant. A text that a spreadsheet would run as a formula gets a leading apostrophe."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(row(Result("", "", "")))
    writer.writerows(map(_cell, row(variant).values()) for variant in summary.variants)
    write_atomically(path, file.getvalue())


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) >= 2 else f"{value:.10g}"
    text = str(value)
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def points(variant: Result, which: str = "best") -> str:
    """`97.8 ± 0.4 %`, the sign never alone on a line."""
    found = variant.best if which == "best" else variant.final
    if found is None or found.low is None or found.high is None:
        return METRICS["test_accuracy"].show(found and found.mean)
    half = max(found.high - found.mean, found.mean - found.low)  # the interval is cut at 0 and 1; show the wider side
    return f"{100 * found.mean:.1f} ± {percent(half)}"


def behind(variant: Result) -> str:
    """`−2.6 points, p 0.01`: the difference to the most accurate, seed by seed."""
    if variant.behind is None:
        return ""
    difference, p = variant.behind
    return f"{100 * difference:+.1f} points, p {'< 0.001' if p < 0.001 else format(p, '.2g')}".replace("-", "−")


def shown(variant: Result, metric: str) -> str:
    """A metric of the variant, as a person reads it."""
    return METRICS[metric].show(variant.get(metric))


def below(variant: Result, heading: str) -> list[str]:
    """What stands small under a cell of the table."""
    found = [(name, shown(variant, name)) for name in HEADINGS[heading].below if variant.get(name) is not None]
    return [f"{text} identity" if name.endswith("_vs_identity") else text for name, text in found]


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
    head = ("variant", "test accuracy", "final epoch", "seeds", *(name.lower() for name in HEADINGS), "verdict")
    lines += ["## Results", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for v in summary.variants:
        numbers = (shown(v, metric.name) for metric in HEADINGS.values())
        cells = (escape(v.label), points(v), points(v, "final"), len(v.scores), *numbers, v.verdict)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Mean and 95 % t-interval over seeds; speeds are beside softmax, above 1 is faster; verdicts are "
              "against the most accurate.", ""]  # fmt: skip
    lines += [f"![{title}](figures/{name}.svg)\n" for name, title in figures]
    lines += ["## What was run", "", *(f"- {name}: {escape(text)}" for name, text in facts), ""]
    if study.info.get("commands"):
        fence = [line.replace("`", "'") for command in study.info["commands"] for line in str(command).splitlines()]
        lines += ["## Run it again", "", "```", *fence, "```", ""]
    write_atomically(path, "\n".join(lines))
