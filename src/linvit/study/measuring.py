"""What a study measures beside accuracy: each thing once for its set of variants, stored as it is made.

What cannot be measured is said, and the rest goes on: nothing that was trained is without its page.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from linvit.attention import create_attention
from linvit.data import Dataset, normalise
from linvit.files import write_atomically
from linvit.measure import speed
from linvit.measure.models import METRICS, MakeOptimizer, side_by_side
from linvit.measure.provenance import provenance
from linvit.measure.race import BASELINES
from linvit.measure.trained import attention_maps, trained_error
from linvit.models import ModelConfig, VisionTransformer
from linvit.progress import Progress
from linvit.records import Record, Records
from linvit.train import Experiment, load
from linvit.train.memory import peak_memory
from linvit.train.recipe import make_optimizer

LENGTHS = (64, 256, 1024)
EXAMPLES, LOOKED_AT = 12, 500  # images shown, of so many tried
Folders = dict[tuple[str, int], Path]


def with_baselines(configs: dict[str, ModelConfig], model: ModelConfig) -> dict[str, ModelConfig]:
    return {name: model.model_copy(update={"attention": name}) for name in BASELINES} | configs


def optimizer_of(base: Experiment) -> MakeOptimizer:
    """The recipe's own, at a rate that leaves the weights alone: a training step is timed with it."""
    return partial(make_optimizer, base.recipe.model_copy(update={"lr": 1e-12}))


def measure_all(
    folder: Path, records: Records, data: Dataset, configs: dict[str, ModelConfig], folders: Folders, base: Experiment,
    device: torch.device, progress: Progress,
) -> list[str]:  # fmt: skip
    """Sentences about what could not be measured."""
    batch = base.plan(len(data.train))[0]
    have = {(r.metric, r.tags.get("attention")) for r in records if r.tags.get("batch") == batch or not _batched(r)}
    failed: list[str] = []

    def missing(*metrics: str) -> list[str]:
        return [spec for spec in configs if any((metric, spec) not in have for metric in metrics)]

    @contextmanager
    def attempt(what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, MemoryError) as error:
            failed.append(f"{what} could not be measured: {str(error).partition(chr(10))[0]}.")

    if missing(*METRICS):  # ratios are measured side by side, so all are measured again
        with attempt("Speed"):
            found = side_by_side(
                configs, baselines=with_baselines({}, base.model), device=device, batch=batch,
                optimizer=optimizer_of(base), progress=progress,
            )  # fmt: skip
            records.append([r.tagged(attention=r.tags["variant"]) for r in found])
    for i, spec in enumerate(missing("peak_memory")):
        progress(i, len(configs), f"memory of {spec}")
        with attempt(f"Memory of {spec}"):
            records.append([peak_memory(configs[spec], base.recipe, device, batch).tagged(attention=spec)])
    with attempt("Speed at other sizes"):
        _curve(records, [spec for spec in missing("attention_time") if _alone(spec)], configs, base, device, progress)
    models = _models(records, configs, folders)
    images = data.test.order(0, 0)  # images of a folder lie class by class
    known = {(r.tags.get("attention"), r.tags.get("seed")) for r in records if r.metric == "attention_error"}
    for i, ((spec, seed), path) in enumerate(models.items()):
        if (spec, seed) not in known:
            progress(i, len(models), f"error of {spec}")
            with attempt(f"Distance of {spec} from softmax"):
                records.append(_errors(load(path), data, images, spec, seed))
    firsts = {spec: path for (spec, _), path in reversed(models.items())}
    if set(missing("examples_of")) & set(firsts) or (firsts and ("illustration", None) not in have):
        progress(0, 1, "examples")
        with attempt("Examples"):
            _examples(folder, records, data, {spec: load(path).to(device) for spec, path in firsts.items()}, device)
            _illustration(folder, records, data, base)
    return failed


def _batched(record: Record) -> bool:
    """Whether it depends on the batch: speed and memory of a model."""
    return record.metric == "peak_memory" or record.metric in METRICS


def _models(records: Records, configs: dict[str, ModelConfig], folders: Folders) -> Folders:
    """(spec, seed) → the folder of its best model; of runs that diverged, only where there is no other."""
    diverged = {(r.tags.get("attention"), r.tags.get("seed")) for r in records if r.metric == "diverged"}
    there = {key: path / "best" for key, path in folders.items() if (path / "best" / "model.safetensors").exists()}
    sound = {key: path for key, path in there.items() if key not in diverged}
    names = {spec for spec, _ in sound}
    return {key: path for key, path in there.items() if key[0] in configs and (key in sound or key[0] not in names)}


def _alone(spec: str) -> bool:
    """Whether one attention layer says all: no mix of layers, nothing that needs a grid of tokens or a CLS token."""
    return not set(spec) & set("+@") and "dwc" not in spec and "exact_cls" not in spec


def _curve(
    records: Records, new: list[str], configs: dict[str, ModelConfig], base: Experiment, device: torch.device,
    progress: Progress,
) -> None:  # fmt: skip
    """Time over tokens, the model's own number among them. All again if one is new: ratios are side by side."""
    if not any(_builds(spec, LENGTHS[-1]) for spec in new):
        return
    model = base.model
    tokens = VisionTransformer(model).tokens
    lengths = sorted({*LENGTHS, min(tokens, LENGTHS[-1])})
    head_dim = model.head_dim or model.dim // model.heads
    specs = [spec for spec in configs if _alone(spec) and _builds(spec, lengths[-1])]
    shape = {"heads": model.heads, "head_dim": head_dim, "device": device}
    found = speed.measure(specs, tokens=lengths, progress=progress, **shape)
    records.append([r for r in found if r.tags["attention"] in specs])


def _builds(spec: str, tokens: int) -> bool:
    """A Linformer cannot project to more tokens than there are; at shorter lengths it is refused one by one."""
    try:
        create_attention(spec, heads=1, head_dim=16, tokens=tokens)
    except ValueError:
        return False
    return True


def _errors(model: VisionTransformer, data: Dataset, images: np.ndarray, spec: str, seed: int) -> list[Record]:
    count = min(32, max(2, 2**23 // model.tokens**2))  # matrices of tokens by tokens, in float64: fewer if they are big
    sample = normalise(data.test.batch(images[:count])[0], data.mean, data.std)
    common = provenance(torch.device("cpu"), torch.float64)
    tags = {"attention": spec, "seed": seed}
    found = trained_error(model, sample)
    return [Record(name, value, n=len(sample), **common, tags=tags) for name, value in found.items()]


def _examples(
    folder: Path, records: Records, data: Dataset, models: dict[str, VisionTransformer], device: torch.device
) -> None:
    """Test images with every variant's prediction and map: those on which variants differ, those that most get wrong,
    and some that all get right."""
    images, labels = data.test.batch(data.test.order(0, 0)[:LOOKED_AT])
    x = normalise(images.to(device), data.mean, data.std)
    chosen: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with torch.inference_mode():
        for spec, model in models.items():
            best = torch.cat([model.eval()(part).softmax(-1) for part in x.split(100)]).max(-1)
            chosen[spec] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    wrong = np.sum([predicted != labels.numpy() for predicted, _ in chosen.values()], axis=0)
    order = pick_examples(wrong, len(models))
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
    records.append([Record("examples", len(labels), artefact="examples.npz"), *marks])


def pick_examples(wrong: np.ndarray, variants: int, count: int = EXAMPLES) -> np.ndarray:
    """Places of images, given how many variants are wrong about each: half of `count` where opinions differ most, a
    third that most get wrong, the rest right, whatever there is of each; the most wrong first."""
    divided = np.argsort(np.abs(2 * wrong - variants), kind="stable")
    divided = divided[(wrong[divided] > 0) & (wrong[divided] < variants)][: count // 2]
    failed = [i for i in np.argsort(-wrong, kind="stable") if wrong[i] and i not in divided][: count // 3]
    rest = [i for i in np.argsort(wrong, kind="stable") if i not in divided and i not in failed]
    found = np.array([*divided, *failed, *rest][:count], dtype=int)
    return found[np.argsort(-wrong[found], kind="stable")]


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
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())
