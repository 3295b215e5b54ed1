"""Interrupted in the middle of an epoch, whatever the recipe, a run ends with the same weights, log and records."""

from __future__ import annotations

import os
import shutil
import signal

import killable
import pytest
import torch
from killable import Killed, kill_after

from linvit.pipeline.train import train
from linvit.signals import Evicted, interrupted
from linvit.training import loop
from linvit.training import run as run_module
from linvit.training.events import Event, Stepped
from linvit.training.files import load_tensors, save_tensors


def run(out, *, stop_at=None, every=0.0, **options):
    """Train, or raise Killed after step `stop_at`."""
    options = killable.TINY | {"epochs": 2} | options
    return train(killable.DATA, out=out, on_event=kill_after(stop_at), checkpoint_seconds=every, **options)


RECIPES = {
    "muon, ema of a conv stem, dropout": {
        **{"stem": "conv", "trunk": (8, 8), "patch_size": None, "ema": 0.9},
        **{"dropout": 0.2, "emb_dropout": 0.1, "drop_path": 0.3},
    },
    "resnet, sgd, mixup and cutmix": {
        **{"stem": "resnet", "trunk": (4, 8), "patch_size": None, "optimizer": "sgd", "lr": 0.05},
        **{"mixup": 0.3, "cutmix": 0.5},
    },
    "adamw, redraw and ema, augmented": {
        **{"optimizer": "adamw", "attention": "performer-hyp:m=8", "redraw": 3, "ema": 0.8},
        **{"pad_crop": 1, "flip": "alternating", "cutout": 2, "randaugment": 1},
    },
    "learned kernel": {"attention": "performer-theta:m=4"},
    "adam, restarts, layers, half an epoch": {
        **{"optimizer": "adam", "schedule": "restarts", "restart_epochs": 1, "epochs": 1.75},
        "attention": "linformer:k=3,sharing=layerwise@1+linformer:k=3,sharing=layerwise@1",
    },
    "sgd without momentum, early stopping": {
        **{"optimizer": "sgd", "momentum": 0.0, "lr": 1.0, "patience": 1, "epochs": 9},
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_resumed_in_the_middle_of_an_epoch(tmp_path, name):
    options = {"seed": 3} | RECIPES[name]
    run(tmp_path / "whole", every=1e9, **options)
    for stop_at in (1, 5):
        with pytest.raises(Killed):
            run(tmp_path / "parts", stop_at=stop_at, **options)
    run(tmp_path / "parts", **options)
    killable.same(tmp_path / "parts", tmp_path / "whole")
    if "patience" in options:
        assert len(killable.read_log(tmp_path / "whole")) < 9


def test_resumed_on_two_threads(tmp_path):
    """A model large enough for its products and convolutions to be split between threads."""
    large = {"stem": "conv", "patch_size": None, "trunk": (32, 64), "dim": 128, "mlp_dim": 256, "batch_size": 32}
    torch.set_num_threads(2)
    try:
        run(tmp_path / "whole", every=1e9, **large)
        with pytest.raises(Killed):
            run(tmp_path / "parts", stop_at=3, **large)
        run(tmp_path / "parts", **large)
    finally:
        torch.set_num_threads(1)
    killable.same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("module", "place", "call"),
    [
        (run_module, "_tested", 1),
        (run_module, "_fitted", 1),
        (loop, "save_model", 2),
        (loop, "save_checkpoint", 2),
        (loop, "append_line", 2),
        (loop, "model_card", 1),
    ],
)
def test_interrupted_at_every_stage(tmp_path, monkeypatch, finished, module, place, call):
    real, calls = getattr(module, place), []

    def interrupt(*args, **named):
        calls.append(place)
        if len(calls) == call:
            raise Killed
        return real(*args, **named)

    monkeypatch.setattr(module, place, interrupt)
    with pytest.raises(Killed):
        run(tmp_path / "run")
    monkeypatch.setattr(module, place, real)
    run(tmp_path / "run")
    killable.same(tmp_path / "run", finished.folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_says_so(tmp_path, finished, number):
    def listener(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match=r"saved at step \d of 8") as stop:
        train(killable.DATA, out=tmp_path / "run", epochs=2, on_event=listener, **killable.TINY)
    assert (stop.type is Evicted) == (number != signal.SIGINT)  # an evicted process is to be started again
    assert signal.getsignal(number) is before
    run(tmp_path / "run")
    killable.same(tmp_path / "run", finished.folder)


def test_only_a_second_ctrl_c_is_immediate():
    """A scheduler warns first and kills later; both while the last step is being saved."""
    with interrupted() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop() == signal.SIGUSR1
    with pytest.raises(Evicted), interrupted():  # stop() was not called since
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_during_the_last_validation_is_not_lost(tmp_path, finished):
    """What is trained is saved, but nothing follows: neither the test nor another run."""

    def listener(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == event.total:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(killable.DATA, out=tmp_path / "run", epochs=2, on_event=listener, **killable.TINY)
    assert not (tmp_path / "run" / "records.jsonl").exists()
    run(tmp_path / "run")
    killable.same(tmp_path / "run", finished.folder)


def test_records_describe_the_best_model_that_is_there(tmp_path):
    """Killed after a best model was kept and before the next checkpoint; the repeated steps then differ."""
    with pytest.raises(Killed):
        run(tmp_path / "run", epochs=4, stop_at=9, every=1e9, lr=0.02)
    best = tmp_path / "run" / "best" / "model.safetensors"
    tensors, facts = load_tensors(best)
    save_tensors(best, tensors, **facts | {"best": 2.0, "best_row": {"loss": 0.0, "accuracy": 2.0}})
    with pytest.raises(Killed):  # a checkpoint from before that model
        run(tmp_path / "other", epochs=4, stop_at=2, lr=0.02)
    shutil.copytree(tmp_path / "other" / "last", tmp_path / "run" / "last", dirs_exist_ok=True)
    trained = run(tmp_path / "run", epochs=4, lr=0.02)
    assert trained.value("validation_accuracy") == 2.0


def test_a_kill_while_resuming_keeps_the_log(tmp_path, monkeypatch, finished):
    with pytest.raises(Killed):
        run(tmp_path / "run", stop_at=6)
    for place in ("append_line", "write_atomically", "save_config"):
        with monkeypatch.context() as patch:
            patch.setattr(loop, place, lambda *args, **named: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                run(tmp_path / "run")
    run(tmp_path / "run")
    killable.same(tmp_path / "run", finished.folder)


def test_a_finished_run_is_returned_as_it_is(finished):
    before = {p: p.stat().st_mtime_ns for p in finished.folder.rglob("*") if p.name != ".lock"}
    events: list[Event] = []
    again = train(killable.DATA, out=finished.folder, epochs=2, on_event=events.append, **killable.TINY)
    assert again.records == finished.records
    assert not events
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_seeds_decide_and_the_callers_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    runs = {name: run(tmp_path / name, epochs=1, dropout=0.1, seed=s) for name, s in (("a", 0), ("b", 0), ("c", 1))}
    assert torch.equal(torch.rand(3), expected)
    state = {name: one.model.state_dict()["head.weight"] for name, one in runs.items()}
    assert torch.equal(state["a"], state["b"])
    assert not torch.equal(state["a"], state["c"])
