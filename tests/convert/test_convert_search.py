"""Which layers can be linear: the search against exhaustive search, and the bound that decides."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linvit.conversion import mixing, run
from linvit.conversion.context import StageResult
from linvit.conversion.images import divide_images
from linvit.conversion.mixing import Choice, Kind, LayerSearch
from linvit.conversion.search import Blocks, Drop, MixScore, evaluations, greedy, images_needed, passing
from linvit.conversion.student import make_student
from linvit.measure.accuracy import evaluate
from linvit.models import create_model
from linvit.pipeline.convert import convert
from linvit.registry import parse, parse_layers
from linvit.training.checkpoint import load


@pytest.fixture(scope="module")
def models(teacher):
    exact = load(teacher)
    other = make_student(exact, "performer-hyp:m=5", "all", 0)
    return exact, other


@pytest.fixture(scope="module")
def blocks(models, digits):
    return Blocks(models, digits.train.some(np.arange(211)), digits.mean, digits.std, batch=101)


def test_the_score_of_a_mix_is_the_accuracy_of_the_model_that_has_it(models, blocks, digits):
    exact, other = models
    mix = (0, 1, 1, 0)
    whole = load_mixed(exact, other, "softmax@1+performer-hyp:m=5@2+softmax@1", mix)
    found = evaluate(whole, blocks.split, digits.classes, digits.mean, digits.std, dtype=torch.float32)
    for base in ((0, 0, 0, 0), (1, 1, 1, 1), mix):  # whatever tokens are used again
        ((minus, accuracy),) = blocks.scores(base, [mix])
        assert accuracy == pytest.approx(found.accuracy)
        assert -minus == pytest.approx(found.loss, rel=1e-4)


def load_mixed(exact, other, layers, mix):
    whole = make_student(exact, layers, "all", 0)
    own = whole.state_dict()
    for i, kind in enumerate(mix):
        own |= {key: v for key, v in (exact, other)[kind].state_dict().items() if key.startswith(f"blocks.{i}.")}
    whole.load_state_dict(own)
    return whole


def test_the_search_comes_within_one_layer_of_exhaustive_search(blocks):
    every = list(itertools.product((0, 1), repeat=4))
    scores = dict(zip(every, blocks.scores(every[0], every), strict=True))
    found = greedy(4, (0, 1), lambda base, mixes: [scores[mix] for mix in mixes])
    assert sorted(found) == [0, 1, 2, 3, 4]
    for share in (0.0, 0.01, 0.03, 0.1, 0.3):
        least = scores[0, 0, 0, 0].accuracy * (1 - share)
        best = max(sum(mix) for mix, (_, accuracy) in scores.items() if accuracy >= least)
        mine = max(linear for linear, (_, (_, accuracy)) in found.items() if accuracy >= least)
        assert mine >= best - 1, share


def test_greedy_is_the_better_of_both_directions():
    source = random.Random(5)
    values = {mix: MixScore(source.random(), 0.0) for mix in itertools.product((0, 1, 2), repeat=5)}

    def scores(base, mixes):
        for mix in mixes:
            assert sum(a != b for a, b in zip(base, mix, strict=True)) <= 1
        return [values[mix] for mix in mixes]

    found = greedy(5, (0, 1, 1), scores)
    assert sorted(found) == list(range(6))
    first = max((mix for mix in values if sum(map(bool, mix)) == 1), key=values.__getitem__)
    assert found[1][1] >= values[first]  # one linear layer: the direction from softmax has tried them all


@pytest.mark.parametrize("seed", range(20))
def test_moves_that_cannot_be_the_best_are_not_tried(seed):
    """Each linear layer hurts more the more of them there are: the search finds what trying every move finds."""
    source, layers, asked = random.Random(seed), 10, []
    hurt = [source.random() for _ in range(layers)]

    def score(mix):
        return MixScore(-(sum(h for h, kind in zip(hurt, mix, strict=True) if kind) ** 1.5), 0.0)

    def scores(base, mixes):
        asked.extend(mixes)
        return [score(mix) for mix in mixes]

    found = greedy(layers, (0, 1), scores)
    mix, mine = (0,) * layers, {0: (0,) * layers}
    while 0 in mix:
        mix = max((mix[:i] + (1,) + mix[i + 1 :] for i in range(layers) if not mix[i]), key=score)
        mine[sum(mix)] = mix
    assert {linear: one for linear, (one, _) in found.items()} == mine
    every = layers * (layers + 1)  # moves, both directions
    assert len(asked) < 0.75 * every
    assert len(asked) == pytest.approx(evaluations(layers, 1), rel=1 / 3)


def test_neither_direction_continues_where_that_is_useless():
    """Each linear layer costs a tenth, but the first, which costs nothing."""
    asked = []

    def scores(base, mixes):
        asked.extend(mixes)
        return [MixScore(x, x) for x in (1 - 0.1 * sum(map(bool, mix[1:])) for mix in mixes)]

    whole = greedy(5, (0, 1), scores)
    many = len(asked)
    asked.clear()
    found = greedy(5, (0, 1), scores, enough=1.0, useless=0.85)
    assert len(asked) < many
    assert {linear: found[linear][1] for linear in found} == {linear: whole[linear][1] for linear in found}
    assert found[1][0] == (1, 0, 0, 0, 0)


def test_a_second_linear_kind_is_taken_where_it_helps():
    """Layer 1 is fine with kind 2 and bad with kind 1; softmax need not be restored."""

    def scores(base, mixes):
        return [MixScore(1.0 - 0.5 * (mix[1] == 1), 0.0) for mix in mixes]

    assert greedy(3, (0, 1, 1), scores)[3][0] == (1, 2, 1)


@pytest.mark.parametrize(("n", "lost", "won"), [(1009, 13, 7), (499, 0, 0), (211, 3, 11)])
def test_the_bound_is_a_paired_interval(n, lost, won):
    teacher = np.array([True] * lost + [False] * won + [True] * (n - lost - won))
    student = np.array([False] * lost + [True] * won + [True] * (n - lost - won))
    drop = Drop.between(teacher, student)
    assert (drop.n, drop.lost, drop.won) == (n, lost, won)
    assert drop.value == pytest.approx(teacher.mean() - student.mean())
    a, b, m = lost + 1, won + 1, n + 2
    wanted = (a - b) / m + 1.6448536269514722 * math.sqrt((a + b - (a - b) ** 2 / m) / m**2)
    assert drop.bound() == pytest.approx(wanted)
    assert drop.bound(0.01) > drop.bound() > drop.value


def test_the_bound_holds_in_95_of_100_samples():
    """True drop 2 points: of 2,000 samples of 300 images, at most 5 % plus four standard errors lie above the bound."""
    source = np.random.default_rng(11)
    misses = 0
    for _ in range(2000):
        lost, won, _ = source.multinomial(300, (0.05, 0.03, 0.92))
        misses += Drop(300, 0.9, int(lost), int(won)).bound() < 0.02
    assert misses / 2000 < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 2000)


def test_fewer_images_prove_nothing():
    for share in (0.01, 0.02, 0.3):
        fewest = images_needed(share, 1)
        assert Drop(fewest, 1.0, 0, 0).within(share)
        assert not Drop(fewest - 1, 1.0, 0, 0).within(share)


FINE, BAD = Drop(1000, 1.0, 1, 0), Drop(1000, 1.0, 500, 0)


def test_risk_is_shared_and_handed_on():
    drops, looked = dict.fromkeys("abc", FINE), []

    def look(name, risk):
        looked.append((name, round(60 * risk)))  # in thirds of 5 %
        return drops[name]

    assert passing("abc", 0.02, look) == ["a", "b", "c"]
    assert looked == [("a", 1), ("b", 2), ("c", 3)]
    drops["b"] = BAD
    looked.clear()
    assert passing("abc", 0.02, look) == ["a", "c"]
    assert looked == [("a", 1), ("b", 2), ("c", 1)]
    assert passing("abc", 0.02, lambda name, risk: BAD) == []


RESULTS = [
    StageResult(name, accuracy, 0.5, "x", 2, 0, 0.0, Path())
    for name, accuracy in (("mix", 0.5), ("mix, stage 2", 0.7), ("stage 3", 0.6))
]


def decision(drops, looked=None):
    """The search in a model of four layers, whose mix with two linear ones was trained in two stages."""
    context = SimpleNamespace(config=SimpleNamespace(depth=4), conversion=SimpleNamespace(max_drop=0.02))
    search = LayerSearch(context, [Kind("x")])  # type: ignore[arg-type]
    search.teacher_accuracy = 1.0
    mixes = [(1,) * i + (0,) * (4 - i) for i in range(5)]
    search.candidates = {i: (mix, MixScore(-i, 1 - 0.01 * i)) for i, mix in enumerate(mixes)}
    search.name = search.result = lambda *mix: mix[-1]  # type: ignore[method-assign]

    def drop(one, risk):
        if looked is not None:
            looked.append(one.name)
        return drops.get(one.name, FINE)

    search._drop = drop  # type: ignore[method-assign]
    return search


def test_the_fastest_mix_that_loses_little_is_trained_further():
    assert decision({}).first == (1, 1, 0, 0)


def test_stages_are_decided_on_with_the_mixes():
    names, looked = ["stage 3: x", "mix, stage 2: x", (1, 1, 0, 0)], []
    search = decision({(1, 1, 1, 0): BAD, (1, 1, 1, 1): BAD}, looked)
    assert search.decide(RESULTS) is RESULTS[1]  # the most accurate of those with as many linear layers
    assert looked == [(1, 0, 0, 0), *names, (1, 1, 1, 0), (1, 1, 1, 1)]
    bad = dict.fromkeys([(1, 1, 1, 0), (1, 1, 1, 1)], BAD)
    assert decision(bad | {names[1]: BAD}).decide(RESULTS) is RESULTS[2]
    assert decision(bad | dict.fromkeys(names[:2], BAD)).decide(RESULTS) is RESULTS[0]
    assert decision(bad | dict.fromkeys(names, BAD)).decide(RESULTS) == (1, 0, 0, 0)
    assert decision({(1, 1, 1, 1): BAD}).decide(RESULTS) == (1, 1, 1, 0)  # more linear than what was trained
    assert decision(bad | dict.fromkeys([*names, (1, 0, 0, 0)], BAD)).decide(RESULTS) is None


def test_few_decisions_accept_what_loses_more():
    """All candidates lose slightly more than the 2 points that are allowed, on the same images; the trained ones are
    much like their mix."""
    source, names = np.random.default_rng(3), ["stage 3: x", "mix, stage 2: x", (1, 1, 0, 0)]
    wrong = 0
    for _ in range(1000):
        lost, won, _ = source.multinomial(600, (0.041, 0.02, 0.939), 4).T
        drops = {(1,) * i + (0,) * (4 - i): Drop(600, 1.0, int(lost[i - 1]), int(won[i - 1])) for i in range(1, 5)}
        for name in names[:2]:
            few = source.integers(-4, 5)
            drops[name] = Drop(600, 1.0, max(0, int(lost[1]) + few), int(won[1]))
        wrong += decision(drops).decide(RESULTS) is not None
    assert wrong / 1000 < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize("spec", ["linformer:k=3,sharing=layerwise", "performer-theta:m=5"])
def test_a_mix_is_the_model_that_was_searched(teacher, digits, tmp_path, monkeypatch, spec):
    """With another linear kind to choose from, and weights that layers share."""
    mix, asked = (0, 1, 2, 1), []
    candidates = {0: ((0,) * 4, MixScore(0.0, 1.0)), 3: (mix, MixScore(0.0, 1.0))}

    def none_passes(found, share, drop):
        asked.append(drop(Choice("it", mix, 3), 0.05))
        return []

    monkeypatch.setattr(run, "LOCAL", parse("efficient"))
    monkeypatch.setattr(run, "MAX_LOCAL_COST", 9.0)
    monkeypatch.setattr(LayerSearch, "candidates", candidates)
    monkeypatch.setattr(mixing, "passing", none_passes)
    options = {"stages": (2,), "steps": 4, "max_drop": 0.4, "device": "cpu", "report": False}
    done = convert(teacher, to=spec, data="digits", out=tmp_path / "mix", **options)
    model, exact = load(tmp_path / "mix/mix"), load(teacher)
    assert model.config.attention == f"softmax@1+{spec}@1+efficient@1+{spec}@1"
    assert [stage.name for stage in done.stages[2:]] == ["stage 2", "mix", "mix, stage 2"]
    assert done.stages[3].replaced == 3
    student, x = load(tmp_path / "mix/stage-2"), torch.randn(7, 1, 8, 8)
    tokens = model.embed(x)
    for i, kind in enumerate(mix):
        tokens = (exact, student, model)[kind].blocks[i](tokens)
    torch.testing.assert_close(model(x), model.classify(tokens))
    decide = divide_images(digits, model.about, True, True, 0).decide
    found = [evaluate(one, decide, digits.classes, digits.mean, digits.std) for one in (exact, model)]
    assert asked == [Drop.between(*(one.predictions == decide.labels for one in found))]
    record = next(r for r in done.records if r.metric == "conversion_drop")
    assert (record.tags["lost"], record.tags["won"]) == (asked[0].lost, asked[0].won)
    assert done.chosen.name == "teacher"  # none passed
    assert torch.equal(done.model(x), exact(x))


def context_of(teacher, to) -> Any:
    depth = teacher.config.depth
    return SimpleNamespace(
        batch=64,
        config=teacher.config,
        conversion=SimpleNamespace(max_drop=0.02, to=(to,), seed=0),
        teacher=teacher,
        device=torch.device("cpu"),
        specs=lambda text: parse_layers(text, depth),
    )


@pytest.mark.parametrize(("side", "useful"), [(8, False), (28, False), (112, True)])
def test_local_softmax_is_tried_where_it_is_cheaper(side, useful):
    """7 × 7 of a grid of 2 × 2, 7 × 7 or 28 × 28 tokens."""
    teacher = create_model(image_size=side, patch_size=4, dim=22, depth=2, heads=2, mlp_dim=13, pool="cls")
    found = run.local_kind(context_of(teacher, "uniform"), ["uniform"])
    assert found == (["window:size=7"] if useful else [])
    assert run.local_kind(context_of(teacher, "window:size=3"), ["window:size=3"]) == []
    assert run.local_kind(context_of(teacher, "uniform"), ["uniform", "inline"]) == []


def test_local_softmax_has_the_teachers_convolutions(monkeypatch):
    """And layers of a teacher that have another attention already count as replaced, and keep it."""
    monkeypatch.setattr(run, "LOCAL", parse("window:size=3"))
    monkeypatch.setattr(run, "MAX_LOCAL_COST", 9.0)
    shape = {"image_size": 8, "patch_size": 2, "dim": 22, "depth": 4, "heads": 2, "mlp_dim": 13}
    teacher = create_model(**shape, attention="softmax:dwc=3@2+uniform@2")
    context = context_of(teacher, "performer-relu:m=4,dwc=3")
    (local,) = run.local_kind(context, ["performer-relu:m=4,dwc=3"])
    assert local == "window:size=3,dwc=3@2+uniform@2"
    search = LayerSearch(context, [Kind("performer-relu:m=4,dwc=3"), Kind(local)])
    mix = (2, 0, 0, 1)
    assert search.name(mix) == "window:size=3,dwc=3@1+softmax:dwc=3@1+uniform@1+performer-relu:m=4,dwc=3@1"
    assert search.replaced(mix) == 3
    key = "blocks.1.attn.attention.dwc.weight"
    monkeypatch.setattr(mixing, "zero_shot", lambda c, layers: make_student(c.teacher, layers, "all", 0))
    assert torch.equal(search.models[2].state_dict()[key], teacher.state_dict()[key])


def test_a_faster_kind_is_preferred_where_it_costs_as_much():
    """Kind 1 saves all of a layer's time, kind 2 half; kind 1 is bad in layers 0 and 1, kind 2 nowhere."""
    hurt = {1: (0.4, 0.3, 0.01, 0.0), 2: (0.02, 0.01, 0.01, 0.0)}

    asked = []

    def scores(base, mixes):
        asked.extend(mixes)
        return [MixScore(-sum(hurt[kind][i] for i, kind in enumerate(mix) if kind), 0.0) for mix in mixes]

    found = greedy(4, (0, 1, 0.5), scores)
    assert found[4][0] == (1, 1, 1, 1)
    assert found[3][0] == (2, 2, 1, 1)
    assert found[2][0] == (0, 0, 1, 1)
    assert found[0][0] == (0, 0, 0, 0)
    asked.clear()
    few = greedy(4, (0, 1, 0.5), scores, least=2.9)
    assert min(sum((0, 1, 0.5)[kind] for kind in mix) for mix in asked) >= 2.9  # no others are evaluated
    assert set(few) == {3, 4}
    assert few[3][0] == (2, 2, 1, 1)
