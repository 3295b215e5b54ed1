from __future__ import annotations

import pytest
import torch

from linvit.measure import models, race
from linvit.measure.models import RACES, SPEEDS, model_calls, side_by_side
from linvit.measure.timing import Timing
from linvit.models import ModelConfig

MODEL = ModelConfig(image_size=8, channels=1, classes=3, patch_size=4, dim=8, depth=1, heads=2, mlp_dim=8)
BASELINES = {name: MODEL.model_copy(update={"attention": name}) for name in ("softmax", "identity")}
SECONDS = {"softmax": 6.0, "identity": 2.0, "uniform": 3.0}  # of a training step; a batch takes half, an image a tenth
CPU = torch.device("cpu")


@pytest.fixture
def built(monkeypatch):
    """The attentions of the models that are built; instead of running, their calls move the clocks."""
    names: list[str] = []
    now = 0.0

    def calls(config, device, batch, optimizer, build, dtype):
        names.append(config.attention)

        def call(share):
            def work():
                nonlocal now
                now += share * SECONDS[config.attention]

            return work

        return {task: call(share) for task, share in zip(RACES, (1.0, 0.5, 0.1), strict=True)}

    monkeypatch.setattr(models, "model_calls", calls)
    monkeypatch.setattr(race, "CLOCKS", {"wall": lambda: now, "cpu": lambda: 10 * now})
    return names


def test_records_by_variant_with_ratios_to_the_baselines(built, monkeypatch):
    """A variant may have any id, a baseline's too."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # which is timed by the wall's clock
    variants = {"mine": MODEL.model_copy(update={"attention": "uniform"}), "identity": BASELINES["softmax"]}
    records = list(side_by_side(variants, baselines=BASELINES, timing=Timing(batch=12, rounds=2)))
    assert sorted(built) == ["identity", "softmax", "uniform"]  # equal models are built and timed once
    found = {(r.tags["variant"], r.metric): r for r in records}
    assert set(found) == {(variant, metric) for variant in variants for metric in SPEEDS}
    values = {key: record.value for key, record in found.items()}
    assert values["mine", "train_step"] == pytest.approx(3.0)
    assert values["mine", "inference_throughput"] == pytest.approx(12 / 1.5)
    assert values["mine", "inference_latency"] == pytest.approx(0.3)
    for task in RACES:  # how many times faster than the baseline
        assert values["mine", f"{task}_vs_softmax"] == pytest.approx(2.0)
        assert values["mine", f"{task}_vs_identity"] == pytest.approx(2 / 3)
        assert values["identity", f"{task}_vs_softmax"] == 1.0
    assert {(r.tags["batch"], r.tags["clock"], r.n) for r in records} == {(12, "wall", 2)}
    assert not any("attention" in r.tags for r in records)
    units = {r.metric: r.unit for r in records}
    assert units == {m: "×" for m in SPEEDS if "_vs_" in m} | {
        "train_step": "s",
        "inference_throughput": "images/s",
        "inference_latency": "s",
    }


def test_the_clock_of_one_thread_is_its_own(built, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    records = list(side_by_side({"a": BASELINES["softmax"]}, baselines=BASELINES, timing=Timing(rounds=1)))
    step = next(r for r in records if r.metric == "train_step")
    assert (step.value, step.tags["clock"]) == (pytest.approx(60.0), "cpu")


def test_calls_train_and_infer():
    moved = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            moved.append(all(p.grad is not None for group in self.param_groups for p in group["params"]))

    calls = model_calls(MODEL, CPU, 5, lambda model: Spy(model.parameters(), lr=0.1))
    calls["train_step"]()
    assert moved == [True]
    batch, one = calls["inference"](), calls["latency"]()
    assert isinstance(batch, torch.Tensor)
    assert isinstance(one, torch.Tensor)
    assert (batch.shape, one.shape, batch.requires_grad) == ((5, 3), (1, 3), False)
