"""What the reports claim, each claim with its tests. `hypotheses` says how a test is decided."""

from __future__ import annotations

import math
import re
import statistics
from functools import partial
from itertools import pairwise

import torch

from linvit.attention import CONTROL, create_attention
from linvit.measure.angle import ratio
from linvit.records import Record
from linvit.studies import attentions_2026
from linvit.studies.hypotheses import (
    Claim,
    Part,
    Test,
    at_least,
    better,
    closes,
    equal,
    explodes,
    learned_below,
    lighter,
    lower_elsewhere,
    no_general,
    outlasts,
    quicker,
    shows,
    trains,
)
from linvit.studies.results import Pair, Ref, Results

TABLES_000 = ("000-mnist", "000-cifar10")
STARTED = ("linformer", "RF16 softmax", "RF16 ReLU")
PERFORMERS_000 = ("RF16 softmax", "RF64 ReLU", "RF128 ReLU", "deterministic ReLU", "deterministic softmax")
KERNELS_001 = ("relu", "exp", "fθ")
cifar10, hybrid, factorial = (partial(Ref, study) for study in ("000-cifar10", "000-hybrid", "002-factorial"))


EXPERIMENTS = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")
ORTHOGONAL = {"family": "performer-exp", "other": "performer-exp:projection=iid"}
POSITIVE = {"family": "performer-exp", "other": "performer-trig"}


def fewer_features_are_quicker(row: str) -> Test:
    """Relative to one ViT, in the races of experiments I and II."""
    what = f"{row} trains faster with 16 features than with 64 (001-sizes)"

    def run(results: Results) -> Part:
        one, other = (results.sized("001", "train_step_vs_softmax", f"001-{n}: {row}") for n in ("I", "II"))
        if one is None or other is None or not (one.value and other.value):
            return Part.missing(what)
        quartiles = [[float(r.tags.get(end) or r.value or 0) for end in ("low", "high")] for r in (one, other)]
        holds = True if quartiles[0][0] > quartiles[1][1] else False if quartiles[0][1] < quartiles[1][0] else None
        busy = one.tags.get("busy") or other.tags.get("busy")
        found = f"{one.value:.2f}× against {other.value:.2f}× ViT's speed"
        found += "; measured on a busy core, which decides nothing" if busy else ""
        return Part.certain(what, found, None if busy else holds)

    return Test(("001-sizes",), run)


def wider_gap(row: str) -> Test:
    """From experiment I to V, by 95 % intervals of both gaps."""
    what = f"the gap between ViT and {row} is wider on TinyImageNet (001-V) than on CIFAR-10 (001-I)"

    def run(results: Results) -> Part:
        pairs = [results.pair(Ref(study, "ViT"), Ref(study, row)) for study in ("001-I", "001-V")]
        found = [pair for pair in pairs if isinstance(pair, Pair)]
        if len(found) < 2:
            return Part.missing(what) if None in pairs else Part(what, "; ".join(map(str, pairs)))
        small, large = found
        steps = [i / 2000 for i in range(-400, 401)]  # of a gap: −20 to 20 points
        holds = 2 * min(max(small.below(gap), large.above(gap)) for gap in steps)  # for either may be wrong
        fails = 2 * min(max(small.above(gap), large.below(gap)) for gap in steps)
        if small.early or large.early:
            holds, fails = 1.0, 1.0
        return Part(what, f"{large} against {small}", min(1.0, holds), min(1.0, fails))

    return Test(("001-I", "001-V"), run)


def gelu(trial: int) -> Ref:
    return Ref(f"002-gelu-{trial}", "GELU", "literal")


def positive_features(results: Results) -> Part:
    near = [ratio(math.pi - gap, 1.0) for gap in (0.1, 0.01, 0.001)]
    return Part.certain(
        "the ratio of squared errors grows without bound as the angle nears π (closed form, length 1)",
        f"{', '.join(f'{value:.2g}' for value in near)} at 0.1, 0.01 and 0.001 before π; "
        f"{ratio(math.pi / 2, 1.0):.2f} at π/2, where trigonometric features are the better ones",
        all(b > 10 * a for a, b in pairwise(near)),
    )


NEARLY = 1.25  # times the time of attention that returns v: "nearly as fast", stated before it was measured


def near_the_limit(records: list[Record]) -> tuple[bool | None, str]:
    """Steps of whole models with most layers take at most NEARLY times those of identity, by the quartiles of their
    rounds."""
    steps: dict[int, dict[str, tuple[float, float, float]]] = {}  # layers → attention → median and quartiles
    for record in records:
        variant = re.fullmatch(r"(.+), (\d+) layers", str(record.tags.get("variant")))
        if record.metric == "train_step" and variant and record.value:
            low, high = (float(record.tags.get(end) or record.value) for end in ("low", "high"))
            steps.setdefault(int(variant[2]), {})[variant[1]] = record.value, low, high
    layers = max(steps)
    limit, softmax = (steps[layers].pop(name) for name in ("identity", "softmax"))
    others = steps[layers]
    holds = True if all(high < NEARLY * limit[1] for _, _, high in others.values()) else None
    holds = False if any(low > NEARLY * limit[2] for _, low, _ in others.values()) else holds
    times = ", ".join(f"{name} {step[0] / limit[0]:.2f}×" for name, step in others.items())
    return holds, (
        f"a step of {layers} layers takes {times}, softmax {softmax[0] / limit[0]:.2f}× the time of one that returns v"
    )


def lower_errors(records: list[Record], family: str, other: str) -> tuple[bool | None, str]:
    """At each σ and number of features, the mean squared error of the output over draws."""
    found: dict[tuple[float, int], dict[str, float]] = {}
    uniform: dict[float, float] = {}
    for r in records:
        if r.metric != "output_mse" or r.value is None:
            continue
        sigma, features = float(r.tags["sigma"] or 0), int(r.tags.get("features") or 0)
        if r.tags.get("family") == CONTROL:
            uniform[sigma] = r.value
        found.setdefault((sigma, features), {})[str(r.tags.get("family"))] = r.value
    pairs = {at: (one[family], one[other]) for at, one in found.items() if {family, other} <= set(one)}
    if not pairs:
        return None, "no such errors were measured"
    lower = [at for at, (a, b) in pairs.items() if a < b]
    beaten = [at for at, (a, _) in pairs.items() if a > uniform.get(at[0], math.inf)]
    return len(lower) == len(pairs), (
        f"lower in {len(lower)} of {len(pairs)} settings of σ and the number of features; in {len(beaten)} larger than "
        "that of uniform attention"
    )


def unbiased(results: Results) -> Part:
    """φ(x)·φ(y) over many draws against e^{x·y}, along ±(1, …, 1)/√d, where missing signs would show."""
    d, x = 8, torch.full((1, 8), 8**-0.5, dtype=torch.float64)
    found = []
    for y in (x, -x):
        values = []
        for draw in range(1500):
            kernel = create_attention("performer-exp:m=16", heads=1, head_dim=d, tokens=4, seed=draw).double().kernel
            values.append(float((kernel.phi(x) * kernel.phi(y)).sum().detach()))  # type: ignore[operator, union-attr]
        error = statistics.stdev(values) / math.sqrt(len(values))
        found.append((statistics.fmean(values) - math.exp(float((x * y).sum()))) / error)
    text = " and ".join(f"{z:+.1f}" for z in found)
    return Part.certain(
        "the mean of φ(x)·φ(y) over 1,500 draws is e^{x·y}, with orthogonal features",
        f"differs by {text} standard errors, for y = x and y = −x of length 1",
        all(abs(z) < 4 for z in found),
    )


def grows_with_depth(records: list[Record]) -> tuple[bool, str]:
    errors: dict[str, dict[int, float]] = {}
    for record in records:
        if record.metric == "depth_error" and record.value is not None and record.tags["attention"] != CONTROL:
            errors.setdefault(str(record.tags["attention"]), {})[int(record.tags["layer"] or 0)] = record.value
    ends = {name: (layers[min(layers)], layers[max(layers)]) for name, layers in errors.items()}
    found = ", ".join(f"{name} {first:.2f} → {last:.2f}" for name, (first, last) in ends.items())
    control = [r.value for r in records if r.metric == "depth_error" and r.tags["attention"] == CONTROL and r.value]
    if control:
        found += f"; uniform {control[0]:.2f} → {control[-1]:.2f}"
    return all(last > first for first, last in ends.values()), f"from the first layer to the last: {found}"


def failures(records: list[Record]) -> dict[str, int]:
    """spec of the literal attention → outputs that are not finite, at all scales."""
    found: dict[str, int] = {}
    for record in records:
        if record.metric == "non_finite":
            spec = str(record.tags["attention"])
            found[spec] = found.get(spec, 0) + int(record.value or 0)
    return found


def elu_is_unstable(records: list[Record]) -> tuple[bool, str]:
    found = failures(records)
    elu, relu = ({s: n for s, n in found.items() if f"f={f}," in s} for f in ("elu", "relu"))
    of = {name: sum(n for s, n in found.items() if f"f={name}," in s) for name in ("gelu", "elu", "relu")}
    text = ", ".join(f"{name.upper()} {count:,}" for name, count in of.items())
    return all(elu.values()) and bool(elu) and not any(relu.values()), f"outputs that are not finite: {text}"


def clamp_is_enough(records: list[Record]) -> tuple[bool, str]:
    found = {spec: n for spec, n in failures(records).items() if "f=exp" in spec}
    kinds = {(clamp, half): 0 for clamp in (True, False) for half in (False, True)}
    for spec, count in found.items():
        kinds["clamp=" in spec, "half=" in spec] += count
    words = {True: "clamped", False: "not clamped"}, {False: "float32", True: "float16"}
    text = ", ".join(f"{words[0][clamp]} in {words[1][half]} {n:,}" for (clamp, half), n in kinds.items())
    holds = not (kinds[True, False] or kinds[True, True]) and kinds[False, False] + kinds[False, True] > 0
    return holds, f"outputs that are not finite: {text}"


def row_of_000(row: str) -> list[Test]:
    """As accurate as the Transformer on both data sets, and faster at the report's own size."""
    tests = [at_least(Ref(study, row), Ref(study, "transformer")) for study in TABLES_000]
    return tests + [quicker(study, row, "transformer") for study in TABLES_000 if row != "RF128 ReLU"]


CLAIMS = (
    *(
        Claim(
            f"000.1{letter}",
            f"Performers are at least as accurate as the Transformer, in less time: {row}.",
            "Loses less than a point on CIFAR-10 (0.2 points on MNIST), and trains faster in the Transformer's own "
            "shape with 144 and 16 tokens" + (", which the report excludes for 128 features." if "128" in row else "."),
            row_of_000(row),
            contradicted="0 of 5 Performers are as accurate as the Transformer in less time, on MNIST and on CIFAR-10",
            mistake="M8",
        )
        for letter, row in zip("abcde", PERFORMERS_000, strict=True)
    ),
    Claim(
        "000.2",
        "More random features make softmax Performers better, and ReLU ones worse.",
        "128 against 16 features on CIFAR-10.",
        [
            better(cifar10("RF128 softmax"), cifar10("RF16 softmax")),
            better(cifar10("RF16 ReLU"), cifar10("RF128 ReLU")),
        ],
        contradicted="softmax is printed for 16 features alone; from 64 to 128 features ReLU changes by +0.03 points "
        "on MNIST and −0.33 on CIFAR-10",
        mistake="M8",
    ),
    Claim(
        "000.3",
        "A row that starts from a trained Transformer needs fewer steps of its own.",
        "On CIFAR-10, better than the same row from scratch with as many steps of its own.",
        [better(cifar10(f"{row} from checkpoint"), cifar10(row)) for row in STARTED],
        contradicted="3 of 4 rows are worse from the checkpoint than from scratch",
    ),
    Claim(
        "000.6",
        "Starting from a trained Transformer saves training, the Transformer's included.",
        "On CIFAR-10, better than the same row trained from scratch for as many steps as both took together.",
        [better(cifar10(f"{row} from checkpoint"), cifar10(f"{row}, twice the steps")) for row in STARTED],
        contradicted="3 of 4 rows are worse from the checkpoint than from scratch",
    ),
    Claim(
        "000.4",
        "Deterministic feature maps are competitive, but slower.",
        "Without projection against 64 (ReLU) or 16 (softmax) random features: loses less than a point (0.2 on MNIST), "
        "and trains more slowly in the Transformer's own shape.",
        [
            test
            for study in TABLES_000
            for plain, drawn in (("deterministic ReLU", "RF64 ReLU"), ("deterministic softmax", "RF16 softmax"))
            for test in (at_least(Ref(study, plain), Ref(study, drawn)), quicker(study, drawn, plain))
        ],
    ),
    Claim(
        "000.5",
        "A convolutional network followed by a Performer beats the convolutional network.",
        "The same trunk with and without the Performer's layers; a trunk with wider stages is shown for reference.",
        [better(hybrid(f"CNN + Performer, {kernel}"), hybrid("CNN")) for kernel in ("softmax", "ReLU")],
        own="no number is printed",
    ),
    Claim(
        "001.1",
        "ViT is the most accurate.",
        "Against each Performer, on CIFAR-10 (I) and on TinyImageNet (V).",
        [better(Ref(study, "ViT"), Ref(study, row)) for study in ("001-I", "001-V") for row in KERNELS_001],
        contradicted="7 of 9 experiments have ViT first by the best epoch (I, II, III, IV, V, VI, VII)",
        mistake="M10",
    ),
    Claim(
        "001.2",
        "ReLU is the cheapest kernel.",
        "Training speed against exp and fθ at the report's size, with 64 tokens (I) and with 256 (V).",
        [quicker(study, "relu", row) for study in ("001-I", "001-V") for row in ("exp", "fθ")],
        own="9 of 9 experiments have relu as the fastest Performer to train",
    ),
    Claim(
        "001.3",
        "Performers pay off only with small patches.",
        "TinyImageNet at the report's size with equal numbers of features: all three train faster than ViT in patches "
        "of 4 (VI, VII), and more slowly in patches of 8 (VIII, IX).",
        [
            test
            for small, large in (("001-VI", "001-VIII"), ("001-VII", "001-IX"))
            for row in KERNELS_001
            for test in (quicker(small, row, "ViT"), quicker(large, "ViT", row))
        ],
        own="on TinyImageNet all three Performers train faster than ViT in 3 of 3 experiments with patches of 4, and "
        "none in 2 of 2 with patches of 8",
        mistake="M9",
    ),
    Claim(
        "001.4",
        "On TinyImageNet exp is the best Performer, and fθ is between it and relu.",
        "Experiment V: exp better than fθ, fθ better than relu.",
        [better(Ref("001-V", a), Ref("001-V", b)) for a, b in (("exp", "fθ"), ("fθ", "relu"))],
        contradicted="exp is the best Performer in 5 of 5 experiments, fθ above relu in 2",
        mistake="M10",
    ),
    Claim(
        "001.5",
        "More features cost more, and gain nothing.",
        "16 features (I) against 64 (II): loses less than a point, and at the report's size each takes more of ViT's "
        "time, which both have in common.",
        [
            test
            for row in KERNELS_001
            for test in (at_least(Ref("001-I", row), Ref("001-II", row)), fewer_features_are_quicker(row))
        ],
        contradicted="from 16 to 64 features 6 of 6 rows became slower; exp gained more than a point on CIFAR-10",
    ),
    Claim(
        "001.6",
        "A learned kernel helps on small data.",
        "fθ better than exp on CIFAR-10 (I).",
        [better(Ref("001-I", "fθ"), Ref("001-I", "exp"))],
        own="fθ is above exp in 4 of 4 experiments on CIFAR-10, by single runs",
    ),
    Claim(
        "001.7",
        "Performers save memory.",
        "Peak memory of a training step at the report's size, all nine experiments: less than ViT's.",
        [lighter(f"001-{n}", row, "ViT") for n in EXPERIMENTS for row in KERNELS_001],
        contradicted="16 of 27 printed shares of ViT's memory are below 100 %",
    ),
    Claim(
        "001.8",
        "No Performer beats ViT at inference on CIFAR-10.",
        "Inference at the report's size, experiments I to IV.",
        [quicker(f"001-{n}", "ViT", row, "inference") for n in ("I", "II", "III", "IV") for row in KERNELS_001],
        own="12 of 12 printed inference times on CIFAR-10 are above ViT's",
    ),
    Claim(
        "001.9",
        "The gap in accuracy between ViT and Performers widens on TinyImageNet.",
        "ViT better than each Performer on TinyImageNet (V) by more points than on CIFAR-10 (I), with 16 features.",
        [wider_gap(row) for row in KERNELS_001],
        contradicted="from I to V the gap of exp falls from 5.23 to 2.00 points; those of relu and fθ grow",
    ),
    Claim(
        "002.1",
        "Patches of 4 beat patches of 8.",
        "The same vision transformer with both.",
        [better(Ref("002-vit", "ViT"), Ref("002-vit", "ViT, patch 8"))],
    ),
    Claim(
        "002.2",
        "Hyperparameters do not transfer from one kernel to another.",
        "GELU at ELU's best learning rate (5e-4) against its own, an eighth of that, as the report trained both: the "
        "latter also with warm-up and clipped gradients. The latter is better, or trains to the end where the former "
        "diverges.",
        [outlasts(gelu(4), gelu(1))],
        own="its NaN at 5e-4 needs no learning rate: with its denominators in float16 GELU gives numbers that are not "
        "finite before any training",
        mistake="M1",
        see_also=("002-non-finite",),
    ),
    Claim(
        "002.3",
        "GELU is the best kernel, at a learning rate 8 times lower.",
        "Under one recipe, better than ReLU, ELU and exp; and its literal run better than those at 5 and 10 times "
        "lower rates.",
        [
            *(better(factorial("gelu"), factorial(row)) for row in ("relu", "elu", "exp")),
            *(better(gelu(4), gelu(trial)) for trial in (2, 3)),
        ],
        own="GELU's 88.64 % is the highest printed; its last section calls ReLU's 87.39 % the highest",
        mistake="M4",
    ),
    Claim(
        "002.4",
        "ELU is fast, but unstable.",
        "Trains faster than ReLU in one shape; and in float16, with the report's denominators, outputs that are "
        "not finite with every α that the report tried, and none with ReLU.",
        [
            quicker("002, one shape", "ELU", "RELU"),
            shows("002-non-finite", "ELU's outputs are not always finite, ReLU's are", elu_is_unstable),
        ],
        contradicted="1 of 4 ELU runs had NaN; 13.11 s per epoch in one place and 31 s in another, for one layer, "
        "against 31 s for four layers of ReLU",
        mistake="M4",
        see_also=tuple(f"002-elu-{trial}" for trial in (1, 2, 3, 4)),
    ),
    Claim(
        "002.5",
        "Clamping its argument makes the exponential kernel stable.",
        "Outputs of the report's own attention in float32 and in float16, q and k at scales to 300: all finite with "
        "the clamp, and not without it. With many tokens it trains to the end in all of three seeds or more.",
        [
            shows("002-non-finite", "with the clamp all outputs are finite, without it not", clamp_is_enough),
            trains(Ref("002-exp", "its EXP, clamped")),
        ],
        contradicted="its limitations mention runs that had to be restarted despite the clamp",
    ),
    Claim(
        "002.6",
        "A learned mixture of exp and ReLU prefers ReLU.",
        "α after training with many tokens, a t-test over seeds; in the report's model of one token α has an effect "
        "only through ε.",
        [learned_below(Ref("002-theta-mixture", "mixture"), "alpha", 0.5, "α is below one half with many tokens")],
        contradicted="with α = 0.1 and 0.9 the one-token model's logits are the same but for ε: what moves α there is "
        "the gradient of ε and of rounding, whose size Adam does not look at",
        mistake="M1",
    ),
    Claim(
        "002.7",
        "Longer training makes up for the gain of pretraining.",
        "None: the report prints no number for it, and no study here pretrains on other images.",
        [],
        own="no number is printed",
    ),
    Claim(
        "002.8",
        "Accuracy drops on CIFAR-100.",
        "ReLU on CIFAR-100 against ReLU on CIFAR-10, fair, by 95 % intervals.",
        [lower_elsewhere(Ref("002-cifar100", "ReLU"), Ref("002-relu", "ReLU"))],
        own="71.12 against 87.39 %",
    ),
    Claim(
        "002.9",
        "AdamW is steadier than Adam for ELU.",
        "Trial 4 with its AdamW loses less than a point to the same with Adam, and trains to the end in all seeds.",
        [
            at_least(Ref("002-elu-4", "ELU, AdamW"), Ref("002-elu-4", "ELU, Adam")),
            trains(Ref("002-elu-4", "ELU, AdamW")),
        ],
        own="it changed the optimizer together with α, heads and features",
    ),
    Claim(
        "002.10",
        "Performers approach ViT with longer training.",
        "The distance to softmax after half of the steps and after all, for seeds that were trained for both.",
        [closes(cifar10(row), cifar10("transformer")) for row in ("RF16 softmax", "RF64 ReLU")],
        own="no number is printed",
    ),
    Claim(
        "003.1",
        "Orthogonal and positive features lower the error.",
        "Mean squared error of attention's output at L = 4,096 and d = 16 (Fig. 4), σ of q and k 0.5 and 1: orthogonal "
        "below independent rows, positive below trigonometric, for every number of features.",
        [
            shows("paper-fig4", "orthogonal below independent", partial(lower_errors, **ORTHOGONAL)),
            shows("paper-fig4", "positive below trigonometric", partial(lower_errors, **POSITIVE)),
        ],
    ),
    Claim("003.2", "The softmax kernel is estimated without bias.", "Computed.", [Test((), unbiased)]),
    Claim(
        "003.3",
        "Features have to be redrawn.",
        "Features redrawn every 100 steps against fixed ones, 16 of each; the same test as 004.4.",
        [better(Ref("paper-fig15", "exp, redrawn"), Ref("paper-fig15", "exp, fixed"))],
    ),
    Claim(
        "003.4",
        "No Performer is as accurate as the Transformer on all data.",
        "Each of report 000's Performers loses a point on CIFAR-10 or 0.2 points on MNIST; one that loses on neither "
        "refutes it.",
        [no_general(PERFORMERS_000, "transformer", TABLES_000)],
    ),
    Claim(
        "003.5",
        "Different data need different Performers.",
        "relu better than exp on CIFAR-10 (I), and worse on TinyImageNet (V), as report 001 prints.",
        [better(Ref("001-I", "relu"), Ref("001-I", "exp")), better(Ref("001-V", "exp"), Ref("001-V", "relu"))],
    ),
    Claim(
        "004.1",
        "Positive features are arbitrarily better than trigonometric ones where the angle is large.",
        "The closed form of both errors.",
        [Test(("paper-fig2",), positive_features)],
    ),
    Claim(
        "004.2",
        "A Performer is nearly as fast as attention that only returns its values.",
        f"A training step of whole models: at most {NEARLY} times as long, a bound that was stated before the test.",
        [shows("paper-fig20-21", f"Performers take at most {NEARLY} times as long", near_the_limit)],
        see_also=("paper-fig3",),
    ),
    Claim(
        "004.3",
        "The error of the approximation grows with depth.",
        "In a trained model: error of the last layer's output against the first's, for every estimate.",
        [shows("paper-fig14", "the last layer's error is the larger one", grows_with_depth)],
    ),
    Claim(
        "004.4",
        "Features must be redrawn.",
        "Features redrawn every 100 steps against fixed ones, 16 of each.",
        [better(Ref("paper-fig15", "exp, redrawn"), Ref("paper-fig15", "exp, fixed"))],
        see_also=("paper-fig5",),
    ),
    Claim(
        "004.5",
        "Positive softmax features do as well as ReLU.",
        "Within a point of each other with equal numbers of features, on CIFAR-10.",
        [equal(cifar10(f"RF{m} softmax"), cifar10(f"RF{m} ReLU")) for m in (64, 128)],
    ),
    Claim(
        "004.6",
        "The Linear Transformer's ELU + 1 explodes.",
        "With 36 layers and without clipping, as in the paper: some of three seeds or more diverges.",
        [explodes(Ref("paper-fig18", "Linear Transformer"))],
    ),
    *attentions_2026.CLAIMS,
)
