"""Evidence → one `Result` per variant, with its verdict, and the reasons to doubt the comparison."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from linvit import metrics
from linvit.records import Record
from linvit.report import statistics
from linvit.report.evidence import Asked, Evidence, run_of
from linvit.report.merit import ACCURACY, BITS, Merit
from linvit.report.statistics import Interval, Standing, Verdicts


@dataclass
class Result(Asked):
    """What is known of one variant. `numbers` holds the metrics that are numbers, means over seeds where there are."""

    index: int = 0  # its place decides colour, shape and dash in every chart
    folds: int = 0
    scores: dict[Any, float] = field(default_factory=dict)  # run → merit of the validation-selected model, as a score
    half: dict[Any, float] = field(default_factory=dict)  # the same after half of the steps
    best: Interval | None = None
    final: Interval | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)  # one line for each run
    failed: list[str] = field(default_factory=list)
    missing: int = 0  # runs that were asked for, and neither ended nor failed
    standing: Standing = field(default_factory=lambda: Standing(statistics.MISSING))

    @property
    def verdict(self) -> str:
        return self.standing.word

    @property
    def control(self) -> bool:
        return self.attention.partition(":")[0] in metrics.CONTROLS

    @property
    def judged(self) -> bool:
        """Whether it is one to be chosen: no control, nothing printed, and trained as the others."""
        return not (self.control or self.beside or self.column == "published")

    @property
    def seeds(self) -> int:
        return len({run[0] if isinstance(run, tuple) else run for run in self.scores})

    @property
    def both(self) -> list[Any]:
        """Runs that were trained for half of the steps and for all."""
        return [seed for seed in self.half if seed in self.scores]

    def get(self, metric: str) -> float | None:
        return self.numbers.get(metric)


@dataclass
class Summary:
    study: Evidence
    variants: list[Result]
    margin: float = statistics.MARGIN
    verdicts: Verdicts = field(default_factory=lambda: statistics.judge({}))
    worth: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # control → how far below the best
    warnings: list[str] = field(default_factory=list)

    @property
    def seeds(self) -> int:
        """As many as were asked for: one that diverged everywhere counts too."""
        asked = self.study.info.get("seeds") or {}
        return max([0, *(v.seeds for v in self.variants), *map(len, asked.values())])

    def looks(self, names: Sequence[str]) -> int:
        """How often some two of these were compared, each time with more seeds."""
        every = self.study.info.get("looks") or []
        pairs = combinations(names, 2)
        shared = [{min(look.get(a, 0), look.get(b, 0)) for look in every} for a, b in pairs]
        return max(
            (sum(seeds * max(1, self.folds) >= statistics.ENOUGH for seeds in found) for found in shared), default=0
        )

    @property
    def folds(self) -> int:
        return self.study.folds

    @property
    def runs(self) -> int:
        """Of each variant."""
        return self.seeds * max(1, self.folds)

    @property
    def merit(self) -> Merit:
        return self.study.merit

    def repeated(self, seeds: int) -> str:
        """How often a variant was trained, in words."""
        if not self.folds:
            return count_seeds(seeds)
        return f"{self.folds} folds" + (f" × {count_seeds(seeds)}" if seeds > 1 else "")

    @property
    def images(self) -> int:
        return max((r.n for r in self.study.of(self.merit.metric)), default=1)

    def judge(self, variants: list[Result]) -> Verdicts:
        """What these variants are among themselves."""
        image = max(1, self.folds) / self.images if self.images > 1 and self.merit is ACCURACY else 0.0
        return statistics.judge(
            {v.id: v.scores for v in variants}, self.study.right, [v.id for v in variants if v.diverged], image,
            self.margin, _shared(self.study), self.merit,
        )  # fmt: skip

    @property
    def sampled(self) -> bool:
        """Whether test images, too, are taken for a sample: it is known of every compared variant which were right."""
        found = self.verdicts.comparison.images
        return len(found) > 1 and bool(np.isfinite(found[~np.eye(len(found), dtype=bool)]).all())

    @property
    def classes(self) -> tuple[int, int] | None:
        """Test images of the smallest and of the largest class, if they are too unequal for accuracy alone."""
        counts = np.bincount(self.study.labels)
        found = (int(counts[counts > 0].min()), int(counts.max())) if len(counts) else (1, 1)
        return found if found[1] > 1.5 * found[0] else None

    def __getitem__(self, name: str) -> Result:
        return next(v for v in self.variants if v.id == name)


def number(value: Any) -> float | None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ok else None


def summarise(study: Evidence, margin: float | None = None) -> Summary:
    """`margin` is the accuracy that may be given up for speed; default: the study's, or 0.01, which is one point, or a
    hundredth of a bit."""
    margin = float(study.info.get("margin") or statistics.MARGIN) if margin is None else margin
    if not 0 < margin <= 0.2:
        raise ValueError(f"a margin of {100 * margin:g} points is not above 0 and at most 20")
    variants = [_result(study, asked, index) for index, asked in enumerate(study.variants)]
    summary = Summary(study, variants, margin)
    run = [v for v in variants if v.column != "published"]  # a printed number has no seeds to compare
    real = [v for v in run if v.judged]
    # one whose runs fail again and again must not keep the others from being judged
    judged = [v for v in real if not (v.failed and len(v.scores) < statistics.ENOUGH)] or real
    summary.verdicts = verdicts = summary.judge(judged or run)
    for variant in variants:
        if variant.column == "published":
            variant.standing = Standing(statistics.PUBLISHED)
        elif variant.beside:
            variant.standing = Standing(statistics.BESIDE if variant.scores else statistics.MISSING)
        elif variant.id in verdicts.of:
            variant.standing = verdicts.of[variant.id]
        elif not variant.control:
            variant.standing = Standing(statistics.UNKNOWN if variant.scores else statistics.MISSING)
        else:  # noise of its own must not blur what is said of the others
            beside = summary.judge([*judged, variant])
            variant.standing = mine = beside.of[variant.id]
            if mine.word == summary.merit.best:
                word = statistics.OPEN if mine.undecided else statistics.UNKNOWN
                variant.standing = replace(mine, word=summary.merit.within(margin) if mine.shown else word)
            pair = {verdicts.best, variant.id} & set(beside.names)
            if (
                verdicts.best
                and len(pair) == 2
                and (found := beside.between(verdicts.best, variant.id, len(verdicts.names)))
            ):
                summary.worth[variant.id] = found
    summary.warnings = list(dict.fromkeys(study.warnings + _doubts(summary)))
    return summary


def _result(study: Evidence, asked: Asked, index: int) -> Result:
    mine, merit = study.of_variant(asked.id), study.merit
    found: dict[Any, dict[Any, float]] = defaultdict(dict)  # selection → run → score
    seen: dict[str, list[float]] = defaultdict(list)
    together: dict[str, list[float]] = defaultdict(list)
    half: dict[Any, float] = {}
    diverged: dict[Any, str] = {}  # run → what happened, from its own record or from a merit that is no number
    for r in mine:
        run, value = run_of(r), number(r.value)
        whole = bool(study.folds) and "seed" in r.tags and "fold" not in r.tags  # of all images, each when held out
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
            diverged.setdefault(run, f"{_name(run)} has no finite {merit.title.removeprefix('Test ').lower()}")
        elif r.metric == merit.half and value is not None:
            half[run] = merit.sign * value
    scores, final = found["best"], found["final"]
    failed = {run_of(r): r.tags.get("why") for r in mine if r.metric == "failed"}
    wanted = len((study.info.get("seeds") or {}).get(asked.id, ())) * max(1, study.folds)
    numbers = {metric: sum(values) / len(values) for metric, values in (seen | together).items()}
    every = len(together["test_accuracy"]) * study.folds == len(scores) > 0
    return Result(
        **vars(asked), index=index, folds=study.folds, scores=scores, half=half, final=_interval(study, final),
        best=_interval(study, scores, numbers["test_accuracy"] if every else None), numbers=numbers,
        diverged=list(diverged.values()), missing=max(0, wanted - len({*scores, *diverged, *failed})),
        failed=[f"{_name(run)}: {why}" for run, why in failed.items() if run not in scores | diverged],
    )  # fmt: skip


def _name(run: Any) -> str:
    return f"seed {run[0]}, fold {run[1]}" if isinstance(run, tuple) else f"seed {run}"


def _shared(study: Evidence) -> float:
    """Of folds, the images held out over those that are not."""
    return 1 / (study.folds - 1) if study.folds > 1 else 0.0


def _interval(study: Evidence, scores: dict[Any, float], mean: float | None = None) -> Interval | None:
    """Of the numbers that the scores are of; around another mean, if that is given: folds may differ by an image."""
    merit = study.merit
    found = statistics.interval((merit.sign * score for score in scores.values()), _shared(study))
    if found is None or found.low is None or found.high is None:
        return found
    shift = 0.0 if mean is None else mean - found.mean
    high = min(1.0, found.high + shift) if merit is ACCURACY else found.high
    return Interval(found.mean + shift, max(0.0, found.low + shift), high, found.n)


def _doubts(summary: Summary) -> list[str]:
    """Where the comparison is not fair, in words a reader can act on."""
    study, variants, found = summary.study, summary.variants, []
    measured = [v for v in variants if v.scores and v.column != "published"]
    for v in variants:
        if v.diverged:
            found.append(f"{v.label}: {'; '.join(v.diverged)}. It is listed, but never recommended.")
        elif not v.scores and not v.failed:
            found.append(f"{v.label} was requested, but has no {summary.merit.title.lower()} yet.")
        if v.failed:
            found.append(f"{v.label} failed: {'; '.join(v.failed)}. The same command tries it again.")
    if measured and (most := max(len(v.scores) for v in measured)) < statistics.ENOUGH:
        if summary.folds:
            found.append(f"{most} folds: that is not enough to tell variants apart; use more --folds, or --seeds.")
        else:
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
    unchecked = [v.label for v in measured if not v.both and not v.diverged]
    if unchecked and not any(v.half for v in measured):
        found.append("It was not checked whether more training would change the order.")
    elif unchecked:
        found.append(f"It was not checked whether more training would change the place of {', '.join(unchecked)}.")
    if len(summary.verdicts.names) > 1 and not summary.sampled and not summary.folds:
        what = "how many bits each test image took" if summary.merit is BITS else "which test images it got right"
        found.append(f"Not every run says {what}: verdicts hold for these test images only.")
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
