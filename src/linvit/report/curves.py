"""Records and their artefacts → the rows that a study's charts draw."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from linvit.metrics import seconds as in_seconds
from linvit.records import Record
from linvit.report.evidence import run_of
from linvit.report.summary import Summary, VariantResult, number

Rows = list[dict[str, Any]]
MAX_POINTS = 120  # of one learning curve
MARKS = 5  # shapes along it
MAX_CLASSES = 20  # of one per-class chart, or one confusion matrix
SCORES = ("f1", "precision", "recall")
SHAPE = ("heads", "head_dim", "prefix")


def scaling(summary: Summary, mode: str) -> tuple[Rows, Rows]:
    """Time of a layer over tokens, the mean of a model's, and where each variant becomes faster than softmax."""
    rows: Rows = []
    breaks: Rows = []
    for v in summary.variants:
        rows += _over_tokens(summary.evidence.of("attention_time", mode=mode, variant=v.id), v.label)
        for r in summary.evidence.of("break_even_tokens", variant=v.id):
            if r.tags.get("mode", mode) == mode and (tokens := number(r.value)):
                breaks.append({"variant": v.label, "tokens": tokens})
    low, high = (end((row["tokens"] for row in rows), default=0) for end in (min, max))
    return rows, [row for row in breaks if low <= row["tokens"] <= high]


def _over_tokens(records: list[Record], label: str) -> Rows:
    rows: Rows = []
    for r in records:
        if (seconds := number(r.value)) and (tokens := number(r.tags.get("tokens"))):
            seconds /= number(r.tags.get("layers")) or 1
            rows.append({"variant": label, "tokens": tokens, "seconds": seconds, "shown": in_seconds(seconds)})
    return sorted(rows, key=lambda row: row["tokens"])


def reference(summary: Summary, mode: str) -> tuple[str, Rows]:
    """The time over tokens of what all are compared with, and its name; no rows where a variant's curve shows it."""
    baselines = {v.id for v in summary.variants if v.baseline}
    timed = summary.evidence.of("attention_time", mode=mode)
    shapes = [[r.tags.get(tag) for tag in SHAPE] for r in timed if r.tags.get("variant") in baselines]
    found = [r for r in timed if r.tags.get("baseline") and [r.tags.get(tag) for tag in SHAPE] not in shapes]
    name = f"{found[0].tags['baseline']} (for comparison)" if found else ""
    return name, _over_tokens(found, name)


def break_even(summary: Summary, variant: VariantResult) -> str:
    """From how many tokens it is faster than softmax, in words; empty if that was not measured."""
    found = []
    for r in summary.evidence.of("break_even_tokens", variant=variant.id):
        tokens, least = number(r.value), number(r.tags.get("from"))
        mode = {"forward": "in inference", "both": "in training"}.get(str(r.tags.get("mode")), "")
        if tokens is None:
            found.append(f"{mode} at no length measured")
        elif tokens == least:
            found.append(f"{mode} at every length measured")
        else:
            found.append(f"{mode} from about {float(f'{tokens:.2g}'):,.0f} tokens")
    return "faster than softmax " + ", ".join(found).strip() if found else ""


def not_timed(summary: Summary) -> dict[str, str]:
    """Variants without a curve over tokens, where others have one, and why."""
    timed = {r.tags.get("variant") for r in summary.evidence.of("attention_time") if number(r.value)}
    without = [v for v in summary.variants if timed and v.id not in timed]
    return {v.label: ", ".join(dict.fromkeys(_refused(summary, v).values())) or "not measured" for v in without}


def partly_timed(summary: Summary) -> list[str]:
    """Of those with a curve, the lengths at which they could not be timed, and why."""
    without = not_timed(summary)
    return [
        f"{v.label} could not be timed at {tokens:,.0f} tokens: {why}."
        for v in summary.variants
        if v.label not in without
        for tokens, why in _refused(summary, v).items()
    ]


def _refused(summary: Summary, variant: VariantResult) -> dict[float, str]:
    """Numbers of tokens at which it cannot be timed, and why."""
    records = summary.evidence.of("attention_time", variant=variant.id)
    found = {number(r.tags.get("tokens")) or 0: str(r.tags["refused"]) for r in records if r.tags.get("refused")}
    return {tokens: why.rpartition("': ")[2] for tokens, why in sorted(found.items())}  # without "spec '…': "


def _logs(summary: Summary, variant: VariantResult) -> list[dict[str, Any]]:
    """Lines of the learning curves of seeds that did not diverge, or of all if every seed did: a mean must be of the
    same seeds."""
    diverged = {run_of(r) for r in summary.evidence.of("diverged", variant=variant.id)}
    every = summary.evidence.of("learning_curve", variant=variant.id)
    whole = [r for r in every if run_of(r) not in diverged] or every
    return [line for record in whole for line in summary.evidence.logs[record.artefact]]


def _by_place(logs: Iterable[dict[str, Any]], key: str, over: str) -> dict[float, list[float]]:
    seen: dict[float, list[float]] = defaultdict(list)
    for line in logs:
        place, value = number(line.get(over)), number(line.get(key))
        if place is not None and value is not None:
            seen[place].append(value)
    return dict(sorted(seen.items()))


def learning(summary: Summary, key: str, over: str = "epoch") -> Rows:
    """Mean, lowest and highest seed at each epoch, or step."""
    rows: Rows = []
    for variant in summary.variants:
        seen = _by_place(_logs(summary, variant), key, over)
        places, last = list(seen), len(seen) - 1
        if last < 1:
            continue
        points = np.linspace(0, last, min(last + 1, MAX_POINTS)).round().astype(int)
        shift = variant.index / len(summary.variants)  # shapes of different lines do not cover each other
        marks = ((np.arange(MARKS) + shift) / MARKS * last).round().astype(int)
        for i in np.union1d(points, marks):
            values = seen[places[i]]
            row = {"mean": sum(values) / len(values), "low": min(values), "high": max(values)}
            rows.append({"variant": variant.label, over: places[i], "marked": bool(i in marks)} | row)
    return rows


def learned(summary: Summary) -> dict[str, Rows]:
    """Parameters of attentions, by name: the mean over seeds at each epoch, of each variant and layer."""
    found: dict[str, Rows] = defaultdict(list)
    for variant in summary.variants:
        logs = _logs(summary, variant)
        for key in dict.fromkeys(key for line in logs for key in line if key.startswith("learned.")):
            _, layer, name = key.split(".", 2)
            seen = _by_place(logs, key, "epoch")
            for place, values in seen.items():
                row = {"epoch": place, "value": sum(values) / len(values), "marked": place == max(seen)}
                found[name].append({"variant": variant.label, "layer": f"layer {layer}"} | row)
    return {name: rows for name, rows in found.items() if len({row["epoch"] for row in rows}) > 1}


def unlearned(summary: Summary) -> list[str]:
    """Variants whose attentions have no such parameters."""
    have = {row["variant"] for rows in learned(summary).values() for row in rows}
    return [v.label for v in summary.variants if v.label not in have]


def growth(summary: Summary) -> Rows:
    """Merit after half of the steps and after all, over the seeds that have both."""
    rows, merit = [], summary.merit
    for v in summary.variants:
        if v.both:
            half, whole = (sum(of[seed] for seed in v.both) / len(v.both) for of in (v.half, v.scores))
            about = {"variant": v.label, "gain": f"{merit.signed(whole - half)} {merit.unit}"}
            for share, score in ((0.5, half), (1, whole)):
                value = merit.sign * score
                rows.append(about | {"share": share, "merit": value, "shown": merit.show(value)})
    return rows


def _matrix(summary: Summary, variant: VariantResult) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Test images by (true, predicted) class, summed over seeds; their shares of the true class; distinct names of the
    classes."""
    found = []
    for record in summary.evidence.of("confusion", variant=variant.id):
        if record.tags.get("selection", "best") == "best":
            with suppress(OSError, ValueError, KeyError, TypeError):  # a file that is missing or broken
                found.append(np.asarray(json.loads(Path(record.artefact).read_bytes())["matrix"], dtype=float))
    matrix = np.sum(found, axis=0) if found else np.zeros((0, 0))
    known = summary.study.dataset.classes
    names = [name if known.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(known)]
    return matrix, matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1), names


def confusion(summary: Summary, variant: VariantResult) -> tuple[Rows, list[str]]:
    matrix, share, names = _matrix(summary, variant)
    if len(matrix) > MAX_CLASSES:
        return [], []
    rows = []
    for (i, j), count in np.ndenumerate(matrix):
        cell = {"true": names[i], "predicted": names[j], "count": int(count), "share": round(float(share[i, j]), 5)}
        rows.append({"variant": variant.label} | cell)
    return rows, names


def confused(summary: Summary, variant: VariantResult, most: int = 8) -> Rows:
    """The pairs of classes most often confused, where there are too many classes for a matrix."""
    if len(summary.study.dataset.classes) <= MAX_CLASSES:
        return []
    _, share, names = _matrix(summary, variant)
    if not len(share):
        return []
    np.fill_diagonal(share, 0)
    cells = [divmod(int(place), len(share)) for place in np.argsort(-share, axis=None, kind="stable")[:most]]
    return [{"true": names[i], "predicted": names[j], "share": share[i, j]} for i, j in cells if share[i, j] > 0]


def classes(summary: Summary) -> tuple[Rows, list[str], int]:
    """F1, precision and recall by variant and class; the classes, hardest first; how many there are if some are cut."""
    labels = {v.id: v.label for v in summary.variants}
    seen: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for metric in SCORES:
        for r in summary.evidence.of(metric):
            value, name, best = number(r.value), r.tags.get("class"), r.tags.get("selection", "best") == "best"
            if value is not None and name is not None and best and "fold" not in r.tags:  # those of all folds count
                seen[labels.get(str(r.tags.get("variant")), ""), str(name)][metric].append(value)
    rows = [
        {"variant": label, "class": name} | {metric: sum(values) / len(values) for metric, values in found.items()}
        for (label, name), found in seen.items()
        if "f1" in found
    ]
    scores = defaultdict(list)
    for row in rows:
        scores[row["class"]].append(row["f1"])
    names = sorted(scores, key=lambda name: np.mean(scores[name]))
    kept = names[:MAX_CLASSES]
    return [row for row in rows if row["class"] in kept], kept, len(names) if len(names) > len(kept) else 0


def models(summary: Summary) -> list[tuple[VariantResult, Rows]]:
    """The layers of each variant's model, from the file that lists them; none if it cannot be read."""
    for record in summary.evidence.of("model_summary"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            layers = json.loads(Path(record.artefact).read_bytes())
            return [
                (v, [row | {"total": row["times"] * row["parameters"]} for row in layers[v.id]])
                for v in summary.variants
                if v.id in layers
            ]
    return []
