"""Made-up results of studies: no number here was measured."""

from __future__ import annotations

from pathlib import Path

from synthetic import dataset, document, record

from linvit.attention import role_of
from linvit.records import Records
from linvit.schemas.study import Variant

ROWS = {
    "transformer": "softmax",
    "RF16 softmax": "performer-exp:m=16",
    "RF64 ReLU": "performer-relu:m=64",
    "deterministic ReLU": "performer-relu:projection=none",
    "linformer": "linformer:k=16",
    "uniform": "uniform",
}
Accuracies = dict[str, list[float | None]]


def made(
    home: Path,
    accuracies: Accuracies,
    *,
    study: str = "000-mnist",
    column: str = "fair",
    scale: str = "cpu",
    speeds: dict[str, tuple[float, float, float]] | None = None,
    identity: str = "images",
    metric: str = "test_accuracy",
    half: float | None = None,
    finished: bool = True,
    folds: int | None = None,
) -> Path:
    """A column of a study: the test accuracies, or another metric, of each row's seeds; None diverged. With folds, of
    the folds of one seed."""
    folder = home / study / scale / column
    folder.mkdir(parents=True, exist_ok=True)
    variants, found = [], []
    for name, values in accuracies.items():
        attention = ROWS.get(name, "softmax")
        variants.append(Variant(id=name, label=name, attention=attention, column=column, role=role_of(attention)))
        about = {"variant": name, "attention": attention}
        for seed, value in enumerate(values):
            run = {"seed": 0, "fold": seed} if folds else {"seed": seed}
            found.append(record(metric, value, n=10_000, selection="best", **run, **about))
            if half is not None:
                found.append(record("half_accuracy", value - half, n=10_000, seed=seed, **about))
            if value is None:
                found.append(record("diverged", 41, seed=seed, layer="blocks.2", **about))
        if speeds and name in speeds:
            middle, low, high = speeds[name]
            found += [
                record("train_step_vs_softmax", middle, n=31, low=low, high=high, clock="cpu", batch=8, **about),
                record("inference_vs_softmax", middle, n=31, low=low, high=high, clock="cpu", batch=8, **about),
                record("peak_memory", 1e8 / middle, batch=8, **about),
            ]
    facts = dataset("mnist", tuple("01"), 28).model_copy(update={"identity": identity})
    seeds = {name: list(range(len(values))) for name, values in accuracies.items()}
    stored = document(variants=variants, dataset=facts, requests=[], seeds=[])
    seeds = {name: [0] for name in accuracies} if folds else seeds
    changes = {"folds": folds, "seeds": seeds, "finished": 1.7e9 if finished else None}
    stored.model_copy(update=changes).save(folder)
    (folder / "report.html").write_text("a page")
    Records(folder / "records.jsonl").append(found)
    return home


def noisy(mean: float, seeds: int = 3, sd: float = 0.001) -> list[float | None]:
    shift = [0.0, 1.0, -1.0, 0.5, -0.5]
    return [mean + sd * shift[i] for i in range(seeds)]


def sizes(home: Path, report: str, systems: dict[str, tuple[float, float]], busy: bool = False) -> None:
    """Made-up races: variant → speed and memory, both relative to softmax."""
    mark = {"busy": True} if busy else {}
    found = []
    for variant, (speed, memory) in systems.items():
        ends = {"low": speed - 0.01, "high": speed + 0.01, "clock": "cpu", "batch": 8, "variant": variant, **mark}
        found += [record(f"{task}_vs_softmax", speed, n=15, **ends) for task in ("train_step", "inference")]
        found.append(record("peak_memory", 1e8 * memory, batch=8, variant=variant, **mark))
    folder = home / f"{report}-sizes" / "cpu"
    folder.mkdir(parents=True)
    Records(folder / "records.jsonl").append(found)
