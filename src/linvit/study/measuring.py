"""What a study measures besides accuracy: each thing once for its set of variants, stored as soon as it is known.

What cannot be measured is noted, and the rest continues: whatever was trained gets its page.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from linvit.attention import has_random_features
from linvit.data import Dataset, normalise
from linvit.devices import amp_dtype
from linvit.execute import DatasetCache, Work
from linvit.files import write_atomically
from linvit.ledger import open_ledger
from linvit.measure.models import SPEEDS, MakeOptimizer, model_calls, side_by_side
from linvit.measure.provenance import provenance
from linvit.measure.race import BASELINES, MIN_ROUNDS, ROUNDS, timed
from linvit.measure.speed import layer_speed
from linvit.measure.threads import use_threads
from linvit.measure.timing import Timing
from linvit.measure.trained import REDRAWS, attention_maps, redrawn, trained_error
from linvit.models import VisionTransformer
from linvit.models.sampling import sample
from linvit.models.stems import from_levels, to_levels
from linvit.models.summary import summary
from linvit.progress import Progress, repeated
from linvit.records import Record, Tag
from linvit.registry import parse_layers
from linvit.schemas.experiment import Experiment
from linvit.schemas.model import ModelConfig
from linvit.schemas.study import Study
from linvit.study.jobs import StudyJob
from linvit.training.checkpoint import load_into
from linvit.training.events import Event, Progressed
from linvit.training.memory import peak_memory
from linvit.training.optimizers import make_optimizer

LENGTHS = (64, 256, 1024)  # tokens at which attentions are timed
EXAMPLES, EXAMPLE_POOL = 12, 500  # images shown, and images they are chosen from
REDRAW_IMAGES, MIN_REDRAW_IMAGES = 1000, 100  # test images on which redrawn features are evaluated
PACED = 4  # images of a pass that is timed to plan the others
SAMPLES = 10  # images drawn by each next-pixel model
ERROR_IMAGES = 32  # on which attention is compared with softmax


class MeasureStudy(Work):
    """The measurements that are missing in a study's folder; they can be made on any machine that sees the folder."""

    result_type = TypeAdapter(list[str])
    folder: str
    jobs: tuple[StudyJob, ...]
    seconds: float | None = None  # in which it should end
    threads: int | None = None

    def run(self, datasets: DatasetCache, on_event: Callable[[Event], None]) -> list[str]:
        """Sentences about what could not be measured, or was left out."""

        def progress(done: int, total: int, what: str) -> None:
            on_event(Progressed(done, total, what))

        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        with use_threads(self.threads), repeated(progress) as tell:
            return Measuring(self, datasets.find(self.experiment), tell, deadline).run()

    @property
    def storage(self) -> Path:
        return Path(self.folder)

    def absolute(self) -> MeasureStudy:
        return self.model_copy(update={"jobs": tuple(job.absolute() for job in self.jobs)})


class Measuring:
    """The measurements of one study.

    To end near a `deadline` (of time.monotonic) races have fewer rounds, and what comes last is left out, which is
    noted; the next call adds it. Speeds of models come first, then memory, curves, errors, redraws and examples.
    """

    def __init__(self, work: MeasureStudy, data: Dataset, progress: Progress, deadline: float | None = None):
        self.folder, self.data, self.base = Path(work.folder), data, work.experiment
        self.device, self.progress, self.deadline = torch.device(work.device), progress, deadline
        self.dtype = amp_dtype(self.base.recipe.amp, self.device)  # as it was trained
        self.ledger = open_ledger(self.folder)
        study = Study.read(Study.path(self.folder))
        self.batch = self.base.length(len(data.train)).batch
        full = [job for job in work.jobs if job.full]
        self.first = {job.variant: job for job in reversed(full)}  # of each variant, the job with the first seed
        self.configs = {v.id: self.first[v.id].experiment.model for v in study.variants if v.id in self.first}
        self.labels = {v.id: v.label for v in study.variants}
        self.jobs = {
            (job.variant, job.experiment.seed): job for job in full if job.experiment.data.identity == data.identity
        }
        self.problems: list[str] = []
        self.built: dict[ModelConfig, VisionTransformer] = {}

    def run(self) -> list[str]:
        calls = (len(self.configs) + len(BASELINES)) * (2 + MIN_ROUNDS)
        if self.missing(*SPEEDS):  # ratios are measured side by side, so all are measured again
            passes = 4 * calls  # a step takes as long as three
            if self.enough_for(1.0, passes):
                self.batch = self.affordable(0.4, self.batch, passes)
                with self.attempt("Speed"):
                    self.speed()
            else:
                self.leave_out("Speed")
        self.memory()
        with self.attempt("Speed at other sizes"):
            self.curves()
        with self.attempt("Layers"):
            self.summaries()
        self.errors()
        if self.base.model.causal:
            with self.attempt("Samples"):
                self.samples()
        elif not self.base.model.pixels and not self.data.several:  # both are about the one class of an image
            self.redraws()
            with self.attempt("Examples"):
                self.examples()
        return self.problems

    def share(self, part: float) -> float | None:
        """The end of this part of the time that is left."""
        return None if self.deadline is None else (1 - part) * time.monotonic() + part * self.deadline

    @cached_property
    def pace(self) -> float:
        """Seconds for which the base's model looks at an image."""
        call = model_calls(self.base.model, self.device, PACED, build=self.build, dtype=self.dtype)["inference"]
        timed(call, 1, self.device)
        return timed(call, 1, self.device)["wall"] / PACED

    def affordable(self, part: float, most: int, passes: int) -> int:
        """How many images, at most so many, this number of passes can take in this part of the time that is left."""
        if self.deadline is None:
            return most
        left = part * max(0.0, self.deadline - time.monotonic())
        return max(1, min(most, int(left / (passes * self.pace))))

    def enough_for(self, part: float, passes: float) -> bool:
        """Whether this part of the time that is left is enough for so many passes of one image."""
        return self.deadline is None or part * (self.deadline - time.monotonic()) >= passes * self.pace

    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def leave_out(self, what: str) -> None:
        self.problems.append(f"{what} was left out to keep the budget.")

    def missing(self, *names: str) -> list[str]:
        return [v for v in self.configs if any(not self.ledger.find(metric, variant=v) for metric in names)]

    def shown(self, metric: str) -> set[str]:
        """The variants that an artefact already shows."""
        return {name for r in self.ledger.find(metric) for name in str(r.tags.get("variants")).split("\n")}

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, MemoryError) as error:
            self.problems.append(f"{what} could not be measured: {str(error).partition(chr(10))[0]}.")

    def build(self, config: ModelConfig) -> VisionTransformer:
        """One model for all seeds; what is trained is loaded into it."""
        key = config.model_copy(update={"seed": 0})
        if key not in self.built:
            self.built[key] = VisionTransformer(config)
        return self.built[key]

    def load(self, name: str, folder: Path, device: torch.device | None = None) -> VisionTransformer:
        """A variant's trained model, until the next one of its shape is loaded."""
        return load_into(self.build(self.configs[name]), folder).to(device or self.device)

    def store(self, records: Sequence[Record], name: str | None = None) -> None:
        """With the variant and its attention."""
        named = []
        for record in records:
            variant = str(name or record.tags["variant"])
            named.append(record.tagged(variant=variant, attention=self.configs[variant].attention))
        self.ledger.append(named)

    def store_artefact(self, metric: str, count: int, file: str, variants: Sequence[str] = ()) -> None:
        tags: dict[str, Tag] = {"variants": "\n".join(variants)} if variants else {}
        self.ledger.append([Record(metric, count, "count", artefact=file, tags=tags)])

    def speed(self) -> None:
        """A variant with a recipe of its own takes its training step with that; batches are the base's for all."""
        recipes = {name: self.first[name].experiment for name in self.configs}
        usual = self.base.recipe.optimizer
        others = {name: _still(job) for name, job in recipes.items() if job.recipe.optimizer != usual}
        found = side_by_side(
            self.configs,
            baselines={name: self.base.model.model_copy(update={"attention": name}) for name in BASELINES},
            timing=Timing(batch=self.batch, rounds=ROUNDS, device=self.device, dtype=self.dtype),
            optimizer=_still(self.base),
            others=others,
            build=self.build,
            progress=self.progress,
            deadline=self.share(0.4),
        )
        self.store(list(found))
        for model in self.built.values():
            model.cpu().zero_grad()  # memory is measured next

    def memory(self) -> None:
        """Each in a process of its own, as many at a time as there are cores."""
        names = self.missing("peak_memory")
        with ThreadPoolExecutor(1 if self.device.type == "cuda" else min(4, os.cpu_count() or 1)) as pool:
            found = {name: pool.submit(self._peak_memory, name) for name in names if not self.late()}
            for i, (name, record) in enumerate(found.items()):
                self.progress(i, len(names), f"memory of {self.labels[name]}")
                wait([record], None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
                if self.late():
                    for other in found.values():
                        other.cancel()  # those that have not started
                with self.attempt(f"Memory of {self.labels[name]}"), suppress(CancelledError):
                    self.store([record.result()], name)
        if lost := [self.labels[name] for name in names if name not in found or found[name].cancelled()]:
            self.leave_out(f"Memory of {', '.join(lost)}")

    def _peak_memory(self, name: str) -> Record:
        """Its process is ended by the deadline."""
        left = None if self.deadline is None else max(0.1, self.deadline - time.monotonic())
        return peak_memory(self.configs[name], self.first[name].experiment.recipe, self.device, self.batch, left)

    def curves(self) -> None:
        """Time over tokens, every model's own number among them. All again if one is new: ratios are side by side."""
        base, sites = self.base.model.site, {name: config.site for name, config in self.configs.items()}
        sizes = [config.image_tokens for config in (self.base.model, *self.configs.values())]
        images = sorted({*LENGTHS, *(min(size, LENGTHS[-1]) for size in sizes)})  # tokens without the prefix
        timed = {(r.tags.get("variant"), r.tags.get("tokens")) for r in self.ledger.find("attention_time")}
        if timed >= {(name, n + where.prefix) for name, where in sites.items() for n in images}:
            return
        layers = {name: _layer_specs(config) for name, config in self.configs.items()}
        tokens = [n + base.prefix for n in images]
        found = list(
            layer_speed(
                layers,
                base,
                tokens=tokens,
                timing=Timing(device=self.device, rounds=ROUNDS, dtype=self.dtype),
                sites=sites,
                progress=self.progress,
                deadline=self.share(0.6),
            )
        )
        self.ledger.append(found)
        measured = {r.tags["tokens"] for r in found if "baseline" in r.tags}
        if lost := [f"{n:,}" for n in tokens if n not in measured]:
            self.leave_out(f"Speed at {' and '.join(filter(None, [', '.join(lost[:-1]), lost[-1]]))} tokens")

    def models(self) -> dict[tuple[str, int], Path]:
        """(variant, seed) → the folder of its best model; of runs that diverged, only where there is no other."""
        places = {key: Path(job.folder) / "best" for key, job in self.jobs.items()}
        present = {key: path for key, path in places.items() if (path / "model.safetensors").exists()}
        diverged = {(r.tags.get("variant"), r.tags.get("seed")) for r in self.ledger.find("diverged")}
        sound = {name for name, seed in present if (name, seed) not in diverged}
        return {key: path for key, path in present.items() if key not in diverged or key[0] not in sound}

    def first_models(self) -> dict[str, Path]:
        return {name: path for (name, _), path in reversed(self.models().items())}

    def each_model(
        self, metric: str, what: str, names: Container[str], passes: float
    ) -> Iterator[tuple[str, int, Path]]:
        """(variant, seed, folder) of every model of these variants without this metric, until there is no time for
        another: for this many passes of one image, or as long as one before took."""
        left = {
            (name, seed): path
            for (name, seed), path in self.models().items()
            if name in names and not self.ledger.find(metric, variant=name, seed=seed)
        }
        longest = 0.0
        for i, ((name, seed), path) in enumerate(left.items()):
            begun = time.monotonic()
            if not self.enough_for(1.0, passes) or (self.deadline and begun + longest > self.deadline):
                return self.leave_out(f"{what} of {len(left) - i} models")
            self.progress(i, len(left), f"{what.lower()} of {self.labels[name]}")
            yield name, seed, path
            longest = max(longest, time.monotonic() - begun)

    def errors(self) -> None:
        """Distance from softmax of every trained model, on its own q and k."""
        order = self.data.test.order(0, 0)  # images of a folder are sorted by class
        for name, seed, path in self.each_model(
            "attention_error", "Distance from softmax", self.configs, 4 * ERROR_IMAGES
        ):
            with self.attempt(f"Distance of {self.labels[name]} from softmax"):
                model = self.load(name, path, torch.device("cpu"))
                count = min(
                    ERROR_IMAGES, max(2, 2**23 // model.tokens**2)
                )  # float64 matrices of tokens²: fewer if they are big
                images = _normalised(self.data.test.batch(order[:count])[0], model)
                where, tags = provenance(torch.device("cpu"), torch.float64), dict[str, Tag](seed=seed)
                units = {"attention_entropy": "nat"}
                self.store(
                    [
                        Record(metric, value, units.get(metric, "fraction"), n=len(images), **where, tags=tags)
                        for metric, value in trained_error(model, images).items()
                    ],
                    name,
                )

    def redraws(self) -> None:
        """The effect of redrawing random features on the accuracy of every trained model that has them."""
        random = {name for name, config in self.configs.items() if has_random_features(config.attention)}
        test, most = self.data.test, min(len(self.data.test), REDRAW_IMAGES)
        left = [key for key in self.models() if key[0] in random and key[0] in self.missing("draw_spread")]
        count = self.affordable(0.5, most, REDRAWS * max(1, len(left)))
        if left and not self.late() and count < min(most, MIN_REDRAW_IMAGES):
            return self.leave_out(f"Spread over redrawn features of {len(left)} models")
        some = test.some(test.order(0, 0)[:count])
        for name, seed, path in self.each_model("draw_spread", "Spread over redrawn features", random, REDRAWS * count):
            with self.attempt(f"Spread of {self.labels[name]} over redrawn features"):
                model = self.load(name, path)
                about = model.about  # a pretrained start has its own statistics
                found = redrawn(model, some, self.data.classes, about["mean"], about["std"], self.device)
                where, tags = provenance(self.device, torch.float32), dict[str, Tag](seed=seed, draws=len(found))
                values = {"draw_spread": statistics.stdev(found), "redrawn_accuracy": statistics.fmean(found)}
                self.store(
                    [Record(metric, v, "fraction", n=len(some), **where, tags=tags) for metric, v in values.items()],
                    name,
                )

    def summaries(self) -> None:
        """The layers of every variant's model, with shapes and parameters."""
        if not set(self.configs) - self.shown("model_summary"):
            return
        layers = {
            name: [asdict(layer) for layer in summary(self.build(config))] for name, config in self.configs.items()
        }
        write_atomically(self.folder / "models.json", json.dumps(layers, ensure_ascii=False))
        self.store_artefact("model_summary", len(layers), "models.json", list(layers))

    def samples(self) -> None:
        """Images that every variant's first model draws, and as many real ones as it sees them."""
        firsts = self.first_models()
        if not set(firsts) - self.shown("samples"):
            return
        if self.late():
            return self.leave_out("Drawing images")
        config, test = self.base.model, self.data.test
        images = normalise(test.batch(test.order(0, 0)[:SAMPLES])[0], (0.0,), (1.0,))
        found = {"real": from_levels(to_levels(images, config), config)}
        for i, (name, path) in enumerate(firsts.items()):
            self.progress(i, len(firsts), f"images drawn by {self.labels[name]}")
            found[f"drawn/{name}"] = sample(self.load(name, path), SAMPLES)
        arrays = {name: drawn.numpy().transpose(0, 2, 3, 1) for name, drawn in found.items()}
        _save_arrays(self.folder / "samples.npz", arrays)
        self.store_artefact("samples", SAMPLES, "samples.npz", list(firsts))

    def examples(self) -> None:
        """Test images with every variant's prediction and attention map: those on which variants differ, those that
        most get wrong, and some that all get right. And one training image as the model sees it."""
        firsts = self.first_models()
        if not set(firsts) - self.shown("examples"):
            return
        count = self.affordable(0.8, EXAMPLE_POOL, len(firsts))
        if self.late() or count < EXAMPLES:
            return self.leave_out("Selecting examples")
        self.progress(0, 1, "examples")
        images, labels = self.data.test.batch(self.data.test.order(0, 0)[:count])
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # classes and their probabilities
        for name, path in firsts.items():
            model = self.load(name, path)
            with torch.inference_mode():
                parts = (_normalised(part.to(self.device), model) for part in images.split(100))
                best = torch.cat([model(part).softmax(-1) for part in parts]).max(-1)
            found[name] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        wrong = np.sum([predicted != labels.numpy() for predicted, _ in found.values()], axis=0)
        order = pick_examples(wrong, len(firsts))
        arrays = {"images": images.numpy()[order].transpose(0, 2, 3, 1), "labels": labels.numpy()[order]}
        for name, path in firsts.items():
            arrays[f"predictions/{name}"], arrays[f"confidence/{name}"] = (part[order] for part in found[name])
            model = self.load(name, path)
            maps = attention_maps(model, _normalised(images[order].to(self.device), model))
            if maps is not None:
                arrays[f"maps/{name}"] = maps.float().cpu().numpy()
        _save_arrays(self.folder / "examples.npz", arrays)
        augmented = self._illustrate()
        self.store_artefact("examples", len(order), "examples.npz", list(firsts))
        self.store_artefact("illustration", augmented, "illustration.npz")

    def _illustrate(self) -> int:
        """One training image, the grid it is cut into, and what augmentation makes of it."""
        images, labels = self.data.train.batch(slice(0, 1))
        augment = self.data.augment(**self.base.recipe.augmentation() | {"mixup": 0.0, "cutmix": 0.0})
        seen = torch.cat([augment(images, labels, torch.zeros(1, dtype=torch.long), epoch, 0)[0] for epoch in range(8)])
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.data.mean, self.data.std))
        pixels = ((seen * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).numpy().transpose(0, 2, 3, 1)
        original, grid = images[0].numpy().transpose(1, 2, 0), np.array(self.base.model.grid)
        _save_arrays(self.folder / "illustration.npz", {"original": original, "grid": grid, "augmented": pixels})
        return len(pixels)


def _still(experiment: Experiment) -> MakeOptimizer:
    """The recipe's optimizer with a rate that leaves the weights alone: a training step is timed with it."""
    return partial(make_optimizer, experiment.recipe.model_copy(update={"lr": 1e-12}))


def _layer_specs(config: ModelConfig) -> list[str]:
    """The spec of each layer; of a model without layers, the one it would have."""
    return [str(spec) for spec in parse_layers(config.attention, config.depth)] or [config.attention]


def _normalised(images: Tensor, model: VisionTransformer) -> Tensor:
    """As the model was trained: a pretrained start has its own statistics."""
    return normalise(images, model.about["mean"], model.about["std"])


def pick_examples(wrong: np.ndarray, variants: int, count: int = EXAMPLES) -> np.ndarray:
    """Indices of images, given how many variants are wrong about each: half of `count` on which variants differ most, a
    third that most get wrong, the rest right, as far as there are; the most wrong first."""
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
