"""Report 002: a vision transformer, and Performers with five kernels behind a convolutional trunk, on CIFAR-10.

Its Performers see one token per image (M1), so the kernel has no effect on values: its rows differ in the trunk's
activation, the sizes and the training, and in the numbers that are not finite. The fair column keeps the convolutional
map as tokens.

The literal column keeps the model of one token, the report's attention as its Algorithm 2 has it (attention `literal`:
raw kernels, ε = 1e-6 added to features and to denominators, q and k both divided by √d, orthogonal Ω), its layer
(`block=002`: no MLP, a norm after the residual; Algorithm 4's for EXP), the activation and dropout after the embedding,
and the report's recipe. Where the report trained with GradScaler (ReLU, ELU, GELU), the attention is computed in
float16 as autocast does on a GPU, emulated on a CPU. The literal column changes: the rest of the model is in float32
(but `amp=fp16` at `full` for ReLU), gradients are not rounded or scaled, a run ends at the first loss that is not
finite where GradScaler would have left out the step, splits and selection are ours (M2), and weights other than those
of the layers start as ours do.

Choices of ours where the report is silent: 256 features of EXP, momentum 0.9 for SGD, weight decay 0.01 for AdamW, two
poolings, a batch of 64 for its ViT, StepLR for ViT and EXP too, OneCycleLR's rising part for its five epochs of
warm-up, float32 and orthogonal Ω for EXP, float32 for the learned kernels, and the recipes of these two.

The report's searches are `linvit tune cifar10 --space 002-vit --sampler grid` and so on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from linvit.studies.declaration import ADAM, PLAIN, Options, PublishedStudy, Rerun, Row, Scale, register

AUGMENTED = {"pad_crop": 4, "flip": "random", "redraw": 0, "patience": 10}
STEP = ADAM | AUGMENTED | {"schedule": "step"}
SGD = PLAIN | AUGMENTED | {"optimizer": "sgd", "schedule": "cosine", "weight_decay": 0.0}
SMALL = {"trunk": (16, 32, 64), "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128, "epochs": 8}
MANY = 12_000  # training images of the fair column at scale cpu
ONE_SEED = Scale(seeds=1)
SOFTMAX = Row("softmax", "softmax", columns=("fair",))
KEPT = """one token per image; the report's attention with its raw kernel and ε{half}; its layer without MLP and with a
norm after the residual; {kept}"""
CHANGED = """{half}the first loss that is not finite ends the run; splits and selection are ours. Our choices where the
report is silent: two poolings{chosen}"""
TRAINED = "sizes, optimizer, schedule, augmentation and early stopping (none at scale cpu)"
HALF = "float32 outside the attention on a CPU, gradients that are neither rounded nor scaled, and "


def shape(dim: int, heads: int, depth: int) -> dict[str, int]:
    return {"dim": dim, "heads": heads, "depth": depth, "mlp_dim": 2 * dim}


def reported(f: str, half: bool = False, **options: Any) -> str:
    """The report's attention with this kernel."""
    given = {"f": f, **options, **({"half": "autocast"} if half else {})}
    return "literal:" + ",".join(f"{key}={value}" for key, value in given.items())


class Recipe(NamedTuple):
    """What the literal column keeps of the report's training, and what the report leaves open."""

    kept: str = TRAINED
    chosen: tuple[str, ...] = ()


class Sizes(NamedTuple):
    """Seeds of both columns at scale cpu, folds of the literal one there, and both columns at full."""

    literal: int = 1
    fair: int = 3
    folds: int | None = None
    literal_full: Scale = ONE_SEED
    fair_full: Scale | None = None


def kernel_study(
    name: str,
    *,
    title: str,
    about: str,
    rows: list[Row],
    shape: Options,
    recipe: Options,
    epochs: int,
    literal_is: Recipe = Recipe(),  # noqa: B008 (frozen)
    block: str = "002",
    sizes: Sizes = Sizes(),  # noqa: B008 (frozen)
) -> PublishedStudy:
    """One kernel of the report, with softmax in the fair column."""
    half = any("half=" in (row.literal or "") for row in rows)
    short = Scale(sizes.literal, limit=4_000, folds=sizes.folds, options={"epochs": 4, "patience": 0})
    literal = {"stem": "length-one", "block": block, "positions": "none", "emb_dropout": recipe.get("dropout", 0.0)}
    literal |= {key: value for key, value in shape.items() if key != "mlp_dim"}
    return PublishedStudy(
        f"002-{name}",
        title=title,
        about=about,
        data="cifar10",
        mistakes=("M1", "M2", "M3", "M4", "M5"),
        rows=[*rows, SOFTMAX],
        kept=KEPT.format(half=", in float16" if half else "", kept=literal_is.kept),
        changed=CHANGED.format(half=HALF if half else "", chosen="".join(f", {one}" for one in literal_is.chosen)),
        literal=Rerun({**literal, "epochs": epochs, **recipe}, full=sizes.literal_full, cpu=short),
        fair=Rerun(
            {"stem": "conv", **shape},
            full=sizes.fair_full or Scale(options={"epochs": epochs}),
            cpu=Scale(sizes.fair, limit=MANY, options=SMALL),
        ),
    )


VIT = PublishedStudy(
    "002-vit",
    title="Vision transformer with patches of 4 and 8 on CIFAR-10",
    about="""The report's vision transformer with patches of 4, and of 8, which it calls worse. It selected models on
    the test images. Expected: fair, patches of 4 some points ahead. Its grid:
    `linvit tune cifar10 -a softmax --space 002-vit --sampler grid`.""",
    data="cifar10",
    mistakes=("M2", "M4"),
    kept="sizes, optimizer, augmentation and epochs",
    changed="splits and selection are ours; float32; the batch size of 64 and StepLR are our choices",
    rows=[Row("ViT", "softmax"), Row("ViT, patch 8", "softmax", options={"patch_size": 8})],
    literal=Rerun(
        STEP | {"size": "002-vit", "pool": "cls", "batch_size": 64, "epochs": 31, "lr": 5e-4, "patience": 0},
        full=ONE_SEED,
        cpu=Scale(seeds=1, limit=8_000, options={"epochs": 3}),
    ),
    fair=Rerun(
        {"size": "002-vit"},
        full=Scale(options={"epochs": 31}),
        cpu=Scale(limit=15_000, options={"dim": 64, "depth": 4, "heads": 4, "mlp_dim": 128, "epochs": 10}),
    ),
)


RELU_ROW = Row("ReLU", "performer-relu:m=256", reported("relu", half=True, m=256))
RELU = kernel_study(
    "relu",
    title="Performer-ReLU on CIFAR-10",
    about="""ReLU features, with SGD on a cosine schedule, mixed precision and five stratified folds, as in the report
    (at `cpu` the literal attention alone is in half precision; 002-precision is about the rest). Expected: literal, far
    above the report's ViT at equal training, since the trunk does the work; fair, no significant difference from
    softmax, nor between 256 and 512 features. The search:
    `linvit tune cifar10 -a performer-relu --space 002-relu`.""",
    rows=[
        RELU_ROW,
        Row("ReLU, 512 features", "performer-relu:m=512", columns=("fair",)),
    ],
    shape=shape(960, 16, 4),
    recipe=SGD | {"dropout": 0.1, "batch_size": 128, "lr": 1.7e-3},
    epochs=59,
    literal_is=Recipe(chosen=("momentum 0.9",)),
    sizes=Sizes(
        folds=5,
        literal_full=Scale(seeds=1, folds=5, options={"amp": "fp16"}),
        fair_full=Scale(options={"epochs": 59, "amp": "bf16"}),
    ),
)
CIFAR100 = replace(
    RELU,
    name="002-cifar100",
    title="Performer-ReLU on CIFAR-100",
    about="The ReLU kernel on CIFAR-100, trained as on CIFAR-10: the report prints one number and no configuration. "
    "Expected: fair, no significant difference from softmax.",
    data="cifar100",
    smoke_images=100,
    rows=[RELU_ROW, SOFTMAX],
    changed=RELU.changed + ", and the whole configuration, which is that of CIFAR-10",
)

PRECISION = PublishedStudy(
    "002-precision",
    title="Performer-ReLU in mixed precision, five stratified folds",
    about="""The report's ReLU model was trained in mixed precision, with five stratified folds. The same Performer in
    float32 and with autocast to bfloat16, which is what a CPU has, and softmax. Expected: no significant difference
    between the precisions. A CPU without bfloat16 refuses.""",
    data="cifar10",
    rows=[
        Row("ReLU", "performer-relu:m=64"),
        Row("ReLU, mixed precision", "performer-relu:m=64", options={"amp": "bf16"}),
        SOFTMAX,
    ],
    fair=Rerun(
        {"stem": "conv"},
        full=Scale(seeds=1, folds=5, options={"epochs": 59}),
        cpu=Scale(seeds=1, folds=5, limit=MANY, options=SMALL),
    ),
)

LONGER, SHIPPED = 4, {"dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256}
PRETRAINING = PublishedStudy(
    "002-pretraining",
    title="Pretraining against longer training",
    about="""The report says that longer training makes up for the gain of pretraining, and prints no number. A
    Performer that starts from weights pretrained on 80 classes of TinyImageNet, and the same from scratch for as many
    steps and for four times as many, on few images of CIFAR-10 at 64 px. No expectation.""",
    data="cifar10",
    rows=[
        Row("ReLU", "performer-relu:m=32", options=SHIPPED),
        Row("ReLU, pretrained", "performer-relu:m=32", options=SHIPPED, pretrained="performer-relu-m-32"),
        Row(f"ReLU, {LONGER} times the steps", "performer-relu:m=32", options=SHIPPED, times=LONGER),
    ],
    fair=Rerun(
        {"stem": "conv", "trunk": (32, 64, 128, 256), "pools": 3},
        full=Scale(seeds=5, options={"epochs": 12}),
        cpu=Scale(seeds=5, limit=3_000, options={"epochs": 4}),
        image_size=64,
    ),
)

# trial → learning rate, batch, heads, depth, dropout, optimizer, α, features, epochs; the width is 768
ELU = {
    1: (5e-4, 128, 16, 1, 0.0, "adam", 1.0, 128, 30),
    2: (1e-4, 128, 16, 2, 0.1, "adam", 0.5, 128, 31),
    3: (5e-5, 64, 16, 3, 0.2, "adam", 0.3, 256, 26),
    4: (5e-4, 128, 8, 1, 0.0, "adamw", 0.25, 256, 20),
}


def elu(trial: int) -> PublishedStudy:
    lr, batch, heads, depth, dropout, optimizer, alpha, m, epochs = ELU[trial]
    recipe = {"optimizer": optimizer, "dropout": dropout, "batch_size": batch, "activation": f"elu:alpha={alpha}"}
    decay = {"weight_decay": 0.01} if optimizer == "adamw" else {}
    fair = f"performer-elu:alpha={alpha},m={m}"
    own: dict[str, dict[str, Any]] = {"Adam": {"weight_decay": 0.0}, "AdamW": {"weight_decay": 0.01}}
    optimizers = [
        Row(f"ELU, {name}", fair, options={"optimizer": name.lower(), "lr": lr, **decayed}, columns=("fair",))
        for name, decayed in (own.items() if optimizer == "adamw" else ())  # the report changed it with other things
    ]
    spec = reported("elu", half=True, alpha=alpha, m=m)
    return kernel_study(
        f"elu-{trial}",
        title=f"Performer-ELU on CIFAR-10, trial {trial}: α = {alpha}",
        about=f"""The ELU kernel, trial {trial} of four, with ELU in the trunk too. Expected: literal, the accuracy of
        the trunk, or a denominator that float16 rounds to zero, as the report's NaNs (002-non-finite); fair, no
        significant difference from softmax. The report's search:
        `linvit tune cifar10 -a performer-elu --space 002-elu --sampler grid`.""",
        rows=[Row("ELU", fair, spec), *optimizers],
        shape=shape(768, heads, depth),
        recipe=STEP | recipe | decay | {"lr": lr},
        epochs=epochs,
        literal_is=Recipe(chosen=("weight decay 0.01",) if decay else ()),
        sizes=Sizes(fair=8) if optimizer == "adamw" else Sizes(),  # two optimizers are compared, by a point
    )


GELU = {1: (1, 10), 2: (10, 55), 3: (5, 57), 4: (8, 87)}  # trial → divisor of the first learning rate, epochs


def gelu(trial: int) -> PublishedStudy:
    divisor, epochs = GELU[trial]
    setup, calmer = "", {}
    expected = "a denominator that float16 rounds to zero, as in the report by epoch 4"
    if trial > 1:
        setup = f", a learning rate {divisor} times lower, five epochs of warm-up and clipped gradients"
        expected = "the accuracy of the trunk at this learning rate, or the same denominators"
        calmer = {"clip_norm": 1.0, "schedule": "torch-onecycle", "warmup": round(5 / epochs, 4)}
    return kernel_study(
        f"gelu-{trial}",
        title=f"Performer-GELU on CIFAR-10, trial {trial}: learning rate {5e-4 / divisor:.3g}",
        about=f"""The GELU kernel, trial {trial} of four, with GELU in the trunk too{setup}. Expected: literal,
        {expected}; fair, no significant difference from softmax.""",
        rows=[Row("GELU", "performer-gelu:m=128", reported("gelu", half=True, m=128))],
        shape=shape(768, 16, 1),
        recipe=STEP | {"activation": "gelu", "batch_size": 128, "lr": 5e-4 / divisor} | calmer,
        epochs=epochs,
        literal_is=Recipe(chosen=("OneCycleLR's rising part for the five epochs of warm-up",) if trial > 1 else ()),
        sizes=Sizes(literal=5),  # the literal runs are compared
    )


EXP = kernel_study(
    "exp",
    title="Performer-EXP on CIFAR-10",
    about="""Features exp(Ωx) without −‖x‖²/2, clamped at ±10, and without the clamp; fair, FAVOR+ and the report's own
    attention with many tokens. Expected: literal, the accuracy of the trunk; fair, no significant difference from
    softmax. The searches: `linvit tune cifar10 -a performer-exp --space 002-exp-grid --sampler grid`, and
    `--space 002-exp-optuna`.""",
    rows=[
        Row("EXP", "performer-exp:m=256", reported("exp", m=256, clamp=10)),
        Row("EXP, not clamped", reported("exp", m=256), columns=("literal",), changed="no clamp"),
        # the report's attention with many tokens, without any protection but its own
        Row("its EXP, clamped", reported("exp", m=256, clamp=10), columns=("fair",)),
        Row("its EXP, not clamped", reported("exp", m=256), columns=("fair",)),
    ],
    block="002-exp",
    literal_is=Recipe(
        "sizes, optimizer, augmentation and epochs", ("256 features", "orthogonal Ω", "StepLR", "float32")
    ),
    shape=shape(576, 16, 3),
    recipe=STEP | {"dropout": 0.1, "batch_size": 64, "lr": 1e-3, "patience": 0},
    epochs=41,
)
MIXTURE = kernel_study(
    "theta-mixture",
    title="Performer with a learned mixture of exp and ReLU on CIFAR-10",
    about="""A learned mixture of exp and ReLU, which the report says prefers ReLU (α = 0.364). Expected: literal, α
    moves although it has no effect: with one token its gradient comes from ε and rounding alone, and Adam divides by
    its size; fair, no significant difference from softmax.""",
    rows=[Row("mixture", "performer-theta-mixture", reported("mixture"))],
    shape=shape(768, 16, 1),
    recipe=STEP | {"batch_size": 128, "lr": 5e-4},
    epochs=60,
    literal_is=Recipe(
        "augmentation",
        ("float32", "and sizes, optimizer, learning rate and batch size, which are those of ELU's first trial"),
    ),
    sizes=Sizes(fair=5),
)
MLP_SPEC = reported("mlp", m=512)
MLP = kernel_study(
    "theta-mlp",
    title="Performer with an MLP for features on CIFAR-10",
    about="""Features computed by an MLP, with a dropout printed as 5.0: run with 0.5 and with 0.05. Fair,
    `performer-theta`, which is positive and starts as FAVOR+. Expected: literal, the accuracy of the trunk, unless a
    signed denominator vanishes; fair, no significant difference from softmax.""",
    rows=[
        Row("MLP", "performer-theta:m=32", MLP_SPEC, changed="dropout 0.5 for 5.0"),
        Row("MLP, dropout 0.05", MLP_SPEC, options={"dropout": 0.05}, columns=("literal",), changed="dropout 0.05"),
    ],
    shape=shape(768, 16, 5),
    recipe=SGD | {"dropout": 0.5, "batch_size": 128, "lr": 1.7e-3, "clip_norm": 1.0},
    epochs=60,
    literal_is=Recipe(
        "sizes, optimizer, clipped gradients and augmentation",
        ("momentum 0.9", "float32", "and learning rate, schedule and batch size, which are those of ReLU"),
    ),
)

SHORTER = SMALL | {"epochs": 5}  # for 18 rows in both columns
KERNELS = {"softmax": "softmax", "uniform": "uniform"} | {
    name: f"performer-{name}:m=32" for name in ("relu", "elu", "gelu", "exp")
}
ACTIVATIONS = {"": {}} | {f", {name} in the trunk": {"activation": name} for name in ("elu", "gelu")}
FACTORIAL = PublishedStudy(
    "002-factorial",
    title="One token or many × kernel × the trunk's activation, on CIFAR-10",
    about="""What the report compared: {one token, the map as tokens} × kernel × the trunk's activation, under one
    recipe. Expected: in the column `literal`, with one token and denominators kept away from zero, all kernels give
    bit-identical weights, and only the trunk's activation makes a difference; in the column `fair`, with the map as
    tokens, kernels differ slightly, and `uniform` shows how much attention contributes.""",
    data="cifar10",
    mistakes=("M1",),
    kept="one token per image, and nothing else",
    changed="everything else is that of the fair column: the stabilised kernels, layers with an MLP, one recipe",
    rows=[
        Row(name + trunk, spec, options=options)
        for trunk, options in ACTIVATIONS.items()
        for name, spec in KERNELS.items()
    ],
    literal=Rerun({"stem": "length-one"}, cpu=Scale(limit=MANY, options=SHORTER)),
    fair=Rerun({"stem": "conv"}, full=Scale(seeds=5), cpu=Scale(5, limit=MANY, options=SHORTER)),
)

register(VIT, RELU, PRECISION, PRETRAINING, *map(elu, ELU), *map(gelu, GELU), EXP, MIXTURE, MLP, CIFAR100, FACTORIAL)
