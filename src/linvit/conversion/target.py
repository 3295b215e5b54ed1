"""A conversion that names no attention chooses one.

1. A race of whole models finds the candidates that are fast enough on this machine.
2. Their accuracy without training, on the images of the search, leaves one or two kinds.
3. The layer search mixes these with softmax. A mix must be fast enough, too.
4. Other images decide: the upper bound of what a mix loses must stay within max_drop.

Every step is stored and made once. If no mix passes, the result is the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from linvit.conversion.budget import MAX_DECIDED, MAX_KINDS, Plan, measured_pace, plan_at, plan_images, subset
from linvit.conversion.candidates import (
    SAME,
    Candidate,
    candidate_layers,
    evaluate_kinds,
    fast_from,
    forecast_speeds,
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
from linvit.schemas.pixels import scaled, sides
from linvit.training.events import Noted

MIN_ACCURACY = 0.5  # relative to the teacher's: a candidate that is worse without training is not mixed
MIN_SAVING = 1 - 1 / MIN_SPEED  # of the teacher's time


def find_target(c: Context) -> StageResult:
    """The student, or the teacher where that is the better choice."""
    layers = candidate_layers(c)
    count = list(layers.values()).count("")
    plan = plan_images(c, count)
    c.images = subset(c.images, plan, c.conversion.seed)
    announce(c, plan, count)
    teacher = c.result("teacher", c.store("teacher", lambda: c.teacher))
    candidates, limit = measure_candidates(c, layers, plan)
    speeds = {one.layers: one.speed for one in candidates}
    target = c.ledger.once(key_of("conversion_target"), lambda: [select_kinds(c, candidates, plan.kinds)])
    kinds, why = str(target.tags["kinds"] or "").split(), str(target.tags["why"] or "")
    chosen = best_mix(c, {kind: speeds[kind] for kind in speeds if kind in kinds}) if kinds else None
    if chosen is not None:
        measure_speeds(c, chosen.attention)
        why = "" if fast_enough(speed_of(c, chosen.attention)) else "mix"
    elif kinds:
        why = "accuracy"
    c.ledger.once(key_of("conversion_kept"), lambda: [c.record("conversion_kept", int(bool(why)), why=why)])
    if chosen is not None and not why:
        return chosen
    if not c.ledger.has("conversion_pays"):
        same = {spec: 1.0 for spec, refusal in layers.items() if refusal == SAME}
        c.ledger.append(forecast(c, speeds | same, limit))
    return teacher


def announce(c: Context, plan: Plan, candidates: int) -> None:
    text = f"comparing {candidates} attentions on {plan.search:,} images, deciding on {plan.decide:,} others"
    text += f": at most about {duration(plan.seconds)}"
    if can_train(c):
        length = f"{sum(c.conversion.steps.values()):,} steps" if c.conversion.steps else ""
        text += f", and {length or duration(training_seconds(c.conversion.budget))} of training if it is needed"
    c.on_event(Noted(text))


def measure_candidates(c: Context, layers: Mapping[str, str], plan: Plan) -> tuple[list[Candidate], float]:
    """The candidates, the fastest first, and the speed without attention. Their accuracies are measured only if that
    is fast enough."""
    for spec, why in layers.items():
        if why:
            refuse(c, spec, why)
    specs = [spec for spec, why in layers.items() if not why]
    speeds = race_kinds(c, specs, plan.batch, plan.seconds / 4)
    limit = max(speeds.values())
    found = sorted((Candidate(spec, speeds[spec]) for spec in specs), key=lambda one: -one.speed)
    if not fast_enough(limit) or not specs:
        return found, limit
    scores = evaluate_kinds(c, specs)
    return [Candidate(one.layers, one.speed, *scores[one.layers]) for one in found], limit


def select_kinds(c: Context, candidates: Sequence[Candidate], most: int) -> Record:
    """A record of the attentions to mix, or of why there are none."""
    fast = [one for one in candidates if fast_enough(one.speed)]
    if not fast:
        return c.record("conversion_target", 0, why="speed", kinds="")
    teacher = evaluate_kinds(c, [])[c.config.attention][0]
    kinds = choose_kinds(fast, teacher, c.conversion.max_drop or 0.0, most)
    return c.record("conversion_target", len(kinds), why="" if kinds else "accuracy", kinds=" ".join(kinds))


def choose_kinds(fast: Sequence[Candidate], teacher: float, max_drop: float, most: int = MAX_KINDS) -> list[str]:
    """The candidates to mix, at most `most`, the fastest first: the fastest one within the drop, or the most accurate
    one if none is; and the next faster ones on the front of speed and accuracy."""

    def rank(one: Candidate) -> tuple[float, float]:
        return one.speed, one.accuracy or 0.0

    front = [
        one
        for one in sorted(fast, key=rank, reverse=True)
        if not any(rank(other) != rank(one) and all(map(float.__ge__, rank(other), rank(one))) for other in fast)
        and (one.accuracy or 0.0) >= MIN_ACCURACY * teacher
    ]
    if not front:
        return []
    within = [i for i, one in enumerate(front) if (one.accuracy or 0.0) >= (1 - max_drop) * teacher]
    anchor = within[0] if within else len(front) - 1  # along the front, accuracy rises as speed falls
    return [one.layers for one in front[max(0, anchor - most + 1) : anchor + 1]]


def best_mix(c: Context, speeds: Mapping[str, float]) -> StageResult | None:
    """The fastest mix of these kinds that is shown to stay within max_drop and is fast enough, by the speeds of its
    kinds. It is trained further only if no mix stays within the drop without."""
    savings = {layers: 1 - 1 / speed for layers, speed in speeds.items()}
    most = max(savings.values())
    kinds = [Kind(layers, saving / most) for layers, saving in savings.items()]
    least = c.config.depth * MIN_SAVING / most
    search = LayerSearch(c, kinds, least, MAX_DECIDED)
    trains = not search.within() and can_train(c)
    if not trains and not search.within(search.slack):
        return None
    results = [search.result(FIRST_MIX, search.first)]
    del search  # with its models, while others are trained
    if trains:
        plan_steps(c, results[0].attention, results[0].folder)
        for name in stage_shares(c.conversion.stages, auto=True):
            results.append(train_stage(c, name, results[0].attention, results[-1].folder))
    return LayerSearch(c, kinds, least, MAX_DECIDED).decide(results)


def can_train(c: Context) -> bool:
    has_length = c.conversion.steps or training_seconds(c.conversion.budget)
    return bool(stage_shares(c.conversion.stages, auto=True) and has_length)


def forecast(c: Context, speeds: Mapping[str, float], limit: float) -> list[Record]:
    """For each attention that is too slow here: the image size from which it would be fast enough, and how long finding
    the target would take there. One record of size 0 if there is none."""
    found, pace = [], measured_pace(c)
    slow = {spec: speed for spec, speed in speeds.items() if not fast_enough(speed)}
    doubled = forecast_speeds(c.config, slow, limit, scaled(c.config.image_size, 2))
    for spec, size in fast_from(c.config, slow, limit).items():
        longer = forecast_speeds(c.config, {}, limit, size)[""]
        config = c.config.model_copy(update={"image_size": size})
        plan = plan_at(c, len(speeds), config, pace._replace(forward=pace.forward * longer))
        record = c.record("conversion_pays", sides(size)[0], model=spec)
        shape = {"shape": size} if isinstance(size, str) else {}
        found.append(record.tagged(seconds=plan.seconds, doubled=doubled.get(spec), **shape))
    return found or [c.record("conversion_pays", 0, model="")]
