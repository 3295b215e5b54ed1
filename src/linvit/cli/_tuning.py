"""What `tune` and `report` say of a search, and how `train` and `compare` read what it found."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linvit.cli._output import print_json, print_table
from linvit.metrics import percent


def show(folder: Path, as_json: bool, quiet: bool) -> None:
    """The answer and the table, as the page in the folder has them."""
    from linvit.progress import duration
    from linvit.report import tuning

    evidence = tuning.read(folder)
    said, page, best = tuning.answer(evidence), folder / "report.html", folder / "best.toml"
    if as_json:
        rows = [
            {"variant": row.id, "trials": len(row.trials), **{how: row.count(how) for how in tuning.HOWS},
             "first_accuracy": row.first and row.first.accuracy, "best_accuracy": row.best and row.best.accuracy,
             "best_trial": row.best and row.best.number, "best_options": row.best and row.best.options,
             "seconds": row.seconds}
            for row in evidence.rows
        ]  # fmt: skip
        print_json({"headline": said.headline, "sentence": said.sentence, "caution": said.caution,
                    "folds": evidence.folds, "variants": rows, "best": str(best) if best.exists() else None,
                    "report": str(page)})  # fmt: skip
        return
    if not quiet:
        first = "defaults" if evidence.plan.get("defaults") else "first trial"
        shown = [
            {"variant": row.label, first: percent(row.first.accuracy or 0) if row.first else "–",
             "best": percent(row.best.accuracy or 0) if row.best else "–", "trials": len(row.trials),
             "pruned": row.count("pruned"), "diverged": row.count("diverged"), "failed": row.count("failed"),
             "time": duration(row.seconds)}
            for row in evidence.rows
        ]  # fmt: skip
        print_table(shown, right=[name for name in shown[0] if name != "variant"])
    print(f"{said.headline}. {said.sentence}")
    print(said.caution)
    if best.exists():
        print(f"Use it: linvit train {evidence.data} --config {shlex.quote(str(best))}")
    print(f"Report: {page}")


def trained(config: Path | None, attention: str | None, start: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """What `train` is asked for, with what a search found where nothing is given."""
    if config is None:
        return given | {"start": start}
    from linvit.tune.best import Best

    best = Best.read(config)
    return best.chosen(attention, given) | {"start": start or best.start}


def compared(
    config: Path | None, attentions: list[str] | None, start: str | None, budget: str | None, match: bool,
    given: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The same for `compare`: each variant with its own options. They were matched when they were found."""
    if config is None:
        return {**given, "attentions": attentions, "start": start, "match": match}
    from linvit.study import Variant
    from linvit.tune.best import Best

    best = Best.read(config)
    shared, own = best.shared(attentions, given)
    length = {} if budget is not None or {"epochs", "steps"} & set(given) else {"epochs": best.epochs}
    variants = [Variant(attention=spec, options=options) for spec, options in own]
    return length | shared | {**given, "variants": variants, "match": False, "start": start or best.start}
