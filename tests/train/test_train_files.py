"""Full disks, read-only folders, damaged files, two processes, another experiment: a clear message, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import killable
import pytest
import torch

import linvit
from linvit import files
from linvit.files import read_lines, write_atomically
from linvit.locks import locked
from linvit.pipeline.train import train
from linvit.training.checkpoint import load
from linvit.training.events import Began, Diverged, Noted
from linvit.training.files import load_tensors, save_tensors

SOURCE = Path(linvit.__file__).parent
STEP_5 = "step-000000005.safetensors"


def run(out, **options):
    return train(killable.DATA, out=out, **killable.TINY | {"epochs": 2, "checkpoint_seconds": 0.0} | options)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A training that was killed after step 5 of 8, to be copied."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(killable.Killed):
        run(folder, on_event=killable.kill_after(5))
    return folder


@pytest.fixture
def copy(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def test_no_pickle_is_ever_loaded():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"torch\.load\b|^\s*(import|from) (pickle|joblib|dill|shelve|marshal)\b", text, re.M), path
        assert "allow_pickle=True" not in text, path


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-7], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])],
    ids=["truncated", "empty", "bit flip"],
)
def test_a_damaged_checkpoint_is_skipped_with_a_message(copy, finished, damage):
    newest = max((copy / "last").glob("step-*"))
    assert newest.name == STEP_5
    newest.write_bytes(damage(newest.read_bytes()))
    events: list = []
    run(copy, on_event=events.append)
    assert isinstance(events[0], Noted)
    assert f"{newest} is damaged" in events[0].text
    assert isinstance(events[1], Began)
    assert (events[1].step, events[1].total) == (4, 8)
    killable.same(copy, finished.folder)


def test_damaged_checkpoints_alone_are_an_error_that_says_what_to_do(copy):
    for path in (copy / "last").glob("step-*"):
        path.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"no checkpoint is whole: .* is damaged .*; delete .*last to start again"):
        run(copy)


def test_facts_are_under_the_checksum_too(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"a": torch.arange(3)}, step=123)
    assert load_tensors(tmp_path / "x.safetensors")[1] == {"step": 123}
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content.replace(b"123", b"124", 1))
    with pytest.raises(ValueError, match="damaged: its checksum"):
        load_tensors(tmp_path / "x.safetensors")


def test_two_newest_checkpoints_are_kept_and_no_half_written_file(copy):
    for place in ("", "best", "last"):
        (copy / place / ".x.part").write_bytes(b"half")
    run(copy)
    steps = sorted(path.name for path in (copy / "last").glob("step-*"))
    assert steps == ["step-000000007.safetensors", "step-000000008.safetensors"]
    assert not list(copy.rglob("*.part"))


@pytest.mark.parametrize("nth", [3, 9, 19])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, finished, nth):
    real, count = os.fsync, [0]

    def full(descriptor):
        count[0] += 1
        if count[0] >= nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*make room") as error:
        run(tmp_path / "run")
    assert str(error.value.filename).startswith(str(tmp_path / "run"))
    monkeypatch.setattr(files.os, "fsync", real)
    run(tmp_path / "run")
    killable.same(tmp_path / "run", finished.folder)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OSError, match="cannot be written") as error:
        run(tmp_path / "file" / "run")
    assert error.value.filename == str(tmp_path / "file" / "run")
    real = open

    def refuse(path, mode="r", *args, **named):
        if "r" not in mode and str(path).startswith(str(tmp_path / "locked")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, mode, *args, **named)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(OSError, match="Permission denied"):
        run(tmp_path / "locked")


def test_one_process_at_a_time(copy, finished):
    """A lock dies with its process."""
    code = f"""
import time
from pathlib import Path
from linvit.locks import locked
with locked(Path({str(copy)!r})):
    print("locked", flush=True)
    time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(ValueError, match="in use by another linvit process"):
        run(copy)
    other.kill()
    other.wait()
    run(copy)
    killable.same(copy, finished.folder)
    with locked(copy), pytest.raises(ValueError, match="in use by another linvit process"):
        run(copy)


def test_a_folder_of_another_experiment_is_left_alone(finished):
    before = {path: path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()}
    for options, says in (
        ({"lr": 0.5}, r"its recipe.lr is .*, not 0.5"),
        ({"seed": 7}, "its model.seed is 0, not 7"),
        ({"attention": "softmax"}, "its model.attention is .*, not softmax"),
    ):
        with pytest.raises(ValueError, match=f"holds another experiment .{says}.: choose another --out"):
            run(finished.folder, **options)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("content", ["[]", "{}", "not json", '{"id": 3}'])
def test_a_folder_with_an_unreadable_experiment_is_left_alone(tmp_path, content):
    (tmp_path / "experiment.json").write_text(content)
    with pytest.raises(ValueError, match="choose another --out"):
        run(tmp_path)
    assert (tmp_path / "experiment.json").read_text() == content


def test_a_folder_with_one_of_our_files_but_no_experiment_is_left_alone(tmp_path):
    (tmp_path / "log.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match=r"holds log\.jsonl, but no experiment\.json"):
        run(tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == "mine\n"


def test_what_cannot_be_built_leaves_no_folder(tmp_path):
    for options, message in (
        ({"patch_size": 3}, "patch_size=3 does not divide"),
        ({"amp": "fp16"}, "amp=fp16 needs a CUDA device"),
        ({"attention": "linformer:k=1000"}, "k=1000"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_divergence_names_the_layer_and_keeps_earlier_results(copy):
    checkpoint, best = copy / "last" / STEP_5, (copy / "best" / "model.safetensors").read_bytes()
    tensors, facts = load_tensors(checkpoint)
    tensors["model.blocks.1.mlp.0.weight"][0, 0] = torch.nan
    save_tensors(checkpoint, tensors, **facts)
    events: list = []
    trained = run(copy, on_event=events.append)
    assert trained.diverged == "blocks.1.mlp.0"
    assert trained.test_accuracy is None
    assert trained.model is not None
    assert events[-1] == Diverged(5, "blocks.1.mlp.0")
    assert (copy / "best" / "model.safetensors").read_bytes() == best
    assert checkpoint.exists()
    assert {r.metric for r in trained.records} == {
        "parameters",
        "macs",
        "learning_curve",
        "train_seconds",
        "gradient_norm",
        "diverged",
    }
    assert trained.value("diverged") == 5
    assert run(copy).diverged == "blocks.1.mlp.0"


def test_a_learning_rate_far_too_high_diverges(tmp_path):
    trained = run(tmp_path / "run", lr=1e30, optimizer="sgd", clip_norm=0, epochs=9)
    assert trained.diverged
    assert trained.find("diverged") is not None


def test_a_log_with_a_torn_end_is_read(tmp_path):
    (tmp_path / "log").write_bytes(b'{"a": 1}\n{"b": "\xc3')
    assert list(read_lines(tmp_path / "log")) == [{"a": 1}]
    (tmp_path / "log").write_bytes(b'{"a": \n{"b": 2}\n')
    with pytest.raises(ValueError, match="log:1: damaged"):
        list(read_lines(tmp_path / "log"))
    assert list(read_lines(tmp_path / "log", skip_bad=True)) == [{"b": 2}]


def test_equal_weights_are_equal_bytes(tmp_path):
    for name in "ab":
        save_tensors(tmp_path / name, {"y": torch.ones(3), "x": torch.zeros(2, 2), "n": torch.tensor(4)}, b=1, a=2)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_write_atomically_keeps_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "x", "old")
    monkeypatch.setattr(files.os, "fsync", lambda d: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        write_atomically(tmp_path / "x", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_trained_model_is_loaded_as_it_was(finished):
    x = torch.randn(3, 3, 8, 8)
    for path in (finished.folder, str(finished.folder / "best")):
        model = load(path)
        assert not model.training
        assert torch.equal(model(x), finished.model(x))
        assert model.about["classes"] == finished.data.classes


def change(best: Path, key: str, value: object, part: str = "model") -> None:
    about = json.loads((best / "config.json").read_text())
    about[part][key] = value
    (best / "config.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda best: (best / "model.safetensors").unlink(), "holds no model yet"),
        (lambda best: (best / "config.json").unlink(), "config.json is missing"),
        (lambda best: (best / "config.json").write_text("{}"), "is not a linvit model's configuration"),
        (lambda best: (best / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors is damaged"),
        (lambda best: change(best, "dim", 18), "does not fit its config.json"),
        (lambda best: change(best, "dim", -1), "config.json: dim=-1"),
        (lambda best: change(best, "dmi", 1), "a model has no option 'dmi'"),
        (lambda best: change(best, "std", [{}], "data"), r"configuration \(data\.std\.0=\{\} must be a number"),
        (lambda best: change(best, "mean", [0.5, 0.5], "data"), "config.json: mean has 2 values for 3 channels"),
        (lambda best: change(best, "classes", None, "data"), "is not a linvit model's configuration"),
        (lambda best: (best / "config.json").write_text("[" * 100_000), "nested too deeply"),
    ],
)
def test_a_damaged_model_says_what_is_wrong(tmp_path, finished, damage, message):
    best = shutil.copytree(finished.folder / "best", tmp_path / "best")
    damage(best)
    with pytest.raises(ValueError, match=message):
        load(best)
