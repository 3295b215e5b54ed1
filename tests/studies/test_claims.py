"""How claims are judged, and that what they say of the reports' own numbers is so."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from results_of import made, noisy, sizes
from synthetic import record

from linvit.records import Records
from linvit.report import statistics
from linvit.report.comparison import LEVEL
from linvit.report.merit import ACCURACY
from linvit.studies import STUDIES, PublishedStudy
from linvit.studies.claims import CLAIMS, PERFORMERS_000
from linvit.studies.declaration import all_published
from linvit.studies.hypotheses import (
    FAILS,
    HOLDS,
    MISSING,
    OPEN,
    Claim,
    at_least,
    better,
    closes,
    equal,
    explodes,
    judge,
    learned_below,
    lower_elsewhere,
    margin_of,
    no_general,
    outlasts,
    trains,
    wider_gap,
)
from linvit.studies.looks import clamp_is_enough, elu_is_unstable, grows_with_depth, lower_errors, near_the_limit
from linvit.studies.mistakes import small_model
from linvit.studies.results import Pair, Ref, Results
from linvit.studies.samples import Sample, above, fisher

A, B = Ref("000-mnist", "RF16 softmax"), Ref("000-mnist", "transformer")
RELU, LINFORMER = Ref("000-mnist", "RF64 ReLU"), Ref("000-mnist", "linformer")


def verdict(home, *tests) -> str:
    return judge([Claim("000.0", "", "", tests)], Results(home))[0].word


@pytest.mark.parametrize(
    ("test", "difference", "seeds", "word"),
    [
        (better, 0.03, 3, HOLDS),
        (better, -0.03, 3, FAILS),
        (better, 0.0, 5, FAILS),  # a tie: shown to be less than a point better, and not shown to be better at all
        (better, 0.03, 1, OPEN),
        (better, 0.03, 2, OPEN),
        (better, 0.005, 5, HOLDS),  # also by less than a point
        (at_least, 0.03, 3, HOLDS),
        (at_least, 0.0, 5, HOLDS),
        (at_least, -0.03, 3, FAILS),
        (at_least, -0.002, 3, OPEN),  # on MNIST, where the margin is 0.2 points
        (equal, 0.0, 5, HOLDS),
        (equal, 0.03, 3, FAILS),
        (equal, -0.03, 3, FAILS),
        (equal, 0.0, 1, OPEN),
    ],
)
def test_what_a_difference_shows(tmp_path, test, difference, seeds, word):
    base = noisy(0.9, seeds)
    ours = [(value or 0) + difference + 0.001 * (-1) ** i for i, value in enumerate(base)]
    made(tmp_path, {"transformer": base, "RF16 softmax": ours})
    assert verdict(tmp_path, test(A, B)) == word


def test_smoke_decides_nothing_and_the_largest_finished_scale_counts(tmp_path):
    better_row = {"transformer": noisy(0.9, 5), "RF16 softmax": noisy(0.95, 5)}
    made(tmp_path, better_row, scale="smoke")
    assert verdict(tmp_path, better(A, B)) == MISSING
    made(tmp_path, better_row)
    assert verdict(tmp_path, better(A, B)) == HOLDS
    made(tmp_path, {"transformer": noisy(0.97, 5), "RF16 softmax": noisy(0.95, 5)}, scale="full")
    assert verdict(tmp_path, better(A, B)) == FAILS
    assert "scale full" in better(A, B).run(Results(tmp_path)).found
    shutil.rmtree(tmp_path / "000-mnist/full")
    made(tmp_path, {"transformer": noisy(0.95)}, scale="full", finished=False)
    assert Results(tmp_path).column("000-mnist", "fair").scale == "cpu"
    shutil.rmtree(tmp_path / "000-mnist/cpu")
    assert Results(tmp_path).column("000-mnist", "fair").scale == "full"


def test_all_tests_must_hold_and_one_may_refute(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": noisy(0.95), "RF64 ReLU": noisy(0.85)})
    away = Ref("000-cifar10", "RF16 softmax")
    for tests, word in (
        ([better(A, B), better(B, RELU)], HOLDS),
        ([better(A, B), better(RELU, B)], FAILS),
        ([better(A, B), better(away, B)], OPEN),  # one was not run
        ([better(RELU, B), better(away, B)], FAILS),
        ([better(away, B)], MISSING),
        ([], MISSING),
    ):
        assert verdict(tmp_path, *tests) == word


def test_claims_of_one_report_share_its_risk(tmp_path):
    """A p between 5 % and a tenth of it: shown for one claim alone, and not among ten."""
    base, ours = [0.90, 0.901, 0.899], [0.906, 0.9025, 0.9045]
    results = Results(made(tmp_path, {"transformer": base, "RF16 softmax": ours}))
    claims = [Claim(f"000.{i}", "", "", [better(A, B)]) for i in range(10)]
    assert LEVEL / 10 < better(A, B).run(results).holds < LEVEL
    assert judge(claims[:1], results)[0].word == HOLDS
    assert {found.word for found in judge(claims, results)} == {OPEN}
    elsewhere = [Claim(f"00{i}.1", "", "", [better(A, B)]) for i in range(10)]
    assert {found.word for found in judge(elsewhere, results)} == {HOLDS}


def test_true_nulls_are_rarely_called_either_way():
    """Two equally good rows: that one is better is said in at most 5 % of studies."""

    class Drawn:
        def pair(self, a: Ref, b: Ref) -> Pair:
            scores = {name: dict(enumerate(0.9 + 0.02 * rng.normal(size=3))) for name in "ab"}
            return Pair(statistics.judge(scores).comparison, 0, 1, "cpu", ACCURACY, "")

    rng, studies = np.random.default_rng(0), 200
    wrong = sum(better(A, B).run(Drawn()).holds <= LEVEL for _ in range(studies))
    assert wrong <= 0.05 * studies + 2 * np.sqrt(0.05 * 0.95 * studies)


@pytest.mark.parametrize(("longer", "word"), [(0.72, HOLDS), (0.76, FAILS), (0.75, FAILS)])
def test_a_checkpoint_saves_training_if_its_models_steps_are_counted(tmp_path, longer, word):
    """It is always better than from scratch with equal steps here."""
    rows = {
        f"{name}{how}": noisy(mean, 5)
        for name in ("linformer", "RF16 softmax")
        for how, mean in ((" from checkpoint", 0.75), ("", 0.7), (", twice the steps", longer))
    }
    rows |= {f"RF16 ReLU{how}": rows[f"RF16 softmax{how}"] for how in ("", " from checkpoint", ", twice the steps")}
    results = Results(made(tmp_path, rows, study="000-cifar10"))
    words = {found.claim.id: found.word for found in judge(CLAIMS, results)}
    assert words["000.6"] == word
    assert words["000.3"] == HOLDS  # fewer steps of its own


def words(home) -> dict[str, str]:
    return {found.claim.id: found.word for found in judge(CLAIMS, Results(home))}


@pytest.mark.parametrize(("large", "word"), [(0.8, HOLDS), (1.2, FAILS)])
def test_small_patches_are_compared_with_large_ones_of_the_same_images(tmp_path, large, word):
    """CIFAR-10 (I) in its 64 patches of 4 says nothing of patch sizes."""
    systems = {}
    for number in ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"):
        speed = {"VI": 1.3, "VII": 1.1, "VIII": large, "IX": large}.get(number, 0.8)
        systems[f"001-{number}: ViT"] = 1.0, 1.0
        systems |= {f"001-{number}: {row}": (speed, 0.9) for row in ("relu", "exp", "fθ")}
    sizes(tmp_path, "001", systems)
    found = words(tmp_path)
    assert found["001.3"] == word
    assert (found["001.2"], found["001.7"], found["001.8"]) == (OPEN, HOLDS, HOLDS)  # all three are equally fast
    (claim,) = (claim for claim in CLAIMS if claim.id == "001.3")
    assert claim.needs == ("001-sizes",)
    titles = [STUDIES[f"001-{number}"].title for number in ("IX", "VI", "VII", "VIII")]
    assert [re.findall(r"patches of (\d), (\d+) features", title)[0] for title in titles] == [
        ("8", "64"),
        ("4", "32"),
        ("4", "64"),
        ("8", "32"),
    ]


def test_busy_cores_decide_nothing_of_speed(tmp_path):
    numbers = ("I", "II", "III", "IV", "V", "VI", "VII")
    systems = {f"001-{n}: {row}": (0.5, 2.0) for n in numbers for row in ("relu", "exp", "fθ")}
    systems |= {f"001-{n}: ViT": (1.0, 1.0) for n in numbers}
    sizes(tmp_path, "001", systems, busy=True)
    found = {verdict.claim.id: verdict for verdict in judge(CLAIMS, Results(tmp_path))}
    assert found["001.8"].word == OPEN
    assert "busy core, which decides nothing" in found["001.8"].parts[0].found
    assert found["001.7"].word == FAILS  # memory does not depend on who else computes


def test_a_gap_is_wider_if_both_intervals_say_so(tmp_path):
    for study, gaps in (("001-I", (0.05, 0.01, 0.01)), ("001-V", (0.02, 0.04, 0.011))):
        rows = {"ViT": noisy(0.8, 5)} | {
            row: [(value or 0) - gap + 0.001 * (-1) ** i for i, value in enumerate(noisy(0.8, 5))]
            for row, gap in zip(("exp", "relu", "fθ"), gaps, strict=True)
        }
        made(tmp_path, rows, study=study, identity=study)
    assert [verdict(tmp_path, wider_gap(row)) for row in ("exp", "relu", "fθ")] == [FAILS, HOLDS, OPEN]


def test_no_performer_is_general_if_each_loses_somewhere(tmp_path):
    rows = "RF16 softmax", "RF64 ReLU"
    test = no_general(rows, "transformer", ("000-mnist", "000-cifar10"))
    made(tmp_path, {"transformer": noisy(0.98, 5), rows[0]: noisy(0.9, 5), rows[1]: noisy(0.98, 5)})
    made(tmp_path, {"transformer": noisy(0.7, 5), rows[0]: noisy(0.7, 5), rows[1]: noisy(0.6, 5)}, study="000-cifar10")
    assert verdict(tmp_path, test) == HOLDS
    made(
        tmp_path,
        {"transformer": noisy(0.7, 5), **dict.fromkeys(rows, noisy(0.7, 5))},
        study="000-cifar10",
        scale="full",
    )
    made(tmp_path, {"transformer": noisy(0.98, 5), **dict.fromkeys(rows, noisy(0.98, 5))}, scale="full")
    assert verdict(tmp_path, test) == FAILS


@pytest.mark.parametrize(("gain", "word"), [(0.02, HOLDS), (0.0, OPEN), (-0.02, FAILS)])
def test_distances_close_if_they_are_smaller_with_twice_the_steps(tmp_path, gain, word):
    short, long = "RF16 softmax", "RF16 softmax, twice the steps"
    rows = {"transformer": noisy(0.9), "transformer, twice the steps": noisy(0.92), short: noisy(0.87)}
    own = [(value or 0) + 0.02 + gain + 0.0004 * (-1) ** i for i, value in enumerate(noisy(0.87))]
    made(tmp_path, rows | {long: own}, study="000-cifar10")
    refs = [Ref("000-cifar10", name) for name in (short, long, "transformer", "transformer, twice the steps")]
    test = closes((refs[0], refs[1]), (refs[2], refs[3]))
    assert test.studies == ("000-cifar10",)
    assert verdict(tmp_path, test) == word
    made(tmp_path, rows, study="000-cifar10", scale="full")
    assert verdict(tmp_path, test) == MISSING


def test_margins_are_those_of_the_data():
    assert [margin_of(name) for name in ("000-mnist", "000-cifar10", "paper-fig6-7-bidirectional")] == [
        (0.002, "0.2 points"),
        (0.01, "1 point"),
        (0.01, "0.01 bits"),
    ]


def test_a_test_says_what_it_could_have_shown(tmp_path):
    """More seeds detect smaller differences; two detect none."""
    found = []
    for seeds in (2, 3, 5):
        made(tmp_path / str(seeds), {"transformer": noisy(0.9, seeds), "RF16 softmax": noisy(0.9, seeds, sd=0.004)})
        found.append(better(A, B).run(Results(tmp_path / str(seeds))).detects)
    assert found[0] == ""
    three, five = (float(text.removesuffix(" points")) for text in found[1:])
    assert 0.1 < five < three < 5


def test_noise_of_two_studies_is_estimated_from_all_of_their_rows(tmp_path):
    """Two rows alone have few degrees of freedom."""
    a, b = Ref("001-I", "relu"), Ref("001-II", "relu")
    few, many = tmp_path / "few", tmp_path / "many"
    for home, names in ((few, ("relu",)), (many, ("relu", "exp", "fθ", "ViT"))):
        for study, shift in (("001-I", 0.012), ("001-II", 0.0)):
            rows = {
                name: [0.8 + shift + 0.004 * math.sin(7 * i + 3 * j + 50 * shift) for j in range(3)]
                for i, name in enumerate(names)
            }
            made(home, rows, study=study)
    assert better(a, b).run(Results(many)).holds < better(a, b).run(Results(few)).holds


def test_accuracy_on_other_images_is_compared_by_means(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": noisy(0.905, sd=0.01)})
    made(tmp_path, {"transformer": noisy(0.7)}, study="000-cifar10", identity="others")
    far = Ref("000-cifar10", "transformer")
    for a, b, word in ((far, B, HOLDS), (B, far, FAILS), (A, B, OPEN)):
        assert verdict(tmp_path, lower_elsewhere(a, b)) == word


def test_36_layers_that_train_to_the_end_do_not_explode(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": [0.9, None, 0.9], "linformer": [0.9, 0.9]})
    for ref, word in ((B, FAILS), (A, HOLDS), (LINFORMER, OPEN), (RELU, MISSING)):
        assert verdict(tmp_path, explodes(ref)) == word


def test_errors_are_lower_in_every_setting_or_not():
    def errors(family: str, *values: float, std: float | None = 0.1) -> list:
        tags = {"attention": family, "family": family, "std": std}
        return [record("output_mse", v, n=15, **tags, features=2**i, sigma=0.5) for i, v in enumerate(values)]

    def shown(*values: float, **options) -> tuple[bool, bool]:
        holds, fails = lower_errors([*base, *errors("a", *values, **options)], "a", "b")[0]
        return holds <= LEVEL, fails <= LEVEL

    base = [*errors("b", 3.0, 2.0), record("output_mse", 1.5, attention="uniform", family="uniform", sigma=0.5)]
    assert lower_errors([*base, *errors("a", 2.0, 1.0)], "a", "b")[1] == (
        "of 2 settings of σ and the number of features significantly lower in 2, larger in 0; in 1 larger than that "
        "of uniform attention"
    )
    assert shown(2.0, 1.0) == (True, False)
    assert shown(2.0, 2.5) == (False, True)
    assert shown(2.0, 1.0, std=5.0) == (False, False)  # by chance
    assert shown(2.0, 2.001) == (False, False)
    assert shown(2.0, 1.0, std=None) == (False, False)
    assert lower_errors(base, "a", "b")[0] is None


def test_rows_of_two_studies_are_compared_if_their_images_are_the_same(tmp_path):
    a, b = Ref("001-I", "relu"), Ref("001-II", "relu")
    for name, mean, identity in (("001-I", 0.9, "x"), ("001-II", 0.8, "x"), ("001-V", 0.7, "y")):
        made(tmp_path, {"relu": noisy(mean)}, study=name, identity=identity)
    assert verdict(tmp_path, better(a, b)) == HOLDS
    found = better(a, Ref("001-V", "relu")).run(Results(tmp_path))
    assert (found.holds, found.fails, found.found) == (1, 1, "run on other images or at another scale")


def test_folds_of_two_studies_are_compared_as_folds(tmp_path):
    names = ["001-I", "001-II", "001-V"]
    for name, mean, folds in zip(names, (0.9, 0.895, 0.8), (5, 5, 4), strict=True):
        made(tmp_path, {"relu": noisy(mean, 5, 0.003)}, study=name, folds=folds)
    first, second, other = (Ref(name, "relu") for name in names)
    pair = Results(tmp_path).pair(first, second)
    assert isinstance(pair, Pair)
    assert (pair.comparison.folds, pair.comparison.seeds[pair.i, pair.j]) == (5, 5)
    assert pair.comparison.shared == 1 / 4
    assert Results(tmp_path).pair(first, other) == "run with different folds"


def test_fewer_bits_are_better(tmp_path):
    bits = {"Transformer": [1.21, 1.22, 1.2], "Performer-ReLU": [1.31, 1.32, 1.3]}
    made(tmp_path, bits, study="paper-fig18", metric="bits_per_dim")
    test = better(*(Ref("paper-fig18", row) for row in bits))
    assert verdict(tmp_path, test) == HOLDS
    assert test.run(Results(tmp_path)).found.startswith("+0.1000 bits")


def test_diverged_runs_are_reported_and_compared_with_nothing(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": [0.9, None, 0.9]})
    for test, word in (
        (better(B, A), OPEN),
        (trains(A), FAILS),
        (trains(B), HOLDS),
        (outlasts(B, A), OPEN),  # one of three against none may be chance
        (outlasts(A, B), OPEN),
        (outlasts(A, A), OPEN),
        (outlasts(B, B), OPEN),
        (outlasts(B, RELU), MISSING),
    ):
        assert verdict(tmp_path, test) == word
    assert "seed 1 diverged in blocks.2 at step 41" in better(B, A).run(Results(tmp_path)).found


@pytest.mark.parametrize(
    ("bad", "worse", "word"), [(0, 5, HOLDS), (5, 0, FAILS), (0, 4, HOLDS), (0, 2, OPEN), (1, 5, HOLDS), (5, 5, OPEN)]
)
def test_one_row_outlasts_another_if_chance_does_not_explain_it(tmp_path, bad, worse, word):
    ends = {"RF16 softmax": bad, "transformer": worse}
    made(tmp_path, {name: [None] * n + [0.9] * (5 - n) for name, n in ends.items()})
    assert verdict(tmp_path, outlasts(A, B)) == word


def test_fishers_test_is_scipys():
    from scipy.stats import fisher_exact

    for bad, count, worse, other in ((0, 5, 4, 5), (2, 7, 3, 5), (1, 3, 1, 3)):
        table = [[bad, count - bad], [worse, other - worse]]
        assert fisher(bad, count, worse, other) == pytest.approx(fisher_exact(table, "less").pvalue)


def test_welchs_test_is_scipys():
    from scipy.stats import ttest_ind

    x, y = [0.71, 0.72, 0.7, 0.75], [0.69, 0.73, 0.6]
    wanted = ttest_ind(x, y, equal_var=False, alternative="greater").pvalue
    assert above(Sample.of(x), Sample.of(y)) == pytest.approx(wanted)


def test_a_performer_that_diverged_leaves_the_claim_of_generality_open(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": [0.9, None, 0.9]})
    part = no_general(["RF16 softmax"], "transformer", ["000-mnist"]).run(Results(tmp_path))
    assert (part.ran, part.holds, part.fails) == (True, 1.0, 1.0)
    assert "diverged" in part.found


@pytest.mark.parametrize(("alphas", "word"), [([0.41, 0.42, 0.43], HOLDS), ([0.6, 0.61, 0.62], FAILS), ([0.4], OPEN)])
def test_a_learned_parameter_is_tested_over_seeds(tmp_path, alphas, word):
    made(tmp_path, {"transformer": noisy(0.9)})
    about = {"variant": "transformer", "attention": "softmax", "name": "alpha"}
    Records(tmp_path / "000-mnist/cpu/fair/records.jsonl").append(
        [
            record("learned_parameter", alpha + shift, seed=seed, layer=layer, **about)
            for seed, alpha in enumerate(alphas)
            for layer, shift in enumerate((-0.1, 0.1))
        ]
    )
    assert verdict(tmp_path, learned_below(B, "alpha", 0.5, "α is below one half")) == word


@pytest.mark.parametrize(("mean", "half"), [(0.9, 0.06), (0.51, 0.0)])  # gains much; hardly above chance of two
@pytest.mark.parametrize(
    ("test", "difference", "word"),
    [
        (better, 0.03, HOLDS),
        (better, -0.03, FAILS),
        (better, 0.0, OPEN),
        (at_least, 0.0, OPEN),
        (at_least, -0.03, FAILS),
        (equal, 0.0, OPEN),
        (equal, 0.03, FAILS),
    ],
)
def test_barely_trained_models_show_nothing_of_small_differences(tmp_path, mean, half, test, difference, word):
    base = noisy(mean, 5)
    made(tmp_path, {"transformer": base, "RF16 softmax": [value + difference for value in base]}, half=half)
    assert verdict(tmp_path, test(A, B)) == word
    assert "too early for small differences" in test(A, B).run(Results(tmp_path)).found


@pytest.mark.parametrize(("performer", "holds"), [(1.2, True), (1.3, False), (1.25, None)])
def test_near_the_limit_is_a_quarter_more_time(performer, holds):
    steps = {"identity": 1.0, "softmax": 4.0, "performer-exp:m=64": performer}
    found = [
        record("train_step", value * layers, variant=f"{name}, {layers} layers")
        for layers in (1, 4)
        for name, value in steps.items()
    ]
    text = f"a step of 4 layers takes performer-exp:m=64 {performer:.2f}×, softmax 4.00× the time of one that returns v"
    assert near_the_limit(found) == (holds, text)
    busy = [replace(each, tags={**each.tags, "busy": True}) for each in found]
    assert near_the_limit(busy) == (None, "measured on a busy core, which decides nothing")


@pytest.mark.parametrize(("last", "holds"), [(0.5, True), (0.05, False), (0.11, None)])
def test_errors_grow_with_depth_if_all_do(last, holds):
    """By the extremes over draws, 0.02 from the mean."""
    ends = {"performer-exp:m=32": (0.1, 0.7), "performer-hyp:m=32": (0.1, last), "uniform": (0.9, 0.8)}  # the control
    found = [
        record("depth_error", value, attention=name, layer=layer, low=value - 0.02, high=value + 0.02)
        for name, values in ends.items()
        for layer, value in zip((1, 12), values, strict=True)
    ]
    assert grows_with_depth(found)[0] is holds


def test_instability_is_judged_by_what_was_not_finite():
    def counted(**counts: int) -> list:
        specs = {
            "gelu": "literal:f=gelu,m=128,half=autocast",
            "elu": "literal:f=elu,m=128,alpha=1.0,half=autocast",
            "relu": "literal:f=relu,m=256,half=autocast",
            "raw": "literal:f=exp,m=256",
            "clamped": "literal:f=exp,m=256,clamp=10",
            "clamped_half": "literal:f=exp,m=256,clamp=10,half=autocast",
        }
        return [record("non_finite", n, n=100, attention=specs[name], sigma=0.1) for name, n in counts.items()]

    holds, text = elu_is_unstable(counted(gelu=9, elu=4, relu=0))
    assert (holds, text) == (True, "outputs that are not finite: GELU 9 of 100, ELU 4 of 100, ReLU 0 of 100")
    assert not elu_is_unstable(counted(gelu=9, elu=0, relu=0))[0]
    assert not elu_is_unstable(counted(gelu=9, elu=4, relu=1))[0]
    assert clamp_is_enough(counted(raw=7, clamped=0))[0]
    assert not clamp_is_enough(counted(raw=7, clamped=1))[0]
    assert not clamp_is_enough(counted(raw=0, clamped=0))[0]
    holds, text = clamp_is_enough(counted(raw=7, clamped=0, clamped_half=2))
    assert holds  # in float32
    assert text.endswith(
        "clamped in float32 0, clamped in float16 2, not clamped in float32 7, not clamped in float16 0"
    )


def test_every_claim_says_what_it_tests(tmp_path):
    counts = {"000": 11, "001": 9, "002": 10, "003": 5, "004": 9, "2026": 9}
    assert [claim.report for claim in CLAIMS] == [report for report, n in counts.items() for _ in range(n)]
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.says
        assert claim.test
        assert set(claim.needs) <= set(STUDIES.names())


def test_every_row_that_a_claim_names_exists(tmp_path):
    """Once all studies have been run, each test finds its rows."""
    for name in {name for claim in CLAIMS for name in claim.needs}:
        study = STUDIES[name]
        if isinstance(study, PublishedStudy):
            for column in study.columns:
                rows = {row.name: noisy(0.9) for row in study.rows_of(column)}
                made(tmp_path, rows, study=study.name, column=column, speeds=dict.fromkeys(rows, (1.0, 0.9, 1.1)))
    figures = {"paper-fig14", "paper-fig20-21", "paper-fig4", "002-non-finite", "000-sizes", "001-sizes", "002-sizes"}
    for claim in CLAIMS:
        for test in claim.tests:
            part = test.run(Results(tmp_path))
            assert part.ran or figures & set(test.studies) or claim.id == "002.8", part.what
            raced = any(name.endswith("-sizes") for name in test.studies)  # whose races have the names of studies
            named = re.findall(r"\b(?:00[012]|paper)-[\w-]+", part.what)
            assert all(study in test.studies or raced for study in named)


def number(study: str, row: str, key: str) -> float:
    return all_published()[study][row].numbers[key]


def leads(row: str, *others: str, key: str = "max_accuracy", sign: int = 1) -> str:
    """The experiments of report 001 in which a row's printed number is above those of all others."""
    names = [study for study in all_published() if study.startswith("001-")]
    first = [s for s in names if all(sign * number(s, row, key) > sign * number(s, other, key) for other in others)]
    return ", ".join(name.removeprefix("001-") for name in first)


def test_what_the_reports_own_numbers_say():
    own = {claim.id: claim.own or claim.contradicted for claim in CLAIMS}
    tables, time = ("000-mnist", "000-cifar10"), "train_s_per_epoch"
    for letter, row in zip("abcde", PERFORMERS_000, strict=True):
        found = re.findall(r"([\d.]+) against ([\d.]+) (?:%|ms)", own[f"000.1{letter}"])
        pairs = [
            (number(s, row, k), number(s, "transformer", k)) for s in tables for k in ("valid_accuracy", "ms_per_step")
        ]
        assert [tuple(map(float, pair)) for pair in found] == pairs
        assert pairs[2][0] < pairs[2][1]  # less accurate on CIFAR-10: the claim is contradicted
    accuracy = partial(number, key="valid_accuracy")
    gains = [
        accuracy(s, f"{row} from checkpoint") - accuracy(s, row)
        for s in tables
        for row in ("linformer", "RF16 softmax")
    ]
    losses = sorted(-gain for gain in gains if gain < 0)
    for claim in ("000.3", "000.6"):
        assert own[claim].startswith(f"{len(losses)} of {len(gains)} rows are less accurate")
        assert f"by {losses[0]:.2f} to {losses[-1]:.2f} points" in own[claim]
    more = [accuracy(study, "RF128 ReLU") - accuracy(study, "RF64 ReLU") for study in tables]
    assert [f"{value:+.2f}".replace("-", "−") for value in more] == re.findall(r"[+−]0\.\d\d", own["000.2"])
    assert leads("ViT", "relu", "exp", "fθ") == re.findall(r"\((.*)\)", own["001.1"])[0] == "I, II, III, IV, V, VI, VII"
    assert leads("relu", "exp", "fθ", key=time, sign=-1).count(",") == 8  # 9 of 9
    assert leads("ViT", "relu", "exp", "fθ", key=time) == "V, VI, VII"
    assert leads("ViT", "relu", "exp", "fθ", key=time, sign=-1).endswith("VIII, IX")
    assert leads("exp", "relu", "fθ") == "V, VI, VII, VIII, IX"
    assert leads("fθ", "exp") == "I, II, III, IV"
    pairs = [(a, b, row) for a, b in (("001-I", "001-II"), ("001-V", "001-VII")) for row in ("relu", "exp", "fθ")]
    assert all(number(b, row, time) > number(a, row, time) for a, b, row in pairs)
    gains = {(a, row): number(b, row, "max_accuracy") - number(a, row, "max_accuracy") for a, b, row in pairs}
    assert [pair for pair, gain in gains.items() if gain > 1] == [("001-I", "exp")]
    memory, infers = (
        {
            (s, row): number(s, row, key) / number(s, "ViT", key)
            for s in (name for name in all_published() if name.startswith("001-"))
            for row in ("relu", "exp", "fθ")
        }
        for key in ("resource_pct_of_vit", "inference_s")
    )
    saved, small = sum(share < 1 for share in memory.values()), ("001-V", "001-VI", "001-VII")
    assert all(memory[study, row] < 1 for study in small for row in ("relu", "exp", "fθ"))
    assert own["001.7"].startswith("9 of 9 printed shares")
    assert own["001.7"].endswith(f"{saved} of {len(memory)} in all nine experiments")
    cifar = {s for s, _ in infers} - {s for s, _ in infers if s.endswith(("V", "VI", "VII", "VIII", "IX"))} | {"001-IV"}
    assert own["001.8"].startswith(f"{sum(infers[s, r] > 1 for s, r in infers if s in cifar)} of {3 * len(cifar)} ")
    gaps = [number(s, "ViT", "max_accuracy") - number(s, "exp", "max_accuracy") for s in ("001-I", "001-V")]
    assert [f"{gap:.2f}" for gap in gaps] == re.findall(r"\d\.\d\d", own["001.9"])
    assert f"{number('002-gelu-4', 'GELU', 'test_accuracy')} %" in own["002.3"]
    assert f"{number('002-elu-4', 'ELU', 's_per_epoch')} s per epoch" in own["002.4"]


def test_the_mixture_of_a_one_token_model_has_no_effect():
    """What is said of claim 002.6: none, but for ε; and yet Adam moves it."""
    differences = []
    for spec in ("performer-theta-mixture", "literal:f=mixture"):
        model, images = small_model("length-one", spec)
        alphas = [parameter for name, parameter in model.named_parameters() if name.endswith("alpha")]
        logits = []
        for value in (0.1, 0.9):
            for alpha in alphas:
                alpha.fill_(value)
            logits.append(model(images).float())
        assert alphas
        differences.append(float((logits[0] - logits[1]).abs().max()))
    assert differences[0] == 0
    assert 0 < differences[1] < 1e-5
    model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.arange(5)).backward()
        assert all(0 < abs(float(alpha.grad)) < 1e-5 for alpha in alphas)
        optimizer.step()
    assert max(abs(float(alpha.detach()) - 0.9) for alpha in alphas) > 1e-3
