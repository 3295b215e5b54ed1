"""Leases: one holder at a time, whatever the storage; the dead are told from the slow."""

from __future__ import annotations

import pytest

optuna = pytest.importorskip("optuna")

from linvit.tune import leases as module  # noqa: E402
from linvit.tune.leases import MOST, NOBODY, Leases, Lost  # noqa: E402
from linvit.tune.storage import open_storage, sqlite  # noqa: E402

RUNNING, WAITING = optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.WAITING
COMPLETE = optuna.trial.TrialState.COMPLETE


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(module, "clock", found)
    return found


@pytest.fixture(params=["sqlite", "journal"])
def worker(request, tmp_path, monkeypatch):
    """worker(machine) → the leases of a worker of that machine; nobody beats unless told to."""
    where = sqlite(tmp_path) if request.param == "sqlite" else str(tmp_path / "trials.journal")
    made: list[Leases] = []

    def make(machine: str = "this") -> Leases:
        storage = open_storage(where)
        ids = [
            optuna.create_study(storage=storage, study_name=name, load_if_exists=True)._study_id
            for name in ("log", "study")
        ]
        with monkeypatch.context() as patch:
            patch.setattr(module, "machine", lambda: machine)
            found = Leases(storage, ids[0], ids[1:], tmp_path)
        found.home.mkdir(exist_ok=True)
        found.alive.acquire()
        made.append(found)
        return found

    monkeypatch.setattr(module, "machine", lambda: "this")
    yield make
    for found in made:
        found.alive.release(force=True)


def state(leases: Leases) -> optuna.trial.FrozenTrial:
    (trial,) = leases.storage.get_all_trials(leases.studies[0], deepcopy=False)
    return trial


def test_a_dead_process_of_this_machine_is_seen_at_once(worker, clock):
    a, b = worker(), worker()
    a.create(a.studies[0])
    b.look()
    assert state(b).state == RUNNING
    clock.now += 1000  # however long it says nothing: its lock says that it lives
    b.look()
    assert state(b).state == RUNNING
    a.alive.release()
    b.look()
    trial = state(b)
    assert (trial.state, b.holder(trial).worker, b.holder(trial).generation) == (WAITING, NOBODY, 1)
    assert b.take(trial)
    assert state(b).state == RUNNING
    a.look()
    with pytest.raises(Lost):
        a.check()


def listen(leases: Leases, clock: Clock, seconds: int) -> None:
    """A worker that looks every second for so long."""
    for _ in range(seconds):
        clock.now += 1
        leases.look()


def test_a_worker_of_another_machine_is_dead_after_a_minute_of_silence(worker, clock):
    a, b = worker("another"), worker()
    a.create(a.studies[0])
    b.look()
    listen(b, clock, 59)
    assert state(b).state == RUNNING
    a.look()  # it beats, by whatever clock
    listen(b, clock, 60)
    assert state(b).state == RUNNING
    listen(b, clock, 2)
    assert state(b).state == WAITING


def test_who_did_not_listen_cannot_tell_who_was_silent(worker, clock):
    """The storage was away for an hour: nobody could beat, and nobody is dead for it."""
    a, b = worker("another"), worker()
    a.create(a.studies[0])
    b.look()
    clock.now += 3600
    b.look()
    assert state(b).state == RUNNING
    a.look()
    a.check()
    listen(b, clock, 59)
    assert state(b).state == RUNNING


def test_the_time_that_others_say_does_not_matter(worker, clock):
    """A machine whose clock is years off beats like any other: numbers are looked at, not times."""
    a, b = worker("another"), worker()
    a.create(a.studies[0])
    for _ in range(30):
        clock.now += 10
        b.look()
        a.beaten = -1e9
        a.look()
    assert state(b).state == RUNNING


def test_of_two_that_take_it_the_first_has_it(worker, clock):
    a, b, c = worker(), worker(), worker()
    a.create(a.studies[0])
    a.release()
    left = state(b)
    there = b.holder(left)
    assert (there.worker, there.generation) == (NOBODY, 1)
    assert b._pass(left, there, b.me, 0)  # c has read the same, and is a moment later
    assert not c._pass(left, there, c.me, 0)
    assert c.holder(left).worker == b.holder(left).worker == b.me
    assert not c.take(state(c))


def test_a_release_that_comes_late_changes_nothing(worker, clock):
    """An observer that wrote its handover is slow to say that the trial waits; the new holder puts that right."""
    a, b, c = worker(), worker(), worker()
    a.create(a.studies[0])
    a.release()
    assert b.take(state(b))
    c.storage.set_trial_state_values(state(c)._trial_id, WAITING)
    assert not c.take(state(c))
    b.look()
    b.check()
    assert state(c).state == RUNNING


def test_one_that_slept_asks_before_it_goes_on(worker, clock):
    a, b = worker("another"), worker()
    a.create(a.studies[0])
    b.look()
    listen(b, clock, 62)
    assert b.take(state(b))
    with pytest.raises(Lost):
        a.check()
    with pytest.raises(Lost):
        a.finish(COMPLETE, [0.5])
    a.release()  # is no longer its to leave
    assert b.holder(state(b)).worker == b.me
    b.finish(COMPLETE, [0.25], how="complete")
    assert (state(a).state, state(a).value, state(a).user_attrs["how"]) == (COMPLETE, 0.25, "complete")


def test_what_is_finished_cannot_be_taken(worker, clock):
    a, b = worker("another"), worker()
    a.create(a.studies[0])
    b.look()
    listen(b, clock, 62)
    left = state(b)
    a.storage.set_trial_state_values(left._trial_id, COMPLETE, [0.5])  # before it has heard
    assert not b.take(left)
    assert b.held is None
    b.look()
    assert state(b).state == COMPLETE


def test_deaths_at_one_place_are_counted(worker, clock):
    first = worker()
    trial = first.create(first.studies[0])
    first.alive.release()
    for count in range(1, MOST + 1):
        other = worker()
        other.look()
        assert other.holder(trial).deaths == count
        assert other.take(state(other))
        other.alive.release()
    last = worker()
    last.storage.set_trial_intermediate_value(trial._trial_id, 1, 0.5)  # it got on
    last.look()
    assert last.holder(trial).deaths == 1


def test_a_trial_that_was_made_but_not_begun_is_left(worker, clock):
    """The storage did what it was asked for, but could not say so."""
    a, b = worker(), worker()
    a.create(a.studies[0])
    a.held = None
    a.look()
    assert state(b).state == WAITING
    assert b.take(state(b))


def test_one_that_dies_while_it_takes_a_trial_does_not_keep_it(worker, clock):
    """Its handover is written, but the trial still waits."""
    a, b, c = worker(), worker(), worker()
    a.create(a.studies[0])
    a.release()
    left = state(b)
    assert b._pass(left, b.holder(left), b.me, 0)
    b.alive.release()
    assert not c.take(state(c))
    c.look()
    assert c.take(state(c))
    assert c.holder(state(c)).worker == c.me


def test_one_leaves_only_what_is_its_own(worker, clock):
    """It has not yet heard that its trial is another's."""
    a, b = worker("another"), worker()
    a.create(a.studies[0])
    b.look()
    listen(b, clock, 62)
    assert b.take(state(b))
    a.release()
    assert (b.holder(state(b)).worker, state(b).state) == (b.me, RUNNING)
