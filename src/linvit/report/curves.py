"""Records and their artefacts → the rows that charts draw."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from linvit.metrics import seconds as in_seconds
from linvit.records import Record
from linvit.report.evidence import read_json, read_lines
from linvit.report.summary import Result, Summary, number

Rows = list[dict[str, Any]]
POINTS = 120  # of one learning curve
MARKS = 5  # shapes along it
CLASSES = 20  # of one per-class chart, or one confusion matrix


def scaling(summary: Summary, mode: str) -> tuple[Rows, Rows]:
    """Time over tokens, and where each variant becomes faster than softmax."""
    rows: Rows = []
    labels = {v.id: v.label for v in summary.variants}
    for r in summary.study.of("attention_time", mode=mode):
        if str(r.tags.get("variant")) not in labels:
            continue
        seconds, tokens = number(r.value), number(r.tags.get("tokens"))
        if seconds and tokens and seconds > 0 and tokens > 0:
            rows.append({"variant": labels[str(r.tags["variant"])], "tokens": tokens, "seconds": seconds,
                         "shown": in_seconds(seconds), "marked": True})  # fmt: skip
    if not rows:
        return [], []
    low, high = min(r["tokens"] for r in rows), max(r["tokens"] for r in rows)
    breaks: Rows = []
    for r in summary.study.of("break_even_tokens"):
        tokens = number(r.value)
        if r.tags.get("mode", mode) == mode and tokens is not None and low <= tokens <= high:
            breaks.append({"variant": labels.get(str(r.tags.get("variant")), ""), "tokens": tokens})
    return sorted(rows, key=lambda r: (r["variant"], r["tokens"])), breaks


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


def not_timed(summary: Summary) -> list[str]:
    """Variants without a curve over tokens, where others have one."""
    timed = {r.tags.get("variant") for r in summary.study.of("attention_time") if number(r.value)}
    return [v.label for v in summary.variants if v.id not in timed] if timed else []


def _whole(summary: Summary, variant: Result) -> list[Record]:
    """The learning curves of seeds that did not diverge, or of all where each did: a mean must be of the same seeds."""
    diverged = {r.tags.get("seed") for r in summary.study.of("diverged", variant=variant.id)}
    curves = summary.study.of("learning_curve", variant=variant.id)
    return [r for r in curves if r.tags.get("seed") not in diverged] or curves


def learning(summary: Summary, key: str) -> Rows:
    """Mean, lowest and highest seed at each epoch."""
    rows: Rows = []
    for variant in summary.variants:
        seen: dict[float, list[float]] = defaultdict(list)
        for record in _whole(summary, variant):
            for line in read_lines(record):
                epoch, value = number(line.get("epoch")), number(line.get(key))
                if epoch is not None and value is not None:
                    seen[epoch].append(value)
        epochs = sorted(seen)
        if len(epochs) < 2:
            continue
        last = len(epochs) - 1
        points = np.linspace(0, last, min(last + 1, POINTS)).round().astype(int)
        shift = variant.index / len(summary.variants)  # shapes of different lines do not cover each other
        marks = ((np.arange(MARKS) + shift) / MARKS * last).round().astype(int)
        for i in np.union1d(points, marks):
            values = seen[epochs[i]]
            rows.append({"variant": variant.label, "epoch": epochs[i], "mean": sum(values) / len(values),
                         "low": min(values), "high": max(values), "marked": bool(i in marks)})  # fmt: skip
    return rows


def _matrix(summary: Summary, variant: Result) -> np.ndarray | None:
    """Test images by (true, predicted) class, summed over seeds."""
    total: np.ndarray | None = None
    for record in summary.study.of("confusion", variant=variant.id):
        if record.tags.get("selection", "best") != "best":
            continue
        found = read_json(record)
        try:
            matrix = np.asarray(found["matrix"], dtype=float)
        except (KeyError, TypeError, ValueError):
            continue
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
            continue
        if total is None:
            total = matrix
        elif total.shape == matrix.shape:
            total = total + matrix
    return total


def _names(summary: Summary, count: int) -> list[str]:
    """A different name for each class, whatever the study calls them."""
    known = summary.study.classes
    names = [known[i] if i < len(known) else str(i) for i in range(count)]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def confusion(summary: Summary, variant: Result) -> tuple[Rows, list[str]]:
    matrix = _matrix(summary, variant)
    if matrix is None or len(matrix) > CLASSES:
        return [], []
    names = _names(summary, len(matrix))
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    rows = [{"variant": variant.label, "true": t, "predicted": p, "count": int(matrix[i, j]),
             "share": round(share[i, j], 5)} for i, t in enumerate(names) for j, p in enumerate(names)]  # fmt: skip
    return rows, names


def confused(summary: Summary, variant: Result, most: int = 8) -> Rows:
    """The pairs of classes most often confused: what a matrix of many classes cannot show."""
    matrix = _matrix(summary, variant)
    if matrix is None or len(matrix) <= CLASSES:
        return []
    names = _names(summary, len(matrix))
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    np.fill_diagonal(share, 0)
    order = np.argsort(-share, axis=None, kind="stable")[:most]
    cells = [divmod(int(k), len(matrix)) for k in order]
    return [{"true": names[i], "predicted": names[j], "share": float(share[i, j])} for i, j in cells if share[i, j] > 0]


def classes(summary: Summary) -> tuple[Rows, list[str], int]:
    """F1, precision and recall by variant and class; the classes, hardest first; how many there are if some are cut."""
    labels = {v.id: v.label for v in summary.variants}
    seen: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for metric in ("f1", "precision", "recall"):
        for r in summary.study.of(metric):
            value = number(r.value)
            if value is not None and r.tags.get("class") is not None and r.tags.get("selection", "best") == "best":
                seen[labels.get(str(r.tags.get("variant")), ""), str(r.tags["class"])][metric].append(value)
    means = {key: {m: sum(v) / len(v) for m, v in found.items()} for key, found in seen.items() if "f1" in found}
    names = list(dict.fromkeys(name for _, name in means))
    score = {name: np.mean([found["f1"] for (_, own), found in means.items() if own == name]) for name in names}
    names.sort(key=lambda name: score[name])
    kept = names[:CLASSES]
    rows = [{"variant": label, "class": name, **found} for (label, name), found in means.items() if name in kept]
    return rows, kept, len(names) if len(names) > len(kept) else 0
