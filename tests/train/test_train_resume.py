"""Interrupted in the middle of an epoch, whatever the recipe, a run ends with the same weights, log and records."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import killable
import pytest
import torch

import linvit
from linvit.errors import Evicted
from linvit.train import Event
from linvit.train.events import Stepped
from linvit.train.files import interrupted, load_tensors, save_tensors

DATA = "synthetic:images=72,size=8"


class Killed(BaseException):
    pass


def run(out, *, stop_at=None, every=0.0, **options):
    """Train, or be torn out of the loop after step `stop_at`."""

    def listener(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == stop_at:
            raise Killed

    return linvit.train(DATA, out=out, listeners=[listener], checkpoint_seconds=every, **killable.TINY | options)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


RECIPES = {
    "muon": {},
    "ema": {"ema": 0.9},
    "ema of a conv stem": {"ema": 0.9, "stem": "conv", "trunk": (8, 8), "patch_size": None},
    "resnet": {"stem": "resnet", "trunk": (4, 8), "patch_size": None},
    "dropout": {"dropout": 0.2, "emb_dropout": 0.1, "drop_path": 0.3},
    "early stopping": {"patience": 1, "lr": 0.3, "epochs": 9},
    "redraw": {"attention": "performer-exp:m=8", "redraw": 2},
    "redraw and ema": {"attention": "performer-hyp:m=8", "redraw": 3, "ema": 0.8},
    "adamw": {"optimizer": "adamw"},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "sgd without momentum": {"optimizer": "sgd", "momentum": 0.0},
    "adam, restarts": {"optimizer": "adam", "schedule": "restarts", "restart_epochs": 1},
    "mixup and cutmix": {"mixup": 0.3, "cutmix": 0.5},
    "augmented": {"pad_crop": 1, "flip": "alternating", "cutout": 2, "randaugment": 1},
    "layers": {"attention": "linformer:k=3,sharing=layerwise@1+linformer:k=3,sharing=layerwise@1"},
    "learned kernel": {"attention": "performer-theta:m=4"},
    "half an epoch": {"epochs": 1.5},
}


@pytest.mark.parametrize("name", RECIPES)
def test_resumed_in_the_middle_of_an_epoch(tmp_path, name):
    options = {"epochs": 3, "seed": 3} | RECIPES[name]
    run(tmp_path / "whole", every=1e9, **options)
    for stop_at in (1, 5):
        with pytest.raises(Killed):
            run(tmp_path / "torn", stop_at=stop_at, **options)
    run(tmp_path / "torn", **options)
    killable.same(tmp_path / "torn", tmp_path / "whole")


def test_resumed_on_two_threads(tmp_path):
    """A model large enough for its products and convolutions to be split between threads."""
    large = {
        "stem": "conv",
        "patch_size": None,
        "trunk": (32, 64),
        "dim": 128,
        "mlp_dim": 256,
        "batch_size": 32,
        "epochs": 3,
    }
    torch.set_num_threads(2)
    try:
        run(tmp_path / "whole", every=1e9, **large)
        with pytest.raises(Killed):
            run(tmp_path / "torn", stop_at=4, **large)
        run(tmp_path / "torn", **large)
    finally:
        torch.set_num_threads(1)
    killable.same(tmp_path / "torn", tmp_path / "whole")


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("run", "_tested"),
        ("run", "_store"),
        ("loop", "save_model"),
        ("loop", "save_checkpoint"),
        ("loop", "append_line"),
        ("loop", "model_card"),
    ],
)
def test_torn_out_of_every_stage(tmp_path, monkeypatch, module, place):
    run(tmp_path / "whole", epochs=2)
    home = sys.modules[f"linvit.train.{module}"]
    real, calls = getattr(home, place), []

    def torn(*args, **named):
        calls.append(place)
        if len(calls) == (2 if module == "loop" and place != "model_card" else 1):
            raise Killed
        return real(*args, **named)

    monkeypatch.setattr(home, place, torn)
    with pytest.raises(Killed):
        run(tmp_path / "torn", epochs=2)
    monkeypatch.setattr(home, place, real)
    run(tmp_path / "torn", epochs=2)
    killable.same(tmp_path / "torn", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_polite_stop_saves_and_says_so(tmp_path, number):
    def listener(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt, match=r"saved at step \d of 8") as stop:
        linvit.train(DATA, out=tmp_path / "run", epochs=2, listeners=[listener], **killable.TINY)
    assert (stop.type is Evicted) == (number != signal.SIGINT)  # who is told to leave is to be started again
    assert list((tmp_path / "run" / "last").glob("step-*"))
    assert signal.getsignal(number) is not None
    run(tmp_path / "run", epochs=2)
    run(tmp_path / "whole", epochs=2)
    killable.same(tmp_path / "run", tmp_path / "whole")


def test_only_a_second_ctrl_c_is_not_held_back():
    """A scheduler warns first and kills later; both while the last step is being saved."""
    with interrupted() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop() == signal.SIGUSR1
    with pytest.raises(Evicted), interrupted():  # nobody has asked
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_during_the_last_validation_is_heard(tmp_path):
    """What is trained is saved, but nothing is begun after it: neither the test nor another run."""

    def listener(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == event.total:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        linvit.train(DATA, out=tmp_path / "run", epochs=2, listeners=[listener], **killable.TINY)
    assert not (tmp_path / "run" / "records.jsonl").exists()
    run(tmp_path / "run", epochs=2)
    run(tmp_path / "whole", epochs=2)
    killable.same(tmp_path / "run", tmp_path / "whole")


def test_a_best_model_of_a_lost_timeline_is_told_as_it_is(tmp_path):
    """Killed after a best model was kept and before the next checkpoint; then going on comes out otherwise."""
    with pytest.raises(Killed):
        run(tmp_path / "run", epochs=6, stop_at=17, every=1e9, lr=0.02)
    best = tmp_path / "run" / "best" / "model.safetensors"
    tensors, facts = load_tensors(best)
    save_tensors(best, tensors, **facts | {"best": 2.0, "best_row": {"loss": 0.0, "accuracy": 2.0}})
    with pytest.raises(Killed):  # a checkpoint from before that model
        run(tmp_path / "other", epochs=6, stop_at=2, lr=0.02)
    shutil.copytree(tmp_path / "other" / "last", tmp_path / "run" / "last", dirs_exist_ok=True)
    trained = run(tmp_path / "run", epochs=6, lr=0.02)
    assert trained.value("validation_accuracy") == 2.0  # of the model that is there, which nothing beat


def test_a_kill_while_going_on_keeps_the_log(tmp_path, monkeypatch):
    """Whatever is cut off after the checkpoint was read: the lines of earlier epochs are there."""
    run(tmp_path / "whole", epochs=4)
    with pytest.raises(Killed):
        run(tmp_path / "torn", epochs=4, stop_at=14)
    loop = sys.modules["linvit.train.loop"]
    for place in ("append_line", "write_atomically", "save_config"):
        with monkeypatch.context() as patch:
            patch.setattr(loop, place, lambda *args, **named: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                run(tmp_path / "torn", epochs=4)
    run(tmp_path / "torn", epochs=4)
    killable.same(tmp_path / "torn", tmp_path / "whole")


def test_a_finished_run_is_returned_as_it_is(tmp_path):
    first = run(tmp_path / "run", epochs=1)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.name != ".lock"}
    events: list[Event] = []
    again = linvit.train(DATA, out=tmp_path / "run", epochs=1, listeners=[events.append], **killable.TINY)
    assert again.records == first.records
    assert not events
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_the_callers_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(tmp_path / "run", epochs=1, dropout=0.1)
    assert torch.equal(torch.rand(3), expected)


def test_seeds_differ_and_repeat(tmp_path):
    runs = {name: run(tmp_path / name, epochs=1, seed=s) for name, s in (("a", 0), ("b", 0), ("c", 1))}
    state = {name: one.model.state_dict()["head.weight"] for name, one in runs.items()}
    assert torch.equal(state["a"], state["b"])
    assert not torch.equal(state["a"], state["c"])
