"""Evidence → one `Result` per variant, with its verdict, and the reasons to doubt the comparison."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from linvit import metrics
from linvit.records import Record
from linvit.report import statistics
from linvit.report.evidence import Asked, Evidence
from linvit.report.statistics import WORSE, Interval, Verdicts


@dataclass
class Result(Asked):
    """What is known of one variant. `numbers` holds the metrics that are numbers, means over seeds where there are."""

    index: int = 0  # its place decides colour, shape and dash in every chart
    scores: dict[int, float] = field(default_factory=dict)  # seed → test accuracy of the validation-selected model
    best: Interval | None = None
    final: Interval | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)  # one line for each seed
    failed: list[str] = field(default_factory=list)
    verdict: str = statistics.MISSING
    behind: tuple[float, float] | None = None  # the most accurate: difference, corrected p

    @property
    def control(self) -> bool:
        return self.attention.partition(":")[0] in metrics.CONTROLS

    def get(self, metric: str) -> float | None:
        return self.numbers.get(metric)


@dataclass
class Summary:
    study: Evidence
    variants: list[Result]
    verdicts: Verdicts = field(default_factory=lambda: statistics.verdicts({}))
    warnings: list[str] = field(default_factory=list)

    @property
    def seeds(self) -> int:
        """As many as were asked for: one that diverged everywhere counts too."""
        asked = self.study.info.get("seeds")
        return max([len(v.scores) for v in self.variants] + [len(asked) if isinstance(asked, list) else 0])

    @property
    def images(self) -> int:
        return max((r.n for r in self.study.of("test_accuracy")), default=1)

    def judge(self, variants: list[Result]) -> Verdicts:
        """What these variants are among themselves."""
        scores = {v.id: v.scores for v in variants}
        diverged = [v.id for v in variants if v.diverged]
        return statistics.verdicts(scores, diverged, resolution=1 / self.images if self.images > 1 else 0.0)

    def __getitem__(self, name: str) -> Result:
        return next(v for v in self.variants if v.id == name)


def number(value: Any) -> float | None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ok else None


def summarise(study: Evidence) -> Summary:
    variants = [_result(study, asked, index) for index, asked in enumerate(study.variants)]
    summary = Summary(study, variants)
    run = [v for v in variants if v.column != "published"]  # a printed number has no seeds to compare
    summary.verdicts = verdicts = summary.judge([v for v in run if not v.control] or run)
    for variant in variants:
        name = variant.id
        if variant.column == "published":
            variant.verdict = "published"
        elif name in verdicts.of:
            variant.verdict, variant.behind = verdicts.of[name], verdicts.against_best(name)
        elif verdicts.best is None:
            variant.verdict = summary.judge([variant]).of[name]
        else:  # a control: noise of its own must not blur what is said of the others
            pair = summary.judge([summary[verdicts.best], variant])
            other = pair.of[verdicts.best]
            variant.verdict = pair.of[name] if pair.best != name else statistics.BETTER if other == WORSE else other
            variant.behind = pair.against(name, verdicts.best)
    summary.warnings = list(dict.fromkeys(study.warnings + _doubts(summary)))
    return summary


def _result(study: Evidence, asked: Asked, index: int) -> Result:
    mine = [r for r in study.records if r.tags.get("variant") == asked.id]
    accuracies: dict[Any, dict[Any, float]] = defaultdict(dict)  # selection → seed → accuracy
    seen: dict[str, list[float]] = defaultdict(list)
    diverged: dict[Any, str] = {}  # seed → what happened, from its own record or from an accuracy that is no number
    for r in mine:
        seed, value = r.tags.get("seed", 0), number(r.value)
        if value is not None and r.tags.get("mode", "forward") == "forward":
            seen[r.metric].append(value)
        if r.metric == "diverged":
            where = f" in {r.tags['layer']}" if r.tags.get("layer") else ""
            diverged[seed] = f"seed {seed} diverged{where}" + (f" at step {value:.0f}" if value is not None else "")
        elif r.metric == "test_accuracy" and value is not None:
            accuracies[r.tags.get("selection", "best")][seed] = value
        elif r.metric == "test_accuracy":
            diverged.setdefault(seed, f"seed {seed} has no finite accuracy")
    scores, final = accuracies["best"], accuracies["final"]
    failed = {r.tags.get("seed", 0): r.tags.get("why") for r in mine if r.metric == "failed"}
    return Result(
        **vars(asked), index=index, scores=scores, best=_fraction(scores), final=_fraction(final),
        numbers={metric: sum(values) / len(values) for metric, values in seen.items()},
        diverged=list(diverged.values()),
        failed=[f"seed {seed}: {why}" for seed, why in failed.items() if seed not in scores | diverged],
    )  # fmt: skip


def _fraction(scores: dict[Any, float]) -> Interval | None:
    found = statistics.interval(scores.values())
    if found is None or found.low is None or found.high is None:
        return found
    return Interval(found.mean, max(0.0, found.low), min(1.0, found.high), found.n)


def _doubts(summary: Summary) -> list[str]:
    """Where the comparison is not fair, in words a reader can act on."""
    study, variants, found = summary.study, summary.variants, []
    measured = [v for v in variants if v.scores and v.column != "published"]
    for v in variants:
        if v.diverged:
            found.append(f"{v.label}: {'; '.join(v.diverged)}. It is listed, but never recommended.")
        elif not v.scores and not v.failed:
            found.append(f"{v.label} was requested, but has no test accuracy yet.")
        if v.failed:
            found.append(f"{v.label} failed: {'; '.join(v.failed)}. The same command tries it again.")
    if measured and (most := max(len(v.scores) for v in measured)) < statistics.ENOUGH:
        seeds = count_seeds(most).capitalize()
        found.append(f"{seeds}: that is not enough to tell variants apart; use --seeds 3 or more.")
    if len({frozenset(v.scores) for v in measured if not v.diverged}) > 1:
        found.append("Not every variant was trained with the same seeds; pairs are compared over the seeds they share.")
    sizes = {v.label: p for v in measured if (p := v.get("parameters"))}
    if sizes and max(sizes.values()) > 1.02 * min(sizes.values()):
        large, small = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        ratio = sizes[large] / sizes[small] - 1
        found.append(f"Parameters are not matched: {large} has {ratio:.0%} more than {small}.")
    for what, of in (("devices", "device"), ("numbers of threads", "threads"), ("data types", "dtype"),
                     ("versions of linvit", "commit")):  # fmt: skip
        if values := _mixed(study.records, of):
            found.append(f"Measured with different {what}: {', '.join(values)}.")
    best = summary.verdicts.best
    for v in measured:
        if v.control and not v.diverged and v.verdict in (statistics.SAME, statistics.BEST, statistics.BETTER):
            other = "the best" if best is None or v.id == best else summary[best].label
            found.append(f"The control {v.label} is as accurate as {other}: these images hardly need attention.")
    return found


def _mixed(records: list[Record], of: str) -> list[str]:
    """Values of a field that differ within a metric: like is then not compared with like. An accuracy may come from
    another number of threads or another day's version than a speed."""
    timed = {metric.name for metric in metrics.TABLE if metric.timed}
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if (value := getattr(record, of)) and (of != "threads" or record.metric in timed):
            found[record.metric].add(str(value))
    return sorted(set().union(*(values for values in found.values() if len(values) > 1)))


def count_seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"
