"""Killed at any moment, the same command resumes and ends with the same bits."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import killable
import pytest

OPTIONS: dict[str, Any] = {
    "epochs": 4,
    "attention": "performer-exp:m=8",
    "dropout": 0.1,
    "drop_path": 0.1,
    "ema": 0.9,
    "redraw": 5,
    "pad_crop": 1,
    "mixup": 0.2,
    "checkpoint_seconds": 0.0,
}


@pytest.fixture(scope="module")
def start():
    """start(data, out, cache, kill_at=None, **options) → a process that trains."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killable"])
    folders = (Path(__file__).parent, Path(__file__).parents[1], os.environ.get("PYTHONPATH", ""))

    def begin(data: Path | str, out: Path, cache: Path, kill_at: int | None = None, **options: Any) -> Any:
        arguments = (str(data), str(out), str(cache), kill_at, OPTIONS | options)
        process = context.Process(target=killable.train, args=arguments)
        process.start()
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
        yield begin


STAGES = ["caching", "training", "evaluation"]


def stage(out: Path, total: int) -> str:
    if (out / "last" / f"step-{total:09d}.safetensors").exists():
        return "evaluation"
    return "training" if (out / "experiment.json").exists() else "caching"


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """An uninterrupted run: (its data, its folder, its number of steps, the seconds of each stage)."""
    home = tmp_path_factory.mktemp("whole")
    data = killable.make_folder(home / "shades")
    total = 4 * ((120 - 24 - 10) // 16)  # epochs of what test and validation images leave
    for name in ("first", "second"):  # the first one also starts the server
        process = start(data, home / name, home / f"{name}-cache")
        seconds = dict.fromkeys(STAGES, 0.0)
        while process.is_alive():
            began, now = time.monotonic(), stage(home / name, total)
            time.sleep(0.001)
            seconds[now] += time.monotonic() - began
        assert process.exitcode == 0
    killable.same(home / "first", home / "second")
    return data, home / "first", total, seconds


def finish(start, data: Path, home: Path, expected: Path) -> None:
    process = start(data, home / "run", home / "cache")
    process.join(120)
    assert process.exitcode == 0
    killable.same(home / "run", expected)


@pytest.mark.slow
def test_killed_at_random_moments(start, whole, tmp_path):
    data, expected, total, seconds = whole
    dice = random.Random(0)
    plan = (
        dice.sample(["caching"] * 4 + ["training"] * 6 + ["evaluation"] * 4, 14) + ["caching"] * 4 + ["training"] * 10
    )
    kills: list[str] = []
    folders = (tmp_path / str(number) for number in itertools.count())
    home = next(folders)
    deadline = time.monotonic() + 200
    while plan:
        assert time.monotonic() < deadline, f"only {len(kills)} kills: {kills}"
        if STAGES.index(stage(home / "run", total)) > STAGES.index(plan[0]):  # too far: let it finish, start another
            finish(start, data, home, expected)
            home = next(folders)
        process = start(data, home / "run", home / "cache")
        while process.is_alive() and stage(home / "run", total) != plan[0]:
            time.sleep(0.0005)
        process.join(dice.uniform(0, seconds[plan[0]]))
        if process.is_alive():
            kills.append(stage(home / "run", total))
            process.kill()
            process.join()
            if kills[-1] == plan[0]:
                plan.pop(0)
    finish(start, data, home, expected)
    assert len(kills) >= 28
    assert set(kills) == set(STAGES)


@pytest.mark.kills
def test_killed_at_every_write(start, whole, tmp_path):
    """One training that dies at its first write, its second, …, each time resuming from what the last one left."""
    data, expected, *_ = whole
    for number in range(1, 400):
        process = start(data, tmp_path / "run", tmp_path / "cache", kill_at=number)
        process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
    assert number > 12
    killable.same(tmp_path / "run", expected)
