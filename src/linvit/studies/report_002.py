"""Report 002: a vision transformer, and Performers with five kernels behind a convolutional trunk, on CIFAR-10.

Its Performers see one token each (M1), so that no kernel can matter: what differs between its rows is the trunk's
activation, the sizes and how they are trained. The literal column has this length-one model with the report's kernels:
q and k each scaled by d^-½, ε = 1e-6, nothing done about denominators that vanish. The fair column keeps the
convolutional map as tokens. What the report leaves open is ours: 256 features where it names none, SGD's momentum 0.9,
AdamW's decay 0.01, two poolings, its ViT's batch of 64, StepLR for ViT and EXP too, and the recipes of the two learned
kernels. Its layers have no MLP, and a norm behind the residual; ours have an MLP of twice the width, and no such norm.
Ours also leave out the activation and dropout behind its embedding, clamp both parts of the mixture where it clamps
one, and keep the denominator of the MLP's features from zero.

The spaces that the report searched are `linvit tune cifar10 --space 002-vit --sampler grid` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linvit.studies import STUDIES, Row, Scale, Table

PLAIN = {"warmup": 0.0, "clip_norm": 0.0, "label_smoothing": 0.0, "pad_crop": 4, "flip": "random", "redraw": 0}
ADAM = {"optimizer": "adam", "betas": (0.9, 0.999), "schedule": "step", "patience": 10, **PLAIN}
SGD = {"optimizer": "sgd", "schedule": "cosine", "patience": 10, "weight_decay": 0.0, **PLAIN}
SMALL = {"trunk": (16, 32, 64), "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128, "epochs": 2}
SMALLER = "12,000 images, a trunk of a quarter of the width, 2 layers of width 64, 2 epochs"
SOFTMAX = Row("softmax", "softmax", columns=("fair",))


def shape(dim: int, heads: int, depth: int) -> dict[str, Any]:
    return {"dim": dim, "heads": heads, "depth": depth, "mlp_dim": 2 * dim}


def kernel(name: str, dim: int, heads: int, **options: Any) -> str:
    """As the report has it: scaled by d^-½ on both sides, with its ε."""
    given = {"scale": round((dim // heads) ** -0.5, 6), "eps": 1e-6, **options}
    return f"performer-{name}:" + ",".join(f"{key}={value}" for key, value in given.items())


def sized(epochs: int, images: int = 2_000) -> dict[str, dict[str, Scale]]:
    """At `cpu`, a small part of the report's training."""
    few = Scale(limit=images, options={"epochs": 2, "patience": 0}, text=f"{images:,} images, 2 epochs of {epochs}")
    return {
        "full": {"literal": Scale(seeds=1), "fair": Scale(options={"epochs": epochs})},
        "cpu": {"literal": few, "fair": Scale(limit=12_000, options=SMALL, text=SMALLER)},
    }


class Kernel(Table):
    """One kernel of the report, and softmax beside it in the fair column."""

    report, data, mistakes = "002", "cifar10", ("M1", "M2", "M3", "M4", "M5")
    takes: Mapping[str, str] = {"full": "hours on a GPU", "cpu": "20 min", "smoke": "30 s"}


@STUDIES.register("002-vit")
class Vit(Table):
    """The report's vision transformer with patches of 4, and of 8, which it says are worse. Expected: fair, patches of
    4 ahead by some points; the report chose on test images. Its grid:
    `linvit tune cifar10 -a softmax --space 002-vit --sampler grid`.

        linvit reproduce 002-vit
    """

    report, title, data = "002", "Vision transformer with patches of 4 and 8 on CIFAR-10", "cifar10"
    mistakes = ("M2", "M4")
    takes = {"full": "hours on a GPU", "cpu": "50 min", "smoke": "30 s"}
    rows = [
        Row("ViT", "softmax"),
        Row("ViT, patch 8", "softmax", options={"patch_size": 8}, fair={"patch_size": 8}),
    ]
    literal = {"size": "002-vit", "pool": "cls", "batch_size": 64, "epochs": 31, "lr": 5e-4, **ADAM, "patience": 0}
    fair = {"size": "002-vit"}
    scales = {
        "full": {"literal": Scale(seeds=1), "fair": Scale(options={"epochs": 31})},
        "cpu": {
            "literal": Scale(seeds=1, limit=10_000, options={"epochs": 2}, text="10,000 images, 2 epochs of 31"),
            "fair": Scale(
                options={"dim": 64, "depth": 4, "heads": 4, "mlp_dim": 128, "epochs": 8},
                text="4 layers of width 64, 8 epochs of 31",
            ),
        },
    }


@STUDIES.register("002-relu")
class Relu(Kernel):
    """ReLU features, with SGD on a cosine, mixed precision and five stratified folds at `full`, as the report has it.
    Expected: literal, far above the report's ViT at equal training, since the trunk does the work; fair, no difference
    from softmax beyond chance, and none between 256 and 512 features. The search:
    `linvit tune cifar10 -a performer-relu --space 002-relu`.

        linvit reproduce 002-relu
    """

    title = "Performer-ReLU on CIFAR-10"
    rows = [
        Row("ReLU", "performer-relu:m=256", kernel("relu", 960, 16, m=256)),
        Row("ReLU, 512 features", "performer-relu:m=512", columns=("fair",)),
        SOFTMAX,
    ]
    literal = {"stem": "length-one", **shape(960, 16, 4), "dropout": 0.1, "batch_size": 128, "epochs": 59, "lr": 1.7e-3,
               **SGD}  # fmt: skip
    fair = {"stem": "conv", **shape(960, 16, 4)}
    scales = sized(59) | {
        "full": {
            "literal": Scale(seeds=1, folds=5, options={"amp": "fp16"}),
            "fair": Scale(options={"epochs": 59, "amp": "bf16"}),
        }
    }


# rate, batch, heads, depth, dropout, optimizer, α, features, epochs: width 768 all
ELU = {
    1: (5e-4, 128, 16, 1, 0.0, "adam", 1.0, 128, 30),
    2: (1e-4, 128, 16, 2, 0.1, "adam", 0.5, 128, 31),
    3: (5e-5, 64, 16, 3, 0.2, "adam", 0.3, 256, 26),
    4: (5e-4, 128, 8, 1, 0.0, "adamw", 0.25, 256, 20),
}
ELU_DOC = """The ELU kernel, trial {i} of four, with ELU in the trunk too. Expected: literal, what the trunk makes of
it; fair, no difference from softmax beyond chance. The report's search:
`linvit tune cifar10 -a performer-elu --space 002-elu --sampler grid`.

    linvit reproduce 002-elu-{i}
"""


def elu(i: int) -> type[Table]:
    lr, batch, heads, depth, dropout, optimizer, alpha, m, epochs = ELU[i]
    recipe = ADAM | {"optimizer": optimizer} | ({"weight_decay": 0.01} if optimizer == "adamw" else {})
    literal = {"stem": "length-one", **shape(768, heads, depth), "dropout": dropout, "batch_size": batch,
               "activation": f"elu:alpha={alpha}", "epochs": epochs, "lr": lr, **recipe}  # fmt: skip
    spec = kernel("elu", 768, heads, alpha=alpha, m=m, negative="literal")
    return type(f"Elu{i}", (Kernel,), {
        "__doc__": ELU_DOC.format(i=i), "title": f"Performer-ELU on CIFAR-10, trial {i}: α = {alpha}",
        "rows": [Row("ELU", f"performer-elu:alpha={alpha},m={m}", spec), SOFTMAX], "literal": literal,
        "fair": {"stem": "conv", **shape(768, heads, depth)}, "scales": sized(epochs),
    })  # fmt: skip


# how many times lower than the first the rate is, epochs
GELU = {1: (1, 10), 2: (10, 55), 3: (5, 57), 4: (8, 87)}
GELU_DOC = """The GELU kernel, trial {i} of four, with GELU in the trunk too{how}. Expected: literal, {what}; fair, no
difference from softmax beyond chance.

    linvit reproduce 002-gelu-{i}
"""


def gelu(i: int) -> type[Table]:
    lower, epochs = GELU[i]
    calm = {"clip_norm": 1.0, "schedule": "cosine", "warmup": round(5 / epochs, 4)} if i > 1 else {}
    literal = {"stem": "length-one", **shape(768, 16, 1), "activation": "gelu", "batch_size": 128, "epochs": epochs,
               "lr": 5e-4 / lower, **ADAM, **calm}  # fmt: skip
    how = f", the rate {lower} times lower, five epochs of warm-up and clipped gradients" if i > 1 else ""
    what = "no NaN, which the report's code found by epoch 4" if i == 1 else "what the trunk and the rate make of it"
    spec = kernel("gelu", 768, 16, m=128, negative="literal")
    return type(f"Gelu{i}", (Kernel,), {
        "__doc__": GELU_DOC.format(i=i, how=how, what=what),
        "title": f"Performer-GELU on CIFAR-10, trial {i}: rate {5e-4 / lower:.3g}",
        "rows": [Row("GELU", "performer-gelu:m=128", spec), SOFTMAX], "literal": literal,
        "fair": {"stem": "conv", **shape(768, 16, 1)}, "scales": sized(epochs),
    })  # fmt: skip


for i in ELU:
    STUDIES.register(f"002-elu-{i}")(elu(i))
for i in GELU:
    STUDIES.register(f"002-gelu-{i}")(gelu(i))


@STUDIES.register("002-exp")
class Exp(Kernel):
    """Features exp(Ωx) without −‖x‖²/2, clamped at ±10; fair, FAVOR+. Expected: literal, what the trunk makes of it;
    fair, no difference from softmax beyond chance. The searches:
    `linvit tune cifar10 -a performer-exp --space 002-exp-grid --sampler grid`, and `--space 002-exp-optuna`.

        linvit reproduce 002-exp
    """

    title = "Performer-EXP on CIFAR-10"
    rows = [
        Row("EXP", "performer-exp:m=256", kernel("gexp", 576, 16, m=256, clamp=10.0)),
        # with one token a clamp has no effect: the report's kernel with many
        Row("its EXP, clamped", kernel("gexp", 64, 4, m=256, clamp=10.0), columns=("fair",)),
        Row("its EXP, not clamped", kernel("gexp", 64, 4, m=256), columns=("fair",)),
        SOFTMAX,
    ]
    literal = {"stem": "length-one", **shape(576, 16, 3), "dropout": 0.1, "batch_size": 64, "epochs": 41, "lr": 1e-3,
               **ADAM, "patience": 0}  # fmt: skip
    fair = {"stem": "conv", **shape(576, 16, 3)}
    scales = sized(41)


@STUDIES.register("002-theta-mixture")
class Mixture(Kernel):
    """A learned mixture of exp and ReLU; it is said to prefer ReLU (α = 0.364). Expected: literal, α stays where it
    began, since one token gives it no gradient; fair, no difference from softmax beyond chance.

        linvit reproduce 002-theta-mixture
    """

    title = "Performer with a learned mixture of exp and ReLU on CIFAR-10"
    rows = [Row("mixture", "performer-theta-mixture", kernel("theta-mixture", 768, 16, clamp=5.0)), SOFTMAX]
    literal = {"stem": "length-one", **shape(768, 16, 1), "batch_size": 128, "epochs": 60, "lr": 5e-4, **ADAM}
    fair = {"stem": "conv", **shape(768, 16, 1)}
    scales = sized(60)


MLP = f"performer-theta-mlp:m=512,scale={round(48**-0.5, 6)}"


@STUDIES.register("002-theta-mlp")
class Mlp(Kernel):
    """Features that an MLP makes, with a dropout printed as 5.0: run with 0.5 and with 0.05. Fair, `performer-theta`,
    which is positive and begins as FAVOR+. Expected: no difference from softmax beyond chance.

        linvit reproduce 002-theta-mlp
    """

    title = "Performer with an MLP for features on CIFAR-10"
    rows = [
        Row("MLP", "performer-theta:m=32", MLP),
        Row("MLP, dropout 0.05", MLP, options={"dropout": 0.05}, columns=("literal",)),
        SOFTMAX,
    ]
    literal = {"stem": "length-one", **shape(768, 16, 5), "dropout": 0.5, "batch_size": 128, "epochs": 60, "lr": 1.7e-3,
               **SGD, "clip_norm": 1.0}  # fmt: skip
    fair = {"stem": "conv", **shape(768, 16, 5)}
    scales = sized(60)


@STUDIES.register("002-cifar100")
class Cifar100(Relu):
    """The ReLU kernel on CIFAR-100, of which the report says a number and nothing else: as on CIFAR-10.

    linvit reproduce 002-cifar100
    """

    title, data, fewest = "Performer-ReLU on CIFAR-100", "cifar100", 100
    rows = [Row("ReLU", "performer-relu:m=256", kernel("relu", 960, 16, m=256)), SOFTMAX]


@STUDIES.register("002-factorial")
class Factorial(Table):
    """What the report compared: {one token, the map as tokens} × kernel × the trunk's activation, under one recipe. The
    column `literal` has one token: all kernels give the same weights to the last bit, and only the trunk's activation
    makes a difference. The column `fair` has the map as tokens: there kernels differ, if little; `uniform` shows what
    attention is worth at all.

        linvit reproduce 002-factorial
    """

    report, title, data = "002", "One token or many × kernel × the trunk's activation, on CIFAR-10", "cifar10"
    mistakes = ("M1",)
    takes = {"full": "hours on a GPU", "cpu": "20 min", "smoke": "30 s"}
    rows = [
        Row(name + rest, spec, options=there, fair=there)
        for rest, there in (("", {}), *((f", {name} in the trunk", {"activation": name}) for name in ("elu", "gelu")))
        for name, spec in (("softmax", "softmax"), ("uniform", "uniform"),
                           *((name, f"performer-{name}:m=32") for name in ("relu", "elu", "gelu", "exp")))
    ]  # fmt: skip
    literal, fair = {"stem": "length-one"}, {"stem": "conv"}
    scales = {
        "full": {"literal": Scale(), "fair": Scale(seeds=5)},
        "cpu": {
            column: Scale(limit=8_000, options=SMALL, text=SMALLER.replace("12,000", "8,000"))
            for column in ("literal", "fair")
        },
    }
