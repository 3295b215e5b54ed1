"""Processes that share a training do what one would: same batches, augmentation, gradients, statistics, decisions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch

from linvit import cli, ranks
from linvit.records import Records
from linvit.train import loop
from linvit.train.files import load_tensors

CLOSE = {"rtol": 1e-7, "atol": 1e-9}  # float64; a gradient of the wrong share is off by 1e-3
CASES: dict[str, dict[str, Any]] = {
    "muon": {},
    "adamw, clipped, averaged": {"optimizer": "adamw", "clip_norm": 0.05, "ema": 0.9},
    "sgd": {"optimizer": "sgd", "lr": 0.05, "epochs": 2},
    "redrawn": {"attention": "performer-exp:m=5", "redraw": 2},
    "linformer": {"attention": "linformer:k=3"},
    "mixed": {"mixup": 0.3, "cutmix": 0.5, "pad_crop": 1, "flip": "alternating", "cutout": 2, "randaugment": 1},
    "batch norm": {"stem": "conv", "trunk": (5, 7), "pools": 1, "patch_size": None, "ema": 0.9},
    "residual": {"stem": "resnet", "trunk": (5, 7), "patch_size": None},
    "early stopping": {"patience": 1, "lr": 0.3, "epochs": 9},
}
FOLDS = {"folds": {"folds": 2, "epochs": 1}}
NORMS = {"norm": {"norm": (7, 3, 5, 11)}, "norm of single pixels": {"norm": (5, 3, 1, 1)}}
WRONG = {
    "diverged": {"optimizer": "sgd", "lr": 1e30, "clip_norm": 0.0},
    "few": {"batch_size": 1},
    "whole": {"task": "whole-batch"},
    "differ": {"differ": True},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def pair(cache, tmp_path_factory) -> Path:
    """All cases, done by two processes."""
    folder = tmp_path_factory.mktemp("pair")
    assert ranked.launch(2, NORMS | CASES | FOLDS | WRONG, folder) == [(0, ""), (0, "")]
    return folder


@pytest.fixture
def double(monkeypatch):
    """This process trains in float64 for a while."""
    monkeypatch.setattr(loop, "started", loop.started)
    monkeypatch.setattr(ranked.accuracy, "normalise", ranked.accuracy.normalise)
    ranked.in_double()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder / "model.safetensors")[0]


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def same(found: Path, expected: Path) -> None:
    for name in ("last", "best"):
        torch.testing.assert_close(weights(found / name), weights(expected / name), **CLOSE)
    for mine, theirs in zip(log(found), log(expected), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"seconds"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5), key  # sums are float32


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_what_one_gives(pair, double, tmp_path, name):
    ranked.train(tmp_path / "one", **CASES[name])
    same(pair / name, tmp_path / "one")
    both = {"pair": pair / name, "one": tmp_path / "one"}
    records = {key: list(Records(folder / "records.jsonl")) for key, folder in both.items()}
    metrics = {key: [(r.metric, r.tags.get("selection"), r.n) for r in found] for key, found in records.items()}
    assert metrics["pair"] == metrics["one"]
    assert {r.threads for r in records["pair"]} == {2}  # of both
    files = {key: sorted(path.name for path in folder.iterdir()) for key, folder in both.items()}
    assert files["pair"] == files["one"]


def test_folds_of_two_processes_are_those_of_one(pair, double, tmp_path):
    ranked.train(tmp_path / "one", **FOLDS["folds"])
    for fold in ("fold-0", "fold-1"):
        same(pair / "folds" / fold, tmp_path / "one" / fold)
    both = [[(r.metric, r.tags, r.n) for r in Records(folder / "records.jsonl")]
            for folder in (pair / "folds", tmp_path / "one")]  # fmt: skip
    assert both[0] == both[1]
    assert (both[0][0][0], both[0][0][2]) == ("test_accuracy", 72)  # of all images


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_of_all_parts(pair, name):
    assert [(pair / f"{name}.{rank}.txt").read_text() for rank in (0, 1)] == ["right", "right"]


def test_what_cannot_be_shared_is_said_by_all(pair, double, tmp_path):
    diverged = ranked.train(tmp_path / "one", **WRONG["diverged"])
    assert diverged.diverged
    says = {
        "diverged": diverged.diverged,
        "few": "error: batch_size=1 is too few for 2 processes: each needs an image",
        "whole": "error: task whole-batch cannot be shared by processes: its loss is of a whole batch",
    }
    for name, text in says.items():
        assert [(pair / f"{name}.{rank}.txt").read_text() for rank in (0, 1)] == [text, text]
    for rank in (0, 1):
        assert "the 2 processes of this training differ in the experiment" in (pair / f"differ.{rank}.txt").read_text()
    steps = [r.value for where in (pair / "diverged", tmp_path / "one")
             for r in Records(where / "records.jsonl") if r.metric == "diverged"]  # fmt: skip
    assert len(steps) == 2
    assert steps[0] == steps[1]
    assert not any((pair / name).exists() for name in ("few", "whole", "differ"))


HARD = {"ema": 0.9, "mixup": 0.3, "pad_crop": 1, "stem": "conv", "trunk": (5, 7), "pools": 1, "patch_size": None}


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory) -> Path:
    """One process, never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "started", loop.started)
        patch.setattr(ranked.accuracy, "normalise", ranked.accuracy.normalise)
        ranked.in_double()
        ranked.train(folder, **HARD)
    return folder


def test_one_is_told_to_leave_all_leave_and_another_number_goes_on(whole, tmp_path):
    told = HARD | {"signal": (signal.SIGTERM, 1, 4)}
    assert ranked.launch(2, {"run": told}, tmp_path) == [(75, f"saved at step 5 of 9 in {tmp_path / 'run'}")] * 2
    assert ranked.launch(3, {"run": HARD}, tmp_path) == [(0, "")] * 3
    same(tmp_path / "run", whole)


def test_one_is_killed_the_other_ends_and_one_alone_goes_on(whole, double, tmp_path):
    found = ranked.launch(2, {"run": HARD | {"signal": (signal.SIGKILL, 1, 4)}}, tmp_path)
    assert [code for code, _ in found] == [0, -signal.SIGKILL]
    said = (tmp_path / "run.0.txt").read_text()
    assert said.startswith("error: another process of this training has ended (")
    assert said.endswith("): nothing that was saved is lost, and the same command goes on from there")
    steps = [int(path.stem.removeprefix("step-")) for path in (tmp_path / "run" / "last").glob("step-*")]
    assert max(steps) == 4  # all that was whole
    ranked.train(tmp_path / "run", **HARD)
    same(tmp_path / "run", whole)


@pytest.mark.kills
def test_torchrun_ends_all_with_one_and_goes_on(cache, tmp_path):
    sets = ["--set", "patch_size=4", "--set", "mlp_dim=19", "--set", "pad_crop=1", "--set", "mixup=0.2"]
    words = ["train", ranked.DATA, "--stem", "patch", "--dim", "14", "--depth", "2", "--heads", "2", *sets,
             "--batch-size", "17", "--epochs", "150", "--device", "cpu", "--json", "-q", "--out"]  # fmt: skip
    out = tmp_path / "two"
    call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", "-m", "linvit", *words, str(out)]  # fmt: skip
    begin = partial(subprocess.Popen, call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    process, deadline = begin(), time.monotonic() + 100
    while not (out / "log.jsonl").exists() or len(log(out)) < 4:
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
    assert not any(str(out) in words_of(p) for p in filter(str.isdigit, os.listdir("/proc")))  # nobody is left
    again = begin()
    said, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert json.loads(said)["folder"] == str(out)  # said once


def words_of(process: str) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:
        return []


def test_only_training_is_shared(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["compare", "digits", "--out", str(tmp_path / "x")]) == 2
    assert "WORLD_SIZE=2: only `linvit train` is shared" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_parts_are_whole_and_even(monkeypatch):
    for length, count in ((17, 2), (17, 5), (3, 3), (2, 3), (0, 2)):
        monkeypatch.setattr(ranks, "count", lambda count=count: count)
        parts = []
        for number in range(count):
            monkeypatch.setattr(ranks, "number", lambda number=number: number)
            parts.append(range(length)[ranks.part(length)])
        assert [i for part in parts for i in part] == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
