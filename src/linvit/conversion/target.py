"""A conversion that names no target finds it: which attention is faster here, and still right?

Four steps, each of which is made once: a race of whole models leaves those that are fast enough; their accuracy before
any training, on the images of the search, leaves one or two; the search of layers mixes them with softmax, where a mix
must be fast enough, too; and the images that decide prove what is lost. If nothing passes, the answer is the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence

from linvit.conversion.budget import MAX_DECIDED, MAX_KINDS, Plan, fewer, planned
from linvit.conversion.candidates import (
    Tried,
    evaluate_kinds,
    fast_from,
    forecast_speeds,
    possible,
    race_kinds,
    refuse,
)
from linvit.conversion.context import Context, StageResult
from linvit.conversion.measuring import measure_speeds, speed_of
from linvit.conversion.mixing import FIRST_MIX, Kind, LayerSearch
from linvit.conversion.stages import plan_steps, stage_shares, train_stage, training_seconds
from linvit.durations import duration
from linvit.ledger import key_of
from linvit.records import Record
from linvit.schemas.conversion import MIN_SPEED, fast_enough
from linvit.training.events import Noted

HOPEFUL = 0.5  # of the teacher's accuracy: what loses more before any training is not mixed
GAIN = 1 - 1 / MIN_SPEED  # share of the teacher's time that must be saved


def find_target(c: Context) -> StageResult:
    """The student, or the teacher where that is the better choice."""
    names = possible(c)
    plan = planned(c, len(names))
    c.images = fewer(c.images, plan, c.conversion.seed)
    announce(c, plan, list(names.values()).count(""))
    teacher = c.result("teacher", c.store("teacher", lambda: c.teacher))
    tried, limit = try_candidates(c, names, plan)
    target = c.ledger.once(key_of("conversion_target"), lambda: [choice(c, tried)])
    kinds, why = str(target.tags["kinds"] or "").split(), str(target.tags["why"] or "")
    chosen = best_mix(c, {one.layers: one.speed for one in tried if one.layers in kinds}) if kinds else None
    if chosen is not None:
        measure_speeds(c, chosen.attention)
        why = "" if fast_enough(speed_of(c, chosen.attention)) else "mix"
    elif kinds:
        why = "accuracy"
    c.ledger.once(key_of("conversion_kept"), lambda: [c.record("conversion_kept", int(bool(why)), why=why)])
    if chosen is not None and not why:
        return chosen
    if not c.ledger.has("conversion_pays"):
        c.ledger.append(payoffs(c, {one.layers: one.speed for one in tried}, limit, plan))
    return teacher


def announce(c: Context, plan: Plan, candidates: int) -> None:
    images = f"{plan.search:,} images guide, {plan.decide:,} decide"
    text = f"choosing among {candidates} attentions takes at most about {duration(plan.seconds)}: {images}"
    if may_train(c):
        length = f"{sum(c.conversion.steps.values()):,} steps" if c.conversion.steps else ""
        text += f"; training, only if it is needed, {length or duration(training_seconds(c.conversion.budget))}"
    c.on_event(Noted(text))


def try_candidates(c: Context, names: dict[str, str], plan: Plan) -> tuple[list[Tried], float]:
    """The candidates that can be here, the fastest first, and the speed without attention. Their accuracies are of use
    if that is fast enough."""
    for layers, why in names.items():
        if why:
            refuse(c, layers, why)
    specs = [layers for layers, why in names.items() if not why]
    speeds = race_kinds(c, specs, plan.batch, plan.seconds / 4)
    limit = max(speeds.values())
    tried = sorted((Tried(layers, speeds[layers]) for layers in specs), key=lambda one: -one.speed)
    if not fast_enough(limit) or not specs:
        return tried, limit
    found = evaluate_kinds(c, specs)
    return [Tried(one.layers, one.speed, *found[one.layers]) for one in tried], limit


def choice(c: Context, tried: Sequence[Tried]) -> Record:
    """The attentions to mix, or why there are none."""
    fast = [one for one in tried if fast_enough(one.speed)]
    if not fast:
        return c.record("conversion_target", 0, why="speed", kinds="")
    teacher = evaluate_kinds(c, [])[c.config.attention][0]
    kinds = choose_kinds(fast, teacher, c.conversion.max_drop or 0.0)
    return c.record("conversion_target", len(kinds), why="" if kinds else "accuracy", kinds=" ".join(kinds))


def choose_kinds(fast: Sequence[Tried], teacher: float, max_drop: float) -> list[str]:
    """Which of them are mixed, the fastest first: the fastest within the drop, or the most accurate; and the next
    faster one of those than which no other is both faster and more accurate."""

    def rank(one: Tried) -> tuple[float, float]:
        return one.speed, one.accuracy or 0.0

    front = [
        one
        for one in sorted(fast, key=rank, reverse=True)
        if not any(rank(other) != rank(one) and all(map(float.__ge__, rank(other), rank(one))) for other in fast)
        and (one.accuracy or 0.0) >= HOPEFUL * teacher
    ]
    if not front:
        return []
    within = [i for i, one in enumerate(front) if (one.accuracy or 0.0) >= (1 - max_drop) * teacher]
    anchor = within[0] if within else len(front) - 1  # along the front, accuracy rises as speed falls
    return [one.layers for one in front[max(0, anchor - MAX_KINDS + 1) : anchor + 1]]


def best_mix(c: Context, speeds: dict[str, float]) -> StageResult | None:
    """The fastest mix of these kinds that is proved to stay within max_drop and is fast enough by its kinds' speeds,
    trained further if no mix stays within without."""
    gains = {layers: 1 - 1 / speed for layers, speed in speeds.items()}
    most = max(gains.values())
    kinds = [Kind(layers, gain / most) for layers, gain in gains.items()]
    least = c.config.depth * GAIN / most
    search = LayerSearch(c, kinds, least, MAX_DECIDED)
    trains = not search.within() and may_train(c)
    if not trains and not search.within(search.slack):
        return None
    results = [search.result(FIRST_MIX, search.first)]
    del search  # with its models, while others are trained
    if trains:
        plan_steps(c, results[0].attention, results[0].folder)
        for name in stage_shares(c.conversion.stages, auto=True):
            results.append(train_stage(c, name, results[0].attention, results[-1].folder))
    return LayerSearch(c, kinds, least, MAX_DECIDED).decide(results)


def may_train(c: Context) -> bool:
    has_length = c.conversion.steps or training_seconds(c.conversion.budget)
    return bool(stage_shares(c.conversion.stages, auto=True) and has_length)


def payoffs(c: Context, speeds: dict[str, float], limit: float, plan: Plan) -> list[Record]:
    """From which image size on each attention would be fast enough, by forecast; and how long it would take to find
    the target there. Without one, a record of no size."""
    found = []
    slow = {spec: speed for spec, speed in speeds.items() if not fast_enough(speed)}
    for spec, side in fast_from(c.config, slow, limit).items():
        there, doubled = (forecast_speeds(c.config, speeds, limit, one) for one in (side, 2 * c.config.image_size))
        more = {"seconds": plan.seconds * there[""], "doubled": doubled.get(spec)}
        found.append(c.record("conversion_pays", side, model=spec, **more))
    return found or [c.record("conversion_pays", 0, model="")]
