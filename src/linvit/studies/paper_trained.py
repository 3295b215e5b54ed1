"""The paper's figures that take training, with images in place of its proteins and texts.

None of them has numbers that could stand beside ours: the data are others, and the models hundreds of times smaller.
What can be tested is what the figures are there to show.
"""

from __future__ import annotations

from linvit.studies import NARROW, STUDIES, Row, Scale, Table

FAIR = ("fair",)


@STUDIES.register("paper-fig5")
class Transfer(Table):
    """A trained softmax model's weights given to Performers and a Linformer: what is left at once (the column "before
    training"), and after as many steps again. Expected: `hyp` and `exp` keep most of the accuracy, `trig` and a
    Linformer little; all recover, and new features help those whose estimate is poor. Two have also been trained from
    nothing for twice the steps, as many as the others and the Transformer took together.

        linvit reproduce paper-fig5
    """

    report, title, data = "004", "A trained Transformer's weights in Performers (image analogue)", "cifar10"
    takes = {"full": "hours on a GPU", "cpu": "20 min", "smoke": "30 s"}
    rows = [
        Row("Transformer", "softmax", columns=FAIR),
        *(
            Row(f"{name}{how}", spec, fair={"redraw": every}, checkpoint=True, columns=FAIR)
            for name, spec in (
                ("positive", "performer-exp:m=32"), ("positive, ±Ω", "performer-hyp:m=16"),
                ("trigonometric", "performer-trig:m=16"), ("regularised", "performer-smreg:m=32"),
            )
            for how, every in ((", redrawn", 100), (", fixed", 0))
        ),
        Row("Linformer", "linformer:k=16", checkpoint=True, columns=FAIR),
        Row("positive, redrawn, from nothing", "performer-exp:m=32", fair={"redraw": 100}, times=2, columns=FAIR),
        Row("Linformer, from nothing", "linformer:k=16", times=2, columns=FAIR),
    ]  # fmt: skip
    literal, fair = {}, {"heads": 4}
    scales = {
        "full": {"fair": Scale(seeds=5, options={"epochs": 12})},
        "cpu": {"fair": Scale(limit=20_000, options=NARROW | {"epochs": 3},
                              text="20,000 images, a quarter of the width, 3 epochs of 12")},
    }  # fmt: skip


@STUDIES.register("paper-fig15")
class Redraw(Table):
    """Random features that stay as they were drawn, against new ones every 100 steps; seeds are lucky or not. Expected:
    with 16 features the spread over seeds and over new draws is larger for fixed ones; `smreg` and ReLU are no worse
    than the unbiased estimate.

        linvit reproduce paper-fig15
    """

    report, title, data = "004", "Fixed and redrawn features, lucky and unlucky seeds", "cifar10"
    takes = {"full": "hours on a GPU", "cpu": "30 min", "smoke": "30 s"}
    rows = [
        Row("softmax", "softmax", columns=FAIR),
        *(
            Row(f"{name}, {how}", spec, fair={"redraw": every}, columns=FAIR)
            for name, spec in (("exp", "performer-exp:m=16"), ("smreg", "performer-smreg:m=16"))
            for how, every in (("fixed", 0), ("redrawn", 100))
        ),
        Row("relu, redrawn", "performer-relu:m=16", fair={"redraw": 100}, columns=FAIR),
    ]
    literal, fair = {}, {"heads": 4}
    scales = {
        "full": {"fair": Scale(seeds=10)},
        "cpu": {"fair": Scale(seeds=5, options=NARROW | {"epochs": 2}, text="a quarter of the width, 2 epochs of 12")},
    }


@STUDIES.register("paper-fig16-17")
class Sweep(Table):
    """Generalised attention with every f of the paper; literal, as it is written, where the denominator of a signed f
    may vanish and the run end in NaN, which is kept. Expected: literal, `identity`, `tanh` and `cos` diverge or lag;
    fair, where denominators are kept positive, all learn MNIST, and few differ beyond chance.

        linvit reproduce paper-fig16-17
    """

    report, title, data = "004", "Kernels of generalised attention, one for each f", "mnist"
    takes = {"full": "an hour on a GPU", "cpu": "15 min", "smoke": "30 s"}
    rows = [
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
        Row("OPT (v itself)", "identity", columns=FAIR),
    ]
    literal = {"size": "nano", "patch_size": 4, "optimizer": "adam", "lr": 1e-3, "betas": (0.9, 0.999),
               "schedule": "constant", "warmup": 0.0, "clip_norm": 0.0, "label_smoothing": 0.0, "batch_size": 128,
               "epochs": 20}  # fmt: skip
    scales = {
        "full": {"literal": Scale(), "fair": Scale(seeds=5)},
        "cpu": {
            "literal": Scale(seeds=1, limit=20_000, options={"epochs": 1}, text="20,000 images, 1 epoch of 20"),
            "fair": Scale(
                limit=20_000, options=NARROW | {"epochs": 2}, text="20,000 images, half the width, 2 epochs of 4"
            ),
        },
    }


class Pixels(Table):
    """A causal model of images, value by value: bits per dimension, less is better."""

    report, data, task = "004", "mnist", "next-pixel"
    literal, fair = {}, {"levels": 16}


@STUDIES.register("paper-fig6-7")
class NextPixel(Pixels):
    """Unidirectional models of MNIST's pixels in place of proteins and ImageNet64: Performers beside a Transformer, the
    small Transformer of one layer that the paper has as a control, and all of it in the reversed order. Expected: ReLU
    and positive features within hundredths of a bit of softmax, one layer behind all of them, both orders alike.

        linvit reproduce paper-fig6-7
    """

    title = "Next-pixel models, forwards and backwards"
    takes = {"full": "a day on a GPU", "cpu": "60 min", "smoke": "30 s"}
    rows = [
        Row("Transformer", "softmax", columns=FAIR),
        Row("Performer-ReLU", "performer-relu:m=64", columns=FAIR),
        Row("Performer-SOFTMAX", "performer-exp:m=64", columns=FAIR),
        Row("Transformer, 1 layer", "softmax", fair={"depth": 1}, columns=FAIR),
        Row("Transformer, reversed", "softmax", fair={"order": "reversed"}, columns=FAIR),
        Row("Performer-ReLU, reversed", "performer-relu:m=64", fair={"order": "reversed"}, columns=FAIR),
    ]
    scales = {
        "full": {"fair": Scale(options={"dim": 512, "depth": 6, "heads": 8, "mlp_dim": 2048, "levels": 256})},
        "cpu": {"fair": Scale(
            seeds=1, limit=4_000, options={"dim": 32, "depth": 2, "mlp_dim": 64, "epochs": 3},
            text="MNIST in 16 levels, 4,000 images, 2 layers of width 32 (of 36 of 512), 3 epochs")},
    }  # fmt: skip


@STUDIES.register("paper-fig18")
class Explosion(Pixels):
    """The Linear Transformer (ELU + 1) beside Performers, unidirectional, three seeds: in the paper its gradients
    explode. Expected: at this depth they do not; the largest norm of each run says how near it came.

        linvit reproduce paper-fig18
    """

    title = "Gradients of the Linear Transformer beside Performers, next-pixel"
    takes = {"full": "a day on a GPU", "cpu": "60 min", "smoke": "30 s"}
    rows = [
        Row("Transformer", "softmax", columns=FAIR),
        Row("Linear Transformer", "performer-elu1:projection=none", columns=FAIR),
        Row("Performer-ReLU", "performer-relu:m=64", columns=FAIR),
        Row("Performer-SOFTMAX", "performer-exp:m=64", columns=FAIR),
    ]
    fair = {"levels": 16, "clip_norm": 0.0}
    scales = {
        "full": {"fair": Scale(options={"dim": 512, "depth": 36, "heads": 8, "mlp_dim": 1024})},
        "cpu": {"fair": Scale(
            limit=2_000, options={"dim": 32, "depth": 4, "mlp_dim": 64, "epochs": 2},
            text="MNIST in 16 levels, 2,000 images, 4 layers of width 32 (of 36 of 512), 2 epochs")},
    }  # fmt: skip


@STUDIES.register("paper-fig19")
class LongRange(Table):
    """Long Range Arena's image task: CIFAR-10 in grey, every pixel a token (L = 1,024); accuracy, speed and memory as
    bubbles on its page. Expected: linear attentions train several times as fast as softmax, and nobody is ahead beyond
    chance.

        linvit reproduce paper-fig19
    """

    report, title, data = "004", "Long Range Arena's pixels: accuracy, speed and memory", "cifar10:grey=true"
    takes = {"full": "a day on a GPU", "cpu": "60 min", "smoke": "30 s"}
    rows = [
        Row("Transformer", "softmax", columns=FAIR),
        Row("Performer", "performer-relu:m=32", columns=FAIR),
        Row("Performer, softmax", "performer-exp:m=32", columns=FAIR),
        Row("Linear Transformer", "performer-elu1:projection=none", columns=FAIR),
        Row("Linformer", "linformer:k=32", columns=FAIR),
        Row("Efficient attention", "efficient", columns=FAIR),
        Row("Local attention", "window", columns=FAIR),
    ]
    literal, fair = {}, {"stem": "pixel", "dim": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "epochs": 50}
    scales = {
        "full": {"fair": Scale()},
        "cpu": {"fair": Scale(
            seeds=1, limit=10_000, options={"dim": 32, "depth": 2, "mlp_dim": 64, "epochs": 2},
            text="10,000 images, 2 layers of width 32, 2 epochs of 50")},
    }  # fmt: skip


@STUDIES.register("paper-long")
class Long(Table):
    """Photos as 1,024 tokens, where linear attention is the point: TinyImageNet behind one pooling. Expected: ReLU
    features train at least twice as fast as softmax, and lose less than a point.

        linvit reproduce paper-long
    """

    report, title, data, fewest = "004", "Photos as 1,024 tokens: speed and accuracy", "tiny-imagenet", 200
    takes = {"full": "a day on a GPU", "cpu": "60 min", "smoke": "30 s"}
    rows = [
        Row("Transformer", "softmax", columns=FAIR),
        Row("Performer-ReLU", "performer-relu:m=16", columns=FAIR),
        Row("Performer-ReLU, deterministic", "performer-relu:projection=none", columns=FAIR),
        Row("Performer-SOFTMAX", "performer-exp:m=16", columns=FAIR),
        Row("Linformer", "linformer:k=64", columns=FAIR),
    ]
    literal = {}
    fair = {"stem": "conv", "trunk": (32, 64), "pools": 1, "dim": 128, "depth": 4, "heads": 4, "mlp_dim": 256,
            "epochs": 60}  # fmt: skip
    scales = {
        "full": {"fair": Scale()},
        "cpu": {"fair": Scale(
            limit=6_000, options={"trunk": (16, 32), "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "epochs": 4},
            text="6,000 images, a quarter of the width, 2 layers, 4 epochs of 60")},
    }  # fmt: skip


LONG = """MNIST at {side} px, a token for every 2 × 2 pixels ({tokens} tokens): what linear attention is worth where it
is the point. Small images of one kind leave little to chance, so that a loss of a point can be ruled out in an hour.
Expected: {expected}.

    linvit reproduce {name}
"""


def long(tokens: int, side: int, epochs: int, expected: str) -> type[Table]:
    name = f"paper-long-{tokens}"
    return type(f"Long{tokens}", (Table,), {
        "__doc__": LONG.format(side=side, tokens=tokens, expected=expected, name=name),
        "report": "004", "title": f"Digits as {tokens:,} tokens: speed and accuracy", "data": "mnist",
        "takes": {"full": "an hour on a GPU", "cpu": "50 min" if tokens > 256 else "10 min", "smoke": "30 s"},
        "rows": [
            Row("Transformer", "softmax:dwc=3", columns=FAIR),
            Row("Performer-ReLU", "performer-relu:m=16,dwc=3", columns=FAIR),
            Row("uniform", "uniform:dwc=3", columns=FAIR),  # the control, with the others' convolution
        ],
        "literal": {}, "sides": {"fair": side},
        "fair": {"stem": "conv", "trunk": (16, 32), "pools": 1, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64,
                 "positions": "sincos", "batch_size": 32, "epochs": 10},
        "scales": {
            "full": {"fair": Scale(seeds=5)},
            "cpu": {"fair": Scale(seeds=5 if tokens > 256 else 3, limit=6_000, options={"epochs": epochs},
                                  text=f"6,000 images, {epochs} epochs of 10")},
        },
    })  # fmt: skip


for tokens, side, epochs, expected in (
    (1024, 64, 3, "ReLU features train at least twice as fast as softmax, and lose less than a point"),
    (256, 32, 5, "ReLU features are a little faster than softmax, and no less accurate beyond chance"),
):
    STUDIES.register(f"paper-long-{tokens}")(long(tokens, side, epochs, expected))
