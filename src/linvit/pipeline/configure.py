"""What `--config best.toml` adds to a request: the options that a search found, beneath those that are given."""

from __future__ import annotations

from linvit.requests import CompareRequest, TrainRequest
from linvit.schemas.search import Best
from linvit.schemas.study import Variant


def configured_training(request: TrainRequest) -> TrainRequest:
    if request.config is None:
        return request
    best = Best.read(request.config)
    winner = best.winner_of(request.attention)
    length = {} if {"epochs", "steps"} & set(request.options) else {"epochs": best.epochs}
    options = length | winner.options | request.options
    return request.replaced(attention=winner.attention, start=request.start or best.start, options=options)


def configured_comparison(request: CompareRequest) -> tuple[CompareRequest, list[Variant]]:
    """The request with what all winners share, and a variant for each; the search has matched their parameters."""
    if request.config is None:
        return request, []
    best = Best.read(request.config)
    shared, own = best.shared(request.attentions, request.options)
    has_length = request.budget is not None or {"epochs", "steps"} & set(request.options)
    options = ({} if has_length else {"epochs": best.epochs}) | shared | request.options
    variants = [Variant(attention=spec, options=found, task=request.task or "classification") for spec, found in own]
    return request.replaced(attentions=(), start=request.start or best.start, match=False, options=options), variants
