"""Trials: a search as its storage has it; who gets the next one, and whether all is done.

Every variant has a study of Optuna's, in which a trial's number is its own. All variants get equally many trials, or
equally many seconds of training: the next trial is of the variant that has had least. One that turns out to be
impossible, or one too many, is void: it is marked as failed, costs nothing and does not count.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linvit.locks import appending, difference
from linvit.metrics import key
from linvit.records import Record, Records
from linvit.study.design import Variant
from linvit.tune.design import Points, Search
from linvit.tune.leases import MOST, Leases
from linvit.tune.space import Point, Range, labels
from linvit.tune.storage import needed

VOIDS = 40  # impossible points of a variant before any possible one, and beside each of them


@dataclass(frozen=True)
class Claim:
    """A trial that is this worker's."""

    variant: Variant
    trial: Any  # Optuna's, frozen as it was found

    @property
    def number(self) -> int:
        return self.trial.number


def agree(storage: Any, search: Search) -> bool:
    """Whether the storage has this search already; a ValueError if it has another one of its name."""
    try:
        about = storage.get_study_user_attrs(storage.get_study_id_from_name(search.name))
    except KeyError:
        return False
    if "settings" in about and (why := difference(about["settings"], search.settings())):
        raise ValueError(f"{search.storage} holds another search called '{search.name}' ({why}): "
                         "choose another --out or --storage")  # fmt: skip
    return "settings" in about


class Trials:
    """The studies of a search. `points` says what there is to try."""

    def __init__(self, search: Search, points: Points, storage: Any):
        self.search, self.points, self.storage = search, points, storage
        self.states = needed().trial.TrialState
        known = agree(storage, search)
        self.log = self._study(search.name)
        if not known:
            storage.set_study_user_attr(self.log, "settings", search.settings())
        self.studies = {variant.id: self._study(self.name(variant)) for variant in search.variants}

    def name(self, variant: Variant) -> str:
        return f"{self.search.name}: {variant.id}"

    def _study(self, name: str) -> int:
        try:
            return self.storage.get_study_id_from_name(name)
        except KeyError:  # several may be creating it at once
            needed().create_study(storage=self.storage, study_name=name, direction="maximize", load_if_exists=True)
        return self.storage.get_study_id_from_name(name)

    def leases(self, folder: Path) -> Leases:
        return Leases(self.storage, self.log, list(self.studies.values()), folder)

    def every(self, variant: Variant) -> list[Any]:
        """By number, the void ones too."""
        return self.storage.get_all_trials(self.studies[variant.id], deepcopy=False)

    def all(self, variant: Variant) -> list[Any]:
        """That count, by number."""
        return [trial for trial in self.every(variant) if "void" not in trial.user_attrs]

    def wanted(self) -> int | None:
        """Trials of each variant; None: as many as there is time for."""
        if self.search.trials is None:
            return self.points.most if self.search.budget is None else None
        return min(self.search.trials, self.points.most or self.search.trials)

    def spent(self, variant: Variant) -> tuple[float, float]:
        """Seconds of training that a variant has had or is having, and those that one more trial takes."""
        trials = self.all(variant)
        known = [trial.user_attrs["seconds"] for trial in trials if "seconds" in trial.user_attrs]
        one = sum(known) / len(known) if known else self.search.expected.get(variant.id, 0.0)
        return sum(known) + one * (len(trials) - len(known)), one

    def neediest(self) -> Variant | None:
        """Who gets the next trial; None: all have had theirs."""
        had: dict[str, float] = {}
        for variant in self.search.variants:
            count = len(self.all(variant))
            if self.points.most is not None and len(self.every(variant)) >= self.points.most:
                continue
            if (wanted := self.wanted()) is not None:
                room, so_far = count < wanted, float(count)
            else:
                so_far, one = self.spent(variant)
                room = not count or so_far + one <= (self.search.share or 0.0)
            if room:
                had[variant.id] = so_far
        first = min(had, key=had.__getitem__, default=None)
        return next((variant for variant in self.search.variants if variant.id == first), None)

    def claim(self, leases: Leases) -> Claim | None:
        """One that was left by its worker, or a new one; None if there is nothing to do now."""
        for variant in self.search.variants:
            for trial in self.every(variant):
                if trial.state == self.states.WAITING and leases.take(trial):
                    if "void" not in trial.user_attrs:
                        return Claim(variant, self.storage.get_trial(trial._trial_id))
                    self.void(leases, trial.user_attrs["void"])  # whoever found that was killed before it was said
        while (variant := self.neediest()) is not None:
            trial = leases.create(self.studies[variant.id])
            if not self._surplus(variant, trial):
                return Claim(variant, trial)
            self.void(leases, "one too many")
        return None

    def _surplus(self, variant: Variant, trial: Any) -> bool:
        """Whether others were faster."""
        wanted, most = self.wanted(), self.points.most
        before = sum(other.number < trial.number for other in self.all(variant))
        return (wanted is not None and before >= wanted) or (most is not None and trial.number >= most)

    def void(self, leases: Leases, why: str) -> None:
        leases.finish(self.states.FAIL, None, void=why)

    def check_possible(self, variant: Variant, why: str) -> None:
        """That a search does not go on for ever where next to nothing is possible."""
        every = self.every(variant)
        void = sum("void" in trial.user_attrs for trial in every)
        if void > VOIDS * (1 + len(every) - void):
            raise ValueError(f"space {self.search.space.name}: {void} of {len(every)} points of {variant.attention} "
                             f"are impossible, the last since {why}")  # fmt: skip

    def given_up(self, claim: Claim, leases: Leases) -> str:
        """Why a trial is not tried once more."""
        deaths = leases.holder(claim.trial).deaths
        return f"{deaths} workers died at the same place" if deaths >= MOST else ""

    def opened(self, claim: Claim) -> tuple[Any, Point]:
        """Optuna's live trial, and its point: the sampler's, or as an earlier worker found it. What the sampler draws
        is a function of the search's seed and the trial's number, so that whoever asks first gets the same."""
        optuna, given = needed(), self.points.given(claim.variant, claim.number)
        if given is not None:
            fixed = {name: labels([value])[0] for name, value in given.items()}
            self.storage.set_trial_system_attr(claim.trial._trial_id, "fixed_params", fixed)
        study = optuna.load_study(study_name=self.name(claim.variant), storage=self.storage,
                                  sampler=self._sampler(claim.number), pruner=self._pruner())  # fmt: skip
        live = optuna.trial.Trial(study, claim.trial._trial_id)
        space, spec = self.search.space, claim.variant.attention
        return live, {
            name: _suggested(live, name, values, space.whole(name, spec)) for name, values in space.of(spec).items()
        }

    def _sampler(self, number: int) -> Any:
        optuna, seed = needed(), zlib.crc32(f"{self.search.seed} {number}".encode())
        if self.search.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=self.search.startup, constant_liar=True)
        return optuna.samplers.RandomSampler(seed=seed)

    def _pruner(self) -> Any:
        pruners, most = needed().pruners, self.search.reports
        if self.search.pruner == "hyperband":
            return pruners.HyperbandPruner(min_resource=1, max_resource=most)
        if self.search.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=self.search.startup, n_warmup_steps=most // 5)
        return pruners.NopPruner()

    def progress(self) -> tuple[int, int]:
        """What is done, of what there is to do: trials, or seconds."""
        if (wanted := self.wanted()) is not None:
            done = sum(trial.state.is_finished() for variant in self.search.variants for trial in self.all(variant))
            return done, wanted * len(self.search.variants)
        share = self.search.share or 0.0
        done = sum(min(share, self.spent(variant)[0]) for variant in self.search.variants)
        return round(done), round(share * len(self.search.variants))

    def over(self) -> bool:
        """Whether every variant has had its share, and all of it is finished."""
        every = [trial for variant in self.search.variants for trial in self.all(variant)]
        return all(trial.state.is_finished() for trial in every) and self.neediest() is None

    def records(self) -> list[Record]:
        """Of all trials that are finished, whichever machine did them."""
        found = []
        for variant in self.search.variants:
            for trial in self.all(variant):
                found += [Record.of(dict(row)) for row in trial.user_attrs.get("records", [])]
        return found

    def write_records(self, folder: Path) -> Records:
        """The folder's records with those of all trials, each once."""
        records = Records(folder / "records.jsonl")
        with appending(folder / "trials"):
            there = {key(record) for record in records}
            records.append(record for record in self.records() if key(record) not in there)
        return records


def _suggested(live: Any, name: str, values: Range | list[Any], whole: bool) -> Any:
    if isinstance(values, list):
        known = labels(values)
        return values[known.index(live.suggest_categorical(name, known))]
    if whole:
        return live.suggest_int(name, int(values.low), int(values.high), log=values.log)
    return live.suggest_float(name, float(values.low), float(values.high), log=values.log)
