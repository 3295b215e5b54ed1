from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest
import torch

from linvit.measure import memory
from linvit.measure.memory import (
    Growth,
    Limits,
    attention_memory,
    bounded,
    extra_memory,
    in_fresh_process,
    is_out_of_memory,
    read_size,
)
from linvit.measure.timing import Timing
from linvit.models import model_config
from linvit.schemas.recipe import Recipe
from linvit.site import Site
from linvit.training.memory import peak_memory

MB, TINY = 2**20, Site(1, 1, 1)


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
    found = peak_memory(model_config(**shape), Recipe(), torch.device("cpu"), 512)
    assert 30 * MB < found.value < 300 * MB
    assert found.tags == {"batch": 512}


def test_a_process_that_fails_says_why():
    with pytest.raises(ValueError, match=r"No module named linvit\.nothing"):
        in_fresh_process("linvit.nothing", {})


def test_growth_is_linear_until_it_is_not():
    forecast = Growth()
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


def test_attentions_are_weighed():
    """One head of 64 floats is 2 MB at this length, and identity's output is its input."""
    site, rest = Site(1, 64, 8192), {"limit": 2**30, "threads": 1, "batch": 1, "device": "cpu", "dtype": "float32"}
    softmax, identity = (memory._weigh_here(name, asdict(site), **rest) for name in ("softmax", "identity"))
    assert 2 * MB <= softmax["forward"] < 40 * MB
    assert softmax["both"] > softmax["forward"]
    assert identity["forward"] < MB
    assert "k=9000" in memory._weigh_here("linformer:k=9000", asdict(site), **rest)["refused"]


def test_each_in_a_process_of_its_own(monkeypatch):
    told = []
    monkeypatch.setattr(memory, "in_fresh_process", lambda module, said, timeout: told.append((module, said)) or {})
    assert memory.weigh("uniform", Site(1, 8, 17, (4, 4), 1), Timing(), Limits(2**30)) == {}
    ((module, said),) = told
    assert module == "linvit.measure.memory"
    assert memory._weigh_here(**json.loads(json.dumps(said)))["forward"] >= 0  # it survives JSON


class Scales:
    """Instead of processes: softmax takes 100 bytes a token, `performer-relu` so many squared."""

    def __init__(self, monkeypatch):
        self.asked = []
        monkeypatch.setattr(memory, "weigh", self.weigh)

    def weigh(self, spec, site, timing, limits):
        self.asked.append((spec, site.tokens))
        if spec == "linformer:k=300" and site.tokens < 300:
            return {"refused": "k=300 is more than the tokens"}
        taken = 100 * site.tokens if spec != "performer-relu" else site.tokens**2
        return {"forward": taken, "both": 2 * taken, "seconds": 0.1}


def test_lengths_double_until_nothing_fits(monkeypatch):
    scales = Scales(monkeypatch)
    monkeypatch.setattr(memory, "NOISE", 1)
    limits = Limits(10**6, double=True)  # q, k, v and a gradient take 16 bytes a token
    records = list(attention_memory(["performer-relu"], TINY, tokens=[256], limits=limits))
    tried = {spec: [n for name, n in scales.asked if name == spec] for spec, _ in scales.asked}
    assert tried["softmax"] == [256, 512, 1024, 2048, 4096]  # 8192 · 216 bytes are too many
    assert tried["performer-relu"] == [256, 512]  # 1024² · 2, too
    refused = {
        r.tags["tokens"]: str(r.tags["refused"])
        for r in records
        if r.tags.get("refused") and r.tags["attention"] == "performer-relu"
    }
    assert min(refused) == 1024
    assert refused[1024] == "it would take about 2.02 MiB, more than 977 KiB"
    most = {(r.tags["attention"], r.tags["mode"]): r for r in records if r.metric == "largest_tokens"}
    assert most["softmax", "both"].value == 10**6 // 216
    assert most["performer-relu", "both"].value == 703  # 2N² + 16N ≤ 10⁶
    assert most["performer-relu", "forward"].tags["to"] == 512


def test_one_length_does_not_tell_how_many_tokens_fit(monkeypatch):
    Scales(monkeypatch)
    one = attention_memory(["performer-relu"], TINY, tokens=[256], limits=Limits(10**9))
    assert not [r for r in one if r.metric == "largest_tokens"]


def test_what_cannot_be_built_at_a_length_is_tried_at_the_next(monkeypatch):
    Scales(monkeypatch)
    records = attention_memory(["linformer:k=300"], TINY, tokens=[256, 512], limits=Limits(10**9))
    found = {
        r.tags["tokens"]: r.value
        for r in records
        if r.metric == "attention_memory" and r.tags["attention"] != "softmax"
    }
    assert found[256] is None
    assert found[512] == 2 * 100 * 512


def test_nothing_fits(monkeypatch):
    Scales(monkeypatch)
    with pytest.raises(ValueError, match="nothing to compare with at N = 256: softmax is refused"):
        list(attention_memory(["uniform"], TINY, tokens=[256], limits=Limits(10**3)))
