"""The result of a search: whether tuning changes which attention wins, judged by one seed and validation images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linvit.durations import duration
from linvit.files import parse_json
from linvit.metrics import METRICS, percent
from linvit.metrics import key as key_of
from linvit.records import Record
from linvit.report.evidence import Evidence, read
from linvit.report.result import NOTHING, Cell, Facts, Result, Section, Table, commands, facts, last_request
from linvit.requests import CompareRequest, TrainRequest
from linvit.schemas.search import Search

OUTCOMES = ("complete", "pruned", "diverged", "failed")
DATA = ("data", "data_root", "image_size", "limit", "skip_bad")  # fields of requests that say which images are read
show = METRICS["trial_accuracy"].show


@dataclass(frozen=True)
class Trial:
    variant: str
    number: int
    how: str  # one of OUTCOMES
    why: str
    accuracy: float | None
    loss: float
    options: dict[str, Any]
    seconds: float
    steps: int
    images: int

    @property
    def row(self) -> dict[str, Any]:
        """Of results.csv."""
        found = {"variant": self.variant, "trial": self.number, "how": self.how, "validation_accuracy": self.accuracy}
        loss = self.loss if math.isfinite(self.loss) else None
        return found | {"validation_loss": loss, "seconds": self.seconds, "steps": self.steps, "why": self.why}


def trials(records: Sequence[Record], variant: str) -> list[Trial]:
    """Of a variant, by number; where one was measured twice, the newest counts."""
    newest = {key_of(r): r for r in sorted(records, key=lambda r: r.time)}

    def value(metric: str, number: int) -> float:
        found = newest.get((metric, variant, number))
        return float(found.value or 0) if found else 0.0

    found = []
    for r in newest.values():
        if r.metric == "trial_accuracy" and r.tags["variant"] == variant:
            number, tags = int(r.tags["trial"] or 0), r.tags
            loss = math.inf if tags.get("loss") is None else float(tags["loss"] or 0.0)
            accuracy = None if r.value is None else float(r.value)
            options, spent = parse_json(str(tags["options"])), value("trial_seconds", number)
            ended = str(tags["how"]), str(tags.get("why") or "")
            steps = int(value("trial_steps", number))
            found.append(Trial(variant, number, *ended, accuracy, loss, options, spent, steps, r.n))
    return sorted(found, key=lambda trial: trial.number)


def best(found: Sequence[Trial]) -> Trial | None:
    """Of those that were trained to the end the most accurate; of equals, the one with the lower loss."""
    whole = [trial for trial in found if trial.how == "complete" and trial.accuracy is not None]
    return max(whole, key=lambda trial: (trial.accuracy, -trial.loss, -trial.number), default=None)


@dataclass(frozen=True)
class TunedVariant:
    id: str
    label: str
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        return best(self.trials)

    @property
    def first(self) -> Trial | None:
        """The trial that all variants started with, if it was trained to the end."""
        return next((t for t in self.trials if t.number == 0 and t.how == "complete"), None)

    @property
    def gain(self) -> float | None:
        if self.best is None or self.first is None:
            return None
        return (self.best.accuracy or 0.0) - (self.first.accuracy or 0.0)

    def count(self, how: str) -> int:
        return sum(trial.how == how for trial in self.trials)

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)


@dataclass(frozen=True, kw_only=True)
class SearchResult(Result):
    kind = "search"

    evidence: Evidence[Search]
    variants: list[TunedVariant]

    def rows(self) -> list[dict[str, Any]]:
        folds = {"folds": self.evidence.document.folds}
        return [trial.row | folds | trial.options for v in self.variants for trial in v.trials]

    def numbers(self) -> dict[str, Any]:
        rows = [
            {"variant": v.id, "trials": len(v.trials), "seconds": v.seconds}
            | {how: v.count(how) for how in OUTCOMES}
            | {"first_accuracy": v.first and v.first.accuracy, "best_accuracy": v.best and v.best.accuracy}
            | {"best_trial": v.best and v.best.number, "best_options": v.best and v.best.options}
            for v in self.variants
        ]
        file = self.page.with_name("best.toml")
        best = {"best": str(file) if file.exists() else None}
        return {"folds": self.evidence.document.folds, "variants": rows} | best

    def sections(self) -> dict[str, Section]:
        from linvit.report import search_charts  # altair takes a second to import

        return search_charts.build(self)


def search_result(folder: Path | str, out: Path | None = None) -> SearchResult:
    """Result of a search; nothing is written. `out`: the folder of the page."""
    folder = Path(folder)
    evidence = read(Search, folder)
    search = evidence.document
    variants = [TunedVariant(v.id, v.label or v.id, trials(evidence.records, v.id)) for v in search.variants]
    if not any(v.trials for v in variants):
        raise ValueError(f"{folder}: no trial of this search has finished: run its command again")
    headline, sentences = _answer(search, variants)
    winners = [v for v in variants if v.best]
    top = max(winners, key=lambda v: v.best.accuracy or 0.0 if v.best else 0.0, default=None)
    return SearchResult(
        title=f"Tuning on {search.dataset.name}",
        headline=headline,
        sentences=sentences,
        limitations=evidence.warnings,
        table=_table(search, variants, None if top is None else variants.index(top)),
        facts=_facts(evidence, variants),
        commands=commands(search.requests),
        suggested=_suggested(search, folder / "best.toml") if top else [],
        page=(out or folder) / "report.html",
        evidence=evidence,
        variants=variants,
    )


def _suggested(search: Search, config: Path) -> list[str]:
    """What compares the best options with seeds and test images, and what uses them."""
    request = last_request(search.requests)
    images: dict[str, Any] = {"data": search.source.data if search.source else search.dataset.name}
    if request is not None:
        images = {name: getattr(request, name) for name in DATA}
    return [kind.of(**images, config=config).command() for kind in (CompareRequest, TrainRequest)]


def noise(accuracy: float, images: int) -> float:
    """The difference on these images that two equally good models of this accuracy exceed in 5 % of cases. Two more
    images right and two wrong (Agresti and Coull) account for small numbers of images."""
    n = images + 4
    p = (accuracy * images + 2) / n
    return 1.96 * math.sqrt(2 * p * (1 - p) / n)


def _leaders(variants: Sequence[TunedVariant], tuned: bool) -> list[tuple[TunedVariant, float]]:
    """Variants by the accuracy of their best trial; or of their first, if all started with the same options."""
    starts = [[(k, v) for k, v in row.first.options.items() if "." not in k] for row in variants if row.first]
    if not tuned and any(one != starts[0] for one in starts):
        return []
    found = [(row, row.best if tuned else row.first) for row in variants]
    known = [(row, trial.accuracy or 0.0) for row, trial in found if trial is not None]
    return sorted(known, key=lambda pair: -pair[1])


def _answer(search: Search, variants: Sequence[TunedVariant]) -> tuple[str, list[str]]:
    """Headline and sentences: whether tuning changes which attention wins."""
    after, before = _leaders(variants, True), _leaders(variants, False)
    images = max((trial.images for row in variants for trial in row.trials), default=1)
    which = f"images in {search.folds}-fold cross-validation" if search.folds else "validation images"
    caution = (
        f"These accuracies are optimistic: a trial has one seed, and the options were selected on the same {images:,} "
        f"{which}."
    )
    if not after:
        return "No trial was trained to the end", ["All trials were pruned, diverged or failed.", caution]
    (top, accuracy), *others = after
    allowed = noise(accuracy, images)
    caution += f" Differences below {100 * allowed:.1f} points are not significant: compare with seeds and test images."
    began = "the defaults" if search.defaults else "the first trial's options, the same for all"
    reached = f"{top.label} reaches {percent(accuracy)}"
    if top.gain is not None:
        reached += f" with {began}" if top.best == top.first else f", {_points(top.gain)} points from {began}"
    if not others:
        return f"Tuned, {top.label} reaches {percent(accuracy)}", [f"{reached}.", caution]
    second, follows = others[0]
    lead = f"{reached}; {second.label} follows with {percent(follows)}."
    tie, leads = f"no significant difference between {top.label} and {second.label}", accuracy - follows > allowed
    if len(before) < 2:
        return f"Tuned, {top.label} leads" if leads else f"Tuned: {tie}", [lead, caution]
    (first, was), (_, next_best) = before[:2]
    led = was - next_best > noise(was, images)
    lead += f" With {began}, {first.label} {'led' if led else 'was first'} with {percent(was)}."
    same = f"Tuning does not change the winner: {top.label}"
    heads = {
        (True, True): same if first.id == top.id else f"Tuning changes the winner, from {first.label} to {top.label}",
        (False, True): f"Tuned, {top.label} leads; before, no variant did",
        (True, False): f"Tuned: {tie}; before, {first.label} led",
        (False, False): f"{tie[0].upper()}{tie[1:]}, tuned or not",
    }
    return heads[led, leads], [lead, caution]


def _points(fraction: float) -> str:
    return f"{100 * fraction:+.1f}".replace("-", "−")


def _table(search: Search, variants: Sequence[TunedVariant], chosen: int | None) -> Table:
    first = "Defaults" if search.defaults else "First trial"
    rows = [
        {
            "Variant": Cell(v.label, symbol=i),
            first: show(v.first and v.first.accuracy),
            "Best": show(v.best and v.best.accuracy),
            "Gain, points": NOTHING if v.gain is None else _points(v.gain),
            **{how.capitalize(): str(v.count(how)) for how in OUTCOMES},
            "Time": duration(v.seconds),
            "Best options": describe(v.best.options) if v.best else NOTHING,
        }
        for i, v in enumerate(variants)
    ]
    alike = "as many trials" if search.trials else "as much time"
    of = "the best model of a trial, on validation images"
    if search.folds:
        of = f"{search.folds}-fold cross-validation on all images but the test images, each predicted when held out"
    note = f"All variants were searched in the same space, with {alike} each. Accuracies: {of}."
    return Table.of(rows, ["Best options"], chosen=chosen, note=note)


def bare(name: str) -> str:
    """An option without the part it belongs to."""
    return name.rpartition(".")[2]


def describe(options: dict[str, Any]) -> str:
    return ", ".join(f"{bare(name)} {shorten(value)}" for name, value in options.items())


def shorten(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _facts(evidence: Evidence[Search], variants: Sequence[TunedVariant]) -> Facts:
    search = evidence.document
    data, space = search.dataset, search.space
    counts, trial = f"{data.train:,} train, {data.validation:,} validation", f"{search.recipe.epochs:g} epochs"
    if search.folds:
        counts = f"{data.train + data.validation:,} images in {search.folds} folds"
        trial = f"{search.folds} folds of {trial}"
    amount = f"{duration(search.share)} of training" if search.share else "the whole grid"
    found = {
        "Data": f"{data.name}, {data.image_size} px, {counts}",
        "Test images": "not read",
        "Space": f"{space.name}: {', '.join([*space.options, *space.attention])}",
        "Fixed": describe(search.options),
        "Sampler": search.sampler,
        "Pruner": search.pruner,
        "Each variant": f"{search.trials} trials" if search.trials else amount,
        "A trial": trial,
        "Seed": str(search.seed),
        "Parameters matched": "yes" if search.match else "no",
        "Storage": search.storage,
        "Time to train": duration(sum(v.seconds for v in variants)),
    }
    return facts(evidence, found, started=search.started, finished=search.finished)
