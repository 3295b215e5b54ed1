"""What a study measures beside accuracy: each thing once for its set of variants, stored as it is made.

What cannot be measured is said, and the rest goes on: nothing that was trained is without its page.
"""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import time
from collections.abc import Container, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linvit.data import Dataset, normalise
from linvit.files import write_atomically
from linvit.measure import speed
from linvit.measure.models import SPEEDS, MakeOptimizer, side_by_side
from linvit.measure.provenance import provenance
from linvit.measure.race import BASELINES, ROUNDS
from linvit.measure.trained import attention_maps, redrawn, redraws, trained_error
from linvit.models import ModelConfig, VisionTransformer
from linvit.models.cost import grid
from linvit.models.sampling import sample
from linvit.models.stems import from_levels, to_levels
from linvit.models.summary import summary
from linvit.progress import Progress, repeated
from linvit.records import Record, Records, Tag
from linvit.registry import parse_layers
from linvit.study.design import Study
from linvit.study.jobs import Job
from linvit.train import Experiment, load
from linvit.train.memory import peak_memory
from linvit.train.optimizers import make_optimizer

LENGTHS = (64, 256, 1024)
EXAMPLES, LOOKED_AT = 12, 500  # images shown, of so many tried
DRAWN_FOR = 1000  # test images at most that new draws are tried on
DRAWN = 10  # images by each next-pixel model


class Measuring:
    """The measurements of one study; `all` makes those that are missing.

    To end near a `deadline` (of time.monotonic) races have fewer rounds, and what comes last is left out, which is said
    and made up for by the next call: speeds of models come first, then memory, curves, errors, draws and examples.
    """

    def __init__(
        self, folder: Path, records: Records, data: Dataset, study: Study, jobs: list[Job], base: Experiment,
        device: torch.device, progress: Progress, deadline: float | None = None,
    ):  # fmt: skip
        self.folder, self.records, self.data, self.base, self.device = folder, records, data, base, device
        self.study, self.every = study, jobs
        self.progress, self.deadline = progress, deadline
        self.batch = base.length(len(data.train)).batch
        jobs = [job for job in jobs if not job.half]
        self.first = {job.variant: job for job in reversed(jobs)}  # of each variant, the job with the first seed
        self.configs = {v.id: self.first[v.id].experiment.model for v in study.variants if v.id in self.first}
        self.labels = {v.id: v.label for v in study.variants}
        self.jobs = {(job.variant, job.experiment.seed): job for job in jobs}
        self.failed: list[str] = []
        found = list(records)
        self.have = {(r.metric, r.tags.get("variant")) for r in found}
        self.known = {(r.metric, r.tags.get("variant"), r.tags.get("seed")) for r in found}
        self.timed = {(r.tags.get("variant"), r.tags.get("tokens")) for r in found if r.metric == "attention_time"}
        self.diverged = {(r.tags.get("variant"), r.tags.get("seed")) for r in found if r.metric == "diverged"}
        self.shown = {
            metric: {name for r in found if r.metric == metric for name in str(r.tags.get("variants")).split("\n")}
            for metric in ("examples", "samples", "model_summary")
        }

    def all(self) -> list[str]:
        """Sentences about what could not be measured, or was left out."""
        given = self.progress
        with repeated(given) as self.progress:
            if self.missing(*SPEEDS):  # ratios are measured side by side, so all are measured again
                with self.attempt("Speed"):
                    self.speed()
            self.memory()
            with self.attempt("Speed at other sizes"):
                self.curves()
            with self.attempt("Layers"):
                self.summaries()
            self.errors()
            if self.base.model.causal:
                with self.attempt("Samples"):
                    self.samples()
            else:
                self.draws()
                with self.attempt("Examples"):
                    self.examples()
        self.progress = given
        return self.failed

    def share(self, part: float) -> float | None:
        """The end of this part of the time that is left."""
        return None if self.deadline is None else (1 - part) * time.monotonic() + part * self.deadline

    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def left_out(self, what: str) -> None:
        self.failed.append(f"{what} was left out to keep the budget.")

    def missing(self, *names: str) -> list[str]:
        return [name for name in self.configs if any((metric, name) not in self.have for metric in names)]

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, MemoryError) as error:
            self.failed.append(f"{what} could not be measured: {str(error).partition(chr(10))[0]}.")

    def store(self, records: list[Record], name: str | None = None) -> None:
        """With the attention beside the variant, for whoever reads the lines."""

        def named(record: Record) -> Record:
            variant = str(name or record.tags["variant"])
            return record.tagged(variant=variant, attention=self.configs[variant].attention)

        self.records.append([named(record) for record in records])

    @staticmethod
    def baselines(base: Experiment) -> dict[str, ModelConfig]:
        return {name: base.model.model_copy(update={"attention": name}) for name in BASELINES}

    @staticmethod
    def optimizer(base: Experiment) -> MakeOptimizer:
        """The recipe's own, at a rate that leaves the weights alone: a training step is timed with it."""
        return partial(make_optimizer, base.recipe.model_copy(update={"lr": 1e-12}))

    def speed(self) -> None:
        """A variant with a recipe of its own takes its training step with that; batches are the base's for all."""
        jobs = {name: self.first[name].experiment for name in self.configs}
        usual = self.base.recipe.optimizer
        others = {name: self.optimizer(job) for name, job in jobs.items() if job.recipe.optimizer != usual}
        self.store(list(side_by_side(
            self.configs, baselines=self.baselines(self.base), device=self.device, batch=self.batch, rounds=ROUNDS,
            optimizer=self.optimizer(self.base), others=others, progress=self.progress,
            deadline=self.share(0.4),
        )))  # fmt: skip

    def memory(self) -> None:
        """Each in a process of its own, as many at a time as there are cores."""
        names = self.missing("peak_memory")
        with ThreadPoolExecutor(1 if self.device.type == "cuda" else min(4, os.cpu_count() or 1)) as pool:
            recipes = {name: self.first[name].experiment.recipe for name in names}
            found = {
                name: pool.submit(peak_memory, self.configs[name], recipes[name], self.device, self.batch)
                for name in names if not self.late()
            }  # fmt: skip
            for i, (name, record) in enumerate(found.items()):
                self.progress(i, len(names), f"memory of {self.labels[name]}")
                wait([record], None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
                if self.late():
                    for other in found.values():
                        other.cancel()  # those that have not begun
                with self.attempt(f"Memory of {self.labels[name]}"), suppress(CancelledError):
                    self.store([record.result()], name)
        if lost := [self.labels[name] for name in names if name not in found or found[name].cancelled()]:
            self.left_out(f"Memory of {', '.join(lost)}")

    def place(self, config: ModelConfig) -> speed.Setting:
        """Where this model's attentions are timed."""
        head_dim = config.head_dim or max(1, config.dim // config.heads)
        return speed.Setting(
            heads=config.heads, head_dim=head_dim, prefix=config.prefix_tokens, causal=config.causal, rounds=ROUNDS,
            device=self.device,
        )  # fmt: skip

    @staticmethod
    def layers(config: ModelConfig) -> list[str]:
        """The spec of each; of a model without layers, the one it would have."""
        return [str(spec) for spec in parse_layers(config.attention, config.depth)] or [config.attention]

    def curves(self) -> None:
        """Time over tokens, every model's own number among them. All again if one is new: ratios are side by side."""
        base, own = self.place(self.base.model), {name: self.place(config) for name, config in self.configs.items()}
        sizes = [math.prod(grid(config)) for config in (self.base.model, *self.configs.values())]
        images = sorted({*LENGTHS, *(min(size, LENGTHS[-1]) for size in sizes)})  # tokens but for the prefix
        if self.timed >= {(name, n + where.prefix) for name, where in own.items() for n in images}:
            return
        layers = {name: self.layers(config) for name, config in self.configs.items()}
        found = list(speed.curve(
            layers, tokens=[n + base.prefix for n in images], setting=base, own=own, progress=self.progress,
            deadline=self.share(0.6),
        ))  # fmt: skip
        self.records.append(found)
        there = {r.tags["tokens"] for r in found if "baseline" in r.tags}
        if lost := [f"{n + base.prefix:,}" for n in images if n + base.prefix not in there]:
            self.left_out(f"Speed at {' and '.join(filter(None, [', '.join(lost[:-1]), lost[-1]]))} tokens")

    def models(self) -> dict[tuple[str, int], Path]:
        """(variant, seed) → the folder of its best model; of runs that diverged, only where there is no other."""
        mine = [key for key, job in self.jobs.items() if job.experiment.data.identity == self.data.identity]
        places = {key: Path(self.jobs[key].folder) / "best" for key in mine}
        there = {key: path for key, path in places.items() if (path / "model.safetensors").exists()}
        sound = {key: path for key, path in there.items() if key not in self.diverged}
        names = {name for name, _ in sound}
        return {key: path for key, path in there.items() if key in sound or key[0] not in names}

    def each(self, metric: str, what: str, names: Container[str]) -> Iterator[tuple[str, int, Path]]:
        """(variant, seed, folder) of every model of these variants without this metric, until it is late."""
        models = {
            key: path for key, path in self.models().items() if key[0] in names and (metric, *key) not in self.known
        }
        for i, ((name, seed), path) in enumerate(models.items()):
            if self.late():
                self.left_out(f"{what} of {len(models) - i} models")
                return
            self.progress(i, len(models), f"{what.lower()} of {self.labels[name]}")
            yield name, seed, path

    def errors(self) -> None:
        """Distance from softmax of every trained model, on its own q and k."""
        images = self.data.test.order(0, 0)  # images of a folder lie class by class
        for name, seed, path in self.each("attention_error", "Distance from softmax", self.configs):
            with self.attempt(f"Distance of {self.labels[name]} from softmax"):
                model = load(path)
                count = min(
                    32, max(2, 2**23 // model.tokens**2)
                )  # matrices of tokens², in float64: fewer if they are big
                sample = _seen(self.data.test.batch(images[:count])[0], model)
                common, tags = provenance(torch.device("cpu"), torch.float64), dict[str, Tag](seed=seed)
                units = {"attention_entropy": "nat"}
                self.store([
                    Record(metric, value, units.get(metric, "fraction"), n=len(sample), **common, tags=tags)
                    for metric, value in trained_error(model, sample).items()
                ], name)  # fmt: skip

    def draws(self) -> None:
        """What chance alone, in drawing random features, does to the accuracy of every trained model that has them."""
        random = set()
        for name, config in self.configs.items():
            where, tokens = self.place(config), config.prefix_tokens + math.prod(grid(config))
            if any(redraws(where.attention(spec, tokens)) for spec in set(self.layers(config))):
                random.add(name)
        test = self.data.test
        some = test.some(test.order(0, 0)[:DRAWN_FOR])
        for name, seed, path in self.each("draw_spread", "Spread over draws", random):
            with self.attempt(f"Spread of {self.labels[name]} over draws of its features"):
                model = load(path).to(self.device)
                about = model.about  # a start brings its own statistics
                found = redrawn(model, some, self.data.classes, about["mean"], about["std"], self.device)
                common, tags = provenance(self.device, torch.float32), dict[str, Tag](seed=seed, draws=len(found))
                values = {"draw_spread": statistics.stdev(found), "redrawn_accuracy": statistics.fmean(found)}
                self.store([
                    Record(metric, value, "fraction", n=len(some), **common, tags=tags)
                    for metric, value in values.items()
                ], name)  # fmt: skip

    def summaries(self) -> None:
        """The layers of every variant's model, with shapes and parameters."""
        if not set(self.configs) - self.shown["model_summary"]:
            return
        told = {name: [asdict(layer) for layer in summary(VisionTransformer(config))]
                for name, config in self.configs.items()}  # fmt: skip
        write_atomically(self.folder / "models.json", json.dumps(told, ensure_ascii=False))
        tags: dict[str, Tag] = {"variants": "\n".join(told)}
        self.records.append([Record("model_summary", len(told), "count", artefact="models.json", tags=tags)])

    def samples(self) -> None:
        """Images that every variant's first model draws, and as many real ones as it sees them."""
        firsts = {name: path for (name, _), path in reversed(self.models().items())}
        if not set(firsts) - self.shown["samples"]:
            return
        if self.late():
            return self.left_out("Drawing images")
        config, test = self.base.model, self.data.test
        images = normalise(test.batch(test.order(0, 0)[:DRAWN])[0], (0.0,), (1.0,))
        found = {"real": from_levels(to_levels(images, config), config)}
        for i, (name, path) in enumerate(firsts.items()):
            self.progress(i, len(firsts), f"images drawn by {self.labels[name]}")
            found[f"drawn/{name}"] = sample(load(path).to(self.device), DRAWN)
        arrays = {name: drawn.numpy().transpose(0, 2, 3, 1) for name, drawn in found.items()}
        _save_arrays(self.folder / "samples.npz", arrays)
        tags: dict[str, Tag] = {"variants": "\n".join(firsts)}
        self.records.append([Record("samples", DRAWN, "count", artefact="samples.npz", tags=tags)])

    def examples(self) -> None:
        """Test images with every variant's prediction and map: those on which variants differ, those that most get
        wrong, and some that all get right. And one training image as the model sees it."""
        firsts = {name: path for (name, _), path in reversed(self.models().items())}
        if not set(firsts) - self.shown["examples"]:
            return
        if self.late():
            return self.left_out("A look at examples")
        self.progress(0, 1, "examples")
        models = {name: load(path).to(self.device) for name, path in firsts.items()}
        images, labels = self.data.test.batch(self.data.test.order(0, 0)[:LOOKED_AT])
        said: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        with torch.inference_mode():
            for name, model in models.items():
                parts = (_seen(part.to(self.device), model) for part in images.split(100))
                best = torch.cat([model.eval()(part).softmax(-1) for part in parts]).max(-1)
                said[name] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        wrong = np.sum([predicted != labels.numpy() for predicted, _ in said.values()], axis=0)
        order = pick_examples(wrong, len(models))
        arrays: dict[str, np.ndarray] = {
            "images": images.numpy()[order].transpose(0, 2, 3, 1), "labels": labels.numpy()[order],
        }  # fmt: skip
        for name, model in models.items():
            arrays[f"predictions/{name}"], arrays[f"confidence/{name}"] = said[name][0][order], said[name][1][order]
            maps = attention_maps(model, _seen(images[order].to(self.device), model))
            if maps is not None:
                arrays[f"maps/{name}"] = maps.float().cpu().numpy()
        _save_arrays(self.folder / "examples.npz", arrays)
        augmented = self._illustration()
        self.records.append([
            Record("examples", len(order), "count", artefact="examples.npz", tags={"variants": "\n".join(models)}),
            Record("illustration", augmented, "count", artefact="illustration.npz"),
        ])  # fmt: skip

    def _illustration(self) -> int:
        """One training image, the grid it is cut into, and what augmentation makes of it."""
        images, labels = self.data.train.batch(slice(0, 1))
        augment = self.data.augment(**self.base.recipe.augmentation() | {"mixup": 0.0, "cutmix": 0.0})
        seen = torch.cat([augment(images, labels, torch.zeros(1, dtype=torch.long), epoch, 0)[0] for epoch in range(8)])
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.data.mean, self.data.std))
        pixels = ((seen * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).numpy().transpose(0, 2, 3, 1)
        cut = np.array(grid(self.base.model))
        arrays = {"original": images[0].numpy().transpose(1, 2, 0), "grid": cut, "augmented": pixels}
        _save_arrays(self.folder / "illustration.npz", arrays)
        return len(pixels)


def _seen(images: Tensor, model: VisionTransformer) -> Tensor:
    """As the model was trained to see them: one that started from trained weights has the start's statistics."""
    return normalise(images, model.about["mean"], model.about["std"])


def pick_examples(wrong: np.ndarray, variants: int, count: int = EXAMPLES) -> np.ndarray:
    """Places of images, given how many variants are wrong about each: half of `count` where opinions differ most, a
    third that most get wrong, the rest right, whatever there is of each; the most wrong first."""
    divided = np.argsort(np.abs(2 * wrong - variants), kind="stable")
    divided = divided[(wrong[divided] > 0) & (wrong[divided] < variants)][: count // 2]
    failed = [i for i in np.argsort(-wrong, kind="stable") if wrong[i] and i not in divided][: count // 3]
    rest = [i for i in np.argsort(wrong, kind="stable") if i not in divided and i not in failed]
    found = np.array([*divided, *failed, *rest][:count], dtype=int)
    return found[np.argsort(-wrong[found], kind="stable")]


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(path, buffer.getvalue())
