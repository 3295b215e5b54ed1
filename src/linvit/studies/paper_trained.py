"""The paper's figures that need training, with images in place of its proteins and texts.

Their numbers cannot be compared with ours: the data differ, and the models are hundreds of times smaller. What can be
tested is what the figures are meant to show.
"""

from __future__ import annotations

from dataclasses import replace

from linvit.studies.declaration import ADAM, DAY, FEW, HOURS, NARROW, PublishedStudy, Rerun, Row, Scale, register

REDRAWN, FIXED = {"redraw": 100}, {"redraw": 0}

TRANSFER = PublishedStudy(
    "paper-fig5",
    title="A trained Transformer's weights in Performers (image analogue)",
    about="""The weights of a trained softmax model loaded into Performers and a Linformer: their accuracy before
    training (the column "before training"), and after as many steps again. Expected: `hyp` and `exp` keep most of the
    accuracy, `trig` and a Linformer little; all recover, and redrawing helps where the estimate is poor. Two rows are
    trained from scratch for twice the steps, as many as the others and the Transformer took together.""",
    data="cifar10",
    rows=[
        Row("Transformer", "softmax"),
        *(
            Row(f"{name}, {how}", spec, options=redraw, checkpoint=True)
            for name, spec in (
                ("positive", "performer-exp:m=32"),
                ("positive, ±Ω", "performer-hyp:m=16"),
                ("trigonometric", "performer-trig:m=16"),
                ("regularised", "performer-smreg:m=32"),
            )
            for how, redraw in (("redrawn", REDRAWN), ("fixed", FIXED))
        ),
        Row("Linformer", "linformer:k=16", checkpoint=True),
        Row("positive, redrawn, from scratch", "performer-exp:m=32", options=REDRAWN, times=2),
        Row("Linformer, from scratch", "linformer:k=16", times=2),
    ],
    fair=Rerun(
        {"heads": 4},
        full=Scale(seeds=5, options={"epochs": 12}),
        cpu=Scale(limit=FEW, options=NARROW | {"epochs": 8}),
    ),
)

REDRAW = PublishedStudy(
    "paper-fig15",
    title="Fixed and redrawn features, lucky and unlucky seeds",
    about="""Random features that stay as first drawn, against features redrawn every 100 steps, over several seeds.
    Expected: with 16 features the spread over seeds and over feature draws is larger for fixed ones; `smreg` and ReLU
    are no worse than the unbiased estimate.""",
    data="cifar10",
    durations=HOURS,
    rows=[
        Row("softmax", "softmax"),
        Row("exp, fixed", "performer-exp:m=16", options=FIXED),
        Row("exp, redrawn", "performer-exp:m=16", options=REDRAWN),
        Row("smreg, fixed", "performer-smreg:m=16", options=FIXED),
        Row("smreg, redrawn", "performer-smreg:m=16", options=REDRAWN),
        Row("relu, redrawn", "performer-relu:m=16", options=REDRAWN),
    ],
    fair=Rerun({"heads": 4}, full=Scale(seeds=10), cpu=Scale(seeds=5, limit=FEW, options=NARROW | {"epochs": 10})),
)

KERNELS = PublishedStudy(
    "paper-fig16-17",
    title="Kernels of generalised attention, one for each f",
    about="""Generalised attention with every f of the paper; literal, as written, where the denominator of a signed f
    may vanish and the run end in NaN, which is kept. Expected: literal, `identity`, `tanh` and `cos` diverge or lag
    behind; fair, where denominators are kept positive, all learn MNIST, and few differ significantly. Learning
    curves are on logarithmic axes, as in the paper.""",
    data="mnist",
    durations=HOURS | {"full": "an hour on a GPU"},
    log_curves=True,
    kept="every f as written, with denominators that may vanish",
    changed="images, the size of the model and the recipe: the paper's are of proteins",
    rows=[
        Row("softmax", "softmax"),
        Row("softmax, positive", "performer-exp:m=32"),
        Row("softmax, trigonometric", "performer-trig:m=16", "performer-trig:m=16,negative=literal"),
        *(Row(f, f"performer-{f}:m=32") for f in ("relu", "sigmoid", "abs", "elu1")),
        *(
            Row(f, f"performer-{f}:m=32", f"performer-{f}:m=32,negative=literal")
            for f in ("gelu", "cos", "tanh", "identity")
        ),
        Row("exponential", "performer-gexp:m=32"),
        Row("Linear Transformer", "performer-elu1:projection=none"),
        Row("OPT (v itself)", "identity", columns=("fair",)),
    ],
    literal=Rerun(
        ADAM | {"size": "nano", "patch_size": 4, "lr": 1e-3, "schedule": "constant", "batch_size": 128, "epochs": 20},
        cpu=Scale(seeds=1, limit=10_000, options={"epochs": 8}),
    ),
    fair=Rerun(full=Scale(seeds=5), cpu=Scale(limit=10_000, options=NARROW | {"epochs": 6})),
)

PIXELS = {"levels": 16}
LARGE = {"dim": 512, "depth": 6, "heads": 8, "mlp_dim": 2048, "levels": 256}
# images of 14 px: 196 tokens, of which a core trains several times as many as of 784
SMALL_PIXELS = Scale(limit=3_000, image_size=14, options={"dim": 32, "depth": 4, "mlp_dim": 64, "epochs": 6})
LINEAR = Row("Linear Transformer", "performer-elu1:projection=none")
MODELS = (("Transformer", "softmax"), ("Performer-ReLU", "performer-relu:m=64"))
POSITIVE = Row("Performer-SOFTMAX", "performer-exp:m=64")

NEXT_PIXEL = PublishedStudy(
    "paper-fig6-7",
    title="Unidirectional models: the next pixel",
    about="""(U) of the paper's figures: unidirectional models of MNIST's pixels in place of proteins and ImageNet64, in
    bits per dimension. Performers, a Transformer, and the small Transformers of 1, 2 and 3 layers that the paper has as
    controls. Expected: ReLU and positive features within hundredths of a bit of softmax; fewer layers need more
    bits.""",
    data="mnist",
    task="next-pixel",
    durations=DAY,
    rows=[
        *(Row(name, spec) for name, spec in MODELS),
        POSITIVE,
        *(Row(f"Transformer, {n} layer{'s' * (n > 1)}", "softmax", options={"depth": n}) for n in (1, 2, 3)),
    ],
    fair=Rerun(PIXELS, full=Scale(options=LARGE), cpu=SMALL_PIXELS),
)

MASKED_PIXEL = PublishedStudy(
    "paper-fig6-7-bidirectional",
    title="Bidirectional models: masked pixels",
    about="""(B) of the paper's figures: hidden pixels of MNIST from all the others, before and after them, in place of
    masked proteins, in bits per hidden value. Performers, a Transformer, and a Linformer, which cannot be
    unidirectional. Expected: ReLU and positive features within hundredths of a bit of softmax, the Linformer
    behind.""",
    data="mnist",
    task="masked-pixel",
    durations=DAY,
    rows=[*(Row(name, spec) for name, spec in MODELS), POSITIVE, Row("Linformer", "linformer:k=64")],
    fair=Rerun(PIXELS, full=Scale(options=LARGE), cpu=SMALL_PIXELS),
)

DEEP = PublishedStudy(
    "paper-fig18",
    title="Gradients of 36 unidirectional layers, next-pixel",
    about="""The left panel: the Linear Transformer (ELU + 1) and Performers, unidirectional, three seeds: in the paper
    its gradients explode. 36 layers, trained with Adam and without clipping at every scale but `smoke`. No expectation:
    the largest norm of each run shows how close it came.""",
    data="mnist",
    task="next-pixel",
    durations=DAY,
    rows=[*(Row(name, spec) for name, spec in MODELS), POSITIVE, LINEAR],
    fair=Rerun(  # Adam, since the pinned optimizer makes all updates of a matrix equally large, whatever its gradient
        PIXELS | ADAM | {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.0},
        full=Scale(options={"dim": 512, "depth": 36, "heads": 8, "mlp_dim": 1024}),
        cpu=Scale(
            limit=1_000,
            image_size=14,
            options={"dim": 32, "depth": 36, "mlp_dim": 64, "epochs": 5, "batch_size": 32},
        ),
    ),
)
DEEP_MASKED = replace(
    DEEP,
    name="paper-fig18-bidirectional",
    title="Gradients of 36 bidirectional layers, masked pixels",
    about="""The right panel: the same systems, bidirectional, on hidden pixels. 36 layers, trained with Adam and
    without clipping at every scale but `smoke`. No expectation: the paper's curve of the Linear Transformer ends early
    there, too.""",
    task="masked-pixel",
)

LONG_RANGE = PublishedStudy(
    "paper-fig19",
    title="Long Range Arena's pixels: accuracy, speed and memory",
    about="""Long Range Arena's image task: CIFAR-10 in grey, every pixel a token (L = 1,024); accuracy, speed and
    memory as bubbles on its page. Expected: linear attentions train several times as fast as softmax, and none is
    significantly more accurate.""",
    data="cifar10:grey=true",
    durations=DAY,
    rows=[
        Row("Transformer", "softmax"),
        Row("Performer", "performer-relu:m=32"),
        Row("Performer, softmax", "performer-exp:m=32"),
        Row("Linear Transformer", "performer-elu1:projection=none"),
        Row("Linformer", "linformer:k=32"),
        Row("Efficient attention", "efficient"),
        Row("Local attention", "window"),
    ],
    fair=Rerun(
        {"stem": "pixel", "dim": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "epochs": 50},
        cpu=Scale(seeds=1, limit=5_000, options={"dim": 32, "depth": 2, "mlp_dim": 64, "epochs": 4}),
    ),
)

SHORT_TRUNK = {"stem": "conv", "trunk": (16, 32), "pools": 1}
SMALL = {"dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
PHOTOS = PublishedStudy(
    "paper-long",
    title="Photos as 1,024 tokens: speed and accuracy",
    about="""Photos as 1,024 tokens, the length that linear attention is made for: TinyImageNet behind one pooling.
    Expected: ReLU features train at least twice as fast as softmax, and lose less than a point.""",
    data="tiny-imagenet",
    durations=DAY,
    smoke_images=200,
    rows=[
        Row("Transformer", "softmax"),
        Row("Performer-ReLU", "performer-relu:m=16"),
        Row("Performer-ReLU, deterministic", "performer-relu:projection=none"),
        Row("Performer-SOFTMAX", "performer-exp:m=16"),
        Row("Linformer", "linformer:k=64"),
    ],
    fair=Rerun(
        SHORT_TRUNK | {"trunk": (32, 64), "dim": 128, "depth": 4, "heads": 4, "mlp_dim": 256, "epochs": 60},
        cpu=Scale(seeds=1, limit=6_000, options=SMALL | {"trunk": (16, 32), "epochs": 5}),
    ),
)


def digits(tokens: int, side: int, cpu: Scale, expected: str) -> PublishedStudy:
    return PublishedStudy(
        f"paper-long-{tokens}",
        title=f"Digits as {tokens:,} tokens: speed and accuracy",
        about=f"""MNIST at {side} px, one token for every 2 × 2 pixels ({tokens} tokens). Small images of one kind leave
        little noise, so a loss of one point can be ruled out within an hour. Expected: {expected}.""",
        data="mnist",
        durations=HOURS | {"full": "an hour on a GPU"},
        rows=[
            Row("Transformer", "softmax:dwc=3"),
            Row("Performer-ReLU", "performer-relu:m=16,dwc=3"),
            Row("uniform", "uniform:dwc=3"),  # the control, with the convolution that the others have
        ],
        fair=Rerun(
            SHORT_TRUNK | SMALL | {"positions": "sincos", "batch_size": 32, "epochs": 10},
            full=Scale(seeds=5),
            cpu=cpu,
            image_size=side,
        ),
    )


DIGITS_1024 = digits(
    1024,
    side=64,
    cpu=Scale(seeds=5, limit=6_000, options={"epochs": 3}),
    expected="ReLU features train at least twice as fast as softmax, and lose less than a point",
)
DIGITS_256 = digits(
    256,
    side=32,
    cpu=Scale(seeds=3, limit=6_000, options={"epochs": 5}),
    expected="ReLU features are slightly faster than softmax, and not significantly less accurate",
)

register(TRANSFER, NEXT_PIXEL, MASKED_PIXEL, REDRAW, KERNELS, DEEP, DEEP_MASKED)
register(LONG_RANGE, PHOTOS, DIGITS_1024, DIGITS_256)
