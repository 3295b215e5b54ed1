"""Full disks, read-only folders, damaged files, two processes, another experiment: a clear message, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
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
from linvit.train.events import Began, Diverged, Noted, Stepped
from linvit.train.files import load_tensors, save_tensors

DATA = "synthetic:images=72,size=8"
SOURCE = Path(linvit.__file__).parent


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(out, **options):
    return linvit.train(DATA, out=out, **killable.TINY | {"epochs": 2, "checkpoint_seconds": 0.0} | options)


class Killed(BaseException):
    pass


def run_until(out, step, **options):
    def listener(event):
        if isinstance(event, Stepped) and event.step == step:
            raise Killed

    with pytest.raises(Killed):
        run(out, listeners=[listener], **options)


def test_no_pickle_is_ever_loaded():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"torch\.load\b|^\s*(import|from) (pickle|joblib|dill|shelve|marshal)\b", text, re.M), path
        assert "allow_pickle=True" not in text, path


def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path):
    run(tmp_path / "whole")
    for number, harm in enumerate((lambda b: b[:-7], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1]))):
        out = tmp_path / str(number)
        run_until(out, 5)
        newest = max((out / "last").glob("step-*"))
        assert newest.name == "step-000000005.safetensors"
        newest.write_bytes(harm(newest.read_bytes()))
        events: list = []
        run(out, listeners=[events.append])
        assert isinstance(events[0], Noted)
        assert f"{newest} is damaged" in events[0].text
        assert events[1] == Began("going on from step 4 of 8", 4, 8)
        killable.same(out, tmp_path / "whole")


def test_no_whole_checkpoint_is_an_error_that_says_what_to_do(tmp_path):
    run_until(tmp_path / "run", 3)
    for path in (tmp_path / "run" / "last").glob("step-*"):
        path.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"no checkpoint is whole: .* is damaged .*; delete .*last to start again"):
        run(tmp_path / "run")


def test_facts_are_under_the_checksum_too(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"a": torch.arange(3)}, step=123)
    assert load_tensors(tmp_path / "x.safetensors")[1] == {"step": 123}
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content.replace(b"123", b"124", 1))
    with pytest.raises(ValueError, match="damaged: its checksum"):
        load_tensors(tmp_path / "x.safetensors")


def test_two_newest_checkpoints_are_kept_and_no_half_written_file(tmp_path):
    run_until(tmp_path / "run", 4)
    for place in ("", "best", "last"):
        (tmp_path / "run" / place / ".x.part").write_bytes(b"half")
    run(tmp_path / "run")
    steps = sorted(path.name for path in (tmp_path / "run" / "last").glob("step-*"))
    assert steps == ["step-000000007.safetensors", "step-000000008.safetensors"]
    assert not list((tmp_path / "run").rglob("*.part"))


@pytest.mark.parametrize("nth", [3, 6, 9, 14, 19])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, nth):
    run(tmp_path / "whole")
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
    killable.same(tmp_path / "run", tmp_path / "whole")


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


def test_one_process_at_a_time(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="in use by another linvit process"):
        run(tmp_path / "run")
    code = f"""
import time
from pathlib import Path
from linvit.locks import locked
with locked(Path({str(tmp_path / "other")!r})):
    print("locked", flush=True)
    time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(ValueError, match="in use by another linvit process"):
        run(tmp_path / "other")
    other.kill()
    other.wait()
    run(tmp_path / "other", epochs=1)  # the lock died with its process


def test_a_folder_of_another_experiment_is_left_alone(tmp_path):
    run(tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for options, says in (
        ({"lr": 0.5}, r"its recipe.lr is .*, not 0.5"),
        ({"seed": 7}, "its model.seed is 0, not 7"),
        ({"attention": "softmax"}, "its model.attention is .*, not softmax"),
    ):
        with pytest.raises(ValueError, match=f"holds another experiment .{says}.: choose another --out"):
            run(tmp_path / "run", **options)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("content", ["[]", "{}", "not json", '{"id": 3}'])
def test_a_folder_with_a_strange_experiment_is_left_alone(tmp_path, content):
    (tmp_path / "experiment.json").write_text(content)
    with pytest.raises(ValueError, match="choose another --out"):
        run(tmp_path)
    assert (tmp_path / "experiment.json").read_text() == content


def test_a_folder_with_something_of_ours_but_no_experiment_is_left_alone(tmp_path):
    (tmp_path / "log.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match=r"holds log\.jsonl, but no experiment\.json"):
        run(tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == "mine\n"


def test_what_cannot_be_built_leaves_no_folder(tmp_path):
    for options in ({"patch_size": 3}, {"amp": "fp16"}, {"attention": "linformer:k=1000"}):
        with pytest.raises(ValueError):
            run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_divergence_names_the_layer_and_keeps_what_was_good(tmp_path):
    run_until(tmp_path / "run", 5)
    checkpoint = tmp_path / "run" / "last" / "step-000000005.safetensors"
    tensors, facts = load_tensors(checkpoint)
    tensors["model.blocks.1.mlp.0.weight"][0, 0] = torch.nan
    save_tensors(checkpoint, tensors, **facts)
    best = (tmp_path / "run" / "best" / "model.safetensors").read_bytes()
    events: list = []
    trained = run(tmp_path / "run", listeners=[events.append])
    assert trained.diverged == "blocks.1.mlp.0"
    assert trained.test_accuracy is None
    assert trained.model is not None
    assert events[-1] == Diverged(5, "blocks.1.mlp.0")
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == best
    assert checkpoint.exists()
    assert {r.metric for r in trained.records} == {
        "parameters", "macs", "learning_curve", "train_seconds", "gradient_norm", "diverged"}  # fmt: skip
    assert trained.value("diverged") == 5
    assert run(tmp_path / "run").diverged == "blocks.1.mlp.0"


def test_a_rate_far_too_high_diverges(tmp_path):
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


def test_load_and_save_round_trip(tmp_path):
    trained = run(tmp_path / "run", dropout=0.2)
    x = torch.randn(3, 3, 8, 8)
    for path in (tmp_path / "run", str(tmp_path / "run" / "best")):
        model = linvit.load(path)
        assert not model.training
        assert torch.equal(model(x), trained.model(x))
        assert model.about["classes"] == trained.data.classes


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda best: (best / "model.safetensors").unlink(), "holds no model yet"),
        (lambda best: (best / "config.json").unlink(), "config.json is missing"),
        (lambda best: (best / "config.json").write_text("{}"), "is not a linvit model's configuration"),
        (lambda best: (best / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors is damaged"),
        (lambda best: _change(best, "dim", 18), "does not fit its config.json"),
        (lambda best: _change(best, "dim", -1), "config.json: dim=-1"),
        (lambda best: _change(best, "dmi", 1), "a model has no option 'dmi'"),
    ],
)
def test_a_damaged_model_says_what_is_wrong(tmp_path, harm, says):
    run(tmp_path / "run", epochs=1)
    harm(tmp_path / "run" / "best")
    with pytest.raises(ValueError, match=says):
        linvit.load(tmp_path / "run" / "best")


def _change(best: Path, key: str, value: int) -> None:
    about = json.loads((best / "config.json").read_text())
    about["model"][key] = value
    (best / "config.json").write_text(json.dumps(about))


def test_the_package_is_the_function():
    code = (
        "import linvit; assert callable(linvit.train); from linvit.train import Recipe; assert callable(linvit.train)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
