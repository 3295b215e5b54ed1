"""What a search found: the best trial of each variant, and how much each option mattered."""

from __future__ import annotations

from typing import Any

from linvit.files import parse_json
from linvit.ledger import Ledger
from linvit.records import Record, Tag
from linvit.schemas.model import ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.schemas.search import Best, Search, Winner
from linvit.schemas.study import Variant
from linvit.training import backbones
from linvit.tuning.points import Points
from linvit.tuning.space import option_value
from linvit.tuning.storage import import_optuna
from linvit.tuning.trials import Trials

MIN_TRIALS = 8  # complete ones, for importances


def importance(search: Search, trials: Trials) -> list[Record]:
    """Of each variant's options, where enough trials are complete."""
    optuna, found = import_optuna(), []
    for variant in search.variants:
        values = [t.value for t in trials.counted(variant) if t.state == trials.states.COMPLETE]
        if len(values) < MIN_TRIALS or len({*values}) < 2:
            continue
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=search.seed)
        shares = optuna.importance.get_param_importances(trials.studies[variant.id], evaluator=evaluator)
        for option, share in shares.items():
            tags: dict[str, Tag] = {"variant": variant.id, "option": option, "dataset": search.dataset.name}
            found.append(Record("option_importance", float(share), "fraction", n=len(values), tags=tags))
    return found


def best_trial(ledger: Ledger, variant: Variant) -> Record | None:
    """Of the complete ones the most accurate; of equals, the one with the lower loss."""
    complete = [r for r in ledger.find("trial_accuracy", variant=variant.id, how="complete") if r.value is not None]
    return max(complete, key=lambda r: (r.value, -float(r.tags["loss"] or 0), -int(r.tags["trial"] or 0)), default=None)


def best_of(search: Search, points: Points, ledger: Ledger) -> Best | None:
    """The best trial of each variant, the best variant first; None if no trial is complete."""
    winners = [
        winner(search, points, variant, top) for variant in search.variants if (top := best_trial(ledger, variant))
    ]
    if not winners:
        return None
    start = backbones.SCRATCH
    if search.start is not None:
        start = backbones.NAME if search.start.shipped else search.start.folder
    return Best(
        data=search.dataset.name,
        epochs=search.recipe.epochs,
        trials=max(len(ledger.find("trial_accuracy", variant=variant.id)) for variant in search.variants),
        seed=search.seed,
        start=start,
        folds=search.folds,
        winner=sorted(winners, key=lambda one: -one.validation_accuracy),
    )


def winner(search: Search, points: Points, variant: Variant, top: Record) -> Winner:
    point: dict[str, Any] = parse_json(str(top.tags["options"]))
    experiment = points.experiment(variant, point)
    names = {*search.options, *point} & {*ModelConfig.model_fields, *Recipe.model_fields}
    options = {name: option_value(experiment, name) for name in sorted(names - {"epochs"})}
    if "size" in search.options:
        options["size"] = search.options["size"]
    if experiment.model.mlp_dim != points.designer.base.model.mlp_dim:  # as it was matched
        options["mlp_dim"] = experiment.model.mlp_dim
    return Winner(
        variant=variant.attention,
        attention=experiment.model.attention,
        trial=int(top.tags["trial"] or 0),
        validation_accuracy=top.value or 0.0,
        options=options,
    )
