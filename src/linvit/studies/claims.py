"""What the reports claim, each claim with its tests. `hypotheses` says how a test is decided."""

from __future__ import annotations

import math
import re
from functools import partial
from itertools import pairwise

from linvit.attention import CONTROL
from linvit.measure.angle import ratio
from linvit.records import Record
from linvit.studies.hypotheses import (
    Claim,
    Part,
    Test,
    at_least,
    better,
    diverges,
    equal,
    faster,
    learned_below,
    outlasts,
    shows,
    trains,
)
from linvit.studies.results import Ref, Results

TABLES_000 = ("000-mnist", "000-cifar10")
PERFORMERS_000 = ("RF16 softmax", "RF64 ReLU", "RF128 ReLU", "deterministic ReLU", "deterministic softmax")
KERNELS_001 = ("relu", "exp", "fθ")
cifar10, hybrid, factorial = (partial(Ref, study) for study in ("000-cifar10", "000-hybrid", "002-factorial"))


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


def near_the_limit(records: list[Record]) -> tuple[bool | None, str]:
    """Steps of whole models with most layers. Near: closer to identity's than to softmax's, by ratio, whichever of the
    quartiles of their rounds is taken."""
    steps: dict[int, dict[str, tuple[float, float, float]]] = {}  # layers → attention → median and quartiles
    for record in records:
        variant = re.fullmatch(r"(.+), (\d+) layers", str(record.tags.get("variant")))
        if record.metric == "train_step" and variant and record.value:
            low, high = (float(record.tags.get(end) or record.value) for end in ("low", "high"))
            steps.setdefault(int(variant[2]), {})[variant[1]] = record.value, low, high
    layers = max(steps)
    limit, softmax = (steps[layers].pop(name) for name in ("identity", "softmax"))
    others = steps[layers]
    holds = True if all(high**2 < limit[1] * softmax[1] for _, _, high in others.values()) else None
    holds = False if any(low**2 > limit[2] * softmax[2] for _, low, _ in others.values()) else holds
    times = ", ".join(f"{name} {step[0] / limit[0]:.2f}×" for name, step in others.items())
    return holds, (
        f"a step of {layers} layers takes {times}, softmax {softmax[0] / limit[0]:.2f}× the time of one that returns v"
    )


def grows_with_depth(records: list[Record]) -> tuple[bool, str]:
    errors: dict[str, dict[int, float]] = {}
    for record in records:
        if record.metric == "depth_error" and record.value is not None and record.tags["attention"] != CONTROL:
            errors.setdefault(str(record.tags["attention"]), {})[int(record.tags["layer"] or 0)] = record.value
    ends = {name: (layers[min(layers)], layers[max(layers)]) for name, layers in errors.items()}
    found = ", ".join(f"{name} {first:.2f} → {last:.2f}" for name, (first, last) in ends.items())
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


CLAIMS = (
    Claim(
        "000.1",
        "Performers are at least as accurate as the Transformer, in less time.",
        "Every Performer trained from scratch: loses less than a point on CIFAR-10 (0.2 points on MNIST), and trains "
        "faster, except with 128 features, which the report excludes.",
        [
            test(Ref(study, row), Ref(study, "transformer"))
            for study in TABLES_000
            for row in PERFORMERS_000
            for test in ((at_least, faster) if row != "RF128 ReLU" else (at_least,))
        ],
        contradicted="0 of 5 Performers are as accurate as the Transformer in less time, on MNIST and on CIFAR-10",
        mistake="M8",
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
        "Starting from a trained Transformer saves training.",
        "On CIFAR-10, a row that starts from the Transformer's weights is better than one trained from scratch for as "
        "many steps as both took together.",
        [
            better(cifar10(f"{row} from checkpoint"), cifar10(f"{row}, twice the steps"))
            for row in ("linformer", "RF16 softmax")
        ],
        contradicted="3 of 4 rows are worse from the checkpoint than from scratch",
    ),
    Claim(
        "000.4",
        "Deterministic feature maps are competitive, but slower.",
        "Without projection against 64 (ReLU) or 16 (softmax) random features: loses less than a point (0.2 on MNIST), "
        "and trains more slowly.",
        [
            test
            for study in TABLES_000
            for plain, drawn in (("deterministic ReLU", "RF64 ReLU"), ("deterministic softmax", "RF16 softmax"))
            for test in (at_least(Ref(study, plain), Ref(study, drawn)), faster(Ref(study, drawn), Ref(study, plain)))
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
        "Training speed against exp and fθ, with 64 tokens (I) and with 256 (V).",
        [faster(Ref(study, "relu"), Ref(study, row)) for study in ("001-I", "001-V") for row in ("exp", "fθ")],
        own="9 of 9 experiments have relu as the fastest Performer to train",
    ),
    Claim(
        "001.3",
        "Performers pay off only with small patches.",
        "TinyImageNet with equal numbers of features: all three train faster than ViT in patches of 4 (VI, VII), and "
        "more slowly in patches of 8 (VIII, IX).",
        [
            test
            for small, large in (("001-VI", "001-VIII"), ("001-VII", "001-IX"))
            for row in KERNELS_001
            for test in (faster(Ref(small, row), Ref(small, "ViT")), faster(Ref(large, "ViT"), Ref(large, row)))
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
        "16 features (I) against 64 (II): trains faster, and loses less than a point.",
        [test(Ref("001-I", row), Ref("001-II", row)) for row in KERNELS_001 for test in (faster, at_least)],
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
        "Trains faster than ReLU under one recipe; and in float16, with the report's denominators, outputs that are "
        "not finite with every α that the report tried, and none with ReLU.",
        [
            faster(factorial("elu"), factorial("relu")),
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
        "004.1",
        "Positive features are arbitrarily better than trigonometric ones where the angle is large.",
        "The closed form of both errors.",
        [Test(("paper-fig2",), positive_features)],
    ),
    Claim(
        "004.2",
        "A Performer is nearly as fast as attention that only returns its values.",
        "A training step of whole models: nearer to that limit than to softmax, by ratio.",
        [shows("paper-fig20-21", "Performers are nearer to the limit than to softmax", near_the_limit)],
        see_also=("paper-fig3",),
    ),
    Claim(
        "004.3",
        "The error of the approximation grows with depth.",
        "Error of the last layer's output against the first's, mean over draws, for every estimate.",
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
        "Some seed diverges. That a few seeds do not, with fewer layers than the paper's 36, shows nothing.",
        [diverges(Ref("paper-fig18", "Linear Transformer"))],
    ),
)
