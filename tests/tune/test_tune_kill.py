"""Workers killed -9: nothing is lost, nothing is done twice, nothing stays running."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

import searching  # noqa: E402

from linvit.records import Records  # noqa: E402
from linvit.report import tuning  # noqa: E402
from linvit.tune.storage import open_storage, sqlite  # noqa: E402


def rows(folder: Path) -> list[tuple]:
    return [
        (t.variant, t.number, t.how, t.accuracy, t.loss, t.steps, json.dumps(t.options))
        for row in tuning.read(folder).rows for t in row.trials
    ]  # fmt: skip


def once(steps: Path) -> None:
    """Every step is saved before it is told: none may be told twice."""
    count = Counter((row["trial"], row["step"]) for row in searching.taken(steps))
    assert count
    assert [key for key, times in count.items() if times > 1] == []


@pytest.mark.slow
def test_one_worker_killed_again_and_again_finds_the_same(begin, tmp_path):
    """Points, accuracies and steps are those of a search that nobody disturbed, to the bit."""
    options = {"trials": 4, "epochs": 4, "space": searching.space(tmp_path)}
    process = begin(tmp_path / "whole" / "x", options, tmp_path / "whole.steps")
    process.join(120)
    assert process.exitcode == 0
    dice, kills, steps = random.Random(3), 0, tmp_path / "steps"
    total = len(searching.taken(tmp_path / "whole.steps"))
    deadline = time.monotonic() + 200
    while True:
        assert time.monotonic() < deadline
        process, before = begin(tmp_path / "x", options, steps), len(searching.taken(steps))
        aim = before + dice.randint(1, max(2, total // 6))
        while process.is_alive() and len(searching.taken(steps)) < aim:
            time.sleep(0.002)
        if process.is_alive() and kills < 4:
            process.kill()
            kills += 1
        process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert kills >= 3
    once(steps)
    assert rows(tmp_path / "x") == rows(tmp_path / "whole" / "x")
    whole = {(Path(row["trial"]).name, row["step"]) for row in searching.taken(tmp_path / "whole.steps")}
    assert {(Path(row["trial"]).name, row["step"]) for row in searching.taken(steps)} <= whole
    for path in (tmp_path / "whole" / "x").glob("*/best/model.safetensors"):
        assert (tmp_path / "x" / path.relative_to(tmp_path / "whole" / "x")).read_bytes() == path.read_bytes()


def attacked(
    begin: Any, home: Path, storage: str | None, kills: int, trials: int, epochs: int, beat: float = 0.5,
    other_machines: bool = False,
) -> None:  # fmt: skip
    """Four workers on one search, of which a random one is killed and replaced, so many times."""
    options = {"trials": trials, "epochs": epochs, "space": searching.space(home), "join": True, "storage": storage}
    dice, steps, out = random.Random(kills), home / "steps", home / f"x{kills}"
    more = {"beat": beat, "other_machines": other_machines, "data": searching.LONG}
    crew = [begin(out, options, steps, **more) for _ in range(4)]
    deadline, killed = time.monotonic() + 1800, 0
    while any(process.is_alive() for process in crew):
        assert time.monotonic() < deadline
        time.sleep(dice.uniform(0.05, 0.5))
        working = {row["worker"] for row in searching.taken(steps)[-40:]}
        able = [i for i, process in enumerate(crew) if process.is_alive() and process.pid in working]
        if able and killed < kills:
            victim = dice.choice(able)
            crew[victim].kill()
            crew[victim].join()
            killed += 1
            crew[victim] = begin(out, options, steps, **more)
    assert killed == kills
    assert [process.exitcode for process in crew] == [0, 0, 0, 0]
    once(steps)
    where = open_storage(storage or sqlite(out))
    for variant in searching.TINY["attentions"]:
        every = optuna.load_study(study_name=f"{out.name}: {variant}", storage=where).trials
        counted = [trial for trial in every if "void" not in trial.user_attrs]
        assert len(counted) == trials
        assert {trial.state.name for trial in every} <= {"COMPLETE", "PRUNED", "FAIL"}
        assert {trial.user_attrs["how"] for trial in counted} <= {"complete", "pruned", "diverged"}
    accuracies = [r for r in Records(out / "records.jsonl") if r.metric == "trial_accuracy"]
    assert len(accuracies) == len({(r.tags["variant"], r.tags["trial"]) for r in accuracies}) == 2 * trials
    last: dict[str, float] = {}
    for row in searching.taken(steps):  # between two steps of a trial, a death included, nobody waits for long
        assert row["time"] - last.get(row["trial"], row["time"]) < 120
        last[row["trial"]] = row["time"]
    assert (out / "best.toml").exists()


@pytest.mark.kills
def test_four_workers_of_which_some_are_killed(begin, tmp_path):
    attacked(begin, tmp_path, None, kills=3, trials=2, epochs=6)


@pytest.mark.slow
def test_workers_of_other_machines_are_missed_too(begin, tmp_path):
    """No lock tells that they are dead: their silence does."""
    attacked(begin, tmp_path, None, kills=2, trials=2, epochs=6, beat=0.4, other_machines=True)


@pytest.mark.kills
def test_four_workers_on_postgresql(begin, tmp_path, postgres):
    attacked(begin, tmp_path, postgres, kills=3, trials=2, epochs=6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal", "postgresql"])
def test_twenty_random_kills(begin, tmp_path, kind, request):
    """With the usual time between beats."""
    storage = {"sqlite": None, "journal": str(tmp_path / "trials.journal")}.get(kind, "")
    if kind == "postgresql":
        storage = request.getfixturevalue("postgres")
    attacked(begin, tmp_path, storage, kills=20, trials=10, epochs=8, beat=10.0)


@pytest.mark.slow
def test_a_worker_that_was_asleep_gives_its_trial_up(begin, tmp_path):
    """Stopped for longer than others wait, it finds that its trial is another's, leaves the folder, and goes on."""
    options = {"trials": 1, "epochs": 6, "space": searching.space(tmp_path), "join": True}
    steps, out = tmp_path / "steps", tmp_path / "x"
    more = {"beat": 0.3, "other_machines": True, "data": searching.LONG}
    sleeper = begin(out, options, steps, **more)
    deadline = time.monotonic() + 120
    while len(searching.taken(steps)) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(sleeper.pid, signal.SIGSTOP)
    other = begin(out, options, steps, **more)
    where = open_storage(sqlite(out))
    log = optuna.load_study(study_name="x", storage=where)
    while not any(entry.user_attrs["worker"] for entry in log.trials):  # another has taken it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(sleeper.pid, signal.SIGCONT)
    for process in (sleeper, other):
        process.join(240)
        assert process.exitcode == 0
    once(steps)
    assert len(rows(out)) == 2


@pytest.mark.slow
def test_workers_of_one_command_are_replaced(tmp_path):
    """`jobs=2`: one is killed, another one goes on, and the search ends as it should."""
    import linvit
    from linvit.tune import search as module

    crews: list[Any] = []
    real = module.Crew.__init__
    said: list[str] = []

    def init(self, *words):
        crews.append(self)
        real(self, *words)

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            crews[0].workers[0].process.kill()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Crew, "__init__", init)
        patch.setattr(tuning, "draw_files", lambda specs, folder: None)
        words = searching.TINY | {"jobs": 2}
        out = linvit.tune(searching.DATA, trials=3, epochs=4, space=searching.space(tmp_path), out=tmp_path / "x",
                          say=say, **words)  # fmt: skip
        alone = linvit.tune(searching.DATA, trials=1, epochs=4, space=searching.space(tmp_path), out=tmp_path / "y",
                            **searching.TINY)  # fmt: skip
    assert sum("a worker was lost (its process ended by SIGKILL" in text for text in said) == 1
    assert len(rows(out)) == 6
    first = [row for row in rows(alone) if row[1] == 0]
    assert [row for row in rows(out) if row[1] == 0] == first  # where a trial runs makes no difference to it
