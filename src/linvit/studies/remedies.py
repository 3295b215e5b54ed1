"""What would decide a claim that is not decided: which run, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from linvit.report.comparison import LEVEL
from linvit.studies.agenda import AGENDA
from linvit.studies.declaration import STUDIES, PublishedStudy
from linvit.studies.hypotheses import FAILS, HOLDS, Part, Test, Verdict
from linvit.studies.results import Results

RAISED = 1.5  # times the seeds that would suffice for one test alone: Holm's correction asks for more


class Remedy(NamedTuple):
    study: str
    command: str
    duration: str  # empty: not known
    why: str  # empty: the study was not run
    seeds: int = 0  # that the command asks for


def remedies(verdict: Verdict, results: Results) -> list[Remedy]:
    """Of each study that the claim's undecided tests look at; none if the claim is decided."""
    if verdict.word in (HOLDS, FAILS):
        return []
    found: dict[tuple[str, str], Remedy] = {}
    for test, part in zip(verdict.claim.tests, verdict.parts, strict=True):
        if not part.ran or min(part.holds, part.fails) > LEVEL:
            for one in _of(test, part, results):
                key = one.study, one.why
                found[key] = max(found.get(key, one), one, key=lambda each: each.seeds)
    if verdict.parts and not found:  # each test shows something alone, which the correction takes back
        every = dict.fromkeys(name for test in verdict.claim.tests for name in test.studies)
        why = "every test shows something alone, but not with Holm's correction"
        return [one for name in every for one in _more_seeds(name, 2 * _seeds(name), why)]
    return list(found.values())


def _of(test: Test, part: Part, results: Results) -> list[Remedy]:
    missing = [name for name in test.studies if not results.ran(name)]
    if missing or not part.ran:  # without a missing study, one has no result of a row yet
        return [_run(name, "" if name in missing else "a row has no result") for name in missing or test.studies]
    if part.busy:
        return [_run(name, "measured on a busy core: delete its folder, and measure it on quiet cores")
                for name in test.studies]  # fmt: skip
    if part.early:
        return [_full(name, "the models are barely trained") for name in test.studies]
    if part.seeds:
        if not math.isfinite(part.seeds):
            return [Remedy(test.studies[0], "", "", "no number of seeds decides it on these test images")]
        return [one for name in test.studies for one in _more_seeds(name, part.seeds, "more seeds")]
    return [Remedy(test.studies[0], "", "", part.open or "the difference is too small for this measurement")]


def _run(name: str, why: str) -> Remedy:
    scale = "cpu" if "cpu" in STUDIES[name].durations else "full"
    return Remedy(name, _command(name, scale), STUDIES[name].durations.get(scale, ""), why)


def _full(name: str, why: str) -> Remedy:
    return Remedy(name, _command(name, "full"), STUDIES[name].durations.get("full", ""), why)


def _command(name: str, scale: str) -> str:
    return f"linvit reproduce {name}" + " --scale full" * (scale == "full")


def _seeds(name: str) -> float:
    study = STUDIES[name]
    return study.size("fair", "cpu").seeds if isinstance(study, PublishedStudy) else 0


def _more_seeds(name: str, seeds: float, why: str) -> list[Remedy]:
    """With the time of all seeds, in proportion to the planned one."""
    now = _seeds(name)
    if not now:
        return []
    count = math.ceil(max(seeds * RAISED, now + 1))
    duration = AGENDA[name]._replace(minutes=AGENDA[name].minutes * count / now).duration if name in AGENDA else ""
    return [Remedy(name, f"linvit reproduce {name} --seeds {count}", duration, why, count)]


def next_runs(verdicts: Sequence[Verdict], results: Results) -> list[tuple[str, str, list[str]]]:
    """Studies that were not run and that undecided claims need, in the order of the agenda: name, duration, claims."""
    needed: dict[str, list[str]] = {}
    for verdict in verdicts:
        for one in remedies(verdict, results):
            if not one.why:
                needed.setdefault(one.study, []).append(verdict.claim.id)
    order = list(AGENDA)
    names = sorted(needed, key=lambda name: order.index(name) if name in AGENDA else len(order))
    return [(name, STUDIES[name].durations.get("cpu", ""), list(dict.fromkeys(needed[name]))) for name in names]
