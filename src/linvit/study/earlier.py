"""What earlier studies found, for `advise`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from linvit import report
from linvit.measure.provenance import machine
from linvit.report.statistics import WORSE
from linvit.study.questions import Question

MAX_DEPTH = 4  # folders below --runs in which a study is looked for: reproductions are that deep
SHOWN_STUDIES = 3
SIMILAR = 2.0  # times as many tokens are still similar
SPEEDS = {
    "latency": "latency_vs_softmax",
    "inference": "inference_vs_softmax",
    "training": "train_step_vs_softmax",
}


@dataclass(frozen=True)
class Finding:
    """What a study found of one attention."""

    attention: str
    accuracy: float
    verdict: str
    shown: bool  # to lose less than the margin
    bad: bool  # shown to lose more, or diverged
    speeds: Mapping[str, float]  # task → relative to softmax, as far as measured


@dataclass(frozen=True)
class EarlierStudy:
    folder: Path
    data: str
    tokens: int
    machine: str  # empty: this one
    margin: float
    findings: tuple[Finding, ...]

    def is_similar(self, question: Question) -> bool:
        """Of the same data; if none are named, of a similar number of tokens."""
        if question.name:
            return self.data == question.name
        return 1 / SIMILAR <= self.tokens / question.tokens <= SIMILAR


def earlier_studies(runs: Path, question: Question) -> list[EarlierStudy]:
    """The studies below `runs`, the most similar first: of the same data, then of a similar number of tokens. Smoke
    runs of reproductions show nothing, and their literal part is not fair."""
    found = []
    for depth in range(MAX_DEPTH + 1):
        for path in sorted(runs.glob("*/" * depth + "study.json")):
            if path.parent.name == "literal" or path.parent.parent.name == "smoke":
                continue
            try:
                earlier = _read(path.parent)
            except (ValueError, KeyError, OSError) as error:
                warnings.warn(f"{path.parent} is left out: {' '.join(str(error).split())}", UserWarning, stacklevel=2)
                continue
            if earlier.findings:
                found.append(earlier)

    def distance(study: EarlierStudy) -> tuple[bool, float]:
        return study.data != question.name, abs(math.log(study.tokens / question.tokens))

    return sorted(found, key=distance)[:SHOWN_STUDIES]


def _read(folder: Path) -> EarlierStudy:
    summary = report.study_result(folder).summary
    study = summary.study
    there, here = study.machine, machine()
    same = all(there.get(key) == here[key] for key in ("cpu", "cores", "device"))
    name = "" if same else f"{there.get('cpu', 'unknown')}, {there.get('cores', '?')} cores, {there.get('device', '?')}"
    findings = [
        Finding(
            v.attention,
            v.best.mean,
            v.verdict,
            v.standing.shown and not v.diverged,
            v.verdict == WORSE or bool(v.diverged),
            {task: v.numbers[metric] for task, metric in SPEEDS.items() if metric in v.numbers},
        )
        for v in summary.variants
        if v.best and v.judged
    ]
    return EarlierStudy(folder, study.dataset.name, study.model.tokens, name, summary.margin, tuple(findings))


def known_attentions(
    studies: Iterable[EarlierStudy], question: Question, what: Literal["shown", "bad"]
) -> dict[str, EarlierStudy]:
    """The attentions of which a similar study found this, and that study."""
    found: dict[str, EarlierStudy] = {}
    for study in studies:
        for finding in study.findings if study.is_similar(question) else ():
            if getattr(finding, what):
                found.setdefault(finding.attention, study)
    return found
