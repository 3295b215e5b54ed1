from __future__ import annotations

import pytest
import torch

from linvit.attention import attention_names, create_attention
from linvit.attention.base import Attention
from linvit.attention.performer import Performer
from linvit.cli.list import macs_formula
from linvit.devices import pick_device
from linvit.measure import speed
from linvit.measure.gate import wrong
from linvit.measure.memory import Limits
from linvit.measure.race import BASELINES, Times
from linvit.measure.speed import attention_speed, break_even, layer_speed
from linvit.measure.timing import MODES, Timing
from linvit.randomness import generator
from linvit.site import Site

SITE, THREE = Site(2, 8, 1), Timing(rounds=3)
CLS = Site(2, 8, 1, prefix=1)


def inputs():
    return torch.randn(4, 1, 2, 19, 8, generator=generator("test"))


class Double(Attention):
    """v in float64, and `factor` times v in float32."""

    factor = 1.0

    def attend(self, q, k, v, mask):
        return v if v.dtype is torch.float64 else self.factor * v


@pytest.mark.parametrize(
    ("factor", "why"), [(1.0, None), (1.00001, None), (1.01, "its output differs"), (float("nan"), "not finite")]
)
def test_the_gate(factor, why):
    attention = Double(Site(2, 8, 19))
    attention.factor = factor
    found = wrong(attention, *inputs())
    assert found is None if why is None else why in (found or "")


def test_the_gate_sees_gradients():
    class Forgetful(Double):
        def attend(self, q, k, v, mask):
            return v if v.dtype is torch.float64 else v.detach() + 0 * v

    assert "∂v" in (wrong(Forgetful(Site(2, 8, 19)), *inputs()) or "")


@pytest.mark.parametrize(("rows", "refused"), [(1, False), (2, True)])
def test_the_gate_forgives_one_row_of_a_gradient(rows, refused):
    """A kink of relu that rounding crosses; an output has none."""

    class Kinked(Double):
        def attend(self, q, k, v, mask):
            crossed = torch.zeros(19, 1)
            crossed[3 : 3 + rows] = 0.0 if v.dtype is torch.float64 else 1.0
            return v + (crossed * q - (crossed * q).detach())[:, :1].sum(1, keepdim=True)

    found = wrong(Kinked(Site(2, 8, 19)), *inputs()) or ""
    assert ("∂q" in found) is refused
    assert "output" not in found


def test_the_gate_forgives_no_row_of_an_output():
    class Slipped(Double):
        def attend(self, q, k, v, mask):
            return v if v.dtype is torch.float64 else v + (torch.arange(19) == 3)[:, None]

    assert "output" in (wrong(Slipped(Site(2, 8, 19)), *inputs()) or "")


@pytest.mark.parametrize("name", attention_names())
def test_everything_registered_passes_the_gate(name):
    attention = create_attention(name, heads=2, head_dim=8, tokens=67, grid=(6, 11), prefix=1)
    found = wrong(attention, *torch.randn(4, 1, 2, 67, 8, generator=generator("gate")))
    assert found is None


class Timekeeper:
    """Instead of a race: softmax takes N² seconds, identity N, a performer 128·N; CPU time is twice that."""

    def __init__(self, monkeypatch, lengths):
        self.lengths, self.raced = list(lengths), []
        monkeypatch.setattr(speed, "race", self.race)

    def race(self, calls, *, device, rounds, progress, deadline):
        n = self.lengths[len(self.raced)]
        self.raced.append(list(calls))

        def seconds(spec):
            return n**2 if spec == "softmax" else n if spec == "identity" else 128.0 * n

        times = {call: {"wall": [s := seconds(call[0])] * rounds, "cpu": [2 * s] * rounds} for call in calls}
        return Times(times, "wall", "cpu")


def test_records(monkeypatch):
    Timekeeper(monkeypatch, [64, 256])
    records = list(attention_speed(["performer-relu:m=5"], SITE, tokens=[256, 64], timing=THREE))
    found = {(r.metric, r.tags["attention"], r.tags["mode"], r.tags.get("tokens")): r for r in records}
    assert len(found) == len(records) == 3 * 2 * 2 * 3 + 2 * 2  # attentions, modes, lengths, metrics; and break-evens
    for mode in MODES:
        time = found["attention_time", "performer-relu:m=5", mode, 64]
        assert (time.value, time.unit, time.n, time.tags["clock"]) == (128 * 64, "s", 3, "wall")
        ratio = found["attention_vs_softmax", "performer-relu:m=5", mode, 256]
        assert (ratio.value, ratio.unit, ratio.tags["clock"]) == (2.0, "×", "cpu")
        assert found["attention_vs_identity", "softmax", mode, 256].value == 1 / 256
        even = found["break_even_tokens", "performer-relu:m=5", mode, None]
        assert (even.value, even.unit) == (pytest.approx(128), "tokens")
        assert found["break_even_tokens", "identity", mode, None].value == 64
        assert ("break_even_tokens", "softmax", mode, None) not in found


def test_a_curve_adds_up_layers_and_times_each_spec_once(monkeypatch):
    keeper = Timekeeper(monkeypatch, [64, 256])
    layers = {
        "softmax": ["performer-relu:m=5"] * 3,  # an id is only a name
        "mixed": ["softmax", "performer-relu:m=5"],
        "none": [],
    }
    records = list(layer_speed(layers, SITE, tokens=[64, 256], timing=THREE))
    assert keeper.raced[0] == [(s, SITE, m) for s in (*BASELINES, "performer-relu:m=5") for m in MODES]
    assert {r.metric for r in records} == {"attention_time", "break_even_tokens"}
    found = {(r.metric, r.tags.get("variant"), r.tags["mode"], r.tags.get("tokens")): r for r in records}
    assert {(variant, metric) for metric, variant, *_ in found} == {
        ("softmax", "attention_time"),
        ("mixed", "attention_time"),
        (None, "attention_time"),
        ("softmax", "break_even_tokens"),
        ("mixed", "break_even_tokens"),
    }
    assert found["attention_time", "softmax", "both", 64].value == 3 * 128 * 64
    assert found["attention_time", "mixed", "both", 64].value == 64**2 + 128 * 64
    baseline = found["attention_time", None, "both", 64]
    assert (baseline.value, baseline.tags["baseline"], baseline.tags["layers"]) == (3 * 64**2, "softmax", 3)
    assert found["break_even_tokens", "softmax", "forward", None].value == pytest.approx(128)
    mixed = found["break_even_tokens", "mixed", "forward", None]
    crossing = break_even({64: 2 / 3, 256: 4 / 3})  # two softmax layers over its own
    assert mixed.value == float(f"{crossing:.3g}")  # no more digits than are known
    assert (mixed.tags["from"], mixed.tags["to"], mixed.tags["layers"]) == (64, 256, 2)


def test_what_needs_a_grid_or_a_class_token_is_timed_where_there_is_one():
    layers = {"both": ["performer-relu:m=5,dwc=3,exact_cls=true", "softmax"], "plain": ["softmax"]}
    records = layer_speed(layers, CLS, tokens=[10, 12, 17], timing=Timing(rounds=1))
    found = [r for r in records if r.metric == "attention_time"]
    refused = {(r.tags["variant"], r.tags["tokens"]) for r in found if r.value is None}
    assert refused == {("both", 12)}  # 11 is a prime
    assert all("grid" in str(r.tags["refused"]) for r in found if r.value is None)
    assert len(found) == 3 * 3 * 2


def test_a_variant_is_timed_with_its_own_heads_and_prefix(monkeypatch):
    keeper, mine = Timekeeper(monkeypatch, [64, 256]), Site(4, 5, 1, prefix=1)
    own = Site(4, 5, 26, (5, 5), prefix=1, layer=2, seed=7)  # of a model: its tokens, layer and seed do not matter
    layers = {"own": ["performer-relu:m=5", "softmax"], "soft": ["softmax"], "base": ["softmax"]}
    records = list(
        layer_speed(layers, SITE, tokens=[64, 256], timing=Timing(rounds=1), sites={"own": own, "soft": mine})
    )
    assert keeper.raced[0] == [
        (s, where, m)
        for s, where in (("softmax", SITE), ("identity", SITE), ("performer-relu:m=5", mine), ("softmax", mine))
        for m in MODES
    ]
    shapes = {
        (r.tags.get("variant"), r.tags["tokens"], r.tags["heads"], r.tags["head_dim"])
        for r in records
        if r.metric == "attention_time"
    }
    assert shapes == {
        ("own", 65, 4, 5),
        ("own", 257, 4, 5),
        ("soft", 65, 4, 5),
        ("soft", 257, 4, 5),
        ("base", 64, 2, 8),
        ("base", 256, 2, 8),
        (None, 64, 2, 8),
        (None, 256, 2, 8),
    }
    # softmax with other heads may be faster or slower than the base's, too
    assert {r.tags["variant"] for r in records if r.metric == "break_even_tokens"} == {"own", "soft"}


SWITCHED = ["performer-relu:m=5,dwc=3", "linformer:k=4", "performer-exp:m=5,exact_cls=true", "softmax:dwc=3"]


def test_every_kind_of_variant_has_a_whole_curve(monkeypatch):
    Timekeeper(monkeypatch, [5, 10])
    layers = {spec: ["softmax", spec] for spec in [*attention_names(), *SWITCHED]}
    found = [r for r in layer_speed(layers, CLS, tokens=[5, 10]) if r.metric == "attention_time"]
    assert len(found) == (1 + len(layers)) * 2 * 2
    assert all(r.value for r in found)


def test_near_the_deadline_there_are_fewer_rounds_and_the_longest_lengths_are_left_out(monkeypatch):
    """The first race takes one second, the others four, of a clock that nothing else moves."""
    now, given = [0.0], []

    def race(calls, *, device, rounds, progress, deadline):
        given.append(deadline)
        now[0] += 1.0 if len(given) == 1 else 4.0
        return Times({call: {"wall": [1.0] * 5, "cpu": [1.0] * 5} for call in calls}, "wall", "cpu")

    monkeypatch.setattr(speed, "race", race)
    monkeypatch.setattr(speed.time, "monotonic", lambda: now[0])
    tokens = [16, 32, 64, 128]
    records = list(layer_speed({"a": ["uniform"]}, SITE, tokens=tokens, deadline=24.0))
    assert {r.tags["tokens"] for r in records if r.metric == "attention_time"} == {16, 32, 64}
    assert given[0] == pytest.approx(24.0 * 16 / sum(tokens))
    even = next(r for r in records if r.metric == "break_even_tokens")
    assert (even.n, even.tags["to"]) == (5, 64)
    assert list(layer_speed({"a": ["uniform"]}, SITE, tokens=tokens, deadline=now[0])) == []


def test_what_cannot_be_built_is_recorded_with_its_reason():
    records = list(attention_speed(["linformer:k=16"], SITE, tokens=[8, 32], timing=THREE))
    refused = [r for r in records if r.tags.get("refused")]
    assert {(r.value, r.tags["tokens"], r.tags["attention"]) for r in refused} == {(None, 8, "linformer:k=16")}
    assert "k=16" in str(refused[0].tags["refused"])
    everywhere = layer_speed({"l": ["linformer:k=64"]}, SITE, tokens=[8], timing=Timing(rounds=1))
    assert [r.value for r in everywhere if r.tags.get("variant") == "l"] == [None, None]
    with pytest.raises(ValueError, match="k=64"):
        list(attention_speed(["linformer:k=64"], SITE, tokens=[8], timing=THREE))


class Weights:
    """Instead of checks: of every spec so many bytes and seconds at a length; what was checked is kept."""

    def __init__(self, monkeypatch, cost):
        self.checked, self.compared = [], set()  # the latter in float64, too
        now = 0.0

        def extra(check, device):
            nonlocal now
            check()
            spec, tokens = self.checked[-1]
            now += cost(spec, tokens)[1]
            return cost(spec, tokens)[0]

        def attention(timing, spec, site):
            self.checked.append((spec, site.tokens))
            return create_attention(spec, heads=site.heads, head_dim=site.head_dim, tokens=8)

        monkeypatch.setattr(Timing, "attention", attention)
        monkeypatch.setattr(Timing, "inputs", lambda timing, site: torch.zeros(4, 1, 2, 8, 8))
        monkeypatch.setattr(speed, "wrong", self.wrong)
        monkeypatch.setattr(speed, "extra_memory", extra)
        monkeypatch.setattr(speed.time, "monotonic", lambda: now)
        monkeypatch.setattr(speed.time, "process_time", lambda: now)

    def wrong(self, *given, compare):
        if compare:
            self.compared.add(self.checked[-1][1])

    def of(self, spec):
        return [n for name, n in dict.fromkeys(self.checked) if name == spec]


@pytest.mark.parametrize("by", ["memory", "seconds"])
def test_lengths_double_until_nothing_is_within_the_limits(monkeypatch, by):
    """softmax costs N², a performer 1000 N: of the limit of 10⁷, 2048² is a part, and 8192 · 1000."""

    def cost(spec, tokens):
        found = {"softmax": tokens**2, "performer-relu": 1000 * tokens}.get(spec, 1)
        return (found, 0.0) if by == "memory" else (1, float(found))

    weights = Weights(monkeypatch, cost)
    Timekeeper(monkeypatch, [2**i for i in range(8, 20)])
    monkeypatch.setattr(Timing, "input_bytes", lambda timing, site: 0)
    limits = Limits(10**7 if by == "memory" else 10**15, 1e7 if by == "seconds" else 1e15, double=True)
    records = list(attention_speed(["performer-relu"], SITE, tokens=[256], limits=limits, timing=THREE))
    times = {
        (r.tags["attention"], r.tags["tokens"]): r
        for r in records
        if r.metric == "attention_time" and r.tags["mode"] == "both"
    }
    assert [n for name, n in times if name == "identity"] == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert [n for (name, n), r in times.items() if name == "softmax" and r.value] == [256, 512, 1024, 2048]
    assert [n for (name, n), r in times.items() if name == "performer-relu" and not r.value] == [16384]
    assert max(weights.of("softmax")[1:]) == 2048  # the first is before anything: whether it can be built
    assert "more than" in str(times["softmax", 4096].tags["refused"])
    ratios = {r.tags["tokens"] for r in records if r.metric == "attention_vs_softmax"}
    assert ratios == {256, 512, 1024, 2048}
    assert max(weights.compared) == 256  # beyond what was asked for, an attention ends, not its check


def test_a_great_length_alone_is_tried_at_lesser_ones_first(monkeypatch):
    weights = Weights(monkeypatch, lambda spec, tokens: (tokens**2 if spec == "performer-relu" else 1, 0.0))
    Timekeeper(monkeypatch, [100_000])
    monkeypatch.setattr(Timing, "input_bytes", lambda timing, site: 0)
    records = list(attention_speed(["performer-relu"], SITE, tokens=[100_000], limits=Limits(10**7), timing=THREE))
    refused = {r.tags["attention"] for r in records if r.tags.get("refused")}
    assert refused == {"performer-relu"}
    assert weights.of("performer-relu") == [100_000, 64, 256, 1024]  # of 4096², 1.7 · 10⁷, it was told before


def test_memory_that_no_forecast_told_is_a_refusal_too(monkeypatch):
    Weights(monkeypatch, lambda spec, tokens: (1, 0.0))
    Timekeeper(monkeypatch, [8])

    def greedy(attention, *inputs, compare):
        if isinstance(attention, Performer):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(speed, "wrong", greedy)
    records = list(attention_speed(["performer-relu"], SITE, tokens=[8], limits=Limits(10**9), timing=THREE))
    refused = {(r.tags["attention"], r.tags["refused"]) for r in records if r.tags.get("refused")}
    assert refused == {("performer-relu", "it takes more than 954 MiB")}


def test_what_is_wrong_where_it_is_compared_is_not_timed_where_it_is_not(monkeypatch):
    def fails(attention, *inputs, compare):
        return "it differs" if compare and isinstance(attention, Performer) else None

    Weights(monkeypatch, lambda spec, tokens: (1000 * tokens, 0.0))
    Timekeeper(monkeypatch, [2**i for i in range(4, 20)])
    monkeypatch.setattr(speed, "wrong", fails)
    monkeypatch.setattr(Timing, "input_bytes", lambda timing, site: 0)
    limits = Limits(10**6, double=True)
    records = list(attention_speed(["performer-relu"], SITE, tokens=[16, 32], limits=limits, timing=THREE))
    times = [r for r in records if r.metric == "attention_time"]
    assert {r.value for r in times if r.tags["attention"] == "performer-relu"} == {None}
    assert {r.tags["refused"] for r in times if r.tags["attention"] == "performer-relu"} == {"it differs"}
    assert max(r.tags["tokens"] for r in times if r.value) > 32


def test_a_prefix_is_no_longer_than_the_sequence():
    with pytest.raises(ValueError, match="prefix=9 is more than tokens=8"):
        list(attention_speed(["softmax"], Site(2, 8, 9, prefix=9), tokens=[8]))


def test_bad_sizes():
    with pytest.raises(ValueError, match="must be at least 1"):
        list(attention_speed(["softmax"], SITE, tokens=[]))
    for bad in ({"batch": 0}, {"rounds": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            Timing(**bad)


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [
        ({64: 2.0, 256: 8.0}, 64),
        ({64: 0.5, 256: 2.0}, 128),  # ratio ∝ N
        ({64: 0.25, 256: 0.5}, None),
        ({64: 2.0, 256: 0.5, 1024: 2.0}, 512),  # from where it stays faster
        ({64: 1.0, 256: 2.0}, 64),
    ],
)
def test_break_even(ratios, tokens):
    assert break_even(ratios) == (None if tokens is None else pytest.approx(tokens))


def test_device():
    assert pick_device("cpu").type == "cpu"
    assert pick_device().type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match="choose auto or cpu"):
        pick_device("nonsense")


@pytest.mark.parametrize(
    ("name", "formula"),
    [("softmax", "2N²d"), ("efficient", "2Nd²"), ("identity", "0"), ("uniform", "Nd"), ("performer-hyp", "8Nmd")],
)
def test_macs_formula(name, formula):
    assert macs_formula(name) == formula
