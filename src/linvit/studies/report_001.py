"""Report 001: a vision transformer and three Performers on CIFAR-10 (I to IV) and TinyImageNet (V to IX).

Its models come from performer-pytorch: "exp" is FAVOR+ with that package's stabiliser (the kernel function that the
report names is never used), "relu" is generalised attention, and fθ is ReLU(WΩx) with W drawn without scaling.

Choices of ours where the report is silent: T_mult = 2, which makes its 70 and 84 epochs whole cycles, and T₀ = 10 for
the 80 epochs of VIII and IX, which fit no cycle. The fair column has a convolutional stem with as many tokens as the
report has patches, and adds `performer-theta`, which is positive and starts as FAVOR+, with as many features as fθ.
"""

from __future__ import annotations

from linvit.schemas.sizes import SIZES
from linvit.studies.declaration import ADAM, FEW, HOURS, PublishedStudy, Rerun, Row, Scale, register

RECIPE = ADAM | {"weight_decay": 3e-5, "batch_size": 256, "schedule": "restarts", "pad_crop": 4, "flip": "random"}
WIDTHS = ("dim", "head_dim", "mlp_dim")
# experiment → data, features, epochs, epochs of the first restart cycle, learning rate
EXPERIMENTS = {
    "I": ("cifar10", 16, 70, 10, 0.0015),
    "II": ("cifar10", 64, 70, 10, 0.0015),
    "III": ("cifar10", 32, 70, 10, 0.0015),
    "IV": ("cifar10", 32, 70, 10, 0.0015),
    "V": ("tiny-imagenet", 16, 84, 12, 0.0015),
    "VI": ("tiny-imagenet", 32, 84, 12, 0.0015),
    "VII": ("tiny-imagenet", 64, 84, 12, 0.0015),
    "VIII": ("tiny-imagenet", 32, 80, 10, 0.0015),
    "IX": ("tiny-imagenet", 64, 80, 10, 0.0016),
}
# at scale cpu: seeds, training images and epochs of the fair column. Claims of accuracy are of I, II and V; of VI to IX
# one seed stands next to the printed number
LENGTHS = {"I": (5, FEW, 10), "II": (5, FEW, 10), "III": (3, FEW, 10), "IV": (3, FEW, 10), "V": (3, 20_000, 7)}
REST = (1, 15_000, 5)
LITERAL = {"cifar10": (FEW, 10), "tiny-imagenet": (10_000, 5)}  # training images and epochs, of one seed


def about(tiny: bool, tokens: int, m: int) -> str:
    if not tiny:
        return (
            f"{tokens} tokens and {m} random features on CIFAR-10. Expected: fair, no significant difference between "
            f"kernels, and none faster than softmax; in the report ViT is two to five points ahead."
        )
    speed = "nothing trains faster than softmax"
    if tokens == 256:
        speed = "a linear attention with 16 or 32 features trains faster than softmax"
    return (
        f"{tokens} tokens and {m} random features on TinyImageNet (200 classes, or the first 100 if only these are "
        f"installed). Expected: with {tokens} tokens {speed}; in the report exp is the best Performer, in VIII and IX "
        "above ViT."
    )


def experiment(number: str) -> PublishedStudy:
    data, m, epochs, cycle, lr = EXPERIMENTS[number]
    (seeds, images, short), (few, brief) = LENGTHS.get(number, REST), LITERAL[data]
    name, tiny = f"001-{number}", data == "tiny-imagenet"
    size, trunk = SIZES[name], (16, 32, 64, 64) if tiny else (16, 32, 64)
    patch, shape = size["patch_size"], {key: size[key] for key in (*WIDTHS, "heads", "depth")}
    small = {key: size[key] // 4 for key in WIDTHS} | {"heads": 4, "depth": size["depth"] // 2}
    return PublishedStudy(
        name,
        title=f"ViT, relu, exp and fθ, experiment {number}: patches of {patch}, {m} features",
        about=about(tiny, ((64 if tiny else 32) // patch) ** 2, m),
        data=data,
        durations=HOURS | ({"full": "a day on a GPU"} if tiny else {}),
        mistakes=("M9", "M10"),
        kept="patches, sizes, heads, dropout, Adam, learning rate, batch, restarts, augmentation and redrawing",
        changed="the model is chosen on validation images, and the initial weights are ours; T_mult = 2, and T₀ = 10 "
        "of VIII and IX, are our choice",
        rows=[
            Row("ViT", "softmax"),
            Row("relu", f"performer-relu:m={m}"),
            Row(
                "exp",
                f"performer-exp:m={m}",
                f"performer-exp:m={m},stabilizer=reference",
                changed="the stabiliser is that of performer-pytorch",
            ),
            Row(
                "fθ",
                f"performer-theta-linear:m={m}",
                changed="W multiplies Ωx: n = m is our reading",
            ),
            Row("fθ, positive", f"performer-theta:m={m // 2}", columns=("fair",)),
        ],
        literal=Rerun(
            RECIPE
            | {"size": name, "emb_dropout": size["dropout"], "lr": lr, "epochs": epochs, "restart_epochs": cycle},
            full=Scale(seeds=1),
            # the schedule keeps its shape: all cycles, in fewer epochs
            cpu=Scale(1, few, options=small | {"epochs": brief, "restart_epochs": cycle * brief / epochs}),
        ),
        fair=Rerun(
            {"stem": "conv", "pools": patch.bit_length() - 1, **shape},
            full=Scale(options={"epochs": epochs}),
            cpu=Scale(seeds, images, options=small | {"epochs": short, "trunk": trunk}),
        ),
        smoke_images=200 if tiny else 40,
    )


register(*map(experiment, EXPERIMENTS))
