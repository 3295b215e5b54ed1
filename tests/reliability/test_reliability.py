"""A small part of `benchmarks/inputs.py` and `benchmarks/kills.py`; and that both notice what they look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from reliability import forked, leftovers, mutations
from reliability.corpus import Canary

from linvit.records import Record, Records

ROOT = Path(__file__).parents[2]


def run(script: str, *words: object) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    call = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, words)]
    done = subprocess.run(call, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.kills
def test_spoilt_inputs_work_or_end_with_one_line(tmp_path):
    said = run("inputs.py", "--out", tmp_path, "--cases", 60, "--seed", 1)
    rows = [json.loads(line) for line in (tmp_path / "seed-1.jsonl").read_text().splitlines()]
    assert [row["problem"] for row in rows if row["problem"]] == []
    assert len(rows) == 60
    assert {0, 2} <= {row["code"] for row in rows}
    assert "| all | 60 |" in said


@pytest.mark.kills
@pytest.mark.parametrize("verb", ["train", "tune", "convert", "compare"])
def test_killed_at_random_moments(verb, tmp_path):
    run("kills.py", "--out", tmp_path, "--verb", verb, "--kills", 4)
    rows = [json.loads(line) for line in (tmp_path / f"{verb}.jsonl").read_text().splitlines()]
    assert sum(row["kills"] for row in rows) == 4
    assert [problem for row in rows for problem in row["problems"]] == []


def test_spoilt_bytes_are_a_function_of_the_seed():
    data = bytes(range(256)) * 3
    text = json.dumps({"a": [1, 2.5, "b"], "c": {"d": None}})
    for spoil, given in ((mutations.spoil_bytes, data), (mutations.spoil_json, text), (mutations.spoil_text, text)):
        found = [spoil(Random(i), given) for i in range(40)]  # type: ignore[operator]
        assert found == [spoil(Random(i), given) for i in range(40)]  # type: ignore[operator]
        assert len(set(found)) > 30


def test_a_canary_is_seen(tmp_path):
    """Loaded as a pickle, which linvit never does, it makes its folder."""
    np.save(tmp_path / "bad.npy", np.array([Canary(tmp_path / "canary")], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(tmp_path / "bad.npy")
    assert not (tmp_path / "canary").exists()
    np.load(tmp_path / "bad.npy", allow_pickle=True)
    assert (tmp_path / "canary").is_dir()


def test_what_was_lost_torn_or_differs_is_found(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    records = [Record("test_accuracy", 0.5, "fraction", tags={"seed": 1}), Record("test_seconds", 2.0, "s")]
    for folder, seconds in ((one, 2.0), (other, 3.0)):
        folder.mkdir()
        Records(folder / "records.jsonl").append([records[0], Record("test_seconds", seconds, "s")])
        (folder / "config.json").write_text("{}")
    assert leftovers.differences(one, other) == []
    assert leftovers.torn(one) == []
    told = [(one / "records.jsonl", line) for line in (one / "records.jsonl").read_text().splitlines()]
    assert leftovers.lost(told) == []
    (one / "records.jsonl").write_text(told[1][1] + "\n")
    assert len(leftovers.lost(told)) == 1
    assert "records.jsonl differs" in leftovers.differences(one, other)[0]
    (other / "config.json").write_text("{")
    assert "config.json" in leftovers.torn(other)[0]
    assert any("config.json differs" in text for text in leftovers.differences(one, other))


def test_a_process_group_is_killed_and_limits_hold(tmp_path):
    pid = forked.start(["list", "kernels"], tmp_path, forked.Limits(10.0), prepare=lambda: __import__("time").sleep(60))
    assert forked.ended(pid, 0.05) is None
    forked.kill(pid)
    found = forked.ended(pid, 10.0)
    assert found is not None
    assert found[0] == -9
