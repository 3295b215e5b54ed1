"""What the reports claim, as hypotheses with tests.

A claim is a list of tests, all of which must come out for it to hold; one that is shown to come out the other way
refutes it. `better`, `at_least` and `equal` are one-sided tests of differences in test accuracy over shared seeds, by
the bounds that all verdicts here have (`report.statistics`), with one point as the margin (a fifth of one on MNIST,
where all are right on more than 99 %):

    better     holds: a − b > 0 is shown.               fails: a − b < 1 point is shown, and not > 0
    at_least   holds: a − b > −1 point is shown.        fails: a − b < −1 point is shown
    equal      holds: |a − b| < 1 point is shown.       fails: |a − b| > 1 point is shown

That all tests come out has the largest of their p (intersection–union), that one of n fails n times the smallest
(Bonferroni). Holm's correction makes it at most 5 % of reports of which any claim is said to hold that does not; and
the same for claims that are said to fail, where an advantage below the margin counts as none. Fewer than three shared
seeds show nothing. Where the best still gains more than five points from half of the training to all of it, or is
hardly above chance, that a difference is small shows nothing either: it must be shown to be one to refute a claim, and
nothing shows that there is none. Speeds are medians of a race beside softmax: one is faster if the quartiles of its
rounds are all above the other's. What was counted or computed, not sampled, is certain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import stdtr

from linvit.measure.error import CONTROL
from linvit.records import Record
from linvit.report.statistics import ENOUGH, LEVEL, MARGIN, holm
from linvit.studies.mistakes import EXPERIMENTS, ahead, small_model, table
from linvit.studies.results import Ref, Results

HOLDS, FAILS, OPEN, MISSING = "holds", "does not hold", "cannot tell at this scale", "not run"


@dataclass(frozen=True)
class Part:
    """What one test found. `holds` and `fails` are p: below 5 %, it was shown."""

    what: str
    found: str
    holds: float = 1.0
    fails: float = 1.0
    ran: bool = True

    @classmethod
    def certain(cls, what: str, found: str, so: bool | None) -> Part:
        return cls(what, found, *((1.0, 1.0) if so is None else (1.0 - so, float(so))))

    @classmethod
    def missing(cls, what: str) -> Part:
        return cls(what, "not run", ran=False)


Test = Callable[[Results], Part]


def better(a: Ref, b: Ref) -> Test:
    return partial(_accuracy, a, b, "is more accurate than", lambda d: (
        (p := d.above(0)), d.below(0 if d.early else MARGIN) if p > LEVEL else 1.0))  # fmt: skip


def at_least(a: Ref, b: Ref) -> Test:
    margin = MARGIN / 5 if "mnist" in a.study else MARGIN
    points = "1 point" if margin == MARGIN else f"{100 * margin:g} points"
    return partial(_accuracy, a, b, f"loses less than {points} to", lambda d: (
        1.0 if d.early else d.above(-margin), d.below(-margin)))  # fmt: skip


def equal(a: Ref, b: Ref) -> Test:
    return partial(_accuracy, a, b, "is within 1 point of", lambda d: (
        1.0 if d.early else max(d.above(-MARGIN), d.below(MARGIN)),
        min(1.0, 2 * min(d.below(-MARGIN), d.above(MARGIN)))))  # fmt: skip


def _accuracy(a: Ref, b: Ref, how: str, test: Callable, results: Results) -> Part:
    what = f"{a} {how} {b}" if a.study != b.study else f"{a.row} {how} {b.row} ({b.study}, {b.column})"
    pair = results.pair(a, b)
    if pair == "":
        return Part.missing(what)
    return Part(what, pair) if isinstance(pair, str) else Part(what, str(pair), *test(pair))


def faster(a: Ref, b: Ref) -> Test:
    """In training, each beside the softmax of its own study."""

    def test(results: Results) -> Part:
        what = f"{a} trains faster than {b}"
        if a.study == b.study:
            what = f"{a.row} trains faster than {b.row} ({b.study})"
        mine, other = results.speed(a), results.speed(b)
        if mine is None or other is None:
            return Part.missing(what)
        so = True if mine[1] > other[2] else False if mine[2] < other[1] else None
        shown = [f"{middle:.2f}×" + (f" ({low:.2f} to {high:.2f})" if low < high else "")
                 for middle, low, high in (mine, other)]  # fmt: skip
        return Part.certain(what, f"{shown[0]} against {shown[1]} softmax's speed", so)

    return test


def diverges(a: Ref) -> Test:
    """In some seed; that it does in none of a few does not show that it never would."""
    return partial(_ends, a, "diverges", lambda bad, good: True if bad else None)


def trains(a: Ref) -> Test:
    """All seeds to the end, of which there are enough; one that does not refutes it."""
    return partial(_ends, a, "trains to the end", lambda bad, good: not bad if bad or good >= ENOUGH else None)


def _ends(a: Ref, how: str, test: Callable[[int, int], bool | None], results: Results) -> Part:
    what, found = f"{a} {how}", results.get(a)
    if found is None:
        return Part.missing(what)
    bad, good = len(found.diverged), len(found.scores)
    return Part.certain(what, f"{bad} of {bad + good} seeds diverged", test(bad, good))


def shows(study: str, what: str, look: Callable[[list[Record]], tuple[bool | None, str]]) -> Test:
    """What a figure's records say."""

    def test(results: Results) -> Part:
        records = results.records(study)
        if not records:
            return Part.missing(f"{what} ({study})")
        so, found = look(records)
        return Part.certain(f"{what} ({study})", found, so)

    return test


@dataclass(frozen=True)
class Claim:
    id: str
    says: str  # in our words
    test: str  # how it is tested, in words
    tests: Sequence[Test]
    needs: tuple[str, ...]  # studies
    own: Callable[[], tuple[bool, str]] | None = None  # whether the report's own numbers deny it, and which
    mistake: str = ""  # that matters for it

    @property
    def report(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    word: str
    parts: list[Part]
    denied: bool  # by the report's own numbers
    own: str

    @property
    def missing(self) -> int:
        return sum(not part.ran for part in self.parts)


def judge(claims: Sequence[Claim], results: Results) -> list[Verdict]:
    """All claims, those of one report together."""
    found = []
    for report in dict.fromkeys(claim.report for claim in claims):
        mine = [claim for claim in claims if claim.report == report]
        parts = [[test(results) for test in claim.tests] for claim in mine]
        ran = [i for i, of in enumerate(parts) if any(part.ran for part in of)]
        hold = holm([max(part.holds for part in parts[i]) for i in ran])
        fail = holm([min(1.0, len(parts[i]) * min(part.fails for part in parts[i])) for i in ran])
        words = dict.fromkeys(range(len(mine)), MISSING)
        for i, p, q in zip(ran, hold, fail, strict=True):
            words[i] = HOLDS if p <= LEVEL else FAILS if q <= LEVEL else OPEN
        for i, claim in enumerate(mine):
            denied, own = claim.own() if claim.own else (False, "")
            found.append(Verdict(claim, words[i], parts[i], denied, own))
    return found


def _printed(study: str, row: str, key: str) -> float:
    return float(table(study)[row].numbers[key])


TABLES_000 = ("000-mnist", "000-cifar10")
PERFORMERS_000 = ("RF16 softmax", "RF64 ReLU", "RF128 ReLU", "deterministic ReLU", "deterministic softmax")
STARTED = ("linformer", "RF16 softmax")
KERNELS_001 = ("relu", "exp", "fθ")


def _own_performers() -> tuple[bool, str]:
    texts, denied = [], False
    for study in TABLES_000:
        base = {key: _printed(study, "transformer", key) for key in ("valid_accuracy", "ms_per_step")}
        both = [row for row in PERFORMERS_000 if _printed(study, row, "valid_accuracy") >= base["valid_accuracy"]
                and _printed(study, row, "ms_per_step") < base["ms_per_step"]]  # fmt: skip
        denied |= not both
        texts.append(f"{len(both)} of {len(PERFORMERS_000)} Performers are as accurate as the Transformer in less time "
                     f"in {study}")  # fmt: skip
    return denied, "; ".join(texts)


def _own_features() -> tuple[bool, str]:
    d = [_printed(study, "RF128 ReLU", "valid_accuracy") - _printed(study, "RF64 ReLU", "valid_accuracy")
         for study in TABLES_000]  # fmt: skip
    return max(d) > 0, (f"softmax is printed for 16 features alone; from 64 to 128 ReLU goes {d[0]:+.2f} points on "
                        f"MNIST and {d[1]:+.2f} on CIFAR-10").replace("-0", "−0")  # fmt: skip


def _own_checkpoint() -> tuple[bool, str]:
    every = [(study, row) for study in TABLES_000 for row in STARTED]
    worse = [_printed(study, f"{row} from checkpoint", "valid_accuracy") < _printed(study, row, "valid_accuracy")
             for study, row in every]  # fmt: skip
    return sum(worse) > len(every) / 2, f"{sum(worse)} of {len(every)} rows are worse from the checkpoint than without"


def _count(of: Sequence[str], rest: str) -> tuple[bool, str]:
    return len(of) < len(EXPERIMENTS), f"{len(of)} of {len(EXPERIMENTS)} experiments {rest}"


def _own_vit() -> tuple[bool, str]:
    best = [name for name in EXPERIMENTS if not any(name in ahead(row, "ViT") for row in KERNELS_001)]
    return _count(best, f"have ViT first by the best epoch ({', '.join(best)})")


def _own_relu() -> tuple[bool, str]:
    cheap = [name for name in EXPERIMENTS
             if all(name in ahead(row, "relu", "train_s_per_epoch") for row in ("exp", "fθ"))]  # fmt: skip
    return _count(cheap, "have relu as the fastest Performer to train")


# TinyImageNet in patches of 4 and of 8, the only images that it has in both; V has no counterpart of 16 features
SMALL, LARGE = ("V", "VI", "VII"), ("VIII", "IX")
PATCHES = (("001-VI", "001-VIII"), ("001-VII", "001-IX"))


def _own_patches() -> tuple[bool, str]:
    fast = {row: ahead("ViT", row, "train_s_per_epoch") for row in KERNELS_001}
    small = [name for name in SMALL if all(name in of for of in fast.values())]
    large = [name for name in LARGE if any(name in of for of in fast.values())]
    return bool(large) or len(small) < len(SMALL), (
        f"in patches of 4 all three Performers train faster than ViT in {len(small)} of {len(SMALL)} experiments on "
        f"TinyImageNet; in patches of 8 one does in {len(large)} of {len(LARGE)}"
    )


TINY = ("V", "VI", "VII", "VIII", "IX")


def _own_tiny() -> tuple[bool, str]:
    top = [name for name in TINY if name in ahead("exp", "relu") and name in ahead("exp", "fθ")]
    between = [name for name in TINY if name in ahead("fθ", "relu")]
    return len(between) < len(TINY), (f"exp is first of the Performers in {len(top)} of {len(TINY)} experiments, fθ "
                                      f"above relu in {len(between)}")  # fmt: skip


def _own_m() -> tuple[bool, str]:
    every = [(few, many, row) for few, many in (("001-I", "001-II"), ("001-V", "001-VII")) for row in KERNELS_001]

    def more(key: str, than: float = 0.0) -> list[str]:
        return [row for few, many, row in every if _printed(many, row, key) > _printed(few, row, key) + than]

    slower, gained = more("train_s_per_epoch"), more("max_accuracy", 1.0)
    return bool(gained) or len(slower) < len(every), (
        f"from 16 to 64 features {len(slower)} of {len(every)} rows became slower; "
        f"{', '.join(gained) or 'none'} gained more than a point"
    )


def _own_theta() -> tuple[bool, str]:
    small = [name for name in ("I", "II", "III", "IV") if name in ahead("fθ", "exp")]
    return len(small) < 4, f"fθ is above exp in {len(small)} of 4 experiments on CIFAR-10, by single runs"


def _own_gelu() -> tuple[bool, str]:
    gelu, relu = _printed("002-gelu-4", "GELU", "test_accuracy"), _printed("002-relu", "ReLU", "test_accuracy")
    return gelu <= relu, f"GELU's {gelu} % is the highest printed; its last section calls ReLU's {relu} % the highest"


def _own_elu() -> tuple[bool, str]:
    bad = [i for i in range(1, 5) if any("NaN" in flag for flag in table(f"002-elu-{i}")["ELU"].quality)]
    seconds = _printed("002-elu-4", "ELU", "s_per_epoch"), _printed("002-relu", "ReLU", "s_per_epoch")
    return True, (f"{len(bad)} of 4 ELU runs had NaN; {seconds[0]} s per epoch in one place and 31 s in another, of "
                  f"one layer, against {seconds[1]:g} s for four layers of ReLU")  # fmt: skip


def _own_alpha() -> tuple[bool, str]:
    """Logits of the one-token model with α = 0.1 and with 0.9."""
    import torch

    model, images = small_model("length-one", "performer-theta-mixture")
    names, said = [name for name, _ in model.named_parameters() if name.endswith("alpha")], []
    for value in (0.1, 0.9):
        for name in names:
            model.get_parameter(name).fill_(value)
        said.append(model(images).float())
    same = bool(names) and torch.equal(*said)
    how = "equal to the last bit: what α became there says nothing" if same else "different"
    return same, f"with α = 0.1 and 0.9 the one-token model's logits are {how}"


def _prefers_relu(results: Results) -> Part:
    """α, the share of exp, after training with many tokens: one number for each seed, the mean over layers."""
    what = f"α is below one half with many tokens, {MIXTURE}"
    column = results.column(MIXTURE.study, MIXTURE.column)
    if column is None or MIXTURE.row not in column.rows:
        return Part.missing(what)
    seeds: dict[Any, list[float]] = {}
    for record in column.summary.study.of("learned_parameter", variant=MIXTURE.row, name="alpha"):
        if record.value is not None:
            seeds.setdefault(record.tags.get("seed"), []).append(record.value)
    means = [sum(values) / len(values) for values in seeds.values()]
    said = f"{', '.join(f'{value:.3f}' for value in means)}, one for each seed"
    if len(means) < ENOUGH:
        return Part(what, said)
    spread = max(float(np.std(means, ddof=1)), 1e-9) / math.sqrt(len(means))
    below = float(stdtr(len(means) - 1, (0.5 - float(np.mean(means))) / spread))
    return Part(what, said, 1 - below, below)


def ratio(angle: float, length: float = 1.0) -> float:
    """Squared error of trigonometric features over that of positive ones, for two vectors of one length."""
    c, l2 = math.cos(angle), length**2
    return 0.5 * math.exp(-4 * l2 * c) * (1 - math.exp(-2 * l2 * (1 - c))) ** 2 / (1 - math.exp(-2 * l2 * (1 + c)))


def _positive(results: Results) -> Part:
    near = [ratio(math.pi - gap) for gap in (0.1, 0.01, 0.001)]
    grows = all(b > 10 * a for a, b in pairwise(near))
    said = ", ".join(f"{value:.2g}" for value in near)
    return Part.certain("the ratio of squared errors grows without bound as the angle nears π (closed form, length 1)",
                        f"{said} at 0.1, 0.01 and 0.001 before π; {ratio(math.pi / 2):.2f} at π/2, where trigonometric "
                        f"features are the better ones", grows)  # fmt: skip


def near_the_limit(records: list[Record]) -> tuple[bool | None, str]:
    """Steps of whole models with most layers; near: closer to identity's than to softmax's, by ratio, whichever of the
    quartiles of their rounds is taken."""
    steps: dict[int, dict[str, tuple[float, float, float]]] = {}  # median and quartiles
    for record in records:
        found = re.fullmatch(r"(.+), (\d+) layers", str(record.tags.get("variant")))
        if record.metric == "train_step" and found and record.value:
            low, high = (float(record.tags.get(end) or record.value) for end in ("low", "high"))
            steps.setdefault(int(found[2]), {})[found[1]] = record.value, low, high
    layers = max(steps)
    limit, softmax = (steps[layers].pop(name) for name in ("identity", "softmax"))
    others = steps[layers].values()
    said = ", ".join(f"{name} {of[0] / limit[0]:.2f}×" for name, of in steps[layers].items())
    so = True if all(of[2] ** 2 < limit[1] * softmax[1] for of in others) else None
    so = False if any(of[1] ** 2 > limit[2] * softmax[2] for of in others) else so
    return (
        so,
        f"a step of {layers} layers takes {said}, softmax {softmax[0] / limit[0]:.2f}× the time of one that returns v",
    )


def grows_with_depth(records: list[Record]) -> tuple[bool, str]:
    errors: dict[str, dict[int, float]] = {}
    for record in records:
        if record.metric == "depth_error" and record.value is not None and record.tags["attention"] != CONTROL:
            errors.setdefault(str(record.tags["attention"]), {})[int(record.tags["layer"] or 0)] = record.value
    ends = {name: (of[min(of)], of[max(of)]) for name, of in errors.items()}
    said = ", ".join(f"{name} {first:.2f} → {last:.2f}" for name, (first, last) in ends.items())
    return all(last > first for first, last in ends.values()), f"from the first layer to the last: {said}"


def _refs(study: str, *rows: str, column: str = "fair") -> list[Ref]:
    return [Ref(study, row, column) for row in rows]


FACTORIAL = partial(Ref, "002-factorial")
MIXTURE = Ref("002-theta-mixture", "mixture")
CLAIMS = (
    Claim("000.1", "Performers are at least as accurate as the Transformer, in less time.",
          "Every Performer from scratch, on CIFAR-10 (and on MNIST): loses less than a point (a fifth), and trains "
          "faster, for which the report excepts 128 features.",
          [test(Ref(study, row), Ref(study, "transformer"))
           for study in TABLES_000 for row in PERFORMERS_000 for test in (at_least, faster)
           if test is at_least or row != "RF128 ReLU"],
          TABLES_000, _own_performers, "M8"),
    Claim("000.2", "More random features make softmax Performers better, and ReLU ones worse.",
          "128 against 16 features on CIFAR-10.",
          [better(Ref("000-cifar10", "RF128 softmax"), Ref("000-cifar10", "RF16 softmax")),
           better(Ref("000-cifar10", "RF16 ReLU"), Ref("000-cifar10", "RF128 ReLU"))],
          ("000-cifar10",), _own_features, "M8"),
    Claim("000.3", "Starting from a trained Transformer saves training.",
          "On CIFAR-10, one that began with the Transformer's weights is better than one that began with nothing and "
          "took as many steps as both of them together.",
          [better(Ref("000-cifar10", f"{row} from checkpoint"), Ref("000-cifar10", f"{row}, twice the steps"))
           for row in STARTED],
          ("000-cifar10",), _own_checkpoint),
    Claim("000.4", "Deterministic feature maps are competitive, but slower.",
          "Without projection against 64 (ReLU) or 16 (softmax) random features: loses less than a point (on MNIST a "
          "fifth), and trains more slowly.",
          [test for study in TABLES_000
           for plain, drawn in (("deterministic ReLU", "RF64 ReLU"), ("deterministic softmax", "RF16 softmax"))
           for test in (at_least(Ref(study, plain), Ref(study, drawn)), faster(Ref(study, drawn), Ref(study, plain)))],
          TABLES_000),
    Claim("000.5", "A convolutional network with a Performer behind it beats the convolutional network.",
          "The same trunk with and without the Performer's layers; one with wider stages stands beside them.",
          [better(ref, Ref("000-hybrid", "CNN"))
           for ref in _refs("000-hybrid", "CNN + Performer, softmax", "CNN + Performer, ReLU")],
          ("000-hybrid",), lambda: (False, "no number is printed")),
    Claim("001.1", "ViT is the most accurate.",
          "Against each Performer, on CIFAR-10 (I) and on TinyImageNet (V).",
          [better(Ref(study, "ViT"), ref) for study in ("001-I", "001-V") for ref in _refs(study, *KERNELS_001)],
          ("001-I", "001-V"), _own_vit, "M10"),
    Claim("001.2", "ReLU is the cheapest kernel.",
          "Training speed against exp and fθ, with 64 tokens (I) and with 256 (V).",
          [faster(Ref(study, "relu"), ref) for study in ("001-I", "001-V") for ref in _refs(study, "exp", "fθ")],
          ("001-I", "001-V"), _own_relu),
    Claim("001.3", "Performers pay off only with small patches.",
          "TinyImageNet with as many features: all three train faster than ViT in patches of 4 (VI, VII), and more "
          "slowly in patches of 8 (VIII, IX).",
          [test for small, large in PATCHES for row in KERNELS_001
           for test in (faster(Ref(small, row), Ref(small, "ViT")), faster(Ref(large, "ViT"), Ref(large, row)))],
          ("001-VI", "001-VII", "001-VIII", "001-IX"), _own_patches, "M9"),
    Claim("001.4", "On TinyImageNet exp is the best Performer, and fθ between it and relu.",
          "Experiment V: exp better than fθ, fθ better than relu.",
          [better(Ref("001-V", "exp"), Ref("001-V", "fθ")), better(Ref("001-V", "fθ"), Ref("001-V", "relu"))],
          ("001-V",), _own_tiny, "M10"),
    Claim("001.5", "More features cost more, and bring nothing.",
          "16 (I) against 64 features (II): trains faster, and loses less than a point.",
          [test(Ref("001-I", row), Ref("001-II", row)) for row in KERNELS_001 for test in (faster, at_least)],
          ("001-I", "001-II"), _own_m),
    Claim("001.6", "A learned kernel helps on small data.",
          "fθ better than exp on CIFAR-10 (I).",
          [better(Ref("001-I", "fθ"), Ref("001-I", "exp"))], ("001-I",), _own_theta),
    Claim("002.1", "Patches of 4 beat patches of 8.", "The same vision transformer with both.",
          [better(Ref("002-vit", "ViT"), Ref("002-vit", "ViT, patch 8"))], ("002-vit",)),
    Claim("002.2", "Hyperparameters do not transfer from one kernel to another.",
          "GELU at the rate that was ELU's best (5e-4) against its own, an eighth of that, as the report trained both: "
          "the latter with warm-up and clipped gradients, too.",
          [better(Ref("002-gelu-4", "GELU", "literal"), Ref("002-gelu-1", "GELU", "literal"))],
          ("002-gelu-1", "002-gelu-4"), mistake="M1"),
    Claim("002.3", "GELU is the best kernel, at a rate 8 times lower.",
          "Under one recipe, better than ReLU, ELU and exp; and its literal run better than those at 5 and 10 times "
          "lower rates.",
          [*(better(FACTORIAL("gelu"), FACTORIAL(row)) for row in ("relu", "elu", "exp")),
           *(better(Ref("002-gelu-4", "GELU", "literal"), Ref(study, "GELU", "literal"))
             for study in ("002-gelu-2", "002-gelu-3"))],
          ("002-factorial", "002-gelu-2", "002-gelu-3", "002-gelu-4"), _own_gelu, "M4"),
    Claim("002.4", "ELU is fast, but unstable.",
          "Trains faster than ReLU under one recipe, and its third trial diverges as the report's did.",
          [faster(FACTORIAL("elu"), FACTORIAL("relu")), diverges(Ref("002-elu-3", "ELU", "literal"))],
          ("002-factorial", "002-elu-3"), _own_elu, "M4"),
    Claim("002.5", "Clamping its argument makes the exponential kernel stable.",
          "With many tokens, where a clamp has an effect: its kernel trains to the end in all of three seeds or more, "
          "and without the clamp some seed diverges.",
          [trains(Ref("002-exp", "its EXP, clamped")), diverges(Ref("002-exp", "its EXP, not clamped"))], ("002-exp",),
          lambda: (True, "its limitations mention runs that had to be restarted despite the clamp")),
    Claim("002.6", "A learned mixture of exp and ReLU prefers ReLU.",
          "α after training with many tokens, a t-test over seeds; in the report's model of one token it is idle.",
          [_prefers_relu], ("002-theta-mixture",), _own_alpha, "M1"),
    Claim("002.7", "What pretraining gains is made up by training longer.",
          "None: the report prints no number of it, and no study here pretrains on other images.", [], (),
          lambda: (False, "no number is printed")),
    Claim("004.1", "Positive features are arbitrarily better than trigonometric ones where the angle is large.",
          "The closed form of both errors.", [_positive], ("paper-fig2",)),
    Claim("004.2", "A Performer is nearly as fast as attention that only returns its values.",
          "A training step of whole models: nearer to that limit than to softmax, by ratio.",
          [shows("paper-fig20-21", "Performers are nearer to the limit than to softmax", near_the_limit)],
          ("paper-fig3", "paper-fig20-21")),
    Claim("004.3", "The error of the approximation grows with depth.",
          "Error of what comes out of the last layer against the first, mean over draws, for every estimate.",
          [shows("paper-fig14", "the last layer's error is the larger one", grows_with_depth)], ("paper-fig14",)),
    Claim("004.4", "Features must be redrawn.", "New features every 100 steps against those first drawn, 16 of them.",
          [better(Ref("paper-fig15", "exp, redrawn"), Ref("paper-fig15", "exp, fixed"))],
          ("paper-fig15", "paper-fig5")),
    Claim("004.5", "Positive softmax features do as well as ReLU.",
          "Within a point of each other with as many features, on CIFAR-10.",
          [equal(Ref("000-cifar10", f"RF{m} softmax"), Ref("000-cifar10", f"RF{m} ReLU")) for m in (64, 128)],
          ("000-cifar10",)),
    Claim("004.6", "The Linear Transformer's ELU + 1 explodes.",
          "Some seed diverges. That none of a few does, in fewer layers than the paper's 36, shows nothing.",
          [diverges(Ref("paper-fig18", "Linear Transformer"))], ("paper-fig18",)),
)  # fmt: skip
