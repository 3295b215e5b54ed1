"""results.csv and report.md: the page's numbers for programs and for a repository."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from linvit.files import write_atomically
from linvit.metrics import METRICS, TABLE, Metric, percent
from linvit.report import statistics
from linvit.report.merit import ACCURACY, Merit
from linvit.report.recommendation import Recommendation
from linvit.report.summary import Result, Summary

HEADINGS = {metric.heading: metric for metric in TABLE if metric.heading}


def row(variant: Result, merit: Merit) -> dict[str, object]:
    best, final, name = variant.best, variant.final, merit.metric
    standing, none = variant.standing, (None, None)
    seeds, images = standing.over_seeds or none, standing.over_images or none
    return {
        "attention": variant.attention, name: best and best.mean, f"{name}_low": best and best.low,
        f"{name}_high": best and best.high, "seeds": variant.seeds,
        f"final_{name.removeprefix('test_')}": final and final.mean, "verdict": variant.verdict,
        "behind_best": standing.behind, "behind_low_seeds": seeds[0], "behind_high_seeds": seeds[1],
        "behind_low_images": images[0], "behind_high_images": images[1], "loses_at_most": standing.loses_at_most,
        "loses_at_least": standing.loses_at_least,
        **{metric.column: variant.get(metric.name) for metric in TABLE if metric.column},
        "folds": variant.folds or None, "variant": variant.id, "label": variant.label, "column": variant.column,
        "diverged": "; ".join(variant.diverged), "failed": "; ".join(variant.failed),
    }  # fmt: skip


def write_csv(summary: Summary, path: Path) -> None:
    """One row per variant. A text that a spreadsheet would run as a formula gets a leading apostrophe."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(row(Result("", "", ""), summary.merit))
    writer.writerows(map(cell, row(variant, summary.merit).values()) for variant in summary.variants)
    write_atomically(path, file.getvalue())


def cell(value: object) -> str:
    """A value in a file for spreadsheets."""
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) >= 2 else f"{value:.10g}"
    text = str(value)
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def points(variant: Result, merit: Merit, which: str = "best") -> str:
    """`97.8 ± 0.4 %`, the sign never alone on a line."""
    found = variant.best if which == "best" else variant.final
    if found is None or found.low is None or found.high is None:
        return merit.show(found and found.mean)
    half = max(found.high - found.mean, found.mean - found.low)  # the interval is cut at 0 and 1; show the wider side
    return f"{merit.plain(found.mean)} ± {merit.show(half)}"


def behind(variant: Result, merit: Merit) -> list[str]:
    """The difference to the best in its unit, its intervals, and the bound that decides."""
    found, lines = variant.standing, []
    if found.behind is not None:
        lines.append(f"{merit.signed(merit.sign * found.behind)} {merit.unit}")
    runs = "folds" if variant.folds else "seeds"
    lines += [f"{name} {' to '.join(map(merit.signed, sorted(merit.sign * end for end in span)))}"
              for name, span in ((runs, found.over_seeds), ("images", found.over_images)) if span]  # fmt: skip
    if found.loses_at_most is not None and found.loses_at_least is not None:
        worse = variant.verdict == statistics.WORSE
        loss, how = (found.loses_at_least, "least") if worse else (found.loses_at_most, "most")
        lines.append(f"loses at {how} {merit.plain(max(0.0, loss))}")
    return lines


def small(variant: Result, summary: Summary) -> list[str]:
    """What stands under the accuracy."""
    found = []
    if variant.best and variant.best.n < summary.runs:
        found.append(f"{variant.best.n} of {summary.runs} {'runs' if summary.folds else 'seeds'}")
    if (value := variant.get("macro_f1")) is not None:
        found.append(f"F1 {percent(value)}")
    if summary.classes and (value := variant.get("balanced_accuracy")) is not None:
        found.append(f"balanced {percent(value)}")
    if (value := variant.get("draw_spread")) is not None:
        found.append(f"± {100 * value:.1f} by the draw alone")
    if (value := variant.get("redrawn_accuracy")) is not None:
        found.append(f"{percent(value)} with features drawn anew")
    return found


def rule(summary: Summary) -> str:
    """How the table's verdicts are to be read."""
    merit, margin = summary.merit, summary.merit.amount(summary.margin)
    over = "seeds and test images are" if summary.sampled else "only seeds are"
    of, sample = "mean and 95 % interval over seeds", f"Here {over} taken for a sample."
    if summary.folds:
        of = (f"out of fold, each image judged by models that were not trained on it, with the corrected resampled "
              f"95 % t-interval (Nadeau and Bengio) over {summary.repeated(summary.seeds)}")  # fmt: skip
        sample = "Folds share most of their training images, which this correction allows for, in verdicts too."
    what = "Accuracies" if merit is ACCURACY else "Bits per dimension, fewer are better"
    text = (f"{what}: {of}. Verdicts: “within {margin}” is shown to lose less than "
            f"{margin} to every other variant, “worse” to lose more to some; at most 5 % of studies say the first of "
            f"one that does not, with a second look at the seeds this page names included. {sample} Below: the "
            f"difference to the best in {merit.unit}, its 95 % intervals, and the bound that "
            f"decides.")  # fmt: skip
    if summary.classes:
        least, most = summary.classes
        text += (f" The test classes are unequal ({least:,} to {most:,} images): balanced accuracy counts each class "
                 f"alike.")  # fmt: skip
    return text


def shown(variant: Result, metric: str) -> str:
    """A metric of the variant, as a person reads it."""
    return METRICS[metric].show(variant.get(metric))


def headings(summary: Summary) -> dict[str, Metric]:
    """Of the table; what is measured of starts alone has a column only where there are some."""
    started = any(v.get("start_accuracy") is not None for v in summary.variants)
    return {name: metric for name, metric in HEADINGS.items() if started or metric.name != "start_accuracy"}


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
    lines += [f"**{escape(advice.headline)}.** {escape(' '.join(advice.sentences))}", ""]
    if advice.command:
        lines += ["```", *advice.command.replace("`", "'").splitlines(), "```", ""]
    lines += [escape(advice.attention_worth), ""] if advice.attention_worth else []
    lines += [f"*{escape(advice.confidence)}.* {escape(advice.reason)}", ""]
    if summary.warnings:
        lines += ["## Where this comparison is weak", "", *(f"- {escape(text)}" for text in summary.warnings), ""]
    merit = summary.merit
    head = ("variant", merit.title.lower(), "final epoch", "seeds", *(name.lower() for name in headings(summary)),
            "verdict", f"{merit.unit} to the best")  # fmt: skip
    lines += ["## Results", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for v in summary.variants:
        numbers = (shown(v, metric.name) for metric in headings(summary).values())
        cells = (
            escape(v.label),
            points(v, merit),
            points(v, merit, "final"),
            summary.repeated(v.seeds) if summary.folds else v.seeds,
            *numbers,
            v.verdict,
            "; ".join(behind(v, merit)),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", f"{rule(summary)} Speeds are beside softmax, above 1 is faster.", ""]
    lines += [f"![{title}](figures/{name}.svg)\n" for name, title in figures]
    lines += ["## What was run", "", *(f"- {name}: {escape(text)}" for name, text in facts), ""]
    if study.info.get("commands"):
        fence = [line.replace("`", "'") for command in study.info["commands"] for line in str(command).splitlines()]
        lines += ["## Run it again", "", "```", *fence, "```", ""]
    write_atomically(path, "\n".join(lines))
