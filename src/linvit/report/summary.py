"""Evidence → one `Result` per variant, with its verdict, and the reasons to doubt the comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from linvit import metrics
from linvit.records import Record
from linvit.report import statistics
from linvit.report.evidence import Asked, Evidence
from linvit.report.statistics import WORSE, Interval, Verdicts


@dataclass
class Result:
    """What is known of one variant. `numbers` holds the metrics that are numbers, means over seeds where there are."""

    id: str
    label: str
    attention: str
    index: int  # its place decides colour, shape and dash in every chart
    column: str = "fair"
    scores: dict[int, float] = field(default_factory=dict)  # seed → test accuracy of the validation-selected model
    best: Interval | None = None
    final: Interval | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)  # metric → quartiles
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
    verdicts: Verdicts = field(default_factory=lambda: Verdicts(None, {}, (), None))
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
    accuracy = [r for r in mine if r.metric == "test_accuracy"]
    best = _by_seed([r for r in accuracy if r.tags.get("selection", "best") == "best"])
    final = _by_seed([r for r in accuracy if r.tags.get("selection") == "final"])
    found = Result(asked.id, asked.label, asked.attention, index, asked.column, best, _fraction(best), _fraction(final))
    for metric in metrics.TABLE:
        rows = [r for r in mine if r.metric == metric.name and r.tags.get("mode", "forward") == "forward"]
        values = [x for r in rows if (x := number(r.value)) is not None]
        if values:
            found.numbers[metric.name] = sum(values) / len(values)
        for row in rows:
            low, high = number(row.tags.get("low")), number(row.tags.get("high"))
            if low is not None and high is not None:
                found.ranges[metric.name] = (low, high)
    found.diverged = _divergences(mine, accuracy)
    done = {*best, *(r.tags.get("seed") for r in mine if r.metric == "diverged")}
    found.failed = [f"seed {r.tags.get('seed')}: {r.tags.get('why')}" for r in mine
                    if r.metric == "failed" and r.tags.get("seed") not in done]  # fmt: skip
    return found


def _by_seed(records: list[Record]) -> dict[int, float]:
    return {r.tags.get("seed", 0): x for r in records if (x := number(r.value)) is not None}  # type: ignore[misc]


def _fraction(scores: dict[int, float]) -> Interval | None:
    found = statistics.interval(scores.values())
    if found is None or found.low is None or found.high is None:
        return found
    return Interval(found.mean, max(0.0, found.low), min(1.0, found.high), found.n)


def _divergences(mine: list[Record], accuracy: list[Record]) -> list[str]:
    """One line for each seed that diverged, from its own record or from an accuracy that is not a number."""
    found: dict[Any, str] = {}
    for r in mine:
        if r.metric == "diverged":
            step = number(r.value)
            where = f" in {r.tags['layer']}" if r.tags.get("layer") else ""
            found[r.tags.get("seed")] = f"seed {r.tags.get('seed')} diverged{where}" + (
                f" at step {step:.0f}" if step is not None else ""
            )
    for r in accuracy:
        if number(r.value) is None:
            found.setdefault(r.tags.get("seed"), f"seed {r.tags.get('seed')} has no finite accuracy")
    return list(found.values())


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
        found.append(f"{_seeds(most)}: that is not enough to tell variants apart; use --seeds 3 or more.")
    if len({frozenset(v.scores) for v in measured if not v.diverged}) > 1:
        found.append("Not every variant was trained with the same seeds; pairs are compared over the seeds they share.")
    sizes = {v.label: p for v in measured if (p := v.get("parameters"))}
    if sizes and max(sizes.values()) > 1.02 * min(sizes.values()):
        large, small = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        ratio = sizes[large] / sizes[small] - 1
        found.append(f"Parameters are not matched: {large} has {ratio:.0%} more than {small}.")
    for what, of in (("devices", "device"), ("numbers of threads", "threads"), ("data types", "dtype"),
                     ("versions of linvit", "commit")):  # fmt: skip
        values = _mixed(study.records, of)
        if values:
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
    found: dict[str, set[str]] = {}
    for record in records:
        if (value := getattr(record, of)) and (of != "threads" or _timed(record.metric)):
            found.setdefault(record.metric, set()).add(str(value))
    return sorted(set().union(*(values for values in found.values() if len(values) > 1)))


def _timed(name: str) -> bool:
    return name in metrics.METRICS and metrics.METRICS[name].timed


def _seeds(count: int) -> str:
    return {1: "One seed"}.get(count, f"{count} seeds")
