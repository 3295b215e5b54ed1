"""Attentions made for vision, one per row and everything else equal: `linvit reproduce attentions-2026`.

Published tables compare whole models: most keep softmax in some layers, and add convolutions, gates, norms or pixels
that their baseline did not get. Here the model, the images, the recipe and the number of parameters are the same for
all rows; `bare` has the attention alone, `extras` gives every row the same convolution of v, gate and positions.
"""

from __future__ import annotations

from linvit.studies.declaration import Published, PublishedStudy, Rerun, Row, Scale, register
from linvit.studies.hypotheses import Claim, better
from linvit.studies.results import Ref

EXTRAS = "dwc=3,gate=silu,cpe=3"
PATCHES = {"stem": "patch", "patch_size": 4, "dim": 64, "depth": 4, "heads": 4, "mlp_dim": 128}

# name → its spec here, and what its authors report of it: accuracy on ImageNet-1k, and what else is in that model
ATTENTIONS = {
    "softmax": ("softmax", "ImageNet-1k: DeiT-T 72.2 %, DeiT-S 79.8 %."),
    "window": ("window:size=3", ""),
    "performer-exp": ("performer-exp:m=32", ""),
    "performer-relu": ("performer-relu:m=32", "ImageNet-1k: ReLU without a convolution, 69.8 to 70.5 % at T size."),
    "performer-elu1": ("performer-elu1", ""),
    "linformer": ("linformer:k=16", ""),
    "efficient": ("efficient", ""),
    "inline": (
        "inline",
        "ImageNet-1k: T 74.5 % with an input-dependent 3 × 3 convolution of v and 6 heads instead of 3.",
    ),
    "mala": ("mala", "ImageNet-1k: T 75.1 %, S 80.3 %; with 5 × 5 convolution, gate and rotary positions."),
    "agent": ("agent:n=16", "ImageNet-1k: T 74.9 %, S 80.5 % with 3 × 3 convolution and eight bias tables."),
    "focused": ("focused", "ImageNet-1k: T 74.1 % with a depthwise convolution."),
    "pola": ("pola", "Published only in models that keep softmax in half of their stages."),
    "nala": ("nala", "Published only in pyramids with softmax in stages 3 and 4."),
    "mhla": (
        "mhla",
        "ImageNet-1k: T 75.8 %, S 81.0 % at 256 tokens instead of 196, with 5 × 5 convolution and q/k norm.",
    ),
    "rala": ("rala", "ImageNet-1k: S 80.4 %; with 5 × 5 convolution, gate and rotary positions."),
    "vit3": (
        "vit3",
        "ImageNet-1k: T 76.5 %, S 81.6 % with convolutional positions before every block, mean pooling, 6 heads.",
    ),
    "twoscale": ("twoscale:cell=2", ""),
    "uniform": ("uniform", ""),
}
BEST = ("softmax", "performer-relu", "mhla", "mala", "agent", "vit3")  # also run with more tokens


def rows(names: tuple[str, ...], extras: str = "") -> list[Row]:
    made = []
    for name in names:
        spec, claim = ATTENTIONS[name]
        full = spec if not extras else f"{spec},{extras}" if ":" in spec else f"{spec}:{extras}"
        made.append(Row(name, full, published=Published({}, flags=(claim,)) if claim else None))
    return made


def table(suffix: str, what: str, rows: list[Row], rerun: Rerun, data: str = "cifar10") -> PublishedStudy:
    return PublishedStudy(
        f"attentions-2026-{suffix}",
        title=f"Attentions made for vision, {what}",
        about=f"""One attention per row, everything else equal: {what}. No expectation: no such table is published.""",
        data=data,
        durations={"full": "a day on a GPU", "cpu": "4 h", "smoke": "2 min"},
        smoke_images=200,
        rows=rows,
        fair=rerun,
    )


# With lr of 0.006, 0.012, 0.02 and 0.04, performer-relu is right on 63.6, 66.1, 67.3 and 65.8 % of validation images
# after two epochs (one seed; `linvit train` with PATCHES). The other rows have no learning rate of their own.
RECIPE = {"epochs": 100, "lr": 0.02}
SMALL = Rerun(PATCHES | RECIPE, cpu=Scale(options={"epochs": 6}))
LONGER = Rerun(PATCHES | RECIPE | {"patch_size": 2}, cpu=Scale(limit=20_000, options={"epochs": 6}))
PHOTOS = Rerun(PATCHES | RECIPE, cpu=Scale(limit=20_000, options={"epochs": 6}))

register(
    table("bare", "the attention alone, CIFAR-10, 64 tokens", rows(tuple(ATTENTIONS)), SMALL),
    table("extras", f"each with {EXTRAS}, CIFAR-10, 64 tokens", rows(tuple(ATTENTIONS), EXTRAS), SMALL),
    table("256", f"each with {EXTRAS}, CIFAR-10, 256 tokens", rows(BEST, EXTRAS), LONGER),
    table("tiny", f"each with {EXTRAS}, Tiny ImageNet, 256 tokens", rows(BEST, EXTRAS), PHOTOS, "tiny-imagenet"),
)


def claim(name: str, than: str = "softmax") -> Claim:
    """That an attention is more accurate than another where both have the same extras. Most authors' models have such
    extras, so that the attention alone neither shows nor refutes what they report."""
    study = "attentions-2026-extras"
    return Claim(
        f"2026.{name}",
        f"{name} is more accurate than {than}.",
        f"CIFAR-10, 64 tokens, the same model and number of parameters, both with {EXTRAS}.",
        [better(Ref(study, name), Ref(study, than))],
        own=ATTENTIONS[name][1].rstrip("."),
        see_also=("attentions-2026-bare",),
    )


MADE_FOR_VISION = ("inline", "mala", "agent", "mhla", "rala", "vit3")  # said to be more accurate than softmax
CLAIMS = (
    *(claim(name) for name in MADE_FOR_VISION),
    *(claim(name, "performer-relu") for name in ("focused", "pola", "nala")),
)
