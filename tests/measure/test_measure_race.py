"""One way to time: every duration here is injected through the clocks, so that no assertion depends on real time."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from linvit.measure import race as module
from linvit.measure.race import is_fine, over_rounds, quartiles, race, ratios, timed
from linvit.measure.threads import use_threads

CPU = torch.device("cpu")


class Machine:
    """Two clocks that only its calls move; CPU time is `busy` times wall time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy: float = 2.0):
        self.wall, self.slow, self.log = 0.0, 1.0, []
        clocks = {"wall": lambda: self.wall, "cpu": lambda: busy * self.wall}
        monkeypatch.setattr(module, "CLOCKS", clocks)

    def call(self, name: str, seconds: float, first: float = 0.0):
        """Takes `seconds`, and `first` more the first time."""

        def work() -> None:
            self.wall += self.slow * seconds + (first if name not in self.log else 0.0)
            self.log.append(name)

        return work


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_seconds_of_one_call_by_either_clock_and_of_several_as_their_sum(machine):
    times = race({"a": machine.call("a", 3.0), "b": machine.call("b", 0.25)}, device=CPU, rounds=5, shortest=1.0)
    assert times.of("a", by="wall") == [3.0] * 5
    assert times.of("b", by="wall") == [0.25] * 5  # not the four that one timing takes
    assert times.of("b", by="cpu") == [0.5] * 5
    assert times.of("a", "b", "b", by="wall") == [3.5] * 5


def test_a_ratio_is_taken_inside_its_round(machine):
    """The machine gets slower from round to round: times tell of it, ratios do not."""

    def slower(done: int, total: int, what: str) -> None:
        machine.slow = 1.0 + done // 2  # two calls a round

    calls = {"a": machine.call("a", 6.0), "b": machine.call("b", 2.0)}
    times = race(calls, device=CPU, rounds=4, progress=slower)
    assert times.of("b", by="wall") == [2.0, 4.0, 6.0, 8.0]
    assert times.ratios("a", "b") == [3.0] * 4
    assert times.ratios("b", "a") == pytest.approx([1 / 3] * 4)


def test_a_cpu_clock_of_coarse_steps_is_not_used(machine, monkeypatch):
    """As under `ulimit -t`: a short call would have taken no time at all."""
    now = itertools.count()
    assert not is_fine(lambda: next(now) // 3 * 4e-3)
    assert is_fine(lambda: next(now) // 3 * 1e-6)
    calls = {"a": machine.call("a", 3.0)}
    assert race(calls, device=CPU, rounds=1).clock == "cpu"
    monkeypatch.setattr(module, "is_fine", lambda clock: False)
    times = race(calls, device=CPU, rounds=1)
    assert (times.clock, times.ratio_clock) == ("wall", "wall")
    monkeypatch.undo()
    monkeypatch.setitem(module.CLOCKS, "cpu", lambda: 7.0)  # it did not move during a timing
    monkeypatch.setattr(module, "is_fine", lambda clock: True)
    assert race({"a": lambda: None}, device=CPU, rounds=1, shortest=1e-6).clock == "wall"


@pytest.mark.parametrize(("seconds", "repeats"), [(0.25, 8), (0.3, 7), (2.0, 1), (50.0, 1)])
def test_short_calls_are_repeated_whatever_the_first_took(machine, seconds, repeats):
    race({"a": machine.call("a", seconds, first=100.0)}, device=CPU, rounds=3, shortest=2.0)
    assert len(machine.log) == 2 + 3 * repeats


def test_every_round_has_each_call_once_in_an_order_that_changes(machine):
    calls = {name: machine.call(name, 1.0) for name in "abc"}
    race(calls, device=CPU, rounds=20)
    rounds = ["".join(machine.log[i : i + 3]) for i in range(6, len(machine.log), 3)]
    assert len(rounds) == 20
    assert {"".join(sorted(order)) for order in rounds} == {"abc"}
    assert {order[0] for order in rounds} == {order[2] for order in rounds} == set("abc")


@pytest.mark.parametrize(("deadline", "rounds"), [(None, 30), (1000.0, 30), (20.0, 8), (3.0, 5), (-1.0, 5)])
def test_near_a_deadline_there_are_fewer_rounds(machine, monkeypatch, deadline, rounds):
    """Two calls of a second each, after two to warm each of them up."""
    monkeypatch.setattr(module.time, "monotonic", lambda: machine.wall)
    calls = {name: machine.call(name, 1.0) for name in "ab"}
    times = race(calls, device=CPU, rounds=30, deadline=deadline)
    assert len(times.of("a")) == len(times.of("b")) == rounds


def test_the_device_is_waited_for(machine, monkeypatch):
    """Work that was only queued is done in `wait`: none of another's, and all of one's own is counted."""
    queued = []

    def wait(device: torch.device) -> None:
        machine.wall += sum(queued)
        queued.clear()

    monkeypatch.setattr(module, "wait", wait)
    calls = {"a": lambda: queued.append(5.0), "b": lambda: queued.append(1.0)}
    queued.append(1000.0)  # from before
    assert timed(calls["a"], 3, torch.device("cuda"))["wall"] == 5.0
    times = race(calls, device=torch.device("cuda"), rounds=3, shortest=1.0)
    assert (times.of("a"), times.of("b")) == ([5.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("device", "threads", "policy", "clocks"),
    [
        ("cpu", 1, "", ("cpu", "cpu")),
        ("cpu", 2, "", ("wall", "wall")),
        ("cpu", 2, "PASSIVE", ("wall", "cpu")),
        ("cpu", 2, "active", ("wall", "wall")),
        ("cuda", 1, "passive", ("wall", "wall")),
    ],
)
def test_which_clock(machine, monkeypatch, device, threads, policy, clocks):
    monkeypatch.setattr(module, "wait", lambda device: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    times = race({"a": machine.call("a", 7.0)}, device=torch.device(device), rounds=1)
    assert (times.clock, times.ratio_clock) == clocks
    assert times.of("a") == [{"wall": 7.0, "cpu": 14.0}[clocks[0]]]


def test_summaries():
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == [2.0, 3.0, 4.0]
    assert quartiles([7.0]) == [7.0] * 3
    assert ratios([6.0, 8.0], [2.0, 4.0]) == [3.0, 2.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])
    record = over_rounds("x", [1.0, 2.0, 3.0], "s", {"device": "cpu", "threads": 1, "dtype": "float32"}, {"a": 5})
    assert (record.value, record.n, record.unit, record.device) == (2.0, 3, "s", "cpu")
    assert record.tags == {"a": 5, "low": 1.5, "high": 2.5}


def test_a_device_that_waits_for_launches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host time is that until the last launch: nearly all of the time if the device computes faster than it is fed."""
    fed, gpu = {"busy": 0.0}, torch.device("cuda")
    monkeypatch.setattr(module, "wait", lambda device: time.sleep(fed.pop("busy", 0.0)))

    def short() -> None:
        time.sleep(1e-3)

    def long() -> None:
        fed["busy"] = 5e-3

    times = race({"short": short, "long": long}, device=gpu, rounds=3)
    assert times.launch_bound("short") == {"launch_bound": True}
    assert times.launch_bound("long") == {}
    assert race({"short": short}, device=torch.device("cpu"), rounds=1).launch_bound("short") == {}


def test_more_threads_than_can_be_meant():
    with pytest.raises(ValueError, match="threads=100000 is more than"), use_threads(100_000):
        pass
