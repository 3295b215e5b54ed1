"""Records and their artefacts → the rows that charts draw."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from linvit.metrics import seconds as in_seconds
from linvit.records import Record
from linvit.report.evidence import run_of
from linvit.report.summary import Result, Summary, number

Rows = list[dict[str, Any]]
POINTS = 120  # of one learning curve
MARKS = 5  # shapes along it
CLASSES = 20  # of one per-class chart, or one confusion matrix
BESIDE = "softmax (for comparison)"
SCORES = ("f1", "precision", "recall")


def scaling(summary: Summary, mode: str) -> tuple[Rows, Rows]:
    """Time of a layer over tokens, the mean of a model's, and where each variant becomes faster than softmax."""
    rows = [row for v in summary.variants
            for row in _over_tokens(summary.study.of("attention_time", mode=mode, variant=v.id), v.label)]  # fmt: skip
    breaks: Rows = []
    for v in summary.variants:
        for r in summary.study.of("break_even_tokens", variant=v.id):
            if r.tags.get("mode", mode) == mode and (tokens := number(r.value)):
                breaks.append({"variant": v.label, "tokens": tokens})
    low, high = (end((row["tokens"] for row in rows), default=0) for end in (min, max))
    return rows, [row for row in breaks if low <= row["tokens"] <= high]


def _over_tokens(records: list[Record], label: str) -> Rows:
    rows: Rows = []
    for r in records:
        if (seconds := number(r.value)) and (tokens := number(r.tags.get("tokens"))):
            seconds /= number(r.tags.get("layers")) or 1
            rows.append({"variant": label, "tokens": tokens, "seconds": seconds, "shown": in_seconds(seconds),
                         "marked": True})  # fmt: skip
    return sorted(rows, key=lambda row: row["tokens"])


def beside(summary: Summary, mode: str) -> Rows:
    """Softmax's own time over tokens, with which all are compared; none where it is a variant's."""
    found = summary.study.of("attention_time", mode=mode, baseline="softmax")
    softmax = {v.id for v in summary.variants if v.attention == "softmax"}
    shapes = [[r.tags.get(tag) for tag in ("heads", "head_dim", "prefix")]
              for r in summary.study.of("attention_time", mode=mode) if r.tags.get("variant") in softmax]  # fmt: skip
    other = [r for r in found if [r.tags.get(tag) for tag in ("heads", "head_dim", "prefix")] not in shapes]
    return _over_tokens(other, BESIDE)


def break_even(summary: Summary, variant: Result) -> str:
    """From how many tokens it is faster than softmax, in words; "" if that was not measured."""
    found = []
    for r in summary.study.of("break_even_tokens", variant=variant.id):
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
    timed = {r.tags.get("variant") for r in summary.study.of("attention_time") if number(r.value)}
    return {v.label: ", ".join(dict.fromkeys(_refused(summary, v).values())) or "not measured"
            for v in summary.variants if v.id not in timed} if timed else {}  # fmt: skip


def partly_timed(summary: Summary) -> list[str]:
    """Of those with a curve, the lengths at which they could not be timed, and why."""
    without = not_timed(summary)
    return [f"{v.label} could not be timed at {tokens:,.0f} tokens: {why}." for v in summary.variants
            if v.label not in without for tokens, why in _refused(summary, v).items()]  # fmt: skip


def _refused(summary: Summary, variant: Result) -> dict[float, str]:
    """Tokens → why it cannot be timed with so many."""
    records = summary.study.of("attention_time", variant=variant.id)
    found = {number(r.tags.get("tokens")) or 0: str(r.tags["refused"]) for r in records if r.tags.get("refused")}
    return {tokens: why.rpartition("': ")[2] for tokens, why in sorted(found.items())}  # without "spec '…': "


def _whole(summary: Summary, variant: Result) -> list[Record]:
    """The learning curves of seeds that did not diverge, or of all where each did: a mean must be of the same seeds."""
    diverged = {run_of(r) for r in summary.study.of("diverged", variant=variant.id)}
    curves = summary.study.of("learning_curve", variant=variant.id)
    return [r for r in curves if run_of(r) not in diverged] or curves


def learning(summary: Summary, key: str, over: str = "epoch") -> Rows:
    """Mean, lowest and highest seed at each epoch, or step."""
    rows: Rows = []
    for variant in summary.variants:
        seen: dict[float, list[float]] = defaultdict(list)
        for record in _whole(summary, variant):
            for line in summary.study.logs[record.artefact]:
                place, value = number(line.get(over)), number(line.get(key))
                if place is not None and value is not None:
                    seen[place].append(value)
        places = sorted(seen)
        if len(places) < 2:
            continue
        last = len(places) - 1
        points = np.linspace(0, last, min(last + 1, POINTS)).round().astype(int)
        shift = variant.index / len(summary.variants)  # shapes of different lines do not cover each other
        marks = ((np.arange(MARKS) + shift) / MARKS * last).round().astype(int)
        for i in np.union1d(points, marks):
            values = seen[places[i]]
            rows.append({"variant": variant.label, over: places[i], "mean": sum(values) / len(values),
                         "low": min(values), "high": max(values), "marked": bool(i in marks)})  # fmt: skip
    return rows


def learned(summary: Summary) -> dict[str, Rows]:
    """Parameters of attentions, by name: the mean over seeds at each epoch, of each variant and layer."""
    found: dict[str, Rows] = defaultdict(list)
    for variant in summary.variants:
        lines = [line for record in _whole(summary, variant) for line in summary.study.logs[record.artefact]]
        for key in dict.fromkeys(key for line in lines for key in line if key.startswith("learned.")):
            _, layer, name = key.split(".", 2)
            seen: dict[float, list[float]] = defaultdict(list)
            for line in lines:
                if (place := number(line.get("epoch"))) is not None and (value := number(line.get(key))) is not None:
                    seen[place].append(value)
            last = max(seen, default=0.0)
            found[name] += [{"variant": variant.label, "layer": f"layer {layer}", "epoch": place,
                             "value": sum(seen[place]) / len(seen[place]), "marked": place == last}
                            for place in sorted(seen)]  # fmt: skip
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
            rows += [{"variant": v.label, "share": share, "merit": merit.sign * score, "marked": True,
                      "shown": merit.show(merit.sign * score), "gain": f"{merit.signed(whole - half)} {merit.unit}"}
                     for share, score in ((0.5, half), (1, whole))]  # fmt: skip
    return rows


def _matrix(summary: Summary, variant: Result) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Test images by (true, predicted) class, summed over seeds; their shares of the true class; the classes, a
    different name for each, whatever the study calls them."""
    found = []
    for record in summary.study.of("confusion", variant=variant.id):
        if record.tags.get("selection", "best") == "best":
            with suppress(OSError, ValueError, KeyError, TypeError):  # a file that is missing or broken
                found.append(np.asarray(json.loads(Path(record.artefact).read_bytes())["matrix"], dtype=float))
    matrix = np.sum(found, axis=0) if found else np.zeros((0, 0))
    known = summary.study.classes or [str(i) for i in range(len(matrix))]
    names = [name if known.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(known)]
    return matrix, matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1), names


def confusion(summary: Summary, variant: Result) -> tuple[Rows, list[str]]:
    matrix, share, names = _matrix(summary, variant)
    if len(matrix) > CLASSES:
        return [], []
    rows = [{"variant": variant.label, "true": names[i], "predicted": names[j], "count": int(count),
             "share": round(float(share[i, j]), 5)} for (i, j), count in np.ndenumerate(matrix)]  # fmt: skip
    return rows, names


def confused(summary: Summary, variant: Result, most: int = 8) -> Rows:
    """The pairs of classes most often confused: what a matrix of many classes cannot show."""
    if 0 < len(summary.study.classes) <= CLASSES:
        return []
    _, share, names = _matrix(summary, variant)
    if len(share) <= CLASSES:
        return []
    np.fill_diagonal(share, 0)
    cells = [divmod(int(place), len(share)) for place in np.argsort(-share, axis=None, kind="stable")[:most]]
    return [{"true": names[i], "predicted": names[j], "share": share[i, j]} for i, j in cells if share[i, j] > 0]


def classes(summary: Summary) -> tuple[Rows, list[str], int]:
    """F1, precision and recall by variant and class; the classes, hardest first; how many there are if some are cut."""
    labels = {v.id: v.label for v in summary.variants}
    seen: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for metric in SCORES:
        for r in summary.study.of(metric):
            value, name = number(r.value), r.tags.get("class")
            if "fold" in r.tags:  # those of all folds together count
                continue
            if value is not None and name is not None and r.tags.get("selection", "best") == "best":
                seen[labels.get(str(r.tags.get("variant")), ""), str(name)][metric].append(value)
    rows = [{"variant": label, "class": name} | {metric: sum(values) / len(values) for metric, values in found.items()}
            for (label, name), found in seen.items() if "f1" in found]  # fmt: skip
    scores = defaultdict(list)
    for row in rows:
        scores[row["class"]].append(row["f1"])
    names = sorted(scores, key=lambda name: np.mean(scores[name]))
    kept = names[:CLASSES]
    return [row for row in rows if row["class"] in kept], kept, len(names) if len(names) > len(kept) else 0
