"""The training loop, from top to bottom: learning rate, step, evaluate, save, log.

Data order, augmentation, dropout and redraws are functions of (seed, epoch or step), so a run that was killed and
continued ends with the same weights, bit for bit, as one that never was.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.data import Augment, Dataset
from linvit.files import remove_parts, write_atomically
from linvit.measure.accuracy import Evaluation, evaluate
from linvit.models import VisionTransformer
from linvit.randomness import generator
from linvit.records import Record, Records
from linvit.train.card import model_card
from linvit.train.checkpoint import load_checkpoint, save_checkpoint, save_config, save_model
from linvit.train.experiment import Experiment
from linvit.train.files import append_line, interrupted, load_tensors, locked, read_lines
from linvit.train.recipe import check_amp, learning_rate, make_optimizer


@dataclass(frozen=True)
class Event:
    """What a progress display needs; `row` is the line of log.jsonl at an epoch's end."""

    step: int
    total: int
    loss: float
    accuracy: float
    images_per_second: float
    eta: float
    row: dict[str, Any] | None = None
    message: str = ""
    begins: bool = False  # the message says what is about to be trained
    epoch: float = 0.0  # how many are done
    epochs: float = 0.0  # how many there will be


Progress = Callable[[Event], None]


@dataclass
class State:
    """What a checkpoint remembers besides tensors."""

    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # of this epoch so far
    correct: int = 0
    seen: int = 0
    best_accuracy: float = -1.0
    best_loss: float = math.inf
    best_step: int = 0
    lowest_loss: float = math.inf
    stale: int = 0  # epochs since the lowest validation loss
    stopped: bool = False
    scaler: dict[str, Any] = field(default_factory=dict)


def run(
    experiment: Experiment,
    dataset: Dataset,
    folder: Path,
    *,
    device: torch.device,
    progress: Progress | None = None,
    checkpoint_seconds: float = 30.0,
    source: dict[str, Any] | None = None,
) -> list[Record]:
    """Train the experiment in its folder, or go on with it, and return its records. `source`: where its data lie."""
    for split in ("train", "validation", "test"):
        if not len(getattr(dataset, split)):
            raise ValueError(f"{dataset.name} has no {split} images, and training needs some")
    check_amp(experiment.recipe.amp, device)
    augment = dataset.augment(**experiment.recipe.augmentation())
    model = VisionTransformer(experiment.model).to(device)  # what cannot be built leaves nothing in the folder
    with locked(folder):
        experiment.claim(folder, source)
        remove_parts(folder, folder / "best", folder / "last")
        records = Records(folder / "records.jsonl")
        if not any(record.metric in ("test_accuracy", "diverged") for record in records):
            quiet = progress or (lambda event: None)
            made = _run(experiment, dataset, augment, model, folder, device, quiet, checkpoint_seconds)
            write_atomically(records.path, "".join(record.line() + "\n" for record in [*records, *made]))
        return list(records)


def _run(
    experiment: Experiment, dataset: Dataset, augment: Augment, model: VisionTransformer, folder: Path,
    device: torch.device, progress: Progress, every: float,
) -> list[Record]:  # fmt: skip
    recipe, seed = experiment.recipe, experiment.seed
    optimizer = make_optimizer(recipe, model)
    averaged = copy.deepcopy(model).requires_grad_(False) if recipe.ema else model
    modules: dict[str, nn.Module] = {"model": model, "average": averaged} if recipe.ema else {"model": model}
    forward = torch.compile(model) if recipe.compile else model
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
    cast = torch.float16 if recipe.amp == "fp16" else torch.bfloat16
    batch, steps_per_epoch, total = experiment.plan(len(dataset.train))

    state = State()
    found = load_checkpoint(folder / "last", modules, optimizer)
    if found is not None:
        facts, complaints = found
        state = State(**facts)
        if state.scaler:
            scaler.load_state_dict(state.scaler)
        for complaint in complaints:
            progress(_message(f"{complaint}; going on from an older checkpoint", state.step, total))
        progress(_message(f"going on from step {state.step} of {total}", state.step, total))
    else:
        what = f"{model.config.attention} on {model.tokens} tokens, {model.parameter_count():,} parameters"
        images = f"{len(dataset.train):,} images of {dataset.name}"
        text = f"{what}; {images}, {total:,} steps of {batch}"
        progress(replace(_message(text, 0, total), begins=True))
    log = folder / "log.jsonl"
    rows = [row for row in read_lines(log) if row["step"] <= state.step]
    write_atomically(log, "".join(json.dumps(row) + "\n" for row in rows))
    for name in ("best", "last"):
        save_config(folder / name, experiment.model, dataset)

    started, saved = time.perf_counter() - state.seconds, time.perf_counter()
    first_step, first_time = state.step, time.perf_counter()
    order, order_epoch = None, -1
    model.train()

    def save() -> None:
        state.seconds, state.scaler = time.perf_counter() - started, scaler.state_dict() if recipe.amp == "fp16" else {}
        facts = {key: value for key, value in vars(state).items() if key != "step"}
        save_checkpoint(folder / "last", state.step, modules, optimizer, facts)

    cuda = [device] if device.type == "cuda" else []
    with interrupted() as stop, torch.random.fork_rng(cuda):  # the caller's random numbers stay as they were
        while state.step < total and not state.stopped:
            epoch, position = divmod(state.step, steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = dataset.train.order(epoch, seed), epoch
            assert order is not None
            rate = learning_rate(recipe, state.step, total, steps_per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate
            if recipe.redraw and state.step and state.step % recipe.redraw == 0:
                model.redraw(state.step)
            dice = generator("step", seed, state.step).initial_seed()
            torch.manual_seed(dice)  # dropout and stochastic depth

            chosen = order[position * batch : (position + 1) * batch]
            images, labels = dataset.train.batch(chosen)
            images, labels = images.to(device), labels.to(device)
            x, targets = augment(images, labels, torch.as_tensor(chosen, device=device), epoch, seed)
            with torch.autocast(device.type, cast, enabled=recipe.amp != "off"):
                logits = forward(x)
                loss = F.cross_entropy(logits.float(), targets, label_smoothing=recipe.label_smoothing)
            value = loss.item()
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm or math.inf).item()
            if not math.isfinite(value) or (not math.isfinite(norm) and recipe.amp != "fp16"):
                torch.manual_seed(dice)
                with torch.autocast(device.type, cast, enabled=recipe.amp != "off"):
                    layer = first_non_finite(model, x)
                return _diverged(experiment, model, layer, state.step, total, device, progress)
            scaler.step(optimizer)
            scaler.update()
            if recipe.ema:
                _average(averaged, model, min(recipe.ema, (1 + state.step) / (10 + state.step)))

            state.step += 1
            state.loss_sum += value * len(chosen)
            state.correct += int((logits.argmax(-1) == labels).sum())
            state.seen += len(chosen)
            row = None
            if state.step % steps_per_epoch == 0 or state.step == total:
                row = _end_epoch(experiment, dataset, averaged, state, folder, device, rate, steps_per_epoch)
                row["seconds"] = round(time.perf_counter() - started, 3)
                if not math.isfinite(row["validation_loss"]):
                    return _diverged(experiment, model, "the validation loss", state.step, total, device, progress)
                append_line(log, row)
            stopping = stop()  # asked once: what is said to be saved must be
            if stopping or state.stopped or state.step == total or time.perf_counter() - saved > every:
                save()
                saved = time.perf_counter()
            speed = (state.step - first_step) / (time.perf_counter() - first_time)
            accuracy = state.correct / state.seen if state.seen else row["train_accuracy"] if row else 0.0
            left = (total - state.step) / speed
            done, all_epochs = state.step / steps_per_epoch, total / steps_per_epoch
            progress(Event(state.step, total, value, accuracy, speed * batch, left, row, epoch=done, epochs=all_epochs))
            if stopping:
                raise KeyboardInterrupt(f"saved at step {state.step} of {total} in {folder}")
    return _finish(experiment, dataset, averaged, state, folder, device)


def _end_epoch(
    experiment: Experiment, dataset: Dataset, model: VisionTransformer, state: State, folder: Path,
    device: torch.device, rate: float, steps_per_epoch: int,
) -> dict[str, Any]:  # fmt: skip
    """Validate, keep the best model, count towards early stopping; the epoch's line of the log."""
    seen = _evaluate(model, dataset, "validation", device)
    row = {
        "epoch": round(state.step / steps_per_epoch, 4),
        "step": state.step,
        "train_loss": state.loss_sum / max(1, state.seen),
        "train_accuracy": state.correct / max(1, state.seen),
        "validation_loss": seen.loss,
        "validation_accuracy": seen.accuracy,
        "learning_rate": rate,
    }
    state.loss_sum, state.correct, state.seen = 0.0, 0, 0
    if math.isfinite(seen.loss) and (seen.accuracy, -seen.loss) > (state.best_accuracy, -state.best_loss):
        state.best_accuracy, state.best_loss, state.best_step = seen.accuracy, seen.loss, state.step
        facts = {"step": state.step, "validation_accuracy": seen.accuracy}
        save_model(folder / "best", model, **facts)
        write_atomically(folder / "best" / "README.md", model_card(experiment, dataset, facts))
    improved = seen.loss < state.lowest_loss
    state.lowest_loss, state.stale = min(seen.loss, state.lowest_loss), 0 if improved else state.stale + 1
    state.stopped = bool(experiment.recipe.patience) and state.stale >= experiment.recipe.patience
    return row


def _finish(
    experiment: Experiment, dataset: Dataset, model: VisionTransformer, state: State, folder: Path, device: torch.device
) -> list[Record]:
    """The test split, seen once by each of the two models that are reported."""
    save_model(folder / "last", model, step=state.step)
    start = time.perf_counter()
    final = _evaluate(model, dataset, "test", device)
    tensors, _ = load_tensors(folder / "best" / "model.safetensors")
    best_model = copy.deepcopy(model)
    best_model.load_state_dict(tensors)
    best = final if state.best_step == state.step else _evaluate(best_model, dataset, "test", device)
    seconds = time.perf_counter() - start
    artefact = folder / "confusion.json"
    write_atomically(artefact, json.dumps({"matrix": best.confusion().tolist()}))
    base = experiment.record("", None, device)
    n = len(dataset.test)
    records = [
        *_facts(base, model),
        replace(base, metric="validation_accuracy", value=state.best_accuracy, n=len(dataset.validation)),
        replace(base, metric="train_seconds", value=state.seconds, unit="s"),
        replace(base, metric="test_seconds", value=seconds, unit="s"),
        replace(base, metric="confusion", value=None, n=n, artefact="confusion.json").tagged(selection="best"),
    ]
    for selection, result in (("best", best), ("final", final)):
        records.append(replace(base, metric="test_accuracy", value=result.accuracy, n=n).tagged(selection=selection))
        records.append(replace(base, metric="test_loss", value=result.loss, n=n).tagged(selection=selection))
    for name, precision, recall, f1 in best.per_class():
        for metric, value in (("precision", precision), ("recall", recall), ("f1", f1)):
            records.append(replace(base, metric=metric, value=value).tagged(**{"class": name, "selection": "best"}))
    facts = {"step": state.best_step, "test_accuracy": best.accuracy, "validation_accuracy": state.best_accuracy}
    write_atomically(folder / "best" / "README.md", model_card(experiment, dataset, facts))
    facts = {"step": state.step, "test_accuracy": final.accuracy}
    write_atomically(folder / "last" / "README.md", model_card(experiment, dataset, facts))
    return records


def _evaluate(model: VisionTransformer, dataset: Dataset, split: str, device: torch.device) -> Evaluation:
    return evaluate(model, getattr(dataset, split), dataset.classes, dataset.mean, dataset.std, device)


@torch.no_grad()
def _average(averaged: nn.Module, model: nn.Module, decay: float) -> None:
    """Weights and batch statistics follow slowly; what is drawn or counted is copied."""
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)
    for (name, mine), theirs in zip(averaged.named_buffers(), model.buffers(), strict=True):
        if "running_" in name:
            mine.lerp_(theirs, 1 - decay)
        else:
            mine.copy_(theirs)


def _diverged(
    experiment: Experiment, model: VisionTransformer, layer: str, step: int, total: int, device: torch.device,
    progress: Progress,
) -> list[Record]:  # fmt: skip
    """A run that ended in a number that is not finite: where and when, what it was, and how it learned until then."""
    progress(_message(f"diverged at step {step}: {layer} is not finite; try a lower lr", step, total))
    base = experiment.record("diverged", step, device)
    return [*_facts(base, model), base.tagged(layer=layer)]


def _facts(base: Record, model: VisionTransformer) -> list[Record]:
    """What holds of a run however it ends."""
    return [
        replace(base, metric="parameters", value=model.parameter_count()),
        replace(base, metric="macs", value=model.macs()),
        replace(base, metric="learning_curve", value=None, artefact="log.jsonl"),
    ]


def _message(text: str, step: int, total: int) -> Event:
    return Event(step, total, math.nan, 0, 0, 0, message=text)


def first_non_finite(model: nn.Module, x: Tensor) -> str:
    """The first module, in the order they run, whose output or gradient is not finite."""
    found: list[str] = []

    def watch(name: str):
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name or "model")) for name, module in model.named_modules()]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    if found:
        return found[0]
    bad = [n for n, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    return f"the gradient of {bad[-1]}" if bad else "the loss"
