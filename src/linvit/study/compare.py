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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linvit import report
from linvit.data import Dataset, normalise
from linvit.files import write_atomically
from linvit.measure import speed
from linvit.measure.models import BASELINES, peak_memory, side_by_side
from linvit.measure.provenance import machine, provenance
from linvit.measure.trained import attention_maps, trained_error
from linvit.models import ModelConfig, VisionTransformer, match_parameters
from linvit.records import Record, Records
from linvit.registry import parse_layers
from linvit.train import Event, Experiment, design, load, open_data, pick_device, run
from linvit.train.files import locked
from linvit.train.recipe import make_optimizer

ATTENTIONS = ("softmax", "performer-exp:m=32", "performer-relu:m=32", "performer-theta:m=32", "linformer:k=16")
MEASURING, PAGE = 10.0, 15.0  # seconds of a budget kept for measuring each variant, and for the page
EXAMPLES = 12


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
    watch, begun = watch or (lambda event: None), time.perf_counter()
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
            study["steps"] = _steps_within(budget, begun, data, configs, len(study["seeds"]), place, base, watch)
        elif study["steps"] is None:
            study["steps"] = base.plan(len(data.train))[2]
        study["epochs"] = round(study["steps"] / base.plan(len(data.train))[1], 3)
        _save(folder, study)
        recipe = base.recipe.model_copy(update={"steps": study["steps"]}) if budget is not None else base.recipe
        records = Records(folder / "records.jsonl")
        start = time.perf_counter()
        folders = _train_all(folder, records, data, configs, recipe, study["seeds"], place, watch, source)
        trained = time.perf_counter()
        _measure_all(folder, records, data, configs, folders, base, place, watch)
        spent = {"training": trained - start, "measuring": time.perf_counter() - trained}
        study["seconds"] = {key: round(study["seconds"][key] + value, 1) for key, value in spent.items()}
        study["finished"] = time.time()
        study["warnings"] = _warnings(study, configs, base, len(data.test), match)
        _save(folder, study)
        report.build(folder)
    watch(StudyEvent("done"))
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
        "seconds": {"training": 0.0, "measuring": 0.0},
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
    device: torch.device, base: Experiment, watch: Watch,
) -> int:  # fmt: skip
    """Equal steps for every run that fit what is left of the budget, from the measured time of a step; stored before
    training."""
    batch = base.plan(len(data.train))[0]
    every = dict(configs)
    for name in BASELINES:
        every.setdefault(name, next(iter(configs.values())).model_copy(update={"attention": name}))

    def show(done: int, total: int, what: str) -> None:
        watch(StudyEvent("measure", done=done, total=total, what="how many steps fit the budget"))

    found = side_by_side(every, device=device, batch=batch, rounds=3, optimizer=_optimizer(base), progress=show)
    step = {r.tags["attention"]: float(r.value or 0) for r in found if r.metric == "train_step"}
    beside = 1.1 + len(data.validation) / len(data.train) / 3  # augmentation, and validation without a backward pass
    one_each = sum(step[name] for name in configs) * seeds * beside
    fixed = time.perf_counter() - begun + PAGE + MEASURING * len(configs)
    steps = int((seconds(budget) - fixed) / one_each)
    if steps < 1:
        need = math.ceil(one_each + fixed)
        raise ValueError(f"budget {budget} is too small for one step of each run: at least {need}s are needed")
    return steps


def _optimizer(base: Experiment) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """The recipe's own, at a rate that leaves the weights alone: a training step is timed with it."""
    return partial(make_optimizer, base.recipe.model_copy(update={"lr": 1e-12}))


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


def _measure_all(
    folder: Path, records: Records, data: Dataset, configs: dict[str, ModelConfig],
    folders: dict[tuple[str, int], Path], base: Experiment, device: torch.device, watch: Watch,
) -> None:  # fmt: skip
    """Each measurement once for this set of variants, stored as it is made."""
    have = {(r.metric, r.tags.get("attention")) for r in records}

    def missing(metric: str) -> list[str]:
        return [spec for spec in configs if (metric, spec) not in have]

    def show(done: int, total: int, what: str) -> None:
        watch(StudyEvent("measure", done=done, total=total, what=what))

    batch = min(64, base.recipe.batch_size)
    if missing("train_step"):  # ratios are measured side by side, so all are measured again
        every = dict(configs)
        for name in BASELINES:
            every.setdefault(name, base.model.model_copy(update={"attention": name}))
        found = list(side_by_side(every, device=device, batch=batch, optimizer=_optimizer(base), progress=show))
        records.append(r for r in found if r.tags["attention"] in configs)
    for i, spec in enumerate(missing("peak_memory")):
        show(i, len(configs), f"memory of {spec}")
        records.append([peak_memory(configs[spec], device, batch)])
    plain = [spec for spec in configs if not set(spec) & set("+@") and "dwc" not in spec and "exact_cls" not in spec]
    if set(missing("attention_time")) & set(plain):
        lengths = [n for n in (64, 256, 1024) if _fits(plain, n)]
        head_dim = base.model.head_dim or base.model.dim // base.model.heads
        shape = {"heads": base.model.heads, "head_dim": head_dim, "rounds": 5, "device": device}
        found = speed.measure(plain, tokens=lengths, progress=show, **shape)
        records.append(r for r in found if r.tags["attention"] in plain)
    models = {}
    for spec in configs:
        path = next(
            (p for (name, _), p in folders.items() if name == spec and (p / "best" / "model.safetensors").exists()),
            None,
        )
        if path is not None:
            models[spec] = load(path / "best").to(device)
    mixed = data.test.order(0, 0)  # images of a folder lie class by class
    sample = normalise(data.test.batch(mixed[:32])[0].to(device), data.mean, data.std)
    for i, spec in enumerate(set(missing("attention_error")) & set(models)):
        show(i, len(configs), f"error of {spec}")
        found = trained_error(models[spec], sample)
        records.append(
            Record(name, value, n=len(sample), **provenance(device, torch.float32), tags={"attention": spec})
            for name, value in found.items()
        )
    if models and (missing("examples_of") or ("illustration", None) not in have):
        show(0, 1, "examples")
        _examples(folder, records, data, models, device)
        _illustration(folder, records, data, base)


def _fits(specs: list[str], tokens: int) -> bool:
    """Whether every spec can be built for so many tokens (a Linformer cannot project to more than there are)."""
    from linvit.attention import create_attention

    try:
        for spec in specs:
            create_attention(spec, heads=1, head_dim=16, tokens=tokens)
    except ValueError:
        return False
    return True


def _examples(
    folder: Path, records: Records, data: Dataset, models: dict[str, VisionTransformer], device: torch.device
) -> None:
    """Test images that most variants get wrong first, with every variant's prediction and map."""
    images, labels = data.test.batch(data.test.order(0, 0)[:500])
    x = normalise(images.to(device), data.mean, data.std)
    chosen: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with torch.inference_mode():
        for spec, model in models.items():
            best = torch.cat([model(part).softmax(-1) for part in x.split(100)]).max(-1)
            chosen[spec] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    wrong = sum((predicted != labels.numpy()).astype(int) for predicted, _ in chosen.values())
    order = np.argsort(-np.asarray(wrong), kind="stable")
    order = np.concatenate([order[: EXAMPLES * 2 // 3], order[len(order) - EXAMPLES // 3 :]])
    order = order[np.sort(np.unique(order, return_index=True)[1])]
    arrays: dict[str, np.ndarray] = {
        "images": images.numpy()[order].transpose(0, 2, 3, 1), "labels": labels.numpy()[order],
    }  # fmt: skip
    for spec, model in models.items():
        arrays[f"predictions/{spec}"], arrays[f"confidence/{spec}"] = chosen[spec][0][order], chosen[spec][1][order]
        maps = attention_maps(model, x[order])
        if maps is not None:
            arrays[f"maps/{spec}"] = maps.float().cpu().numpy()
    _save_arrays(folder / "examples.npz", arrays)
    marks = [Record("examples_of", len(order), tags={"attention": spec}) for spec in models]
    records.append([Record("examples", len(order), artefact="examples.npz"), *marks])


def _illustration(folder: Path, records: Records, data: Dataset, base: Experiment) -> None:
    """One training image, the grid it is cut into, and what augmentation makes of it."""
    images, labels = data.train.batch(slice(0, 1))
    plain = base.recipe.augmentation() | {"mixup": 0.0, "cutmix": 0.0}
    augment = data.augment(**plain)
    seen = torch.cat([augment(images, labels, torch.zeros(1, dtype=torch.long), epoch, 0)[0] for epoch in range(8)])
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
    pixels = ((seen * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).numpy().transpose(0, 2, 3, 1)
    grid = np.array(VisionTransformer(base.model).stem.grid)
    arrays = {"original": images[0].numpy().transpose(1, 2, 0), "grid": grid, "augmented": pixels}
    _save_arrays(folder / "illustration.npz", arrays)
    records.append([Record("illustration", len(pixels), artefact="illustration.npz")])


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    import io

    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())


def _warnings(
    study: dict[str, Any], configs: dict[str, ModelConfig], base: Experiment, test: int, match: bool
) -> list[str]:
    """What a reader must know before trusting the comparison."""
    found = []
    counts = {spec: VisionTransformer(config).parameter_count() for spec, config in configs.items()}
    target = VisionTransformer(base.model).parameter_count()
    for spec, count in counts.items():
        if abs(count / target - 1) > 0.02:
            how = "although the MLP was adjusted" if match else "parameters were not matched"
            found.append(f"{spec} has {count:,} parameters, {count / target - 1:+.1%} of softmax's: {how}.")
    if len(study["seeds"]) < 3:
        found.append(f"{len(study['seeds'])} seed(s): differences cannot be told from chance; use --seeds 3 or more.")
    if study["epochs"] < 1:
        found.append(f"{study['steps']} steps are {study['epochs']:.2g} of an epoch: nobody has learned much yet.")
    if base.recipe.patience:
        found.append("Early stopping (patience) lets variants differ in their number of steps.")
    if test < 500:
        found.append(f"Only {test} test images: accuracies have a resolution of {1 / max(1, test):.1%}.")
    return found
