"""What to ask next: changes to the last request that would resolve what is open, or a request that uses the answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linvit.files import slug
from linvit.report.comparison import ENOUGH
from linvit.report.result import last_request
from linvit.report.summary import Summary, VariantResult
from linvit.requests import CompareRequest, ReproduceRequest, Request, TrainRequest

Changes = dict[str, Any]  # to a request
OWN_IMAGES = "path/to/images"


def use(summary: Summary, chosen: VariantResult) -> tuple[str, Request | None]:
    """What to do with a decision, in words and as a request: compare on the user's own images, or train."""
    request, source = last_request(summary.study.requests), summary.study.source
    own = source is not None and (Path(source.data).is_absolute() or "://" in source.data)
    if not own:
        baseline = next((v.attention for v in summary.variants if v.baseline), chosen.attention)
        pair = () if chosen.baseline else (baseline, chosen.attention)
        return "Run it on your own images:", CompareRequest.of(data=OWN_IMAGES, attentions=pair)
    if not isinstance(request, CompareRequest) or chosen.variant.options or chosen.variant.data:
        return f"Train it on your images: attention={chosen.attention}.", None
    shared = ("data", "image_size", "resize", "data_root", "skip_bad", "start", "config", "options")
    kept = {name: getattr(request, name) for name in shared}
    out = Path("runs") / f"train-{slug(chosen.attention)}"
    return "Train it:", TrainRequest.of(**kept, attention=chosen.attention, out=out)


def longer(summary: Summary, times: int) -> Changes | None:
    """The same study with this many times the training, in its own folder. What a budget chose is kept: a larger budget
    would also allow a larger model and more seeds."""
    study, request = summary.study, last_request(summary.study.requests)
    if isinstance(request, ReproduceRequest):  # its scales decide how long it trains
        return {"scale": "full"} if request.scale != "full" else None
    options = request.options if isinstance(request, CompareRequest) else {}
    in_steps, epochs = "steps" in options, float(f"{times * (study.epochs or 1):.4g}")
    changes: Changes = {"budget": None} | ({"steps": times * (study.steps or 1)} if in_steps else {"epochs": epochs})
    if study.plan and study.budget:
        plan = study.plan
        changes = {"image_size": plan.image_size, "seeds": plan.seeds, "folds": study.folds} | plan.options | changes
    if len(study.requests) > 1:  # the last one may have been for some variants only
        changes |= _named(summary, [v for v in summary.variants if v.judged], any(v.control for v in summary.variants))
    out = request.out if isinstance(request, CompareRequest) else None
    return changes | {"out": Path(f"{out or Path('runs') / f'compare-{slug(study.dataset.name)}'}-longer")}


def more_seeds(summary: Summary, variants: Sequence[VariantResult], seeds: int) -> Changes:
    """Trains these variants with this many seeds, and no others where the request can name them."""
    compared = isinstance(last_request(summary.study.requests), CompareRequest)
    margin = {"margin": summary.margin} if compared and summary.margin != summary.study.margin else {}
    controls = any(len(v.scores) < ENOUGH and not v.diverged for v in summary.variants if v.control)
    return {"seeds": seeds} | margin | _named(summary, variants, controls)


def _named(summary: Summary, variants: Sequence[VariantResult], controls: bool) -> Changes:
    """A comparison of these variants; empty where more than their attentions distinguishes them."""
    request = last_request(summary.study.requests)
    own = any(v.variant.options or v.variant.data for v in variants)
    if not isinstance(request, CompareRequest) or request.config is not None or own:
        return {}
    return {"attentions": tuple(dict.fromkeys(v.attention for v in variants)), "controls": controls}
