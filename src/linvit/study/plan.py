"""A plan that is kept: from the images, a budget and a few timed steps to image size, model, batch, seeds and steps.

Small models on small images learn something in minutes where large ones do not get through an epoch, and what has not
been learned cannot be compared. So the largest of a ladder of models is taken that sees every image often enough with
three seeds, which is the least that can prove anything; else with one, which can still say what to look at. What is
left of the budget goes into more seeds, then into more steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from linvit.data import Survey
from linvit.errors import MEMORY
from linvit.measure.models import model_calls
from linvit.measure.threads import use_threads
from linvit.models import ModelConfig, VisionTransformer
from linvit.models.cost import estimate
from linvit.progress import Progress, duration
from linvit.report.statistics import LOOK, dunnett
from linvit.train.defaults import TUNED
from linvit.train.experiment import resolve
from linvit.train.loop import Rate

BUDGET = "30m"  # for images that no recipe was tuned for, if no length is asked for
LADDER = ((128, 1), (96, 1), (64, 1), (64, 2), (48, 2), (32, 2), (32, 4))  # side, and how many times narrower
PROOF = 3  # seeds
MANY = (10, 5)  # seeds, where training is long enough with them
SEEN, FEWEST, MOST = 80_000, 4, 40  # images that a run should see, and epochs that this may be
START_SEEN, START_FEWEST, START_MOST = 8_000, 1.5, 12  # the same of one that starts from a trained model
WHOLE = 4  # times as much is all that helps
SMALL_SET, SMALL_BATCH = 8_000, 64  # few images: more steps rather than larger ones
TIMING, LONGEST = 0.05, 60.0  # of the budget, and seconds, for timing
KEPT = 0.95  # of the budget is planned with
MEASURING = (0.12, 25.0, 240.0)  # of the budget for all that is not training: a share, at least and at most so many s
STARTING, PER_RUN = 6.0, 1.0  # seconds for workers to start, and for each run to be built, saved and read
BETWEEN_SEEDS, DISCORDANT = 0.007, 0.1  # usual: an accuracy's deviation, and images that only one of a pair gets right
OTHERS = 1.25  # steps of other attentions beside softmax's, with augmentation and validation


class Offer(BaseModel):
    """What a budget buys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: float
    image_size: int
    narrower: int
    seeds: int
    folds: int = 1  # of each seed; 1: none
    epochs: float
    tells: str

    @property
    def text(self) -> str:
        size = {1: "the whole model", 2: "half as wide", 4: "a quarter as wide"}[self.narrower]
        return f"{self.image_size} px, {size}, {repeated(self)}, {self.epochs:.3g} epochs: {self.tells}"


class Plan(BaseModel):
    """What was chosen for a budget, and what it is expected to take; stored with the study."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seconds: float  # the budget
    image_size: int
    options: dict[str, Any]  # of the model and the recipe
    seeds: int
    folds: int = 1  # of each seed; 1: none
    steps: int = 0
    expected: dict[str, float] = {}  # seconds, by what they are for
    offers: list[Offer] = []  # this budget's, then larger ones'


def repeated(of: Plan | Offer) -> str:
    """How often each variant is trained, in words."""
    seeds = "1 seed" if of.seeds == 1 else f"{of.seeds} seeds"
    return seeds if of.folds == 1 else f"{of.folds} folds × {seeds}"


@dataclass(frozen=True)
class Rung:
    """A model for images of one size, and how long a core takes to learn from one of them."""

    side: int
    narrower: int
    options: dict[str, Any]
    model: ModelConfig
    seconds: float = math.inf


@dataclass(frozen=True)
class Planner:
    """What a budget of so many seconds can be used for, on so many cores."""

    images: Survey
    variants: int
    cores: int
    device: torch.device
    seeds: int | None = None  # asked for
    folds: int = 1  # that each seed is trained with; every one is as good as another seed
    like: ModelConfig | None = None  # the model that is started from
    rungs: Sequence[Rung] = ()
    correction: float = 1.0  # of what is expected of a rung, once more is known

    @property
    def enough(self) -> float:
        """Epochs after which differences begin to mean something."""
        if self.like is not None:
            return min(START_MOST, max(START_FEWEST, START_SEEN / self.images.train))
        if self.images.name in TUNED:
            return TUNED[self.images.name]["epochs"] / 2
        return min(MOST, max(FEWEST, SEEN / self.images.train))

    def with_rungs(
        self, given: Mapping[str, Any], image_size: int | None, sizes: bool, attentions: Collection[str] = ()
    ) -> Planner:
        """The ladder for these images, the largest first; what is asked for, or cannot be otherwise, is fixed. A rung
        that one of the attentions cannot have is left out: a Linformer has no more keys than there are tokens."""
        model_given = {"size", *ModelConfig.model_fields} & set(given)
        fixed = image_size or (None if sizes and self.images.name not in TUNED else self.images.side)
        side = fixed or max(8, self.images.side // 4 * 4)
        if self.like is not None:
            fixed = image_size or (None if sizes else self.images.side)
            sides = [fixed] if fixed else _sides(self.like, self.images.side)
            steps = {(size, 1): None for size in sides}
        else:
            steps = {(fixed or min(size, side), 1 if model_given else narrower): None for size, narrower in LADDER}
        rungs = [self._rung(*step, dict(given)) for step in steps]
        fit = [rung for rung in rungs if all(_takes(rung.model, attention) for attention in attentions)]
        return replace(self, rungs=fit or rungs)  # if none does, that is said when the models are built

    def _rung(self, side: int, narrower: int, given: dict[str, Any]) -> Rung:
        facts = {"image_size": side, "channels": self.images.channels, "classes": self.images.classes}
        model, recipe = resolve(self.images.name, facts, "softmax", 0, given, self.like, self.like is not None)
        chosen: dict[str, Any] = {}
        if narrower > 1:
            chosen["trunk"] = tuple(max(8, width // narrower) for width in model.widths)
        if narrower > 2:
            chosen |= {"dim": max(32, model.dim // 2), "mlp_dim": max(64, model.mlp_dim // 2)}
        if chosen:
            model, _ = resolve(self.images.name, facts, "softmax", 0, given | chosen)
        few = self.images.train < SMALL_SET
        batch = min(SMALL_BATCH, recipe.batch_size) if few and "batch_size" not in given else recipe.batch_size
        batch = largest_batch(model, batch, self.cores)
        return Rung(side, narrower, chosen | ({"batch_size": batch} if batch != recipe.batch_size else {}), model)

    def timed(self, budget: float, progress: Progress) -> Planner:
        """With the time of each rung, from the cheapest up while it is worth it; the rest by their operations."""
        until = time.perf_counter() + min(LONGEST, TIMING * budget) / 4
        found: list[Rung] = []
        with use_threads(1):
            for i, rung in enumerate(reversed(self.rungs)):
                progress(i, len(self.rungs), f"timing a model for {rung.side} px")
                late = time.perf_counter() > until
                if found and (late or self.epochs(found[-1], 1, budget) < self.enough / 4):
                    work = estimate(rung.model).macs / estimate(found[-1].model).macs
                    found.append(replace(rung, seconds=found[-1].seconds * max(1.0, work)))
                else:
                    found.append(replace(rung, seconds=seconds_per_image(rung.model, self.device)))
        progress(len(self.rungs), len(self.rungs), "timed")
        return replace(self, rungs=found[::-1])

    def epochs(self, rung: Rung, seeds: int, budget: float) -> float:
        """That fit; each variant is trained with every seed and fold, and once for half as long."""
        training = KEPT * budget - measuring(budget) - STARTING
        one = rung.seconds * OTHERS * self.correction * self.images.train / self.cores  # epoch of one run
        return max(0.0, training / (self.variants * (seeds * self.folds + 0.5) * one))

    def choose(self, budget: float) -> tuple[Rung, int]:
        """The rung and the number of seeds."""
        for seeds in [self.seeds] if self.seeds else [math.ceil(PROOF / self.folds), 1]:
            for rung in self.rungs:
                if self.epochs(rung, seeds, budget) >= self.enough:
                    return rung, self._seeds(rung, seeds, budget)
        return self.rungs[-1], self.seeds or 1

    def _seeds(self, rung: Rung, least: int, budget: float) -> int:
        wanted = [] if self.seeds or least * self.folds < PROOF else [math.ceil(n / self.folds) for n in MANY]
        return next((n for n in wanted if self.epochs(rung, n, budget) >= WHOLE * self.enough), least)

    def offer(self, budget: float) -> Offer:
        rung, seeds = self.choose(budget)
        return self.described(budget, rung, seeds, min(WHOLE * self.enough, self.epochs(rung, seeds, budget)))

    def described(self, budget: float, rung: Rung, seeds: int, epochs: float) -> Offer:
        if epochs < self.enough / 2:
            tells = "most likely too early to tell anything"
        elif seeds * self.folds < PROOF:
            tells = "the most accurate so far, without proof"
        else:
            points = max(1, round(100 * resolution(self.variants, seeds, self.images.test, self.folds)))
            tells = f"which come within about {points} point{'s' * (points > 1)} of the best"
        return Offer(seconds=budget, image_size=rung.side, narrower=rung.narrower, seeds=seeds, folds=self.folds,
                     epochs=epochs, tells=tells)  # fmt: skip

    def larger(self, budget: float) -> list[Offer]:
        """Budgets that buy something else than this one does."""
        found = [self.offer(budget)]
        for factor in (2, 4, 8, 16, 32):
            offer = self.offer(factor * budget)
            if (offer.tells, offer.seeds, offer.image_size, offer.narrower) != (
                (last := found[-1]).tells, last.seeds, last.image_size, last.narrower
            ):  # fmt: skip
                found.append(offer)
        return found[1:4]


def _takes(model: ModelConfig, attention: str) -> bool:
    try:
        VisionTransformer(model.model_copy(update={"attention": attention}))
    except ValueError:
        return False
    return True


def _sides(like: ModelConfig, there: int) -> list[int]:
    """Image sizes that a trained model can be used at: its own; twice that where the images have as many pixels and the
    tokens stay few; and half of it, from 96 px up."""
    own, fits = like.image_size, like.patch_size or 1 << (like.pools or 0)
    double = [2 * own] if 2 * own <= min(there, 256) else []
    half = [own // 2 // fits * fits] if own // 2 >= 96 else []
    return [*double, own, *half]


def resolution(variants: int, seeds: int, test: int, folds: int = 1) -> float:
    """How much less than the best's accuracy can be shown not to be lost, if seeds and images differ as they usually
    do: the bound of the report's verdicts."""
    others, runs = max(1, variants - 1), seeds * folds
    by_seeds, by_images = 2 * BETWEEN_SEEDS**2, DISCORDANT / test
    known = dunnett(others, others * (runs - 1), LOOK)
    if folds > 1:  # images are part of what differs between runs, which share most of them
        return known * math.sqrt((by_seeds + by_images) * (1 / runs + 1 / (folds - 1)))
    return math.hypot(known * math.sqrt(by_seeds / runs), dunnett(others, math.inf, LOOK) * math.sqrt(by_images))


def measuring(budget: float) -> float:
    share, least, most = MEASURING
    return min(most, max(least, share * budget))


def seconds_per_image(model: ModelConfig, device: torch.device, batch: int = 16) -> float:
    """Of one training step, with what the others are not timed with left out: it is for choosing between rungs."""
    step = model_calls(model, device, batch)["train_step"]
    step()
    start, count = time.perf_counter(), 0
    while count < 2 or (time.perf_counter() - start < 0.3 and count < 20):
        step()
        count += 1
    return (time.perf_counter() - start) / count / batch


def largest_batch(model: ModelConfig, wanted: int, jobs: int) -> int:
    """That asked for, halved until as many trainings as run at a time take a quarter of the machine's memory."""
    one = step_memory(model, 1)
    while wanted > 1 and jobs * one * wanted > MEMORY / 4:
        wanted //= 2
    return wanted


def step_memory(model: ModelConfig, batch: int) -> int:
    """Bytes that a training step takes beside the model, roughly: what modules put out for one image, kept for the
    backward pass with its gradient. Measured peaks were half to two thirds of it."""
    outputs = 0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal outputs
        if isinstance(output, Tensor) and not next(module.children(), None):
            outputs += output.numel()

    built = VisionTransformer(model).eval()
    for module in built.modules():
        module.register_forward_hook(count)
    with torch.inference_mode():
        built(torch.zeros(1, model.channels, model.image_size, model.image_size))
    return 8 * outputs * batch


def fitting(
    budget: float, spent: float, rates: Mapping[str, Rate], images: Survey, per_epoch: int, seeds: int, jobs: int,
    most: int,
) -> tuple[int, dict[str, float]]:  # fmt: skip
    """Equal steps for every run that fit what is left, at most so many; and what time is expected to go where.

    `rates` are of one worker while all work. A run of half the steps is half a run; at the end one worker waits for
    the other for half a run on average, which the short runs, done last, make a quarter."""
    step = sum(1 / rate.steps for rate in rates.values())
    image = sum(1 / rate.images for rate in rates.values())
    one = step + image * images.validation / per_epoch  # of each variant, with its share of a validation
    fixed = len(rates) * (seeds + 1) * PER_RUN + image * (images.validation + 2 * images.test) * (seeds + 1)
    share = (seeds + 0.5) / jobs + (0.25 * (jobs > 1)) / len(rates)
    beside = spent + STARTING + fixed / jobs
    steps = min(most, int((KEPT * budget - measuring(budget) - beside) / (one * share)))
    if steps < 2:
        need = budget
        while KEPT * need - measuring(need) < beside + 2 * one * share:
            need *= 1.1
        raise ValueError(f"budget {duration(budget)} is too small for two steps of each run: {duration(need)} would do")
    return steps, {"planning": spent, "training": steps * one * share + fixed / jobs, "measuring": measuring(budget)}


Say = Callable[[str], None]


def lines(
    plan: Plan, images: Survey, model: ModelConfig, variants: int, epochs: float, jobs: int, start: str
) -> list[str]:
    """The plan, for a person."""
    built = VisionTransformer(model)
    counts = f"{images.train:,} train, {images.validation:,} validate, {images.test:,} test"
    scaled = f", made {model.image_size} px" if images.side != model.image_size else ""
    spent = ", ".join(f"{duration(value)} {what}" for what, value in plan.expected.items())
    found = [
        f"plan for {duration(plan.seconds)}, {jobs if jobs > 1 else 'one'} training{'s' * (jobs > 1)} at a time",
        f"  images   {counts}; {images.classes} classes, about {images.side} px{scaled}",
        f"  model    {built.parameter_count():,} parameters, {built.tokens} tokens, dim {model.dim}, "
        f"{model.depth} layer{'s' * (model.depth != 1)}",
        f"  start    {start}",
        f"  runs     {variants} variants × {repeated(plan)}, {plan.steps:,} steps ({epochs:.3g} epochs), "
        "and each once for half",
        f"  time     about {duration(sum(plan.expected.values()))}: {spent}",
        f"  tells    {plan.offers[0].tells}",
    ]
    for offer in plan.offers[1:]:
        found.append(f"  {duration(offer.seconds):8} would buy {offer.text}")
    return found
