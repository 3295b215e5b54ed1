"""Evidence → one `VariantResult` per variant, with its verdict, and the limitations of the comparison."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from linvit import metrics
from linvit.durations import duration
from linvit.records import Record
from linvit.report import statistics
from linvit.report.comparison import ENOUGH, held_out
from linvit.report.evidence import Run, StudyEvidence, run_of
from linvit.report.merit import ACCURACY, BITS, PRECISION, Merit
from linvit.report.statistics import Interval, Standing, Verdicts
from linvit.schemas.study import MAX_MARGIN, Study, Variant


@dataclass
class VariantResult:
    """What is known of one variant. `numbers` holds the metrics that are numbers, means over seeds where there are."""

    variant: Variant
    index: int = 0  # its place decides colour, shape and dash in every chart
    folds: int = 0
    scores: dict[Run, float] = field(default_factory=dict)  # merit of the validation-selected model, as a score
    half: dict[Run, float] = field(default_factory=dict)  # the same after half of the steps
    best: Interval | None = None
    final: Interval | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)  # one line for each run
    failed: list[str] = field(default_factory=list)
    missing: int = 0  # runs that were requested and have neither ended nor failed
    standing: Standing = field(default_factory=lambda: Standing(statistics.MISSING))

    @property
    def id(self) -> str:
        return self.variant.id

    @property
    def label(self) -> str:
        return self.variant.label

    @property
    def attention(self) -> str:
        return self.variant.attention

    @property
    def control(self) -> bool:
        return self.variant.control

    @property
    def baseline(self) -> bool:
        """Whether speeds are relative to it."""
        return self.variant.role == "baseline"

    @property
    def published(self) -> bool:
        return self.variant.column == "published"

    @property
    def verdict(self) -> str:
        return self.standing.word

    @property
    def judged(self) -> bool:
        """Whether it may be recommended: not a control, not a printed number, and trained for as long as the others."""
        return not (self.control or self.variant.beside or self.published)

    @property
    def seeds(self) -> int:
        return len({run[0] if isinstance(run, tuple) else run for run in self.scores})

    @property
    def both(self) -> list[Run]:
        """Runs that were trained for half of the steps and for all."""
        return [run for run in self.half if run in self.scores]

    def get(self, metric: str) -> float | None:
        return self.numbers.get(metric)


@dataclass
class Summary:
    evidence: StudyEvidence
    variants: list[VariantResult]
    margin: float = statistics.MARGIN
    verdicts: Verdicts = field(default_factory=lambda: statistics.judge({}))
    worth: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # control → how far below the best
    limitations: list[str] = field(default_factory=list)

    @property
    def study(self) -> Study:
        return self.evidence.document

    @property
    def seeds(self) -> int:
        """As many as were requested: a variant that diverged with every seed counts too."""
        return max([0, *(v.seeds for v in self.variants), *map(len, self.study.seeds.values())])

    def looks(self, names: Sequence[str]) -> int:
        """How often some two of these were compared, each time with more seeds."""
        pairs = combinations(names, 2)
        shared = [{min(look.get(a, 0), look.get(b, 0)) for look in self.study.looks} for a, b in pairs]
        runs = max(1, self.folds)
        return max((sum(seeds * runs >= ENOUGH for seeds in found) for found in shared), default=0)

    @property
    def folds(self) -> int:
        return self.evidence.folds

    @property
    def runs(self) -> int:
        """Of each variant."""
        return self.seeds * max(1, self.folds)

    @property
    def merit(self) -> Merit:
        return self.evidence.merit

    @property
    def untrained(self) -> bool:
        return self.evidence.untrained

    @property
    def enough(self) -> int:
        """Shared seeds without which nothing is claimed."""
        return 1 if self.untrained else ENOUGH

    def repeated(self, seeds: int) -> str:
        """How often a variant was trained, in words."""
        if self.untrained:
            return "one run without training"
        if not self.folds:
            return count_seeds(seeds)
        return f"{self.folds} folds" + (f" × {count_seeds(seeds)}" if seeds > 1 else "")

    @property
    def images(self) -> int:
        return max((r.n for r in self.evidence.of(self.merit.metric)), default=1)

    def judge(self, variants: list[VariantResult]) -> Verdicts:
        """What these variants are among themselves."""
        image = max(1, self.folds) / self.images if self.images > 1 and self.merit is ACCURACY else 0.0
        return statistics.judge(
            {v.id: v.scores for v in variants},
            self.evidence.right,
            [v.id for v in variants if v.diverged],
            image,
            self.margin,
            self.folds,
            self.merit,
            self.enough,
        )

    @property
    def sampled(self) -> bool:
        """Whether intervals account for test images, too: per-image results of all compared variants are known."""
        found = self.verdicts.comparison.images
        return len(found) > 1 and bool(np.isfinite(found[~np.eye(len(found), dtype=bool)]).all())

    @property
    def classes(self) -> tuple[int, int] | None:
        """Test images of the smallest and of the largest class, if they are too unequal for accuracy alone."""
        counts = np.bincount(self.evidence.labels)
        found = (int(counts[counts > 0].min()), int(counts.max())) if len(counts) else (1, 1)
        return found if found[1] > 1.5 * found[0] else None

    def __getitem__(self, name: str) -> VariantResult:
        return next(v for v in self.variants if v.id == name)


def number(value: Any) -> float | None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ok else None


def summarise(evidence: StudyEvidence, margin: float | None = None) -> Summary:
    """`margin` is the accuracy that a faster variant may lose (default: the study's): 0.01 is one point, or a hundredth
    of a bit."""
    margin = evidence.document.margin if margin is None else margin
    if not 0 < margin <= MAX_MARGIN:
        raise ValueError(f"margin={margin:g} must be above 0 and at most {MAX_MARGIN:g} ({MAX_MARGIN:.0%})")
    variants = [_result(evidence, variant, index) for index, variant in enumerate(evidence.document.variants)]
    summary = Summary(evidence, variants, margin)
    run = [v for v in variants if not v.published]  # a printed number has no seeds to compare
    real = [v for v in run if v.judged]
    # a variant whose runs fail repeatedly must not prevent verdicts on the others
    judged = [v for v in real if not (v.failed and len(v.scores) < summary.enough)] or real
    summary.verdicts = summary.judge(judged or run)
    for variant in variants:
        if variant.published:
            variant.standing = Standing(statistics.PUBLISHED)
        elif variant.variant.beside:
            variant.standing = Standing(statistics.BESIDE if variant.scores else statistics.MISSING)
        elif variant.id in summary.verdicts.of:
            variant.standing = summary.verdicts.of[variant.id]
        elif not variant.control:
            variant.standing = Standing(statistics.UNKNOWN if variant.scores else statistics.MISSING)
        else:
            _judge_control(summary, judged, variant)
    summary.limitations = list(dict.fromkeys([*evidence.warnings, *_limitations(summary)]))
    return summary


def _judge_control(summary: Summary, judged: list[VariantResult], control: VariantResult) -> None:
    """In a comparison of its own, so that its noise does not affect the verdicts on the others."""
    found = summary.judge([*judged, control])
    control.standing = standing = found.of[control.id]
    if standing.word == summary.merit.best:
        word = statistics.OPEN if standing.undecided else statistics.UNKNOWN
        control.standing = replace(standing, word=summary.merit.within(summary.margin) if standing.shown else word)
    best = summary.verdicts.best
    if best and {best, control.id} <= set(found.names):
        worth = found.between(best, control.id, len(summary.verdicts.names))
        summary.worth |= {control.id: worth} if worth else {}


def _result(evidence: StudyEvidence, variant: Variant, index: int) -> VariantResult:
    own, merit = evidence.of_variant(variant.id), evidence.merit
    found: dict[Any, dict[Run, float]] = defaultdict(dict)  # selection → run → score
    seen: dict[str, list[float]] = defaultdict(list)
    together: dict[str, list[float]] = defaultdict(list)
    half: dict[Run, float] = {}
    diverged: dict[Run, str] = {}  # run → what happened, from its own record or from a merit that is not finite
    for r in own:
        run, value = run_of(r), number(r.value)
        whole = bool(evidence.folds) and "seed" in r.tags and "fold" not in r.tags  # of all images, each when held out
        if value is not None and r.tags.get("mode", "forward") == "forward":
            (together if whole else seen)[r.metric].append(value)
        if r.metric == "diverged":
            where = f" in {r.tags['layer']}" if r.tags.get("layer") else ""
            diverged[run] = f"{_name(run)} diverged{where}" + (f" at step {value:.0f}" if value is not None else "")
        elif r.metric == merit.metric and whole:
            continue
        elif r.metric == merit.metric and value is not None:
            found[r.tags.get("selection", "best")][run] = merit.sign * value
        elif r.metric == merit.metric:
            diverged.setdefault(run, f"{_name(run)} has no finite {merit.noun}")
        elif r.metric == merit.half and value is not None:
            half[run] = merit.sign * value
    scores = found["best"]
    failed = {run_of(r): r.tags.get("why") for r in own if r.metric == "failed"}
    requested = len(evidence.document.seeds.get(variant.id, ())) * max(1, evidence.folds)
    numbers = {metric: sum(values) / len(values) for metric, values in (seen | together).items()}
    every = len(together["test_accuracy"]) * evidence.folds == len(scores) > 0
    return VariantResult(
        variant,
        index,
        evidence.folds,
        scores,
        half,
        final=_interval(evidence, found["final"]),
        best=_interval(evidence, scores, numbers["test_accuracy"] if every else None),
        numbers=numbers,
        diverged=list(diverged.values()),
        missing=max(0, requested - len({*scores, *diverged, *failed})),
        failed=[f"{_name(run)}: {why}" for run, why in failed.items() if run not in scores | diverged],
    )


def _name(run: Run) -> str:
    return f"seed {run[0]}, fold {run[1]}" if isinstance(run, tuple) else f"seed {run}"


def _interval(evidence: StudyEvidence, scores: dict[Run, float], mean: float | None = None) -> Interval | None:
    """Of the numbers that the scores are of; around another mean, if that is given: folds may differ by an image."""
    merit = evidence.merit
    found = statistics.interval((merit.sign * score for score in scores.values()), held_out(evidence.folds))
    if found is not None and found.low is None and evidence.untrained:
        return statistics.over_images(found.mean, max(r.n for r in evidence.of(merit.metric)))
    if found is None or found.low is None or found.high is None:
        return found
    shift = 0.0 if mean is None else mean - found.mean
    high = min(1.0, found.high + shift) if merit in (ACCURACY, PRECISION) else found.high
    return Interval(found.mean + shift, max(0.0, found.low + shift), high, found.n)


def _limitations(summary: Summary) -> list[str]:
    """Where the comparison is not fair, in words that a reader can act on."""
    found, measured = [], [v for v in summary.variants if v.scores and not v.published]
    for v in summary.variants:
        if v.diverged:
            found.append(f"{v.label}: {'; '.join(v.diverged)}. It is listed, but never recommended.")
        elif not v.scores and not v.failed:
            found.append(f"{v.label} was requested, but has no {summary.merit.title.lower()} yet.")
        if v.failed:
            found.append(f"{v.label} failed: {'; '.join(v.failed)}. The same command retries it.")
    if summary.untrained:
        found.append(_untrained(summary))
    elif measured and (most := max(len(v.scores) for v in measured)) < ENOUGH:
        runs = f"{most} folds" if summary.folds else count_seeds(most)
        found.append(f"{runs.capitalize()} per variant cannot show a difference: at least {ENOUGH} can.")
    if len({frozenset(v.scores) for v in measured if not v.diverged}) > 1:
        found.append("The variants were not trained with the same seeds; pairs are compared over the seeds they share.")
    sizes = {v.label: p for v in measured if (p := v.get("parameters"))}
    if sizes and max(sizes.values()) > 1.02 * min(sizes.values()):
        large, small = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        ratio = sizes[large] / sizes[small] - 1
        found.append(f"Parameters are not matched: {large} has {ratio:.0%} more than {small}.")
    for name, what in MIXED.items():
        if values := _mixed(summary.evidence.records, name):
            found.append(f"Measured with different {what}: {', '.join(values)}.")
    unchecked = [v.label for v in measured if not v.both and not v.diverged]
    if unchecked and not summary.untrained:
        of = f"the place of {', '.join(unchecked)}" if any(v.half for v in measured) else "the order"
        found.append(f"It was not checked whether more training would change {of}.")
    if len(summary.verdicts.names) > 1 and not summary.sampled and not summary.folds:
        what = "bits of each test image" if summary.merit is BITS else "predictions of each test image"
        found.append(f"Some runs did not store the {what}: verdicts hold for these test images only.")
    return found


def _untrained(summary: Summary) -> str:
    plan = summary.study.plan
    longer = next((offer for offer in plan.offers[1:] if offer.epochs), None) if plan else None
    trains = f"; a budget of {duration(longer.seconds)} would allow it" if longer else ""
    return (
        "Nothing was trained: features are those of the start, frozen, and heads are fitted to them. There are no "
        "training seeds, so intervals are over test images alone. Training helps most where an attention differs from "
        f"the one that the start was trained with{trains}."
    )


MIXED = {"device": "devices", "threads": "numbers of threads", "dtype": "data types", "commit": "versions of linvit"}


def _mixed(records: list[Record], name: str) -> list[str]:
    """Values of a field that differ within a metric. An accuracy may have been measured with another number of threads
    or another version than a speed."""
    timed = {metric.name for metric in metrics.TABLE if metric.timed}
    found: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if (value := getattr(record, name)) and (name != "threads" or record.metric in timed):
            found[record.metric].add(str(value))
    return sorted(set().union(*(values for values in found.values() if len(values) > 1)))


def count_seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"
