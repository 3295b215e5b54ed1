"""Report 001: a vision transformer and three Performers on CIFAR-10 (I to IV) and TinyImageNet (V to IX).

Its models come from performer-pytorch, so that "exp" is FAVOR+ with that package's stabiliser (the kernel function it
names is never used), "relu" generalised attention, and fθ ReLU(WΩx) with W drawn unscaled. What it leaves open is ours:
T_mult = 2, which makes its 70 and 84 epochs whole cycles, and T₀ = 10 for the 80 epochs of VIII and IX, which fit none.
The fair column has a convolutional stem of as many tokens as the report has patches. Beside the report's fθ it has
`performer-theta`, which is positive and begins as FAVOR+, with as many features.
"""

from __future__ import annotations

from typing import Any

from linvit.models.sizes import SIZES
from linvit.studies import STUDIES, Row, Scale, Table

ADAM = {"optimizer": "adam", "betas": (0.9, 0.999), "weight_decay": 3e-5, "batch_size": 256, "schedule": "restarts",
        "warmup": 0.0, "clip_norm": 0.0, "label_smoothing": 0.0, "pad_crop": 4, "flip": "random"}  # fmt: skip
WIDTHS = ("dim", "heads", "head_dim", "mlp_dim")
# experiment → features, epochs, length of the first cycle, rate
EXPERIMENTS = {
    "I": (16, 70, 10, 0.0015),
    "II": (64, 70, 10, 0.0015),
    "III": (32, 70, 10, 0.0015),
    "IV": (32, 70, 10, 0.0015),
    "V": (16, 84, 12, 0.0015),
    "VI": (32, 84, 12, 0.0015),
    "VII": (64, 84, 12, 0.0015),
    "VIII": (32, 80, 10, 0.0015),
    "IX": (64, 80, 10, 0.0016),
}
CIFAR = """{name}: {tokens} tokens and {m} random features on CIFAR-10. Expected: fair, nothing to tell the kernels
apart but chance, and nobody faster than softmax from {m} features on; the report has ViT two to five points ahead.

    linvit reproduce {name}
"""
TINY = """{name}: {tokens} tokens and {m} random features on TinyImageNet (200 classes, or the first 100 if only they
are there). Expected: {speed}; the report has exp best of the Performers, and in VIII and IX above ViT.

    linvit reproduce {name}
"""


def rows(m: int) -> list[Row]:
    return [
        Row("ViT", "softmax"),
        Row("relu", f"performer-relu:m={m}"),
        Row("exp", f"performer-exp:m={m}", f"performer-exp:m={m},stabilizer=reference"),
        Row("fθ", f"performer-theta-linear:m={m}"),
        Row("fθ, positive", f"performer-theta:m={m // 2}", columns=("fair",)),
    ]


def scales(cycle: float, epochs: int, done: int, small: dict[str, int], tiny: bool) -> dict[str, dict[str, Scale]]:
    """At `cpu`, the literal schedule keeps its shape: all of its cycles in fewer epochs, `done`."""
    images = 6_000 if tiny else 10_000
    width = f"{images:,} images, a quarter of the width and half of the depth"
    short = {"epochs": done, "restart_epochs": cycle * done / epochs, **small}
    return {
        "full": {"literal": Scale(seeds=1), "fair": Scale(options={"epochs": epochs})},
        "cpu": {
            "literal": Scale(seeds=1, limit=images, options=short, text=f"{width}, {done} epochs of {epochs}"),
            "fair": Scale(
                limit=images,
                options={"epochs": done, "trunk": (16, 32, 64, 64) if tiny else (16, 32, 64), **small},
                text=f"{width}, {done} epochs of {epochs}",
            ),
        },
    }


def experiment(number: str) -> type[Table]:
    """The study of one of the nine, from its line above and its size."""
    name, (m, epochs, cycle, lr) = f"001-{number}", EXPERIMENTS[number]
    size, tiny = SIZES[name], number in ("V", "VI", "VII", "VIII", "IX")
    side, patch = (64 if tiny else 32), size["patch_size"]
    small = {"depth": size["depth"] // 2} | {key: size[key] // 4 for key in WIDTHS if key != "heads"} | {"heads": 4}
    done = 3 if not tiny else 2 if patch == 4 else 4
    fair: dict[str, Any] = {key: size[key] for key in (*WIDTHS, "depth")}
    speed = "with 256 tokens a linear attention of 16 or 32 features trains faster than softmax" if patch == 4 else (
        "with 64 tokens nothing trains faster than softmax"
    )  # fmt: skip
    return type(f"Experiment{number}", (Table,), {
        "__doc__": (TINY if tiny else CIFAR).format(name=name, tokens=(side // patch) ** 2, m=m, speed=speed),
        "report": "001", "title": f"ViT, relu, exp and fθ, experiment {number}: patches of {patch}, {m} features",
        "data": "tiny-imagenet" if tiny else "cifar10", "fewest": 200 if tiny else 40,
        "mistakes": ("M9", "M10"), "rows": rows(m),
        "takes": {"full": "a day on a GPU" if tiny else "hours on a GPU", "cpu": "20 min", "smoke": "30 s"},
        "literal": {"size": name, "emb_dropout": size["dropout"], "lr": lr, "epochs": epochs, "restart_epochs": cycle,
                    **ADAM},
        "fair": {"stem": "conv", "pools": patch.bit_length() - 1, **fair},
        "scales": scales(cycle, epochs, done, small, tiny),
    })  # fmt: skip


for number in EXPERIMENTS:
    STUDIES.register(f"001-{number}")(experiment(number))
