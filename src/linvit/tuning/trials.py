"""Trials: a search as its storage has it, which trial is next, and whether all are done.

Every variant has a study of Optuna's. All variants get equally many trials, or equally many seconds of training: the
next trial is of the variant that has had least. A trial whose point is impossible is void: it is marked as failed and
does not count.

Trials have numbers of their own (the user attribute `number`), which seed their samplers. A trial that a killed process
left behind is marked as failed and enqueued again with its number and point; it resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from linvit.locks import difference
from linvit.records import Record
from linvit.schemas.experiment import Experiment
from linvit.schemas.search import Search
from linvit.schemas.study import Variant
from linvit.tuning.points import Points
from linvit.tuning.space import Point, labels, suggested_point, variant_space
from linvit.tuning.storage import import_optuna

MAX_VOID = 40  # impossible points of a variant before any possible one, and for each of them


class Opened(NamedTuple):
    """A trial that is to be run."""

    variant: Variant
    number: int
    live: Any  # Optuna's
    point: Point
    experiments: list[Experiment]


def study_name(search: Search, variant: Variant) -> str:
    return f"{search.name}: {variant.id}"


def check_storage(storage: Any, search: Search, folder: Path) -> None:
    """A ValueError if the storage has another search of this name, or the same one of another folder."""
    optuna = import_optuna()
    names = set(optuna.get_all_study_names(storage))
    for name in (study_name(search, variant) for variant in search.variants):
        stored = optuna.load_study(study_name=name, storage=storage).user_attrs if name in names else {}
        why = difference(stored["settings"], search.settings()) if "settings" in stored else ""
        other = Path(stored.get("folder", folder))
        if not why and other != folder.resolve() and Search.path(other).exists():
            why = f"its folder is {other}"
        if why:
            raise ValueError(
                f"{search.storage} holds another search called '{search.name}' ({why}): choose another --out or "
                "--storage"
            )


class Trials:
    """The studies of a search. Only one process works on them, which holds the lock of the folder."""

    def __init__(self, search: Search, points: Points, storage: Any, folder: Path):
        optuna = import_optuna()
        self.search, self.points, self.states = search, points, optuna.trial.TrialState
        check_storage(storage, search, folder)
        self.studies = {}
        for variant in search.variants:
            self.studies[variant.id] = study = optuna.create_study(
                storage=storage,
                study_name=study_name(search, variant),
                direction="maximize",
                load_if_exists=True,
                pruner=self._pruner(),
            )
            study.set_user_attr("settings", search.settings())
            study.set_user_attr("folder", str(folder.resolve()))
        self.left = [(variant, trial) for variant in search.variants for trial in self._unfinished(variant)]

    def all(self, variant: Variant) -> list[Any]:
        """By number, with void ones; of a trial that was enqueued again, the newest."""
        every = self.studies[variant.id].get_trials(deepcopy=False)
        return list({trial.user_attrs["number"]: trial for trial in every}.values())

    def counted(self, variant: Variant) -> list[Any]:
        return [trial for trial in self.all(variant) if "void" not in trial.user_attrs]

    def _unfinished(self, variant: Variant) -> list[Any]:
        """Left by a killed process; those first that are enqueued already."""
        found = [t for t in self.all(variant) if t.state not in (self.states.COMPLETE, self.states.PRUNED)]
        found = [t for t in found if not t.state.is_finished() or not {"how", "void"} & set(t.user_attrs)]
        return sorted(found, key=lambda trial: trial.state != self.states.WAITING)

    @property
    def trials_each(self) -> int | None:
        """Trials of each variant; None: as many as there is time for."""
        limit = self.points.max_trials
        if self.search.trials is None:
            return limit if self.search.budget is None else None
        return min(self.search.trials, limit or self.search.trials)

    def spent(self, variant: Variant) -> tuple[float, float]:
        """Seconds of training that a variant has had or is having, and those that one more trial takes."""
        trials = self.counted(variant)
        known = [trial.user_attrs["seconds"] for trial in trials if "seconds" in trial.user_attrs]
        one = sum(known) / len(known) if known else self.search.expected.get(variant.id, 0.0)
        return sum(known) + one * (len(trials) - len(known)), one

    def neediest(self) -> Variant | None:
        """Who gets the next trial; None: all have had theirs."""
        had: dict[str, float] = {}
        for variant in self.search.variants:
            count, limit = len(self.counted(variant)), self.points.max_trials
            if limit is not None and len(self.all(variant)) >= limit:
                continue
            if self.trials_each is not None:
                has_room, amount = count < self.trials_each, float(count)
            else:
                amount, one = self.spent(variant)
                has_room = not count or amount + one <= (self.search.share or 0.0)
            if has_room:
                had[variant.id] = amount
        first = min(had, key=had.__getitem__, default=None)
        return next((variant for variant in self.search.variants if variant.id == first), None)

    def open_next(self) -> Opened | None:
        """One that a killed process left, or a new one; None: there is no more to do."""
        while True:
            if self.left:
                variant, trial = self.left.pop(0)
                number = trial.user_attrs["number"]
                if trial.state != self.states.WAITING:
                    self._enqueue_again(variant, trial)
            elif (variant := self.neediest()) is not None:
                number = len(self.all(variant))
                self._enqueue(variant, number, self.points.given(variant, number))
            else:
                return None
            study = self.studies[variant.id]
            study.sampler = self._sampler(number)
            live = study.ask()
            assert live.user_attrs["number"] == number
            point = suggested_point(self.search.space, variant.attention, live)
            try:
                return Opened(variant, number, live, point, self.points.experiments(variant, point))
            except ValueError as error:
                live.set_user_attr("void", str(error))
                study.tell(live, state=self.states.FAIL)
                self._check_possible(variant, str(error))

    def _enqueue(self, variant: Variant, number: int, point: Point | None) -> None:
        params = {name: labels([value])[0] for name, value in (point or {}).items()}
        self.studies[variant.id].enqueue_trial(params, user_attrs={"number": number})

    def _enqueue_again(self, variant: Variant, trial: Any) -> None:
        """With its point, unless the process was killed before all of it was drawn."""
        study, number = self.studies[variant.id], trial.user_attrs["number"]
        if trial.state == self.states.RUNNING:
            study.tell(trial.number, state=self.states.FAIL)
        if set(trial.params) == set(variant_space(self.search.space, variant.attention)):
            study.enqueue_trial(trial.params, user_attrs={"number": number})
        else:
            self._enqueue(variant, number, self.points.given(variant, number))

    def _check_possible(self, variant: Variant, why: str) -> None:
        """A search must end where next to nothing is possible."""
        every = self.all(variant)
        void = sum("void" in trial.user_attrs for trial in every)
        if void > MAX_VOID * (1 + len(every) - void):
            raise ValueError(
                f"space {self.search.space.name}: {void} of {len(every)} points of {variant.attention} are impossible, "
                f"the last because {why}"
            )

    def _sampler(self, number: int) -> Any:
        """Its points are a function of the seed and the trial's number (and, for tpe, of the trials that are
        finished)."""
        samplers, seed = import_optuna().samplers, zlib.crc32(f"{self.search.seed} {number}".encode())
        if self.search.sampler == "tpe":
            return samplers.TPESampler(seed=seed, n_startup_trials=self.search.startup, constant_liar=True)
        return samplers.RandomSampler(seed=seed)

    def _pruner(self) -> Any:
        pruners, reports = import_optuna().pruners, self.search.reports
        if self.search.pruner == "hyperband":
            return pruners.HyperbandPruner(min_resource=1, max_resource=reports)
        if self.search.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=self.search.startup, n_warmup_steps=reports // 5)
        return pruners.NopPruner()

    def finish(self, opened: Opened, how: str, value: float | None, records: Sequence[Record]) -> None:
        """Store the result; it may not be stored twice."""
        state = {"complete": self.states.COMPLETE, "failed": self.states.FAIL}.get(how, self.states.PRUNED)
        opened.live.set_user_attr("seconds", next(r.value for r in records if r.metric == "trial_seconds"))
        opened.live.set_user_attr("records", [json.loads(record.line()) for record in records])
        opened.live.set_user_attr("how", how)
        self.studies[opened.variant.id].tell(opened.live, value if how == "complete" else None, state)

    def records(self) -> list[Record]:
        """Of all finished trials."""
        stored = [t.user_attrs.get("records", []) for v in self.search.variants for t in self.counted(v)]
        return [Record.of(dict(row)) for rows in stored for row in rows]

    def progress(self) -> tuple[int, int]:
        """What is done, of what there is to do: trials, or seconds."""
        variants = self.search.variants
        if self.trials_each is not None:
            done = sum("how" in trial.user_attrs for variant in variants for trial in self.counted(variant))
            return done, self.trials_each * len(variants)
        share = self.search.share or 0.0
        done = sum(min(share, self.spent(variant)[0]) for variant in variants)
        return round(done), round(share * len(variants))
