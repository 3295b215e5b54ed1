from __future__ import annotations

import sys

import pytest
import torch

from linvit.measure import memory
from linvit.measure.memory import Forecast, bounded, extra_memory, is_out_of_memory, measure, read_size
from linvit.models import model_config
from linvit.train.memory import peak_memory
from linvit.train.recipe import create_recipe

MB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is the process's own, from its start")
@pytest.mark.parametrize("freed", [0, 200])
def test_memory_that_was_used_before_counts_again(freed):
    """In pieces, which an allocator keeps when they are freed."""
    for _ in range(2):
        pieces = [torch.ones(16 * 1024) for _ in range(freed * 16)]
        del pieces
    found = extra_memory(lambda: [torch.ones(16 * 1024) for _ in range(100 * 16)])
    assert 95 * MB < found < 125 * MB


def test_a_training_step_is_measured_in_a_process_of_its_own():
    shape = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 64, "depth": 2, "heads": 2}
    few, many = (peak_memory(model_config(**shape), create_recipe(), torch.device("cpu"), n) for n in (64, 512))
    assert 4 * MB < few.value < many.value
    assert many.tags == {"batch": 512}


def test_a_process_that_fails_says_why():
    shape = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2}
    with pytest.raises(ValueError, match="negative dimension"):
        peak_memory(model_config(**shape), create_recipe(), torch.device("cpu"), -3)


def test_a_forecast_is_linear_until_growth_is_not():
    forecast = Forecast()
    assert forecast.at(64) == 0
    forecast.add(64, 10.0)
    assert forecast.at(128) == 40.0  # of one length nothing is known: the worst
    forecast.add(128, 20.0)
    assert forecast.at(512) == 80.0
    forecast.add(256, 60.0)  # 3 ×: a quadratic part shows
    assert forecast.at(512) == pytest.approx(200)  # 40 of what grows with N, 160 with N²
    forecast.add(512, 400.0)  # more than quadratic is taken for that
    assert forecast.at(1024) == pytest.approx(1600)


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("1000", 1000)]
)
def test_sizes_are_read(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "4 XB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size: write 500MB"):
        read_size(text)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are limited so on Linux")
def test_too_much_fails_by_itself_and_the_limit_goes():
    with bounded(64 * MB, torch.device("cpu")), pytest.raises(RuntimeError) as caught:
        torch.empty(8 * 2**30, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert torch.empty(2 * 2**30, dtype=torch.uint8).numel()  # not touched: addresses alone
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_attentions_are_weighed_in_processes_of_their_own():
    """One head of 64 floats is 2 MB at this length, and identity's output is its input."""
    found = {(r.metric, r.tags["attention"], r.tags["mode"]): r for r in measure(
        ["identity"], tokens=[8192], heads=1, head_dim=64, most_memory=2**30)}  # fmt: skip
    softmax = found["attention_memory", "softmax", "forward"]
    assert (softmax.unit, softmax.tags["tokens"]) == ("bytes", 8192)
    assert 2 * MB <= softmax.value < 40 * MB
    assert found["attention_memory", "softmax", "both"].value > softmax.value
    assert found["attention_memory", "identity", "forward"].value < MB
    ratio = found["memory_vs_softmax", "identity", "both"]
    both = [found["attention_memory", name, "both"].value for name in ("identity", "softmax")]
    assert ratio.value == pytest.approx(both[0] / both[1])


class Scales:
    """Instead of processes: softmax takes 100 bytes a token, `performer-relu` so many squared."""

    def __init__(self, monkeypatch):
        self.asked = []
        monkeypatch.setattr(memory, "_in_a_fresh_process", self.weigh)

    def weigh(self, spec, tokens, setting, limit, seconds):
        self.asked.append((spec, tokens))
        if spec == "linformer:k=300" and tokens < 300:
            return {}, "k=300 is more than the tokens"
        taken = 100 * tokens if spec != "performer-relu" else tokens**2
        return {"forward": taken, "both": 2 * taken, "seconds": 0.1}, ""


def test_lengths_double_until_nothing_fits(monkeypatch):
    scales = Scales(monkeypatch)
    monkeypatch.setattr(memory, "LEAST", 1)
    setting = {"heads": 1, "head_dim": 1}  # q, k, v and a gradient take 16 bytes a token
    records = list(measure(["performer-relu"], tokens=[256], until_limit=True, most_memory=10**6, **setting))
    tried = {spec: [n for name, n in scales.asked if name == spec] for spec, _ in scales.asked}
    assert tried["softmax"] == [256, 512, 1024, 2048, 4096]  # 8192 · 216 bytes are too many
    assert tried["performer-relu"] == [256, 512]  # 1024² · 2, too
    refused = {r.tags["tokens"]: str(r.tags["refused"]) for r in records
               if r.tags.get("refused") and r.tags["attention"] == "performer-relu"}  # fmt: skip
    assert min(refused) == 1024
    assert refused[1024] == "it would take about 2.02 MiB, more than 977 KiB"
    most = {(r.tags["attention"], r.tags["mode"]): r for r in records if r.metric == "largest_tokens"}
    assert most["softmax", "both"].value == 10**6 // 216
    assert most["performer-relu", "both"].value == 703  # 2N² + 16N ≤ 10⁶
    assert most["performer-relu", "forward"].tags["to"] == 512


def test_one_length_does_not_tell_how_many_tokens_fit(monkeypatch):
    Scales(monkeypatch)
    one = measure(["performer-relu"], tokens=[256], most_memory=10**9, heads=1, head_dim=1)
    assert not [r for r in one if r.metric == "largest_tokens"]


def test_what_cannot_be_built_at_a_length_is_tried_at_the_next(monkeypatch):
    Scales(monkeypatch)
    records = measure(["linformer:k=300"], tokens=[256, 512], most_memory=10**9, heads=1, head_dim=1)
    found = {r.tags["tokens"]: r.value for r in records
             if r.metric == "attention_memory" and r.tags["attention"] != "softmax"}  # fmt: skip
    assert found[256] is None
    assert found[512] == 2 * 100 * 512


def test_nothing_fits(monkeypatch):
    Scales(monkeypatch)
    with pytest.raises(ValueError, match="nothing to compare with at N = 256: softmax is refused"):
        list(measure(["uniform"], tokens=[256], most_memory=10**3))
