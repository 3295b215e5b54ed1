"""Processes that share a training do what one would: same batches, augmentation, gradients, statistics, decisions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch
from killable import read_log

from linvit import cli, ranks
from linvit.records import Records
from linvit.training import loop
from linvit.training.files import load_tensors

CLOSE = {"rtol": 1e-7, "atol": 1e-9}  # float64; a gradient of the wrong share is off by 1e-3
Cases = Mapping[str, dict[str, Any]]
QUICK: Cases = {
    "norm": {"norm": (7, 3, 5, 11)},
    "muon, batch norm, averaged, mixed": {
        **{"stem": "conv", "trunk": (5, 7), "pools": 1, "patch_size": None, "ema": 0.9, "epochs": 2},
        **{"mixup": 0.3, "cutmix": 0.5, "pad_crop": 1, "flip": "alternating"},
    },
    "few": {"batch_size": 1},
}
CASES: Cases = {
    "adamw, clipped": {"optimizer": "adamw", "clip_norm": 0.05, "ema": 0.9},
    "sgd": {"optimizer": "sgd", "lr": 0.05, "epochs": 2},
    "redrawn": {"attention": "performer-exp:m=5", "redraw": 2},
    "linformer": {"attention": "linformer:k=3", "cutout": 2, "randaugment": 1},
    "residual": {"stem": "resnet", "trunk": (5, 7), "patch_size": None},
    "early stopping": {"optimizer": "sgd", "momentum": 0.0, "lr": 1.0, "patience": 1, "epochs": 9},
}
FOLDS: Cases = {"folds": {"folds": 2, "epochs": 1}}
SINGLE: Cases = {"norm of single pixels": {"norm": (5, 3, 1, 1)}}
WRONG: Cases = {
    "diverged": {"optimizer": "sgd", "lr": 1e30, "clip_norm": 0.0},
    "whole": {"task": "whole-batch"},
    "differ": {"differ": True},
}
HARD = {"ema": 0.9, "mixup": 0.3, "pad_crop": 1, "stem": "conv", "trunk": (5, 7), "pools": 1, "patch_size": None}


@contextmanager
def in_double() -> Iterator[None]:
    """This process trains in float64 for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "started", loop.started)
        patch.setattr(ranked.accuracy, "normalise", ranked.accuracy.normalise)
        ranked.in_double()
        yield


@pytest.fixture
def double() -> Iterator[None]:
    with in_double():
        yield


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder / "model.safetensors")[0]


def same(found: Path, expected: Path) -> None:
    for name in ("last", "best"):
        torch.testing.assert_close(weights(found / name), weights(expected / name), **CLOSE)
    for mine, theirs in zip(read_log(found), read_log(expected), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"seconds"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5), key  # sums are float32


def said(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}.{rank}.txt").read_text() for rank in (0, 1)]


def test_two_processes_train_what_one_does(double, tmp_path):
    """Batch statistics, averaged weights and augmentation; the other cases run with the tests that kill."""
    pair, name = tmp_path / "pair", "muon, batch norm, averaged, mixed"
    assert ranked.launch(2, QUICK, pair) == [(0, ""), (0, "")]
    assert said(pair, "norm") == ["right", "right"]
    assert said(pair, "few") == 2 * ["error: batch_size=1 is too few for 2 processes: each needs an image"]
    assert not (pair / "few").exists()
    ranked.train(tmp_path / "one", **QUICK[name])
    compare(pair / name, tmp_path / "one")


def compare(pair: Path, one: Path) -> None:
    same(pair, one)
    both = {"pair": pair, "one": one}
    records = {key: list(Records(folder / "records.jsonl")) for key, folder in both.items()}
    metrics = {key: [(r.metric, r.tags.get("selection"), r.n) for r in found] for key, found in records.items()}
    assert metrics["pair"] == metrics["one"]
    assert {r.threads for r in records["pair"]} == {2}  # of both
    files = {key: sorted(path.name for path in folder.iterdir()) for key, folder in both.items()}
    assert files["pair"] == files["one"]


@pytest.mark.kills
def test_whatever_the_recipe_two_processes_train_what_one_does(double, tmp_path):
    pair = tmp_path / "pair"
    assert ranked.launch(2, SINGLE | CASES | FOLDS | WRONG, pair) == [(0, ""), (0, "")]
    assert said(pair, "norm of single pixels") == ["right", "right"]
    for name, options in CASES.items():
        ranked.train(tmp_path / name, **options)
        compare(pair / name, tmp_path / name)
    assert len(read_log(pair / "early stopping")) < 9
    _compare_folds(pair / "folds", tmp_path / "folds")
    diverged = ranked.train(tmp_path / "diverged", **WRONG["diverged"])
    assert diverged.diverged
    assert said(pair, "diverged") == 2 * [diverged.diverged]
    message = "error: task whole-batch cannot be shared by processes: its loss depends on the whole batch"
    assert said(pair, "whole") == 2 * [message]
    for text in said(pair, "differ"):
        assert "the 2 processes of this training differ in the experiment" in text
    steps = [r.value for r in Records(pair / "diverged" / "records.jsonl") if r.metric == "diverged"]
    assert steps == [diverged.value("diverged")]
    assert not any((pair / name).exists() for name in ("whole", "differ"))


def _compare_folds(pair: Path, one: Path) -> None:
    ranked.train(one, **FOLDS["folds"])
    for fold in ("fold-0", "fold-1"):
        same(pair / fold, one / fold)
    both = [[(r.metric, r.tags, r.n) for r in Records(folder / "records.jsonl")] for folder in (pair, one)]
    assert both[0] == both[1]
    assert (both[0][0][0], both[0][0][2]) == ("test_accuracy", 72)  # of all images


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """One process, never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with in_double():
        ranked.train(folder, **HARD)
    return folder


@pytest.mark.kills
def test_a_signal_to_one_stops_all_and_another_number_resumes(whole, tmp_path):
    with_signal = HARD | {"signal": (signal.SIGTERM, 1, 4)}
    assert ranked.launch(2, {"run": with_signal}, tmp_path) == [(75, f"saved at step 5 of 9 in {tmp_path / 'run'}")] * 2
    assert ranked.launch(3, {"run": HARD}, tmp_path) == [(0, "")] * 3
    same(tmp_path / "run", whole)


@pytest.mark.kills
def test_one_is_killed_the_other_ends_and_one_alone_resumes(whole, double, tmp_path):
    found = ranked.launch(2, {"run": HARD | {"signal": (signal.SIGKILL, 1, 4)}}, tmp_path)
    assert [code for code, _ in found] == [0, -signal.SIGKILL]
    error = (tmp_path / "run.0.txt").read_text()
    assert error.startswith("error: another process of this training has ended (")
    assert "nothing that was saved is lost" in error
    steps = [int(path.stem.removeprefix("step-")) for path in (tmp_path / "run" / "last").glob("step-*")]
    assert max(steps) == 4  # the last complete step
    ranked.train(tmp_path / "run", **HARD)
    same(tmp_path / "run", whole)


@pytest.mark.kills
def test_torchrun_ends_all_with_one_and_resumes(tmp_path):
    out = tmp_path / "two"
    options = {"stem": "patch", "dim": 14, "depth": 2, "heads": 2, "patch-size": 4, "batch-size": 17, "epochs": 150}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += [word for pair in ("mlp_dim=19", "pad_crop=1", "mixup=0.2") for word in ("--set", pair)]
    launcher = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 -m linvit"
    call = [sys.executable, *launcher.split(), "train", ranked.DATA, *words, "--device", "cpu", "--json", "-q"]
    begin = partial(
        subprocess.Popen,
        [*call, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    process, deadline = begin(), time.monotonic() + 100
    while not (out / "log.jsonl").exists() or len(read_log(out)) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    found = [(int(p), words_of(p)) for p in filter(str.isdigit, os.listdir("/proc"))]
    workers = [p for p, given in found if str(out) in given and "torch.distributed.run" not in given]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in err
    assert not any(str(out) in words_of(p) for p in filter(str.isdigit, os.listdir("/proc")))  # none is left
    again = begin()
    answer, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert json.loads(answer)["folder"] == str(out)  # printed once


def words_of(process: str) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:
        return []


def test_only_training_is_shared(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["compare", "digits", "--out", str(tmp_path / "x")]) == 2
    assert "WORLD_SIZE=2: only `linvit train` can be shared" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_parts_are_complete_and_even(monkeypatch):
    for length, count in ((17, 2), (17, 5), (3, 3), (2, 3), (0, 2)):
        monkeypatch.setattr(ranks, "count", lambda count=count: count)
        parts = []
        for number in range(count):
            monkeypatch.setattr(ranks, "number", lambda number=number: number)
            parts.append(range(length)[ranks.part(length)])
        assert [i for part in parts for i in part] == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
