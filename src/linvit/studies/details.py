"""What a report prints of a row besides its accuracy, and what was found here: validation losses, learned parameters,
and scores by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from linvit.report.result import Table
from linvit.report.summary import number
from linvit.studies.declaration import Published
from linvit.studies.results import ColumnResult

SCORES = ("precision", "recall", "f1")
Classes = Mapping[str, Sequence[float]]  # class → its scores


@dataclass(frozen=True)
class Details:
    """Of a row in one column; means over seeds."""

    loss: float | None = None  # the lowest on validation images
    alpha: float | None = None  # of a learned mixture, after training: the mean over layers
    classes: Classes = field(default_factory=dict)


def details(ran: ColumnResult, row: str) -> Details:
    evidence = ran.summary.evidence
    logs = [evidence.logs.get(r.artefact, []) for r in evidence.of("learning_curve", variant=row)]
    losses = [[loss for line in log if (loss := number(line.get("validation_loss"))) is not None] for log in logs]
    lowest = [min(each) for each in losses if each]
    alphas = [r.value for r in evidence.of("learned_parameter", variant=row, name="alpha") if r.value is not None]
    found: dict[str, list[list[float]]] = {}
    for i, score in enumerate(SCORES):
        for r in evidence.of(score, variant=row, selection="best"):
            if r.value is not None:
                found.setdefault(str(r.tags["class"]), [[] for _ in SCORES])[i].append(r.value)
    classes = {name: [fmean(each) for each in scores] for name, scores in found.items() if all(scores)}
    return Details(fmean(lowest) if lowest else None, fmean(alphas) if alphas else None, classes)


def by_class(row: str, published: Published, found: Mapping[str, Details]) -> Table | None:
    """Precision, recall and F1 of each class as printed, and as found in each column; None if none are printed."""
    printed = published.numbers.get("per_class")
    if not printed:
        return None
    rows = []
    for name, scores in printed.items():
        line = {"Class": name, "Published": " / ".join(f"{scores[score]:.0f}" for score in SCORES)}
        for column, each in found.items():
            mine = each.classes.get(name)
            line[column.capitalize()] = " / ".join(f"{100 * score:.0f}" for score in mine) if mine else ""
        rows.append(line)
    return Table.of(rows, title=f"{row}: precision / recall / F1 of each class, in percent")
