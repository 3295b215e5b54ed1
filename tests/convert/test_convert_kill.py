"""Killed in any stage or in the search, the same call resumes and ends with the same bits."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import convertible
import pytest

from linvit.records import Records

OPTIONS = {"to": "performer-exp", "data": "digits", "steps": 8, "max_drop": 0.2, "limit": 200, "report": False}
MEASURED = {"time", "commit", "value", "low", "high"}
TIMED = ("conversion_speed", "conversion_vs_teacher", "conversion_seconds")


@pytest.fixture(scope="module")
def start(teacher):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["convertible"])
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), old]))

    def begin(out: Path, kill_at: int | None = None) -> int | None:
        process = context.Process(target=convertible.convert, args=(str(teacher), str(out), kill_at, OPTIONS))
        process.start()
        process.join(120)
        return process.exitcode

    yield begin
    if old is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = old


def left_by(folder: Path) -> dict[str, object]:
    """Weights to the bit, and everything that was measured but for times; a measurement may have been written twice."""
    lines = (json.loads(record.line()) for record in Records(folder / "records.jsonl"))
    rows = {
        json.dumps(
            {k: v for k, v in row.items() if k not in (MEASURED if row["metric"] in TIMED else {"time", "commit"})}
        )
        for row in lines
    }
    models = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("model.safetensors")}
    return {"records": rows, **models}


@pytest.mark.kills
def test_killed_again_and_again(start, tmp_path):
    assert start(tmp_path / "whole") == 0
    whole = left_by(tmp_path / "whole")
    assert {
        f"{name}/model.safetensors" for name in ("teacher", "zero-shot", "stage-1/best", "stage-2/best", "mix", "best")
    } <= set(whole)
    codes, stages = [], set()
    for kill_at in (3, 14, 29, 44, 52, 61, 77):
        codes.append(start(tmp_path / "killed", kill_at))
        stages.add(tuple(sorted(path.name for path in (tmp_path / "killed").glob("*/"))))
    assert codes.count(-9) >= 5, codes
    assert len(stages) >= 4, stages
    assert start(tmp_path / "killed") == 0
    killed = left_by(tmp_path / "killed")
    assert killed["records"] == whole["records"]
    assert [name for name in whole if whole[name] != killed[name]] == []
