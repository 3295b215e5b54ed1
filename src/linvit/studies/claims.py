"""What the reports claim, each claim with its tests. `hypotheses` says how a test is decided."""

from __future__ import annotations

from functools import partial

from linvit.studies import attentions_2026
from linvit.studies.declaration import all_published
from linvit.studies.hypotheses import (
    Claim,
    Test,
    at_least,
    better,
    closes,
    equal,
    explodes,
    learned_below,
    lower_elsewhere,
    no_general,
    outlasts,
    shows,
    trains,
    wider_gap,
)
from linvit.studies.looks import (
    NEARLY,
    clamp_is_enough,
    elu_is_unstable,
    grows_with_depth,
    lower_errors,
    near_the_limit,
    positive_features,
    unbiased,
)
from linvit.studies.races import fewer_features_are_quicker, lighter, quicker
from linvit.studies.results import Ref

TABLES_000 = ("000-mnist", "000-cifar10")
STARTED = ("linformer", "RF16 softmax", "RF16 ReLU")
PERFORMERS_000 = ("RF16 softmax", "RF64 ReLU", "RF128 ReLU", "deterministic ReLU", "deterministic softmax")
KERNELS_001 = ("relu", "exp", "fθ")
FROM_CHECKPOINT = "3 of 4 rows are less accurate from the checkpoint than from scratch, by 0.25 to 0.85 points"
cifar10, hybrid, factorial = (partial(Ref, study) for study in ("000-cifar10", "000-hybrid", "002-factorial"))
pixels, hidden = (partial(Ref, f"paper-fig6-7{which}") for which in ("", "-bidirectional"))
SMALL_PATCHES = ("V", "VI", "VII")  # experiments with 256 tokens
ORTHOGONAL = {"family": "performer-exp", "other": "performer-exp:projection=iid"}
POSITIVE = {"family": "performer-exp", "other": "performer-trig"}


def gelu(trial: int) -> Ref:
    return Ref(f"002-gelu-{trial}", "GELU", "literal")


def twice(row: str) -> tuple[Ref, Ref]:
    """A row of report 000's CIFAR-10, and the same trained for twice the steps."""
    return cifar10(row), cifar10(f"{row}, twice the steps")


SLOWER = "RF128 ReLU"  # the report claims a lower cost for fewer than 128 features


def row_of_000(letter: str, row: str) -> Claim:
    """As accurate as the Transformer on both data sets, and faster at the report's own size."""
    timed = row != SLOWER
    tests = [at_least(Ref(study, row), Ref(study, "transformer")) for study in TABLES_000]
    tests += [quicker(study, row, "transformer") for study in TABLES_000 if timed]
    speed = (
        ", and trains faster in the Transformer's own shape with 16 and 144 tokens."
        if timed
        else ". Speed is not tested: the report claims a lower cost only below 128 features."
    )
    return Claim(
        f"000.1{letter}",
        f"Performers are at least as accurate as the Transformer{', in less time' if timed else ''}: {row}.",
        f"Loses less than 0.2 points on MNIST and less than a point on CIFAR-10{speed}",
        tests,
        contradicted="; ".join(_beside_the_transformer(study, row) for study in TABLES_000),
        mistake="M8",
    )


def _beside_the_transformer(study: str, row: str) -> str:
    """Both as printed."""
    own, other = (all_published()[study][name].numbers for name in (row, "transformer"))
    accuracies = f"{own['valid_accuracy']:.2f} against {other['valid_accuracy']:.2f} %"
    times = f"{own['ms_per_step']} against {other['ms_per_step']} ms per step"
    return f"{'MNIST' if study == '000-mnist' else 'CIFAR-10'} {accuracies}, {times}"


CLAIMS = (
    *map(row_of_000, "abcde", PERFORMERS_000),
    Claim(
        "000.2",
        "More random features make softmax Performers better, and ReLU ones worse.",
        "128 against 16 features on CIFAR-10.",
        [
            better(cifar10("RF128 softmax"), cifar10("RF16 softmax")),
            better(cifar10("RF16 ReLU"), cifar10("RF128 ReLU")),
        ],
        own="softmax is printed for 16 features alone; from 64 to 128 features ReLU changes by +0.03 points on MNIST "
        "and −0.33 on CIFAR-10",
        mistake="M8",
    ),
    Claim(
        "000.3",
        "A row that starts from a trained Transformer needs fewer steps of its own.",
        "On CIFAR-10, better than the same row from scratch with as many steps of its own.",
        [better(cifar10(f"{row} from checkpoint"), cifar10(row)) for row in STARTED],
        own=f"{FROM_CHECKPOINT}; the number of steps is not printed",
    ),
    Claim(
        "000.6",
        "Starting from a trained Transformer saves training, the Transformer's included.",
        "On CIFAR-10, better than the same row trained from scratch for as many steps as both took together.",
        [better(cifar10(f"{row} from checkpoint"), cifar10(f"{row}, twice the steps")) for row in STARTED],
        own=f"{FROM_CHECKPOINT}; the Transformer's own training is not counted",
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
        "000.7",
        "Performers save memory.",
        "Peak memory of a training step in the Transformer's own shape, with 16 and 144 tokens: less than its own.",
        [lighter(study, row, "transformer") for study in TABLES_000 for row in PERFORMERS_000],
        own="no number is printed",
    ),
    Claim(
        "001.1",
        "ViT is the most accurate.",
        "Against each Performer, on CIFAR-10 (I) and on TinyImageNet (V).",
        [better(Ref(study, "ViT"), Ref(study, row)) for study in ("001-I", "001-V") for row in KERNELS_001],
        contradicted="“consistently” in its conclusion; first by the best epoch in 7 of 9 experiments (I, II, III, IV, "
        "V, VI, VII)",
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
        "Performers save memory with small patches.",
        "Peak memory of a training step at the report's size, TinyImageNet in patches of 4 (V, VI, VII): less than "
        "ViT's.",
        [lighter(f"001-{n}", row, "ViT") for n in SMALL_PATCHES for row in KERNELS_001],
        own="9 of 9 printed shares of ViT's memory are below 100 % there, and 16 of 27 in all nine experiments",
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
        "latter also with warm-up and clipped gradients. The latter is better; or, if seeds diverge, fewer of its own "
        "do (Fisher's exact test).",
        [outlasts(gelu(4), gelu(1))],
        own="NaN by epoch 4 at 5e-4, 88.64 % at an eighth of it with warm-up and clipped gradients",
        note="NaN need not be due to the learning rate: with the report's denominators in float16, GELU gives numbers "
        "that are not finite before any training",
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
        "Outputs of the report's own attention in float32, q and k at scales to 300: all finite with the clamp, and "
        "not without it. With many tokens it trains to the end in all of three seeds or more.",
        [
            shows("002-non-finite", "with the clamp all outputs are finite, without it not", clamp_is_enough),
            trains(Ref("002-exp", "its EXP, clamped")),
        ],
        contradicted="its limitations mention runs that had to be restarted despite the clamp",
        note="in float16, which the report does not mention for this model, the clamp does not suffice: exp(10)² times "
        "the number of features is out of range",
    ),
    Claim(
        "002.6",
        "A learned mixture of exp and ReLU prefers ReLU.",
        "α after training with many tokens, a t-test over seeds; in the report's model of one token α has an effect "
        "only through ε.",
        [learned_below(Ref("002-theta-mixture", "mixture"), "alpha", 0.5, "α is below one half with many tokens")],
        own="α = 0.364 after training, by one run of a model with one token",
        note="with α = 0.1 and 0.9 the one-token model's logits are the same but for ε: what moves α there is the "
        "gradient of ε and of rounding, whose size Adam does not look at",
        mistake="M1",
    ),
    Claim(
        "002.7",
        "Longer training makes up for the gain of pretraining.",
        "A Performer from scratch with four times the steps loses less than a point to one that starts from weights "
        "pretrained on TinyImageNet.",
        [at_least(Ref("002-pretraining", "ReLU, 4 times the steps"), Ref("002-pretraining", "ReLU, pretrained"))],
        own="no number is printed",
    ),
    Claim(
        "002.8",
        "Accuracy drops on CIFAR-100.",
        "ReLU on CIFAR-100 against ReLU on CIFAR-10, fair, by Welch's t-test.",
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
        "The distance to softmax after as many steps and after twice as many, on CIFAR-10.",
        [closes(twice(row), twice("transformer")) for row in ("RF16 softmax", "RF16 ReLU")],
        own="no number is printed",
    ),
    Claim(
        "003.1",
        "Orthogonal and positive features lower the error.",
        "Mean squared error of attention's output at L = 4,096 and d = 16 (Fig. 4), σ of q and k 0.5 and 1: orthogonal "
        "below independent rows, positive below trigonometric, for every number of features, by Welch's t-tests over "
        "draws.",
        [
            shows("paper-fig4", "orthogonal below independent", partial(lower_errors, **ORTHOGONAL)),
            shows("paper-fig4", "positive below trigonometric", partial(lower_errors, **POSITIVE)),
        ],
    ),
    Claim(
        "003.2",
        "The softmax kernel is estimated without bias.",
        "Computed when this page is made: the mean of φ(x)·φ(y) over draws of features.",
        [Test((), unbiased)],
    ),
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
        f"A training step of whole models with 1,024 tokens: at most {NEARLY} times as long. The paper gives no "
        "number; this bound was fixed before these records were measured.",
        [shows("paper-fig20-21", f"Performers take at most {NEARLY} times as long", near_the_limit)],
        see_also=("paper-fig3",),
    ),
    Claim(
        "004.3",
        "The error of the approximation grows with depth.",
        "In a trained model: error of the last layer's output against the first's, for every estimate, by the extremes "
        "over draws.",
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
        "36 layers as in the paper, trained with Adam and without clipping on pixels of MNIST: some of three seeds or "
        "more diverges.",
        [explodes(Ref("paper-fig18", "Linear Transformer"))],
    ),
    Claim(
        "004.7",
        "Performers are as good as the Transformer, unidirectional and bidirectional.",
        "Pixels of MNIST in place of proteins, the next one and hidden ones: loses less than 0.01 bits per dimension.",
        [
            at_least(of(row), of("Transformer"))
            for of in (pixels, hidden)
            for row in ("Performer-ReLU", "Performer-SOFTMAX")
        ],
    ),
    Claim(
        "004.8",
        "A Linformer is behind Performers.",
        "Hidden pixels of MNIST in place of proteins: fewer bits per dimension with ReLU and with positive features.",
        [better(hidden(row), hidden("Linformer")) for row in ("Performer-ReLU", "Performer-SOFTMAX")],
    ),
    Claim(
        "004.9",
        "Small Transformers are no match.",
        "The next pixel of MNIST: fewer bits with a Performer of all layers than with a Transformer of 1, 2 or 3.",
        [better(pixels("Performer-ReLU"), pixels(f"Transformer, {n} layer{'s' * (n > 1)}")) for n in (1, 2, 3)],
    ),
    *attentions_2026.CLAIMS,
)
