from __future__ import annotations

import numpy as np
import pytest
import torch

from linvit.attention import attention_names, build_attention, with_size
from linvit.measure import advice, features
from linvit.measure.advice import MIN_POINTS, Forecast, Model, Workload, fit, kind_of, layer_call, points, terms
from linvit.metrics import problems
from linvit.models import VisionTransformer, model_config
from linvit.records import Record
from linvit.site import Site

CPU = torch.device("cpu")
RATES = {  # seconds per unit of each kind of work
    "softmax": [3e-5, 0.0, 0.0, 2e-9, 1e-9, 3e-11],
    "identity": [2e-5, 0.0, 0.0, 0.0, 0.0, 0.0],
    "performer-relu": [2e-4, 1e-6, 1e-8, 3e-9, 5e-10, 4e-11],
    "linformer": [1e-4, 0.0, 2e-8, 2e-9, 5e-10, 3e-11],
}
FACTOR = {"forward": 1.0, "both": 3.5}


def load(tokens: int, heads: int, head_dim: int, batch: int = 1, mode: str = "forward", prefix: int = 0) -> Workload:
    return Workload(Site(heads, head_dim, tokens, prefix=prefix).at(tokens), batch, mode)


def true_seconds(spec: str, where: Workload) -> float:
    return FACTOR[where.mode] * float(np.dot(terms(spec, where), RATES[kind_of(spec)]))


def timings(noise: float = 0.0, where=None) -> list[Record]:
    """What a machine with these rates would measure."""
    draw = np.random.default_rng(0)
    found = []
    for place, size in where or points():
        for kind in RATES:
            for mode in advice.MODES:
                here, spec = place._replace(mode=mode), with_size(kind, size, place.site.tokens)
                seconds = true_seconds(spec, here) * (1 + noise * draw.standard_normal())
                found.append(Record("attention_time", seconds, "s", 3, tags={"attention": spec, **here.tags()}))
    return found


def test_the_fit_finds_the_rates():
    every = np.array([terms(with_size("performer-relu", size), place) for place, size in points()])
    rates = np.array([2e-4, 0.0, 1e-8, 3e-9, 0.0, 4e-11])
    np.testing.assert_allclose(fit(every, every @ rates), rates, rtol=1e-5, atol=1e-14)


def test_no_rate_is_negative():
    every = np.array([terms("softmax", place) for place, _ in points()])
    seconds = np.geomspace(1e-5, 1e-2, len(every))  # nothing to do with the work
    assert (fit(every, seconds) >= 0).all()


@pytest.mark.parametrize(("noise", "allowed"), [(0.0, 1e-6), (0.05, 0.15)])
@pytest.mark.parametrize("mode", advice.MODES)
def test_a_forecast_is_right_where_nothing_was_measured(noise, allowed, mode):
    known = Forecast(timings(noise))
    for spec in ("softmax", "identity", "performer-relu:m=48", "linformer:k=24"):
        for here in (load(197, 3, 64, 1, mode), load(1025, 6, 32, 7, mode, 1), load(67, 5, 16, 13, mode)):
            assert known.seconds(spec, here) == pytest.approx(true_seconds(spec, here), rel=allowed)
    assert known.error <= allowed


def test_the_error_of_a_forecast_is_of_points_that_it_has_not_seen():
    """As many rates as points fit whatever was measured, and forecast nothing."""
    noise = Forecast(timings(0.3, points()[:6]))
    fitted = [noise.seconds(str(r.tags["attention"]), Workload.of(r)) / advice.quick(r) - 1 for r in noise.records]
    assert noise.error > 1.5 * np.median(np.abs(fitted))


def test_the_break_even_is_where_the_times_cross():
    model = whole()
    for spec, task in (("performer-relu:m=40", "inference"), ("linformer:k=16", "latency")):
        even = model.break_even(spec, task)
        assert even is not None
        assert even == float(f"{even:.2g}")
        for n, faster in ((0.85 * even, False), (1.15 * even, True)):
            here = model.loads[task].at(round(n))
            assert (true_seconds(spec, here) < true_seconds("softmax", here)) is faster
    assert model.break_even("identity", "training") == model.lengths("identity")[0] == 49  # always faster
    assert model.break_even("performer-relu:m=4096", "latency") is None  # not within what was measured


def test_lengths_stay_within_what_was_measured_and_a_linformers_keys():
    known = Forecast(timings())
    low, high = known.lengths
    for spec, prefix in (("softmax", 0), ("softmax", 3), ("linformer:k=100", 1)):
        found = known.squares(spec, prefix)
        assert found == sorted(set(found))
        assert low <= found[0] <= found[-1] <= high
        assert all(np.sqrt(n - prefix).is_integer() for n in found)
    assert min(known.squares("linformer:k=100", 1)) >= 100


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("performer-relu:m=32", "performer-relu"),
        ("linformer:k=16,sharing=none", "linformer:sharing=none"),
        ("softmax", "softmax"),
        ("performer-exp:m=8,dwc=3", "performer-exp:dwc=3"),
    ],
)
def test_kinds(spec, kind):
    assert kind_of(spec) == kind


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("performer-relu", "performer-relu:m=40"),
        ("linformer", "linformer:k=23"),
        ("softmax", "softmax"),
        ("performer-relu:projection=none", "performer-relu:projection=none"),
        ("performer-exp:dwc=3", "performer-exp:m=40,dwc=3"),
    ],
)
def test_sizes(kind, spec):
    assert with_size(kind, 40, 23) == spec


def test_points_are_spread_from_the_first_on_and_never_change():
    assert points() == points()
    assert len({place for place, _ in points()}) == advice.POINTS
    for some in (points()[:MIN_POINTS], points()):
        tokens, groups = [p.site.tokens for p, _ in some], [p.batch * p.site.heads for p, _ in some]
        assert min(tokens) < 64
        assert max(tokens) > 4000
        assert min(groups) == 1
        assert max(groups) > 30
    for (site, batch, _), _ in points():
        assert 2 * batch * site.heads * site.tokens**2 * site.head_dim <= 1.2e9 or batch * site.heads == 1


@pytest.mark.parametrize("name", attention_names())
def test_every_attention_has_work_at_every_point(name):
    for place, size in points()[:3]:
        found = terms(with_size(name, size, place.site.tokens), place)
        assert all(term >= 0 for term in found)
        assert found[-1] > 0 or name == "identity"


@pytest.mark.parametrize("spec", ["softmax", "performer-relu:m=5", "linformer:k=7"])
def test_a_layer_is_timed_as_a_model_calls_it(spec):
    """From the projection to the joined heads and back, against the attention itself on separate q, k and v."""
    here = load(11, 3, 5, 2)
    attention = build_attention(spec, here.site)
    projection, gradient = advice.inputs(here, CPU)
    q, k, v = (part.unflatten(-1, (3, 5)).transpose(1, 2).contiguous() for part in projection.chunk(3, -1))
    separate = [x.requires_grad_() for x in (q, k, v)]
    wanted = attention(*separate).transpose(1, 2).reshape(2, 11, 15)
    torch.testing.assert_close(layer_call(attention, here, projection, gradient)(), wanted)
    back = torch.autograd.grad(wanted, separate, gradient)
    found = layer_call(attention, here._replace(mode="both"), projection, gradient)()
    joined = torch.cat([x.transpose(1, 2).reshape(2, 11, 15) for x in back], -1)
    torch.testing.assert_close(found[0], joined, rtol=1e-4, atol=1e-5)  # type: ignore[index]


class Measured:
    """Instead of the machine: counts how often it is asked."""

    def __init__(self, monkeypatch, tmp_path):
        self.count, self.folder = 0, tmp_path
        monkeypatch.setattr(advice, "_timed_points", self.measure)

    def measure(self, kinds, device, seconds, progress):
        self.count += 1
        return iter([record for record in timings() if kind_of(str(record.tags["attention"])) in kinds])

    def ask(self, spec="performer-relu:m=32", **options) -> Forecast:
        return advice.forecast([spec], device=CPU, cache=self.folder, **options)


def test_what_was_measured_is_kept(monkeypatch, tmp_path):
    machine = Measured(monkeypatch, tmp_path)
    first, again = machine.ask(), machine.ask("performer-relu:m=8")  # the same kind
    assert machine.count == 1
    assert first.rates.keys() == again.rates.keys()
    here = load(197, 3, 64)
    assert again.seconds("softmax", here) == first.seconds("softmax", here)
    machine.ask("linformer:k=8")
    assert machine.count == 2
    machine.ask(fresh=True)
    assert machine.count == 3


@pytest.mark.parametrize("what", ["versions", "commit", "machine", "threads"])
def test_other_versions_or_another_machine_are_measured_again(monkeypatch, tmp_path, what):
    machine = Measured(monkeypatch, tmp_path)
    machine.ask()
    if what == "threads":
        found = advice.provenance(CPU, torch.float32)
        monkeypatch.setattr(advice, "provenance", lambda *at: found | {"threads": 77})
    else:
        monkeypatch.setattr(advice, what, lambda: {"cpu": "another"} if what == "machine" else "9.9.9")
    machine.ask()
    machine.ask()
    assert machine.count == 2


def test_a_damaged_cache_is_measured_again(monkeypatch, tmp_path):
    machine = Measured(monkeypatch, tmp_path)
    machine.ask()
    (file,) = (tmp_path / "advice").glob("*.jsonl")
    file.write_text("nonsense\n" + file.read_text())
    machine.ask()
    machine.ask()
    assert machine.count == 2


def test_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("LINVIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Measured(monkeypatch, None).ask()
    assert list((tmp_path / "linvit" / "advice").glob("*.jsonl"))


def whole(measured=()) -> Model:
    """A model of 3 layers that takes 7, 40 and 150 ms without attention, for one image, 8 of them, and training."""
    config = model_config(image_size=28, patch_size=2, dim=48, heads=3, depth=3, mlp_dim=96)
    times = {"inference_latency": 0.007, "inference_throughput": 8 / 0.04, "train_step": 0.15}
    records = [Record(metric, value, tags={"attention": "identity"}) for metric, value in times.items()]
    return Model(config, 8, Forecast(timings()), [*records, *measured])


def test_a_model_is_its_rest_and_its_layers():
    model, spec = whole(), "performer-relu:m=32"
    here = load(196, 3, 16, 8, "both")
    assert model.loads["training"] == here
    layers = 3 * (true_seconds(spec, here) - true_seconds("identity", here))
    assert model.seconds(spec, "training") == pytest.approx(0.15 + layers, rel=1e-6)
    assert model.seconds("identity", "training") == pytest.approx(0.15)
    assert model.speed(spec, "training") == pytest.approx(model.seconds("softmax", "training") / (0.15 + layers))
    assert model.share("training") == pytest.approx(1 - 0.15 / model.seconds("softmax", "training"))
    assert model.speed("softmax", "latency") == 1


def test_what_was_measured_of_a_model_beats_the_forecast():
    here = load(196, 3, 16, 8)
    times = {"softmax": 0.020, "identity": 0.001, "performer-relu:m=32": 0.005}
    layers = [Record("attention_time", t, "s", tags={"attention": spec, **here.tags()}) for spec, t in times.items()]
    model = whole(layers)
    assert model.speed("performer-relu:m=32", "inference") == pytest.approx((0.04 + 3 * 0.019) / (0.04 + 3 * 0.004))
    assert model.speed("performer-relu:m=32", "latency") == pytest.approx(
        whole().speed("performer-relu:m=32", "latency")
    )


@pytest.mark.parametrize("factor", [0.2, 0.99, 1.01, 5.0])
def test_forecasts_pass_through_what_was_measured(factor):
    """Of a layer that takes so many times softmax's time at 196 tokens, whatever its kind takes elsewhere."""
    here, spec = load(196, 3, 16, 8), "performer-relu:m=32"
    times = {"softmax": 0.020, "identity": 0.001, spec: 0.020 * factor}
    layers = [Record("attention_time", t, "s", tags={"attention": one, **here.tags()}) for one, t in times.items()]
    model = whole(layers)
    assert model.ratio(spec, "inference") == pytest.approx(1 / factor)
    assert model.ratio(spec, "inference", 196) == pytest.approx(1 / factor)
    assert model.ratio(spec, "inference", 225) == pytest.approx(1 / factor, rel=0.25)  # nothing jumps
    assert model.ratio("performer-relu:m=40", "inference") == pytest.approx(1 / factor, rel=0.25)
    for even in (model.break_even(spec, "inference"), model.pays_from(spec, "inference", 1.0)):
        assert even is None or (even > 196) is (factor > 1)


def test_what_few_tokens_take_does_not_scale_the_forecast_for_many():
    """Four tokens, fewer than at any point, whose layer takes a hundred times what it should."""
    spec, model = "performer-relu:m=32", whole()
    config = model.config.model_copy(update={"image_size": 4})
    here = load(4, 3, 16, 8)
    times = {"softmax": 1e-4, "identity": 1e-5, spec: 1e-2}
    layers = [Record("attention_time", t, "s", tags={"attention": one, **here.tags()}) for one, t in times.items()]
    small = Model(config, 8, model.known, [*model.records, *layers])
    assert small.ratio(spec, "inference") == pytest.approx(1e-2)
    assert small.ratio(spec, "inference", 1024) == pytest.approx(model.ratio(spec, "inference", 1024))
    assert small.break_even(spec, "inference") == pytest.approx(model.break_even(spec, "inference"), rel=0.2)
    assert small.lengths(spec)[0] == 49


def test_more_than_memory_has_is_one_line(monkeypatch, tmp_path):
    def side_by_side(configs, **given):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(advice, "side_by_side", side_by_side)
    config = model_config(image_size=28, patch_size=2, dim=48, heads=3, depth=3, mlp_dim=96)
    with pytest.raises(ValueError, match=r"batch=3: timing it takes more than the .* of memory free"):
        advice.measure_model(config, [], Forecast(timings()), batch=3, device=CPU, cache=tmp_path)


def test_from_where_a_whole_model_gains():
    model, spec = whole(), "performer-relu:m=32"
    n = model.pays_from(spec, "inference", 1.05)
    assert n is not None
    assert n > (model.break_even(spec, "inference") or 0)  # a tie is passed later
    assert model.speed(spec, "inference", round(0.9 * n)) < 1.05 < model.speed(spec, "inference", round(1.1 * n))
    assert model.pays_from("softmax", "inference", 1.05) is None


def test_what_is_measured_here_is_as_the_table_of_metrics_says(monkeypatch, tmp_path):
    few = [(load(n, 2, d, b, prefix=1), m) for n, d, b, m in ((10, 8, 1, 8), (17, 16, 2, 16), (26, 8, 3, 8))]
    monkeypatch.setattr(advice, "points", lambda: few)
    seen = []
    known = advice.forecast(
        ["performer-exp:m=8,dwc=3"],
        device=CPU,
        cache=tmp_path,
        progress=lambda done, total, what: seen.append(done / total),
    )
    assert len(known.records) == 3 * 3 * 2
    assert seen == sorted(seen)
    assert seen[-1] == 1
    config = model_config(image_size=12, patch_size=4, dim=14, heads=2, depth=1, mlp_dim=22)
    specs = ["performer-exp:m=8,dwc=3"]
    model = advice.measure_model(config, specs, known, batch=3, device=CPU, cache=tmp_path)
    assert set(model.measured) == {(spec, s) for spec in (*advice.BASELINES, *specs) for s in model.loads.values()}
    assert all(seconds > 0 for seconds in model.without.values())
    assert [problem for record in (*known.records, *model.records) for problem in problems(record)] == []
    stored = len(list((tmp_path / "advice").iterdir()))
    advice.measure_model(config, specs, known, batch=3, device=CPU, cache=tmp_path)
    assert len(list((tmp_path / "advice").iterdir())) == stored == 2


def test_what_computes_something_else_is_not_timed(monkeypatch):
    monkeypatch.setattr(advice, "wrong", lambda *given: "its output is not finite")
    with pytest.raises(ValueError, match="softmax is not timed: its output is not finite"):
        list(advice._timed_points(["softmax"], CPU, 1.0, advice.ignore))


def error_of(spec: str, value: float) -> Record:
    return Record("attention_error", value, "fraction", tags={"attention": spec})


def test_the_fewest_features_for_a_target():
    records = [error_of(f"performer-exp:m={m}", e) for m, e in ((8, 0.5), (64, 0.2), (16, 0.4), (32, 0.15))]
    records += [error_of("performer-hyp:m=8", 0.3), error_of("uniform", 0.45)]
    exp, hyp = features.enough(records, ["performer-exp", "performer-hyp"], 0.2)
    assert (exp.count, exp.error, exp.spec, exp.features) == (32, 0.15, "performer-exp:m=32", 32)
    assert (hyp.count, hyp.error, hyp.tried, hyp.spec, hyp.features) == (None, 0.3, 8, None, 16)  # two of each row
    assert features.control(records) == 0.45


def test_only_estimates_of_softmax_get_there_by_more_features():
    specs = ["performer-relu:m=32", "performer-exp:m=32", "performer-theta:m=32", "linformer:k=16", "performer-exp:m=8"]
    assert features.estimators(specs) == ["performer-exp", "performer-hyp"]


def test_one_token_has_no_error_and_one_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setattr(features, "COUNTS", (8,))
    alone = features.errors_at_random(["performer-exp"], Site(2, 7, 1), 1.0)
    assert {r.tags["tokens"] for r in alone} == {1}
    assert all(r.value == pytest.approx(0, abs=1e-9) for r in alone if r.metric == "attention_error")
    with pytest.raises(ValueError, match=r"sigma=1e\+200 is too large: the distance of .* from softmax is not finite"):
        features.errors_at_random(["performer-exp"], Site(2, 7, 23), 1e200)


def test_errors_of_drawn_and_of_a_models_own_q_and_k(monkeypatch):
    monkeypatch.setattr(features, "COUNTS", (8, 512))
    kinds = ["performer-exp"]
    drawn = features.errors_at_random(kinds, Site(2, 7, 23), 0.3)
    few, many = (next(r for r in drawn if r.tags["attention"] == f"performer-exp:m={m}") for m in (8, 512))
    assert (many.value or 1) < 0.5 * (few.value or 0)
    model = VisionTransformer(model_config(image_size=12, patch_size=4, dim=14, heads=2, depth=6, mlp_dim=22))
    seen = features.errors_in_model(model, torch.randn(2, 3, 12, 12), kinds, 60.0)
    assert [r.tags["attention"] for r in seen] == ["uniform", "performer-exp:m=8", "performer-exp:m=512"]
    assert all(r.n == features.MAX_LAYERS for r in seen)
    assert (seen[2].value or 1) < (seen[1].value or 0)
    assert [problem for record in (*drawn, *seen) for problem in problems(record)] == []
