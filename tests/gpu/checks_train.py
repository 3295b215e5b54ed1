"""Training on a GPU: every attention in every precision, without synchronisation inside a step, with few launches.

Run by test_gpu.py in a process of its own, where there is a fake CUDA device.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from cases import defaults
from fakegpu import Device, gpu

import linvit
from linvit.data import feed
from linvit.training.loop import Training
from linvit.training.muon import Muon

IMAGES = "synthetic:images=72,size=8"
TINY = {"stem": "patch", "patch_size": 2, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "batch_size": 16}
RECIPE = {"start": "scratch", "steps": 4}
CORE = {"softmax", "linformer:k=5", "window", "performer-exp:m=11", "performer-relu:m=11", "performer-trig:m=11"}
SPECS = [pytest.param(spec, marks=[] if spec in CORE else pytest.mark.slow) for spec in defaults()]


@pytest.fixture
def device():
    with gpu() as made:
        yield made


@pytest.fixture
def steps(device: Device, monkeypatch) -> list[tuple[Counter[str], Counter[str]]]:
    """For each step of a training, its synchronisations and launches."""
    found, step = [], Training._step

    def watched(self, batch):
        waits, launches = Counter(device.waits), Counter(device.launches)
        out = step(self, batch)
        found.append((device.waits - waits, device.launches - launches))
        return out

    monkeypatch.setattr(Training, "_step", watched)
    return found


def train(folder: Path, attention: str, **options):
    return linvit.train(IMAGES, attention=attention, device="cuda", out=folder, **TINY | RECIPE | options)


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("spec", SPECS)
def check_training(tmp_path, steps, device, spec, amp):
    trained = train(tmp_path / "run", spec, amp=amp)
    assert not trained.diverged
    assert trained.test_accuracy is not None
    assert [waits for waits, _ in steps[1:]] == [Counter()] * 3  # the first puts constants on the device
    dtype = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
    if spec == "softmax":
        assert set(device.sdpa_dtypes) == {dtype}
    assert {record.dtype for record in trained.records} == {str(dtype).removeprefix("torch.")}


def check_the_usual_precision_is_half(tmp_path, device):
    trained = train(tmp_path / "run", "softmax")
    assert set(device.sdpa_dtypes) == {torch.bfloat16}
    assert {record.dtype for record in trained.records} == {"bfloat16"}
    assert all("SDPA flash" in record.settings for record in trained.records)


@pytest.mark.parametrize(
    "options",
    [
        {"pad_crop": 2, "flip": "random", "cutout": 3},
        {"mixup": 0.2, "cutmix": 1.0},
        {"randaugment": 3},
        {"ema": 0.9, "optimizer": "adamw", "redraw": 1},
        {"optimizer": "sgd", "clip_norm": 0},
        {"stem": "conv", "trunk": (8, 8), "pools": 1, "patch_size": None},
        {"task": "next-pixel", "stem": "next-pixel", "patch_size": None, "label_smoothing": 0.0},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("amp", ["off", "bf16"])
def check_no_option_synchronises(tmp_path, steps, options, amp):
    train(tmp_path / "run", "performer-relu:m=11", amp=amp, **options)
    assert [waits for waits, _ in steps[1:]] == [Counter()] * 3  # the first puts constants on the device


def check_images_that_do_not_fit_come_from_a_thread(tmp_path, steps, monkeypatch):
    monkeypatch.setattr(feed, "RESIDENT", 0.0)
    elsewhere = train(tmp_path / "host", "softmax")
    assert [waits for waits, _ in steps[1:]] == [Counter()] * 3
    monkeypatch.undo()
    there = train(tmp_path / "device", "softmax")
    for ours, theirs in zip(elsewhere.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def check_weights_are_those_of_a_cpu(tmp_path, device):
    """In float32, with the same operations; kernels of a real GPU round differently."""
    options = {**TINY, **RECIPE, "optimizer": "sgd", "amp": "off"}
    gpu_run = train(tmp_path / "gpu", "softmax", optimizer="sgd", amp="off")
    cpu_run = linvit.train(IMAGES, attention="softmax", device="cpu", out=tmp_path / "cpu", **options)
    for ours, theirs in zip(gpu_run.model.parameters(), cpu_run.model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach().cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def check_launches_of_a_step(tmp_path, steps, device, monkeypatch, amp):
    """Twelve layers: a whole step of softmax, the part of it that is Muon's, and uncompiled linear attention."""
    deep, counts, muon, update = {**TINY, "depth": 12}, {}, [], Muon._step

    def watched(self, *args):
        before = sum(device.launches.values())
        update(self, *args)
        muon.append(sum(device.launches.values()) - before)

    monkeypatch.setattr(Muon, "_step", watched)
    for spec in ("softmax", "performer-relu:m=11", "performer-exp:m=11"):
        steps.clear()
        linvit.train(IMAGES, attention=spec, device="cuda", out=tmp_path / spec[-7:], **deep | RECIPE, amp=amp)
        counts[spec] = sum(steps[-1][1].values())
    assert counts["softmax"] <= 900
    assert muon[-1] <= 100
    assert max(counts.values()) <= 2000  # without a compiler
