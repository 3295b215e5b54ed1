"""A plan, for people."""

from __future__ import annotations

from linvit.data import Survey
from linvit.durations import duration
from linvit.models import estimate
from linvit.schemas.model import ModelConfig
from linvit.schemas.study import Plan, repetitions


def plan_lines(
    plan: Plan, images: Survey, model: ModelConfig, variants: int, epochs: float, jobs: int, start: str
) -> list[str]:
    """The plan, for people."""
    counts = f"{images.train:,} train, {images.validation:,} validation, {images.test:,} test"
    scaled = f", resized to {model.image_size} px" if images.side != model.image_size else ""
    scaled += f"; at most {plan.limit:,} of each split" if plan.limit else ""
    length = f"{repetitions(plan)}, {plan.steps:,} steps ({epochs:.3g} epochs), plus one half-length run per variant"
    runs = ["frozen features and a fitted head"] if "frozen features" in plan.expected else []
    runs += [length] if plan.steps else []
    spent = ", ".join(f"{duration(value)} {what}" for what, value in plan.expected.items())
    found = [
        f"plan for {duration(plan.seconds)}, {jobs if jobs > 1 else 'one'} training{'s' * (jobs > 1)} at a time",
        f"  images   {counts}; {images.classes} classes, about {images.side} px{scaled}",
        f"  model    {estimate(model).parameters:,} parameters, {model.tokens} tokens, dim {model.dim}, "
        f"{model.depth} layer{'s' * (model.depth != 1)}",
        f"  start    {start}",
        f"  runs     {variants} variant{'s' * (variants != 1)} × {'; then × '.join(runs)}",
        *([f"  left out {', '.join(plan.left_out)}, for lack of time; -a adds them"] if plan.left_out else []),
        f"  time     about {duration(sum(plan.expected.values()))}: {spent}",
        f"  shows    {plan.offers[0].resolves}",
    ]
    return found + [f"  {duration(offer.seconds):8} would allow {offer.text}" for offer in plan.offers[1:]]
