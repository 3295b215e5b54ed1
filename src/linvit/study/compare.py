"""`compare`: variants × seeds under one protocol, measured on this machine, reported on one page.

One data order and split for all; equal steps; parameters matched to softmax's by the width of the MLP; seeds outermost,
variants in turn, so that a drift of the machine hits all alike. A finished part is never run twice: the same call again
goes on where it stopped, and a new variant or seed runs only what is new.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from linvit import report
from linvit.data import Dataset
from linvit.files import remove_parts, write_atomically
from linvit.measure.models import side_by_side
from linvit.measure.provenance import machine
from linvit.measure.race import ROUNDS
from linvit.models import ModelConfig, VisionTransformer, match_parameters
from linvit.progress import Progress
from linvit.records import Record, Records
from linvit.registry import parse_layers
from linvit.study.measuring import measure_all, optimizer_of, with_baselines
from linvit.train import Event, Experiment, design, open_data, pick_device, run
from linvit.train.defaults import defaults
from linvit.train.files import locked

ATTENTIONS = ("softmax", "performer-exp:m=32", "performer-relu:m=32", "performer-theta:m=32", "linformer:k=16")
MEASURING, PAGE = 8.0, 12.0  # seconds of a budget kept for each variant's memory and curves, and for the page


@dataclass(frozen=True)
class StudyEvent:
    """What a live display shows: a training's event, or a measurement under way."""

    stage: str  # "train", "measure", "done"
    attention: str = ""
    seed: int = 0
    run: int = 0  # of `runs`
    runs: int = 0
    event: Event | None = None
    done: int = 0
    total: int = 0
    what: str = ""


Watch = Callable[[StudyEvent], None]


def compare(
    data: str | Path | Dataset = "digits",
    *,
    attentions: Sequence[str] = ATTENTIONS,
    seeds: int = 3,
    seed: int = 0,
    epochs: float | None = None,
    budget: str | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    data_root: str | Path | None = None,
    image_size: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    match: bool = True,
    command: str = "",
    watch: Watch | None = None,
    decoding: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Path:
    """Train and measure every attention with every seed, write the report; the study's folder."""
    show, begun = watch or (lambda event: None), time.perf_counter()

    def measuring(done: int, total: int, what: str) -> None:
        show(StudyEvent("measure", done=done, total=total, what=what))

    if seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1")
    if epochs is not None and budget is not None:
        raise ValueError("give epochs or a budget, not both")
    if budget is not None and options.get("steps") is not None:
        raise ValueError("give steps or a budget, not both")
    if budget is not None:
        seconds(budget)  # a wrong one is an error before anything is done
    attentions = list(dict.fromkeys(attentions))
    if not attentions:
        raise ValueError("give at least one attention to compare")
    place = pick_device(device)
    data, source = open_data(
        data, data_root, image_size=image_size, limit=limit, skip_bad=skip_bad, patch_size=options.get("patch_size"),
        progress=decoding,
    )  # fmt: skip
    options = options | ({"epochs": epochs} if epochs is not None else {})
    folder = Path(out) if out is not None else Path("runs") / f"compare-{data.name}"
    base = design(data, "softmax", seed, **options)
    asked = {spec: _matched(data, spec, base.model, seed, options, match) for spec in attentions}
    with locked(folder):
        study = _claim(folder, data, base, attentions, list(range(seed, seed + seeds)), budget, match, command)
        # those of earlier calls too: a study is whole, and what is finished costs nothing
        configs = {
            spec: asked.get(spec) or _matched(data, spec, base.model, seed, options, match)
            for spec in study["attentions"]
        }
        if budget is not None and study["steps"] is None:
            study["steps"] = _steps_within(budget, begun, data, configs, len(study["seeds"]), place, base, measuring)
        elif study["steps"] is None:
            study["steps"] = base.plan(len(data.train))[2]
        study["epochs"] = round(study["steps"] / base.plan(len(data.train))[1], 3)
        _save(folder, study)
        recipe = base.recipe.model_copy(update={"steps": study["steps"]}) if budget is not None else base.recipe
        remove_parts(folder, folder / "figures")
        records = Records(folder / "records.jsonl")
        folders = _train_all(folder, records, data, configs, recipe, study["seeds"], place, show, source)
        trained, before = time.perf_counter(), records.path.stat().st_size
        failed = measure_all(folder, records, data, configs, folders, base, place, measuring)
        study["seconds"]["measuring"] += round(time.perf_counter() - trained, 1)
        if study["finished"] is None or records.path.stat().st_size != before:
            study["finished"] = time.time()
        study["warnings"] = _warnings(study, data, base, limit) + failed
        _save(folder, study)
        report.build(folder)
    show(StudyEvent("done"))
    return folder


def _matched(
    data: Dataset, spec: str, base: ModelConfig, seed: int, options: dict[str, Any], match: bool
) -> ModelConfig:
    config = design(data, spec, seed, **options).model
    parse_layers(spec, config.depth)
    if not match or spec == "softmax":
        return VisionTransformer(config).config  # built once: a bad option is an error before anything is trained
    return match_parameters(config, VisionTransformer(base).parameter_count())


def _claim(
    folder: Path, data: Dataset, base: Experiment, attentions: list[str], seeds: list[int], budget: str | None,
    match: bool, command: str,
) -> dict[str, Any]:  # fmt: skip
    """study.json: new, or this study's with variants and seeds added; a ValueError if it is another's."""
    model = base.model.model_dump(mode="json", exclude={"attention", "seed"})
    recipe = base.recipe.model_dump(mode="json")
    fixed = {"identity": data.identity, "model": model, "recipe": recipe, "budget": budget, "parameter_matching": match}
    path = folder / "study.json"
    if path.exists():
        try:
            study = json.loads(path.read_text(encoding="utf-8"))
            there = {"identity": study["dataset"]["identity"]} | {key: study[key] for key in list(fixed)[1:]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not a study that compare wrote: choose another --out") from None
        for key, value in fixed.items():
            if there[key] != value:
                what = "its images" if key == "identity" else f"its {key.replace('_', ' ')}"
                raise ValueError(f"{folder} holds another study ({what} differ): choose another --out")
        before = study["attentions"], study["seeds"]
        study["attentions"] = list(dict.fromkeys([*study["attentions"], *attentions]))
        study["seeds"] = sorted({*study["seeds"], *seeds})
        if (study["attentions"], study["seeds"]) != before and command:  # all that it takes to have this study again
            study["command"] = "\n".join(dict.fromkeys([*study["command"].splitlines(), command]))
        return study
    for name in ("experiment.json", "records.jsonl", "report.html", "results.csv"):
        if (folder / name).exists():
            raise ValueError(f"{folder} holds {name}, but no study: choose another --out")
    return {
        "format": 1, "command": command, "started": time.time(), "finished": None,
        "dataset": {
            "name": data.name, "classes": data.classes, "image_size": data.image_size, "channels": data.channels,
            "train": len(data.train), "validation": len(data.validation), "test": len(data.test),
            "identity": data.identity,
        },
        "attentions": attentions, "seeds": seeds, "epochs": None, "steps": None, "warnings": [], "machine": machine(),
        "seconds": {"measuring": 0.0},
        **{key: value for key, value in fixed.items() if key != "identity"},
    }  # fmt: skip


def _save(folder: Path, study: dict[str, Any]) -> None:
    write_atomically(folder / "study.json", json.dumps(study, indent=1, ensure_ascii=False) + "\n")


def seconds(text: str) -> float:
    """`90s`, `10m`, `1.5h` or plain seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not found or float(found[1]) <= 0:
        raise ValueError(f"budget '{text}' is not a duration: write 90s, 10m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _steps_within(
    budget: str, begun: float, data: Dataset, configs: dict[str, ModelConfig], seeds: int,
    device: torch.device, base: Experiment, measuring: Progress,
) -> int:  # fmt: skip
    """Equal steps for every run that fit what is left of the budget beside testing, measuring and the page; from
    measured times, stored before training."""
    batch, per_epoch, _ = base.plan(len(data.train))
    every = with_baselines(configs, base.model)

    def show(done: int, total: int, what: str) -> None:
        measuring(done, total, "how many steps fit the budget")

    found = list(side_by_side(
        every, baselines=with_baselines({}, base.model), device=device, batch=batch, rounds=3,
        optimizer=optimizer_of(base), by="wall", progress=show,
    ))  # fmt: skip
    of = {(r.metric, r.tags["variant"]): float(r.value or 0) for r in found}
    step = sum(of["train_step", spec] for spec in configs) * seeds
    image = sum(1 / of["inference_throughput", spec] for spec in configs) * seeds  # without a backward pass
    validation, test = image * len(data.validation), image * len(data.test)
    timing = sum(of["train_step", spec] + of["inference_latency", spec] + batch / of["inference_throughput", spec]
                 for spec in every)  # fmt: skip
    one_each = 1.1 * step + validation / per_epoch  # augmentation; a validation after each epoch
    fixed = time.perf_counter() - begun + validation + 2 * test + ROUNDS * timing + MEASURING * len(configs) + PAGE
    steps = int((seconds(budget) - fixed) / one_each)
    if steps < 1:
        need = math.ceil(one_each + fixed)
        raise ValueError(f"budget {budget} is too small for one step of each run: at least {need}s are needed")
    return steps


def _train_all(
    folder: Path, records: Records, data: Dataset, configs: dict[str, ModelConfig], recipe: Any, seeds: list[int],
    device: torch.device, watch: Watch, source: dict[str, Any] | None,
) -> dict[tuple[str, int], Path]:  # fmt: skip
    """Every run in its own folder; its records copied into the study's, once."""
    there = {_key(record) for record in records}
    folders: dict[tuple[str, int], Path] = {}
    names = list(configs)
    jobs = [(spec, s) for i, s in enumerate(seeds) for spec in names[i % len(names) :] + names[: i % len(names)]]
    for number, (spec, s) in enumerate(jobs):
        config = configs[spec].model_copy(update={"seed": s})
        experiment = replace(Experiment.of(data, config, recipe, s), label=spec)
        name = re.sub(r"[^\w.]+", "-", spec)[:60].strip("-")
        place = folders[spec, s] = folder / f"{name}-seed{s}-{experiment.id[:6]}"

        def show(event: Event, spec: str = spec, s: int = s, number: int = number) -> None:
            watch(StudyEvent("train", spec, s, number, len(jobs), event))

        found = run(experiment, data, place, device=device, progress=show, source=source)  # at once, if it is finished
        named = (replace(r, artefact=f"{place.name}/{r.artefact}" if r.artefact else "") for r in found)
        records.append(record for record in named if _key(record) not in there)  # a kill may have cut the last append
    return folders


def _key(record: Record) -> tuple:
    return record.experiment, record.metric, *sorted((k, str(v)) for k, v in record.tags.items())


def _warnings(study: dict[str, Any], data: Dataset, base: Experiment, limit: int | None) -> list[str]:
    """What a reader must know before trusting the comparison, and the records cannot tell."""
    found, whole = [], defaults(data).get("epochs")
    if study["epochs"] < 1:
        found.append(f"{study['steps']} steps are {study['epochs']:.2g} of an epoch: nobody has learned much yet.")
    elif whole and study["epochs"] < whole:
        found.append(f"{study['epochs']:g} of the recipe's {whole:g} epochs: more training may change the order.")
    if limit is not None:
        found.append(f"At most {limit:,} images of each split were used: more may change the order.")
    if base.recipe.patience:
        found.append("Early stopping (patience) lets variants differ in their number of steps.")
    if base.recipe.amp != "off" or base.recipe.compile:
        found.append("Speeds and memory are of float32 models that are not compiled; the training was otherwise.")
    if len(data.test) < 500:
        found.append(f"Only {len(data.test)} test images: one of them is {1 / max(1, len(data.test)):.1%} of accuracy.")
    return found
