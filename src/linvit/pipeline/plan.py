"""Plan: from the images, a time budget and a few timed steps to image size, model, batch, seeds and steps.

Small models on small images learn something in minutes where large ones do not finish an epoch, and models that have
not learned cannot be compared. So the plan takes the largest of a ladder of models that sees every image often enough
with three seeds, the fewest that can prove anything; else with one, which can still show what to try. Of the default
attentions it takes as many as cost neither size, seeds nor training. What is left of the budget goes into more seeds,
then into more steps.

A trained start keeps its own image size. Its frozen features with a fitted head come first, for every variant: they
take one pass over the images, of fewer images if there is no time for all. It is trained only if the rest of the budget
is enough for that, and only what is no worse on validation images is kept.

The plan is made three times: from a few timed steps of each rung; from each variant's own speed, where its jobs run,
when the images are decoded; and from the time that is left, after the frozen features or when runs turn out too slow.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from linvit.attention import BASELINE
from linvit.data import Survey, decoding_seconds
from linvit.devices import amp_dtype, pick_device, places
from linvit.durations import duration, seconds
from linvit.measure.models import model_calls
from linvit.measure.race import timed
from linvit.measure.threads import use_threads
from linvit.models import estimate
from linvit.pipeline.batches import largest_batch
from linvit.pipeline.design import DataShape, check_attention, resolve
from linvit.pipeline.steps import (
    PLANNED_SHARE,
    RUN_OVERHEAD,
    WORKER_START,
    fitting_images,
    fitting_steps,
    frozen_seconds,
    measuring_seconds,
    run_seconds,
)
from linvit.progress import Progress
from linvit.report.comparison import LOOK, dunnett, held_out
from linvit.requests import CompareRequest, Request
from linvit.schemas.model import ModelConfig
from linvit.schemas.pixels import ImageSize, scaled, sides
from linvit.schemas.study import MIN_SEEDS, Offer, Plan, Study, Variant
from linvit.training.defaults import ATTENTIONS, START_ATTENTIONS, TUNED
from linvit.training.heads import operations
from linvit.training.loop import Rate

DEFAULT_BUDGET = "30m"  # for images without a tuned recipe, if no length is given
LADDER = ((128, 1), (96, 1), (64, 1), (64, 2), (48, 2), (32, 2), (32, 4))  # image size, and how many times narrower
MIN_VARIANTS = 3  # of the default ones: softmax, another and the control
MORE_SEEDS = (10, 5)  # if training is still long enough with them
SEEN_IMAGES, MIN_EPOCHS, MAX_EPOCHS = 80_000, 4, 40  # that a run from scratch should see
START_SEEN_IMAGES, START_MIN_EPOCHS, START_MAX_EPOCHS = 8_000, 1.5, 12  # and one from a trained model
USEFUL = 4  # times as many epochs are the most that helps
SMALL_SET, SMALL_BATCH = 8_000, 64  # few images: more steps rather than larger batches
TIMING_SHARE, MAX_TIMING = 0.05, 60.0  # of the budget, and seconds, for timing
FORWARD = 1 / 3  # of a training step's time
PLACING = 12.0  # seconds to find out where jobs run faster
SOLVED = 1e10  # operations per second of fitting a head
MIN_LIMIT, MIN_OF_CLASS = 100, 3  # images of each split, in all and of a class, that frozen features need
TIMED_MACS = 4e9  # of a step that is timed on a CPU, roughly
CPU_BATCH, GPU_BATCH = 16, 256  # images of a step that is timed
SEED_DEVIATION, DISCORDANT = 0.007, 0.1  # typical: std. dev. of an accuracy, share of images two models disagree on
SLOWER = 1.25  # a step of other attentions relative to softmax's, with augmentation and validation


@dataclass(frozen=True)
class Rung:
    """A model for images of one size, and how long a core takes to train on one of them."""

    size: ImageSize
    narrower: int
    options: dict[str, Any]
    model: ModelConfig
    seconds: float = math.inf


@dataclass(frozen=True)
class Planner:
    """What a budget can be used for, on `cores` cores."""

    images: Survey
    variants: int
    cores: int
    device: torch.device
    seeds: int | None = None  # as requested
    folds: int = 1  # of each seed; each is a training of its own
    like: ModelConfig | None = None  # the model that is started from
    fitted: bool = False  # its frozen features come first, with a fitted head
    amp: torch.dtype = torch.float32  # of autocast
    fewest: int = 0  # variants that are compared if there is no time for all; 0: all
    rungs: Sequence[Rung] = ()
    decoding: float = 0.0  # seconds until another image is decoded
    correction: float = 1.0  # of what is expected of a rung, once more is known

    @property
    def enough(self) -> float:
        """Epochs from which differences begin to mean something."""
        if self.like is not None:
            return min(START_MAX_EPOCHS, max(START_MIN_EPOCHS, START_SEEN_IMAGES / self.images.train))
        if self.images.name in TUNED:
            return TUNED[self.images.name]["epochs"] / 2
        return min(MAX_EPOCHS, max(MIN_EPOCHS, SEEN_IMAGES / self.images.train))

    def with_rungs(
        self, given: Mapping[str, Any], image_size: ImageSize | None, resizable: bool, attentions: Collection[str] = ()
    ) -> Planner:
        """The ladder for these images, the largest first; what is given is fixed. A rung that one of the attentions
        cannot have is left out: a Linformer has no more keys than there are tokens."""
        given_size = self.images.size or self.images.side
        if self.like is not None:
            fixed = image_size or (None if resizable else given_size)
            steps = [(size, 1) for size in ([fixed] if fixed else _start_sizes(self.like, self.images.side))]
        else:
            fixed = image_size or (None if resizable and self.images.name not in TUNED else given_size)
            side = fixed or max(8, self.images.side // 4 * 4)
            shaped = bool({"size", *ModelConfig.model_fields} & set(given))
            steps = [(fixed or min(size, side), 1 if shaped else narrower) for size, narrower in LADDER]
        rungs = [self._rung(size, narrower, dict(given)) for size, narrower in dict.fromkeys(steps)]
        fitting = [rung for rung in rungs if all(_takes(rung.model, attention) for attention in attentions)]
        return replace(self, rungs=fitting or rungs)  # if none fits, designing the variants says why

    def _rung(self, size: ImageSize, narrower: int, given: dict[str, Any]) -> Rung:
        data = DataShape(self.images.name, size, self.images.channels, self.images.classes)
        model, recipe = resolve(data, BASELINE, 0, given, self.like, self.like is not None)
        chosen: dict[str, Any] = {}
        if narrower > 1:
            chosen["trunk"] = tuple(max(8, width // narrower) for width in model.widths)
        if narrower > 2:
            chosen |= {"dim": max(32, model.dim // 2), "mlp_dim": max(64, model.mlp_dim // 2)}
        if chosen:
            model, _ = resolve(data, BASELINE, 0, given | chosen)
        batch = recipe.batch_size
        if self.images.train < SMALL_SET and "batch_size" not in given:
            batch = min(SMALL_BATCH, batch)
        batch = largest_batch(model, batch, self.cores, self.device)
        return Rung(size, narrower, chosen | ({"batch_size": batch} if batch != recipe.batch_size else {}), model)

    def timed(self, budget: float, progress: Progress) -> Planner:
        """With the time of each rung, from the cheapest up while there is time; the rest by their operations. A budget
        that is too small even for the cheapest is refused as soon as that is known."""
        until = time.perf_counter() + timing_seconds(budget) / 4
        found: list[Rung] = []
        with use_threads(1):
            for i, rung in enumerate(reversed(self.rungs)):
                progress(i, len(self.rungs), f"timing a model for {rung.size} px")
                late = time.perf_counter() > until
                if found and (late or self.epochs(found[-1], 1, budget) < self.enough / 4):
                    work = estimate(rung.model).macs / estimate(found[-1].model).macs
                    found.append(replace(rung, seconds=found[-1].seconds * max(1.0, work)))
                else:
                    found.append(replace(rung, seconds=self._seconds_per_image(rung.model)))
                if not i:
                    replace(self, variants=self.fewest or self.variants).check(found[0], budget)
        progress(len(self.rungs), len(self.rungs), "timed")
        return replace(self, rungs=found[::-1])

    def _seconds_per_image(self, model: ModelConfig) -> float:
        """Of one training step, without what is the same for all rungs. A GPU is given as many images as it takes."""
        few = max(1, min(CPU_BATCH, int(TIMED_MACS / estimate(model).macs)))
        batch = few if self.device.type == "cpu" else largest_batch(model, GPU_BATCH, 1, self.device)
        step = model_calls(model, self.device, batch, dtype=self.amp)["train_step"]
        timed(step, 1, self.device)
        one = timed(step, 1, self.device)["wall"]
        return timed(step, max(1, min(20, round(0.3 / max(one, 1e-9)))), self.device)["wall"] / batch

    def epochs(self, rung: Rung, seeds: int, budget: float) -> float:
        """That fit; each variant is trained with every seed and fold, and once for half as long."""
        training = self._room(budget) - (self.frozen_seconds(rung) if self.fitted else 0.0)
        one = rung.seconds * SLOWER * self.correction * self.images.train / self.cores  # epoch of one run
        return max(0.0, training / (self.variants * (seeds * self.folds + 0.5) * one))

    def _room(self, budget: float) -> float:
        """Seconds for all runs."""
        before = PLACING + timing_seconds(budget) if self.fitted else self.decoding * self.images.total
        return PLANNED_SHARE * budget - measuring_seconds(budget) - WORKER_START - before

    def frozen_seconds(self, rung: Rung, limit: int | None = None) -> float:
        """For the features of all images, or of at most `limit` of each split, once these are decoded, and the heads of
        all variants and folds, which share features."""
        images = self.images.limited(limit)
        features = images.total * rung.seconds * FORWARD * SLOWER
        head = operations(images.train, rung.model.features, images.classes) / SOLVED + RUN_OVERHEAD
        return self.variants * (features + self.folds * head) / self.cores + self.decoding * images.total

    def limit(self, rung: Rung, budget: float) -> int | None:
        """How many images of each split the budget allows; None: all. A ValueError if they are too few."""
        images, room = self.images, self._room(budget)
        most = max(images.train, images.validation, images.test)
        if self.frozen_seconds(rung) <= room:
            return None
        found = bisect_right(range(most), room, key=lambda count: self.frozen_seconds(rung, count)) - 1
        least = min(most, self.least)
        if found < least:
            what = f"the features of {least} images of each split with {self.variants} variants"
            self.require(budget, self.frozen_seconds(rung, least), what)
        return max(found, least)

    def check(self, rung: Rung, budget: float) -> None:
        """A ValueError, with a budget that is enough, if this one is too small to show anything with this rung."""
        if self.fitted:
            self.limit(rung, budget)
        else:
            step = rung.options.get("batch_size", SMALL_BATCH) * rung.seconds * SLOWER * self.variants / self.cores
            self.require(budget, 2 * step * ((self.seeds or 1) * self.folds + 0.5), "two steps of each run")

    @property
    def least(self) -> int:
        """Images of each split below which frozen features show too little."""
        return max(MIN_LIMIT, MIN_OF_CLASS * self.images.classes)

    def require(self, budget: float, needed: float, what: str) -> None:
        """Refuse a budget without room for this many seconds before any image is decoded, and name one that has it."""
        need = budget
        while self._room(need) < needed:
            need *= 1.1
        if need > budget:
            raise ValueError(f"budget {duration(budget)} is too small for {what}: use {duration(need)}")

    def choose(self, budget: float) -> tuple[Rung, int]:
        """The rung and the number of seeds."""
        for seeds in [self.seeds] if self.seeds else [math.ceil(MIN_SEEDS / self.folds), 1]:
            for rung in self.rungs:
                if self.epochs(rung, seeds, budget) >= self.enough:
                    return rung, self._more_seeds(rung, seeds, budget)
        return self.rungs[-1], self.seeds or 1

    def _more_seeds(self, rung: Rung, seeds: int, budget: float) -> int:
        if self.seeds or seeds * self.folds < MIN_SEEDS:
            return seeds
        more = [math.ceil(n / self.folds) for n in MORE_SEEDS]
        return next((n for n in more if self.epochs(rung, n, budget) >= USEFUL * self.enough), seeds)

    def affordable(self, budget: float) -> int:
        """How many of the variants can be compared at no cost in image size, width, seeds, training or images; where
        the fewest are not trained enough either, just these."""

        def result(variants: int) -> tuple[Any, ...]:
            planner = replace(self, variants=variants)
            rung, seeds = planner.choose(budget)
            epochs, proof = planner.epochs(rung, seeds, budget), seeds * self.folds >= MIN_SEEDS
            if self.fitted and epochs < self.enough / 2:  # nothing is trained: what counts is the number of images
                return rung.size, planner.frozen_seconds(rung) <= planner._room(budget)
            return rung.size, rung.narrower, proof, epochs >= self.enough

        fewest = min(MIN_VARIANTS, self.variants)
        best = result(fewest)
        return next(n for n in range(self.variants, 0, -1) if n <= fewest or (best[-1] and result(n) == best))

    def offer(self, budget: float) -> Offer:
        rung, seeds = self.choose(budget)
        epochs = min(USEFUL * self.enough, self.epochs(rung, seeds, budget))
        if self.fitted and epochs < self.enough / 2:
            return self.described(budget, rung, seeds, 0.0, self.limit(rung, budget))
        return self.described(budget, rung, seeds, epochs)

    def described(self, budget: float, rung: Rung, seeds: int, epochs: float, limit: int | None = None) -> Offer:
        if self.fitted and not epochs:
            test = self.images.limited(limit).test
            points = max(1, round(100 * resolution(self.variants, math.inf, test)))
            resolves = f"which variants are within about {points} point{'s' * (points > 1)} of the best, untrained"
        elif epochs < self.enough / 2:
            resolves = "most likely too little training to show a difference"
        elif seeds * self.folds < MIN_SEEDS:
            resolves = "the most accurate so far, without proof"
        else:
            points = max(1, round(100 * resolution(self.variants, seeds, self.images.test, self.folds)))
            resolves = f"which variants are within about {points} point{'s' * (points > 1)} of the best"
        return Offer(
            seconds=budget,
            image_size=rung.size,
            narrower=rung.narrower,
            seeds=seeds,
            folds=self.folds,
            epochs=epochs,
            resolves=resolves,
        )

    def larger(self, budget: float) -> list[Offer]:
        """Budgets that would allow something else than this one."""
        found = [self.offer(budget)]
        for factor in (2, 4, 8, 16, 32):
            offer = self.offer(factor * budget)
            if any(getattr(offer, name) != getattr(found[-1], name) for name in OFFERED):
                found.append(offer)
        return found[1:4]

    def settle(
        self, plan: Plan, rates: Mapping[str, Rate], per_epoch: int, jobs: int, spent: float, frozen: bool = True
    ) -> Plan:
        """The plan with the steps that fit, from each variant's own speed where its jobs will run. frozen: features are
        still to be computed. All seeds but one are given up where they leave no time for training."""
        rung = next(r for r in self.rungs if r.size == plan.image_size and r.options.items() <= plan.options.items())
        most = max(2, round(USEFUL * self.enough * per_epoch))
        runs, images = plan.seeds * plan.folds, self.images.limited(plan.limit)
        head = operations(images.train, rung.model.features, images.classes) / SOLVED if self.fitted else None
        once = plan.seeds > 1 and not self.seeds and plan.model_copy(update={"seeds": 1})
        try:
            steps, expected = fitting_steps(
                plan.seconds, spent, rates, images, per_epoch, runs, jobs, most, head, frozen
            )
        except ValueError:
            if not once:
                raise
            return self.settle(once, rates, per_epoch, jobs, spent, frozen)
        if once and head is not None and steps < self.enough / 2 * per_epoch:
            return self.settle(once, rates, per_epoch, jobs, spent, frozen)
        planner = self
        if head is not None and steps < self.enough / 2 * per_epoch:
            steps, most = 0, max(images.train, images.validation, images.test)
            expected.pop("training")
            count = fitting_images(plan.seconds, spent, rates, images, jobs, head)
            if frozen and (count := max(count, self.least)) < most:  # slower than expected
                expected["frozen features"] *= images.limited(count).total / images.total
                plan, images = plan.model_copy(update={"limit": count}), images.limited(count)
        elif steps < most:
            planner = replace(self, correction=self.epochs(rung, plan.seeds, plan.seconds) / (steps / per_epoch))
        mine = planner.described(plan.seconds, rung, plan.seeds, steps / per_epoch, plan.limit)
        changes = {
            "steps": steps,
            "expected": expected,
            "frozen_seconds": {} if head is None else frozen_seconds(rates, images, head),
            "run_seconds": run_seconds(rates, images, per_epoch, steps),
            "offers": [mine, *planner.larger(plan.seconds)],
        }
        return plan.model_copy(update=changes)


OFFERED = ("resolves", "seeds", "image_size", "narrower")  # in which one offer differs from another


def choose_plan(
    request: Request,
    images: Survey,
    variants: Sequence[Variant],
    like: ModelConfig | None,
    device: torch.device,
    slots: int | None,
    earlier: Study | None,
    resizable: bool,
    progress: Progress,
) -> tuple[Planner | None, Plan | None, Sequence[Variant]]:
    """What to train within the request's budget, or within the default one, and which of the variants, if these are the
    default ones; None: its length is given, or it is no comparison. resizable: the images can be opened at any size."""
    if not isinstance(request, CompareRequest) or (budget := budget_of(request, images, variants)) is None:
        return None, None, variants
    if earlier and earlier.budget == budget and earlier.plan:  # what was chosen stays chosen
        return None, earlier.plan, variants if request.attentions else without(variants, earlier.plan.left_out)
    trained = [v for v in variants if not v.published]
    near = device if slots is None else pick_device("auto")  # where steps are timed
    cores, amp = slots or places(device), amp_dtype(request.options.get("amp", "auto"), near)
    shaped = request.with_scratch or {"start_head", "head"} & set(request.options)
    fitted = like is not None and like.head == "linear" and not shaped
    planner = Planner(images, len(trained), cores, near, request.seeds, request.folds or 1, like, fitted, amp)
    planner = planner.with_rungs(request.options, request.image_size, resizable, {v.attention for v in trained})
    decoding = decoding_seconds(images, planner.rungs[-1].size) if resizable else 0.0
    asked = tuple(v.attention for v in trained if not v.control)
    usual = not request.attentions and asked in (ATTENTIONS, START_ATTENTIONS)
    planner = replace(planner, decoding=decoding, fewest=min(MIN_VARIANTS, len(trained)) if usual else 0)
    planner = planner.timed(seconds(budget), progress)
    left_out: tuple[str, ...] = ()
    if usual:
        fewer = planner.affordable(seconds(budget))
        left_out = asked[len(asked) - (len(trained) - fewer) :]
        planner, variants = replace(planner, variants=fewer), without(variants, left_out)
    rung, count = planner.choose(seconds(budget))
    planner.check(rung, seconds(budget))
    plan = Plan(
        seconds=seconds(budget),
        image_size=rung.size,
        options=rung.options | ({"start_head": "fitted"} if fitted else {}),
        seeds=count,
        folds=planner.folds,
        limit=planner.limit(rung, seconds(budget)) if fitted and resizable else None,
        left_out=left_out,
    )
    return planner, plan, variants


def without(variants: Sequence[Variant], left_out: Collection[str]) -> Sequence[Variant]:
    return [v for v in variants if v.attention not in left_out]


def budget_of(request: CompareRequest, images: Survey, variants: Sequence[Variant]) -> str | None:
    tuned = images.name in TUNED or variants[0].task != "classification"
    if request.budget is None and not tuned and not {"epochs", "steps"} & set(request.options):
        return DEFAULT_BUDGET
    return request.budget


def timing_seconds(budget: float) -> float:
    return min(MAX_TIMING, TIMING_SHARE * budget)


def _takes(model: ModelConfig, attention: str) -> bool:
    try:
        check_attention(model.model_copy(update={"attention": attention}))
    except ValueError:
        return False
    return True


def _start_sizes(like: ModelConfig, available: int) -> list[ImageSize]:
    """Image sizes at which a trained model can be used: its own, and twice that if the images have as many pixels and
    the tokens stay few."""
    own, twice = like.image_size, scaled(like.image_size, 2)
    return [twice, own] if max(sides(twice)) <= min(available, 256) else [own]


def resolution(variants: int, seeds: float, test: int, folds: int = 1) -> float:
    """The smallest margin within which variants can be shown to be of the best, if seeds and images differ as they
    usually do: the bound of the report's verdicts. Infinite seeds: nothing is trained."""
    others, runs = max(1, variants - 1), seeds * folds
    by_seeds, by_images = 2 * SEED_DEVIATION**2, DISCORDANT / test
    quantile = dunnett(others, others * (runs - 1), LOOK)
    if folds > 1:  # each tests other images, and was trained on mostly the same
        between = (by_seeds + by_images) * (1 / runs + held_out(folds))
        return max(quantile * math.sqrt(between), dunnett(others, math.inf, LOOK) * math.sqrt(by_images / folds))
    return math.hypot(quantile * math.sqrt(by_seeds / runs), dunnett(others, math.inf, LOOK) * math.sqrt(by_images))
