"""Leases: which worker has which trial, so that each is done once, whoever is killed.

Optuna has none that would do: its heartbeat covers neither journals nor ask-and-tell, and from an SQLite file two
processes may take the same waiting trial. What every storage keeps is the order in which a study's trials are created.
So handovers are trials of a study of their own: a log that all read alike. Whoever creates a trial has its generation
0; an entry of the log counts if it follows the generation before it, and of two that do, the first.

A holder writes another number into its trial every few seconds. It is dead if it was a process of this machine and the
lock that it keeps all its life is free; if it was one of another machine, when the number has stayed the same for a
minute *of the observer's clock*: machines need not agree on the time. A dead worker's trial is passed to nobody and
waits; a worker that is free passes it to itself, and goes on from the last checkpoint. A holder that was asleep for
long, or cut off, asks whether the trial is still its own before it goes on.
"""

from __future__ import annotations

import platform
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from linvit.tune.storage import needed

BEAT, STALE = 10.0, 60.0  # seconds between two beats, and without one until a worker of another machine is dead
NOBODY = ""
MOST = 8  # workers that may die at the same place of a trial, which is then given up


class Lost(Exception):
    """The trial is another worker's now."""


@dataclass(frozen=True)
class Holder:
    generation: int
    worker: str
    deaths: int = 0  # of workers since the trial was last seen to get on


def machine() -> str:
    """Of this boot: locks are told by the kernel that keeps them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def clock() -> float:
    """Seconds, those of a machine that sleeps included where they are counted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Leases:
    """One worker's, for as long as the context lasts. `log` and `studies` are ids of Optuna's studies."""

    def __init__(self, storage: Any, log: int, studies: Sequence[int], folder: Path):
        self.storage, self.log, self.studies = storage, log, studies
        self.states = needed().trial.TrialState
        name = uuid.uuid4().hex[:12]
        self.me, self.home = f"{machine()}/{name}", folder / ".workers"
        self.alive = FileLock(self.home / f"{name}.lock")
        self.held: tuple[int, int] | None = None  # id and generation of the trial that is this worker's
        self.lost, self.beats, self.beaten = False, 0, clock()
        self.seen: dict[int, tuple[tuple[Any, ...], float]] = {}  # trial → what its holder last said, and when
        self.turn, self.over = threading.RLock(), threading.Event()
        self.watch = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Leases:
        self.home.mkdir(parents=True, exist_ok=True)
        self.alive.acquire()
        self.look()
        self.watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.watch.join()
        with suppress(Exception):  # what cannot be said now is told by the lock, which others find free
            self.release()
            Path(self.alive.lock_file).unlink(missing_ok=True)
        self.alive.release()

    def holder(self, trial: Any) -> Holder:
        """Whose it is."""
        found = Holder(0, trial.user_attrs["worker"])
        for entry in self.storage.get_all_trials(self.log, deepcopy=False):
            about = entry.user_attrs
            if about["trial"] == trial._trial_id and about["generation"] == found.generation + 1:
                found = Holder(about["generation"], about["worker"], about["deaths"])
        return found

    def create(self, study: int) -> Any:
        """A new trial, which is this worker's."""
        with self.turn:
            mine = needed().trial.create_trial(state=self.states.RUNNING, user_attrs={"worker": self.me})
            number = self.storage.create_new_trial(study, mine)
            self._hold(number, 0)
            return self.storage.get_trial(number)

    def take(self, trial: Any) -> bool:
        """Make a trial this worker's that is nobody's; False if another one is faster."""
        with self.turn:
            there = self.holder(trial)
            if there.worker != NOBODY or not self._pass(trial, there, self.me, there.deaths):
                return False
            try:
                self.storage.set_trial_state_values(trial._trial_id, self.states.RUNNING)
            except needed().exceptions.UpdateFinishedTrialError:  # by one that was taken for dead
                return False
            self._hold(trial._trial_id, there.generation + 1)
            return True

    def release(self) -> None:
        """Leave the trial to whoever is free."""
        with self.turn:
            if self.held is not None and not self.lost:
                number, generation = self.held
                self._leave(self.storage.get_trial(number), Holder(generation, self.me), 0)
            self.held = None

    def check(self) -> None:
        """Lost, if the trial is another's; asked of the storage only by one that has not been heard for long."""
        if clock() - self.beaten > STALE / 2:
            self.look()
        if self.lost:
            raise Lost

    def finish(self, state: Any, values: Sequence[float] | None, **facts: Any) -> None:
        """The trial is done, with these attributes."""
        with self.turn:
            assert self.held is not None
            self.look()
            self.check()
            try:
                for key, value in facts.items():
                    self.storage.set_trial_user_attr(self.held[0], key, value)
                self.storage.set_trial_state_values(self.held[0], state, values)
            except needed().exceptions.UpdateFinishedTrialError:
                raise Lost from None
            self.held = None

    def look(self) -> None:
        """Say that this worker is alive; look whether the others are."""
        with self.turn:
            if clock() - self.beaten > STALE / 2:  # it was asleep or cut off itself, and cannot tell who was silent
                self.seen.clear()
            if self.held is not None:
                self._beat(*self.held)
            self.beaten = clock()
            unfinished = (self.states.RUNNING, self.states.WAITING)
            for study in self.studies:
                for trial in self.storage.get_all_trials(study, deepcopy=False, states=unfinished):
                    if self.held is None or trial._trial_id != self.held[0]:
                        with suppress(needed().exceptions.UpdateFinishedTrialError):
                            self._observe(trial)

    def _beat(self, number: int, generation: int) -> None:
        trial = self.storage.get_trial(number)
        there = self.holder(trial)
        if (there.generation, there.worker) != (generation, self.me) or trial.state.is_finished():
            self.lost = True
            return
        self.beats += 1
        self.storage.set_trial_user_attr(number, "beat", self.beats)
        if trial.state == self.states.WAITING:  # a slow observer said so when it was true
            self.storage.set_trial_state_values(number, self.states.RUNNING)

    def _observe(self, trial: Any) -> None:
        """Pass a trial to nobody whose holder is dead."""
        there = self.holder(trial)
        if there.worker == NOBODY:
            if trial.state == self.states.RUNNING:  # whoever passed it on was killed before it could say so
                self.storage.set_trial_state_values(trial._trial_id, self.states.WAITING)
        elif there.worker == self.me or self._is_dead(trial, there):
            reached = [len(trial.intermediate_values), *trial.user_attrs.get("reached", [])]
            deaths = there.deaths + 1 if reached == trial.user_attrs.get("died at") else 1
            self.storage.set_trial_user_attr(trial._trial_id, "died at", reached)
            self._leave(trial, there, deaths)

    def _is_dead(self, trial: Any, holder: Holder) -> bool:
        home, _, name = holder.worker.rpartition("/")
        lock = self.home / f"{name}.lock"
        if home == machine() and lock.exists():
            return _is_free(lock)
        said, now = (holder, trial.user_attrs.get("beat")), clock()
        last, when = self.seen.get(trial._trial_id, (None, now))
        if said != last:
            self.seen[trial._trial_id] = said, now
            return False
        return now - when > STALE

    def _leave(self, trial: Any, holder: Holder, deaths: int) -> None:
        if self._pass(trial, holder, NOBODY, deaths):
            self.storage.set_trial_state_values(trial._trial_id, self.states.WAITING)

    def _pass(self, trial: Any, holder: Holder, worker: str, deaths: int) -> bool:
        """Write a handover; whether it is the one that counts."""
        about = {"trial": trial._trial_id, "generation": holder.generation + 1, "worker": worker, "deaths": deaths}
        entry = needed().trial.create_trial(state=self.states.COMPLETE, value=0.0, user_attrs=about)
        self.storage.create_new_trial(self.log, entry)
        now = self.holder(trial)
        return (now.generation, now.worker) == (about["generation"], worker)

    def _hold(self, number: int, generation: int) -> None:
        self.held, self.lost, self.beaten = (number, generation), False, clock()

    def _watch(self) -> None:
        while not self.over.wait(BEAT):
            with suppress(Exception):  # `check` asks again, where it matters
                self.look()


def _is_free(lock: Path) -> bool:
    """Whether nobody holds a lock."""
    try:
        with FileLock(lock, timeout=0):
            return True
    except (Timeout, OSError, NotImplementedError):
        return False
