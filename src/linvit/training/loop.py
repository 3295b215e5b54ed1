"""The training loop: learning rate, step, validate, read, save, tell.

Data order, augmentation, dropout and redraws are functions of (seed, epoch or step), so a run that was killed and
continued ends with the same weights, bit for bit, as one that never was. No step synchronises with the device: sums
and the first step that gave a number that is not finite are kept there and read every few steps. From such a step on
the optimizer stands still, so that the layer it came from can be found afterwards.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from linvit import ranks
from linvit.data import Dataset, Split
from linvit.data.feed import AHEAD, Feed, ahead
from linvit.devices import amp_dtype, autocast, wait
from linvit.files import append_line, read_lines, write_atomically
from linvit.models import VisionTransformer
from linvit.randomness import generator
from linvit.schemas.experiment import Experiment
from linvit.signals import interrupted, stopped
from linvit.training.card import model_card
from linvit.training.checkpoint import load_checkpoint, save_checkpoint, save_config, save_model
from linvit.training.events import Began, Diverged, Listener, Noted, Progressed, Stepped, Validated, tell
from linvit.training.features import remembering
from linvit.training.files import load_tensors
from linvit.training.heads import fitted_head, mean_head
from linvit.training.optimizers import make_optimizer
from linvit.training.recipe import learning_rate
from linvit.training.sharing import Shared, share_gradients, share_norms
from linvit.training.start import normalised, started
from linvit.training.tasks import TASKS

LEAST_SCALE = 1e-4  # of gradients in half precision: it halves with each step that overflows, from 65,536
WARM, TRIED = 2, 256  # steps before a rate is taken, and images that are evaluated for it
FIRST, TIMED_STEPS = 4, 4  # images of a step of the warm-up, and steps in which a rate is taken, at least
READ = 10  # steps between two looks at what the device has summed up


@dataclass
class Tally:
    """What a checkpoint remembers besides tensors."""

    step: int = 0
    seconds: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of this epoch: loss, right, images
    best: float = -math.inf  # the highest score of a validation, as the task selects
    floor: float = -math.inf  # below which none is kept
    best_row: dict[str, float] = field(default_factory=dict)  # of the model that is kept
    lowest_loss: float = math.inf
    stale: int = 0  # validations since the lowest loss
    stopped: bool = False
    scaler: dict[str, Any] = field(default_factory=dict)
    first_row: dict[str, float] = field(default_factory=dict)  # the validation of a start, before any step
    norms: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of gradients: the epoch's sum, the largest of all


class Batch(NamedTuple):
    step: int
    epoch: int
    indices: Tensor  # on the host
    images: Tensor
    labels: Tensor


class Rate(NamedTuple):
    steps: float  # per second
    images: float  # evaluated per second


class Training:
    """One training and its parts; what cannot be built is an error before anything is written."""

    def __init__(self, experiment: Experiment, dataset: Dataset, device: torch.device, listeners: Sequence[Listener]):
        dataset = normalised(dataset, experiment)
        self.first = ranks.number() == 0  # who alone writes and tells
        self.experiment, self.dataset, self.device = experiment, dataset, device
        self.listeners = listeners if self.first else ()
        recipe = self.recipe = experiment.recipe
        self.task = TASKS[experiment.task](experiment, dataset, device)
        model, self.headless = started(experiment, dataset)
        self.model = model.to(device)
        share_norms(self.model)
        self.averaged = copy.deepcopy(self.model).requires_grad_(False) if recipe.ema else self.model
        self.modules: dict[str, nn.Module] = {"model": self.model}
        if recipe.ema:
            self.modules["average"] = self.averaged
        self.forward = torch.compile(self.model) if recipe.compile else self.model
        self.optimizer = make_optimizer(recipe, self.model)
        self.dtype = amp_dtype(recipe.amp, device)
        self.scaled = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.scaled)
        self.batch, self.per_epoch, self.total = experiment.length(len(dataset.train))
        self._check_ranks()
        self.feed = Feed(dataset.train, device)
        self.tally = Tally()
        self.diverged: Diverged | None = None
        self.shown = math.nan, 0.0  # loss and accuracy when the device was last asked

    def _check_ranks(self) -> None:
        if ranks.count() == 1:
            return
        ranks.agree("the experiment", self.experiment.id)
        if not self.task.mean_over_images:
            raise ValueError(
                f"task {self.experiment.task} cannot be shared by processes: its loss depends on the whole batch"
            )
        if self.batch < ranks.count():
            raise ValueError(f"batch_size={self.batch} is too few for {ranks.count()} processes: each needs an image")

    def fit(self, folder: Path, checkpoint_seconds: float) -> None:
        """Train in the folder, or resume there. Afterwards `diverged` says whether and where; test is never read."""
        self._resume(folder)
        tally, begun, first = self.tally, time.perf_counter(), self.tally.step
        earlier, saved = tally.seconds, begun
        with interrupted() as stop, self._begun():
            for batch in self._batches():
                rate = self._step(batch)
                tally.step += 1
                ends = tally.step % self.per_epoch == 0 or tally.step == self.total
                late = time.perf_counter() - saved > checkpoint_seconds
                stopping, late = ranks.highest(stop(), late)  # asked once: what is said to be saved must be
                due = stopping or tally.step == self.total or late
                if (ends or due or tally.step % READ == 0) and not self._read():
                    return
                tally.seconds = earlier + time.perf_counter() - begun
                row = self._validate(folder, rate) if ends else {}
                if self.diverged:
                    return
                if due or tally.stopped:
                    self._save(folder)
                    saved = time.perf_counter()
                self._tell(row, (tally.step - first) / (time.perf_counter() - begun))
                if stopping:
                    raise stopped(stopping, f"saved at step {tally.step} of {self.total} in {folder}")
                if tally.stopped:
                    break
            if stopping := ranks.highest(stop())[0]:
                raise stopped(stopping, f"trained to the end, but not tested, in {folder}")
        if self.first:
            save_model(folder / "last", self.averaged, step=tally.step)

    def evaluate(self, model: nn.Module, split: Split) -> Any:
        """As the task does, each rank a part of every batch; where nothing is trained, with the features of `heads`."""
        if ranks.count() > 1:
            return self.task.evaluate(Shared(model), split)
        frozen = not self.total and self.recipe.start_head == "fitted"
        with remembering(model, self.device, self.dtype) if frozen else nullcontext(model) as able:
            return self.task.evaluate(able, split)

    def rate(self, seconds: float) -> Rate:
        """The speed of real steps, measured for about this many seconds after two to warm up. On a CPU, whose time
        grows with the batch, steps that would take long have fewer images. Nothing is written, and the model must not
        be used afterwards."""
        self.total, start, whole = 10**9, 0.0, self.batch  # however short it is meant to be
        self.batch = min(whole, FIRST) if self.device.type == "cpu" and ranks.count() == 1 else whole
        with self._begun():
            for count, batch in enumerate(self._batches()):
                self._step(batch)
                if self.device.type != "cpu" and count > WARM and (count - WARM) % READ:
                    continue  # a device is asked as seldom as in a training
                wait(self.device)
                now = time.perf_counter()
                if count == WARM - 1:  # of the warm-up, the last step tells how many images there is time for
                    fit = seconds / TIMED_STEPS * self.batch / max(now - start, 1e-9)
                    self.batch = max(1, min(whole, int(fit))) if self.batch < whole else whole
                start = now if count < WARM else start
                if count > WARM and now - start >= seconds:
                    break
        steps = (count - WARM + 1) / (now - start) * self.batch / whole
        held, tried = self.dataset.validation, max(1, min(TRIED, round(seconds * steps * whole)))
        some = Split(held.store, held.rows[:tried], held.labels[:tried])
        for _ in range(2 if tried < TRIED else 1):  # of few, the first time is for warming up
            start = time.perf_counter()
            self.task.evaluate(self.averaged, some)
        return Rate(steps, len(some) / (time.perf_counter() - start))

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Ready for steps; the caller's random numbers stay as they were."""
        self.sums = torch.tensor(self.tally.sums, device=self.device)
        self.norms = torch.tensor(self.tally.norms, device=self.device)
        self.bad_step = torch.tensor(-1.0, device=self.device)
        self.model.train()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield

    def _resume(self, folder: Path) -> None:
        found = load_checkpoint(folder / "last", self.modules, self.optimizer)
        step = found[0]["step"] if found else 0  # agreed before the first rank writes there
        ranks.agree("the step to resume at (is --out on storage that all machines share?)", str(step))
        if found is None:
            what = f"{self.model.config.attention} on {self.model.tokens} tokens"
            size = f"{self.model.parameter_count():,} parameters; {len(self.dataset.train):,} images"
            text = f"{what}, {size} of {self.dataset.name}, {self.total:,} steps of {self.batch}"
            if start := self.experiment.start:
                head = "with a new head" if self.headless else "including its head"
                head = "with a fitted head" if self.recipe.start_head == "fitted" else head
                text += f"; starts from {start.name}, {head}"
            tell(self.listeners, Began(text, 0, self.total))
            self._look_at_start(folder)
        else:
            facts, complaints = found
            self.tally = Tally(**facts)
            self._know_best(folder / "best" / "model.safetensors")
            if self.tally.scaler:
                self.scaler.load_state_dict(self.tally.scaler)
            for complaint in complaints:
                tell(self.listeners, Noted(f"{complaint}; resuming from an older checkpoint"))
            text = f"resuming at step {self.tally.step} of {self.total}"
            tell(self.listeners, Began(text, self.tally.step, self.total))
        if not self.first:
            return
        log = folder / "log.jsonl"
        rows = [row for row in read_lines(log) if row["step"] <= self.tally.step]
        if first := self.tally.first_row:
            before = {f"validation_{name}": value for name, value in first.items()}
            rows = [{"epoch": 0.0, "step": 0, **before}, *(row for row in rows if row["step"])]
        write_atomically(log, "".join(json.dumps(row) + "\n" for row in rows))  # without what will be done again
        for name in ("best", "last"):
            save_config(folder / name, self.experiment.model, self.dataset)

    @torch.no_grad()
    def _look_at_start(self, folder: Path) -> None:
        """A start is validated before its first step, with a head from class means where it has none of its own, or
        with a fitted head. It is kept until one comes that validation images cannot tell from the best; one with a
        fitted head until one comes that is as good."""
        if self.experiment.start is None:
            return
        for name, value in self._first_head().items():
            getattr(self.model.head, name).copy_(value)
            if self.averaged is not self.model:
                getattr(self.averaged.head, name).copy_(value)
        result = self.evaluate(self.averaged, self.dataset.validation)
        self.tally.first_row = dict(self.task.row(result))
        if self.recipe.start_head == "fitted":
            self.tally.floor = self.task.select(result)[0]
        self._keep_if_best(folder, result)

    def _first_head(self) -> dict[str, Tensor]:
        """Empty where the model begins with the head that it has."""
        if self.recipe.start_head == "fitted":

            def progress(done: int, total: int, what: str) -> None:
                tell(self.listeners, Progressed(done, total, what))

            return fitted_head(self.model, self.dataset, not self.headless, self.device, self.dtype, progress)
        return mean_head(self.model, self.dataset, self.experiment.seed, self.device) if self.headless else {}

    def _know_best(self, path: Path) -> None:
        """A best model may be newer than the checkpoint. Where steps repeat to the bit it will be made again; where
        not, what is said of the best model must still be said of the one that is there."""
        facts: dict[str, Any] = load_tensors(path)[1] if path.exists() else {}
        if facts.get("step", 0) > self.tally.step:
            self.tally.best, self.tally.best_row = facts["best"], facts["best_row"]

    def _batches(self) -> Iterator[Batch]:
        """From the next step to the last; for a GPU the next ones are gathered in a thread."""
        for step, epoch, chosen, parts in ahead(self._gathered(), AHEAD if self.device.type == "cuda" else 0):
            yield Batch(step, epoch, torch.as_tensor(chosen), *self.feed.sent(parts))

    def _gathered(self) -> Iterator[tuple[int, int, np.ndarray, tuple[Tensor, ...]]]:
        epoch, order = -1, np.empty(0)
        for step in range(self.tally.step, self.tally.step if self.tally.stopped else self.total):
            if step // self.per_epoch != epoch:
                epoch = step // self.per_epoch
                order = self.dataset.train.order(epoch, self.experiment.seed)
            chosen = self._chosen(step, order)[ranks.part(self.batch)]
            yield step, epoch, chosen, self.feed.gathered(chosen)

    def _chosen(self, step: int, order: np.ndarray) -> np.ndarray:
        position = step % self.per_epoch * self.batch
        return order[position : position + self.batch]

    def _step(self, batch: Batch) -> float:
        """One step of the optimizer; the learning rate it took."""
        recipe = self.recipe
        rate = learning_rate(recipe, batch.step, self.total, self.per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if recipe.redraw and batch.step and batch.step % recipe.redraw == 0:
            self.model.redraw(batch.step)
        loss, right = self._loss(self.forward, batch)
        self.optimizer.zero_grad(set_to_none=True)
        share = len(batch.images) / self.batch  # of a mean over the batch; 1 where nobody else has a part of it
        self.scaler.scale(loss * share).backward()
        value, right = share_gradients(self.model, loss.detach() * share, right)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm or math.inf)
        finite = value.isfinite() if self.scaled else value.isfinite() & norm.isfinite()
        self.bad_step = torch.where(finite | (self.bad_step >= 0), self.bad_step, float(batch.step))
        if self.scaled:  # the scaler skips a step that overflowed, and tries again with smaller numbers
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.found_inf = (self.bad_step >= 0).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        self.sums += torch.stack([value * self.batch, right, torch.ones_like(value) * self.batch])
        norm = torch.where(norm.isfinite(), norm, 0.0)
        self.norms = torch.stack([self.norms[0] + norm, torch.maximum(self.norms[1], norm)])
        if recipe.ema:
            _average(self.averaged, self.model, min(recipe.ema, (1 + batch.step) / (10 + batch.step)))
        return rate

    def _loss(self, forward: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        others = (ranks.number(),) if ranks.count() > 1 else ()  # two parts of a batch do not drop the same
        torch.manual_seed(generator("step", self.experiment.seed, batch.step, *others).initial_seed())  # dropout, depth
        with autocast(self.device, self.dtype):
            return self.task.loss(forward, batch.images, batch.labels, batch.indices, batch.epoch)

    def _read(self) -> bool:
        """Bring the sums here, and say whether all is finite; this is where the device is waited for."""
        *read, bad = torch.cat([self.sums, self.norms, self.bad_step[None]]).tolist()
        self.tally.sums, self.tally.norms = read[:3], read[3:]
        if bad < 0 and self.scaled and self.scaler.get_scale() < LEAST_SCALE:
            self._diverge(self.tally.step, "the gradient, at any scale,")
        if bad < 0:
            return self.diverged is None
        step, epoch = int(bad), int(bad) // self.per_epoch
        order = self.dataset.train.order(epoch, self.experiment.seed)
        with watched(self.model) as found:  # of the whole batch, so that all ranks find the same
            chosen = self._chosen(step, order)
            batch = Batch(step, epoch, torch.as_tensor(chosen), *self.feed.sent(self.feed.gathered(chosen)))
            loss, _ = self._loss(self.model, batch)
        if not found:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            weights = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
            found += [f"the gradient of {name}" for name, grad in reversed(weights) if not grad.isfinite().all()]
        self._diverge(step, found[0] if found else "the loss")
        return False

    def _diverge(self, step: int, layer: str) -> None:
        self.diverged = Diverged(step, layer)
        tell(self.listeners, self.diverged)

    def _validate(self, folder: Path, rate: float) -> dict[str, float]:
        """Keep the best model, count towards early stopping; the line of the log."""
        tally, (loss, right, seen) = self.tally, self.tally.sums
        result = self.evaluate(self.averaged, self.dataset.validation)
        found = self.task.row(result)
        if not math.isfinite(found["loss"]):
            self._diverge(tally.step, "the validation loss")
            return {}
        row = {
            "epoch": round(tally.step / self.per_epoch, 4),
            "step": tally.step,
            "train_loss": loss / max(1, seen),
            "train_accuracy": right / max(1, seen),
            **{f"validation_{name}": value for name, value in found.items()},
            "gradient_norm": tally.norms[0] * self.batch / max(1, seen),
            "gradient_norm_max": tally.norms[1],
            "learning_rate": rate,
            "seconds": round(tally.seconds, 3),
        }
        row |= {f"learned.{layer}.{name}": value for (layer, name), value in self.averaged.learned().items()}
        tally.sums, tally.norms[0] = [0.0, 0.0, 0.0], 0.0
        self.sums.zero_()
        self.norms[0] = 0.0
        self._keep_if_best(folder, result)
        tally.stale = 0 if found["loss"] < tally.lowest_loss else tally.stale + 1
        tally.lowest_loss = min(found["loss"], tally.lowest_loss)
        tally.stopped = bool(self.recipe.patience) and tally.stale >= self.recipe.patience
        if self.first:
            append_line(folder / "log.jsonl", row)
        return row

    def _keep_if_best(self, folder: Path, result: Any) -> None:
        """Of models that are not significantly worse than the best, keep the last: it was trained for longer, and of
        many looks at few images the best is the luckiest."""
        tally, found = self.tally, self.task.row(result)
        score, chance = self.task.select(result)
        if score < max(tally.best - chance, tally.floor):
            return
        tally.best, tally.best_row = max(score, tally.best), dict(found)
        if self.first:
            facts = {"step": tally.step} | {f"validation_{name}": value for name, value in found.items()}
            save_model(folder / "best", self.averaged, **facts, best=tally.best, best_row=tally.best_row)
            write_atomically(folder / "best" / "README.md", model_card(self.experiment, self.dataset, facts))

    def _save(self, folder: Path) -> None:
        if not self.first:
            return
        self.tally.scaler = self.scaler.state_dict() if self.scaled else {}
        save_checkpoint(folder / "last", self.modules, self.optimizer, asdict(self.tally))

    def _tell(self, row: dict[str, float], speed: float) -> None:
        step, (loss, right, seen) = self.tally.step, self.tally.sums
        if row:
            self.shown = row["train_loss"], row["train_accuracy"]
        elif seen:
            self.shown = loss / seen, right / seen
        event = Stepped(
            step,
            self.total,
            *self.shown,
            speed * self.batch,
            (self.total - step) / speed,
            step / self.per_epoch,
            self.total / self.per_epoch,
        )
        tell(self.listeners, Validated(**vars(event), row=row) if row else event)


@torch.no_grad()
def _average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    """Weights and batch statistics follow slowly; what is drawn or counted is copied."""
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)
    for (name, mine), theirs in zip(averaged.named_buffers(), model.buffers(), strict=True):
        if "running_" in name:
            mine.lerp_(theirs, 1 - decay)
        else:
            mine.copy_(theirs)


class watched:
    """While it lasts, the names of modules whose output is not finite, in the order they run."""

    def __init__(self, model: VisionTransformer):
        self.found: list[str] = []
        self.handles = [m.register_forward_hook(self._hook(name or "model")) for name, m in model.named_modules()]

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                self.found.append(name)

        return look

    def __enter__(self) -> list[str]:
        return self.found

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
