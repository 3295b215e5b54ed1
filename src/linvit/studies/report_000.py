"""Report 000: Transformers, Linformers and Performers on MNIST and CIFAR-10, from scratch and from a checkpoint.

Its Transformer and Linformer are PyTorch models; its Performers are Keras models with another width, depth, batch size
and head, so its times cannot be compared, and its accuracies hardly (M6, M7). It describes the training of the Keras
models twice; the literal column follows the first description: 30 epochs, batches of 32 on MNIST and 256 on CIFAR-10.

Choices of ours where the report is silent: a constant learning rate of 1e-3 for the PyTorch models; Linformer's k, a
quarter of the tokens (16 in the fair column). Deviations: images are normalised by their own mean and standard
deviation (report: 0.5), and weight decay is added to Adam's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from linvit.devices import pick_device
from linvit.measure.memory import Limits
from linvit.measure.race import ROUNDS
from linvit.measure.speed import attention_speed
from linvit.measure.timing import Timing
from linvit.records import Record
from linvit.report import benchmarks
from linvit.site import Site
from linvit.studies.declaration import (
    ADAM,
    FEW,
    NARROW,
    Figure,
    Options,
    PublishedStudy,
    Rerun,
    Row,
    Scale,
    register,
)
from linvit.studies.run import Reproduction

TORCH = ADAM | {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.0, "redraw": 0, "pad_crop": 0, "flip": "none"}
KINDS = (("softmax", "exp"), ("ReLU", "relu"))
KERAS = {"000-keras-cifar": {"crop": True}}  # of 32 px, patches of 6 leave out two
MISTAKES = ("M5", "M6", "M7", "M8")


KEPT = """patches, sizes, heads, dropout, head, Adam, batch sizes and epochs (of the two descriptions of the Keras
models, the first)"""
CHANGED = """images are normalised by their own mean and deviation (report: 0.5), weight decay is added to Adam's
gradient, the model is chosen on validation images, and the learning rate of the PyTorch models, 1e-3, is our choice"""
FEATURES = (16, 32, 64, 128)


def rows(keras: str, batch: int, k: int, **keras_images: Any) -> list[Row]:
    """The nine rows of both tables, the sweep over features that the report describes and prints in part, and rows that
    those from a checkpoint must beat to save training."""
    theirs: dict[str, Any] = {
        "literal_options": {
            "size": keras,
            "batch_size": batch,
            "weight_decay": 1e-4,
            "epochs": 30,
            **KERAS.get(keras, {}),
        },
        "literal_data": keras_images,
        "changed": f"the Keras model's shape, 30 epochs and batches of {batch}, in PyTorch",
    }
    shape = "the PyTorch Transformer's shape and training: a Keras model could not load its weights"
    random = {f"RF{m} {name}": f"performer-{kernel}:m={m}" for name, kernel in KINDS for m in FEATURES}
    started = ("RF16 softmax", "RF16 ReLU")
    return [
        Row("transformer", "softmax"),
        Row("linformer", "linformer:k=16", f"linformer:k={k}", changed=f"k = {k} is our choice"),
        Row(
            "linformer from checkpoint",
            "linformer:k=16",
            f"linformer:k={k},init=pool",
            checkpoint=True,
            changed=f"k = {k}, and projections that start as averages, are our choices",
        ),
        *(Row(name, spec, **theirs) for name, spec in random.items()),
        *(Row(f"{name} from checkpoint", random[name], checkpoint=True, changed=shape) for name in started),
        Row("deterministic ReLU", "performer-relu:projection=none", **theirs),
        Row("deterministic softmax", "performer-exp:projection=none", **theirs),
        Row("linformer, twice the steps", "linformer:k=16", times=2, columns=("fair",)),
        *(Row(f"{name}, twice the steps", random[name], times=2, columns=("fair",)) for name in started),
        Row("transformer, twice the steps", "softmax", times=2, columns=("fair",)),
    ]


MNIST = PublishedStudy(
    "000-mnist",
    title="Transformer, Linformer and Performers on MNIST",
    about="""Nine systems on MNIST, a sweep over the number of random features, and rows trained for twice the
    steps. Expected: fair at `full`, all within noise of each other and above the report's 99.12 %; at `cpu`, all are
    far less trained.""",
    data="mnist",
    mistakes=MISTAKES,
    kept=KEPT,
    changed=CHANGED,
    rows=rows("000-keras-mnist", batch=32, k=4),
    literal=Rerun(
        TORCH | {"size": "000-torch-mnist", "batch_size": 32, "epochs": 20},
        full=Scale(seeds=1),
        cpu=Scale(seeds=1, limit=5_000, options={"epochs": 2}),
    ),
    fair=Rerun(
        full=Scale(seeds=5, options={"epochs": 20}),
        cpu=Scale(seeds=8, limit=10_000, options=NARROW | {"epochs": 3}),
    ),
)

CIFAR10 = PublishedStudy(
    "000-cifar10",
    title="Transformer, Linformer and Performers on CIFAR-10",
    about="""Nine systems, a sweep over the number of random features, and rows trained for twice the steps, on
    CIFAR-10. Expected: fair at `full`, every Performer above the report's best (72.70 %); more features help FAVOR+
    and hardly ReLU; twice the steps from scratch are no worse than a checkpoint and as many steps again.""",
    data="cifar10",
    mistakes=MISTAKES,
    kept=KEPT + ", 72 px images for the PyTorch models and 32 px for the Keras models",
    changed=CHANGED,
    rows=rows("000-keras-cifar", batch=256, k=36, image_size=32),
    literal=Rerun(
        TORCH | {"size": "000-torch-cifar", "batch_size": 32, "epochs": 100},
        full=Scale(seeds=1),
        cpu=Scale(seeds=1, limit=1_500, options={"epochs": 2}),
        image_size=72,
    ),
    fair=Rerun(
        full=Scale(seeds=5, options={"epochs": 12}),
        # 48 px in a stem that halves them twice: the report's 144 tokens
        cpu=Scale(seeds=5, limit=10_000, image_size=48, options=NARROW | {"epochs": 10}),
    ),
)

CIFAR100 = replace(
    CIFAR10,
    name="000-cifar100",
    title="Transformer, Linformer and Performers on CIFAR-100",
    about="The systems of 000-cifar10 on CIFAR-100. The report was asked for this and has no results. No expectation.",
    data="cifar100",
    smoke_images=100,
    fair=replace(CIFAR10.fair, cpu=Scale(limit=FEW, options=NARROW | {"epochs": 6})),
)

NO_BLOCKS = {"depth": 0, "heads": None, "mlp_dim": None}
HYBRID = PublishedStudy(
    "000-hybrid",
    title="A ResNet's first stages alone, and followed by a Transformer or Performers",
    about="""The first stages of a ResNet alone, with wider stages, and followed by attention: the report claims that
    CNN + Performer beats CNN, and prints no number. Expected: transformer blocks help, and no attention differs
    significantly from another; `uniform` shows how much of the gain is due to attention.""",
    data="cifar10",
    rows=[
        Row("CNN", "softmax", options=NO_BLOCKS),
        Row("CNN, wider", "softmax", options=NO_BLOCKS | {"trunk": (20, 40, 96)}),
        Row("CNN + Transformer", "softmax"),
        Row("CNN + Performer, softmax", "performer-exp:m=32"),
        Row("CNN + Performer, ReLU", "performer-relu:m=32"),
    ],
    fair=Rerun(
        {"stem": "resnet", "trunk": (16, 32, 64), "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128},
        full=Scale(seeds=5, options={"epochs": 30}),
        cpu=Scale(limit=FEW, options={"epochs": 6}),
    ),
)


def measure_linformer(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    timing = Timing(rounds=size["rounds"], device=pick_device(size["device"] or run.request.device))
    specs = [f"linformer:k={k}" for k in size["keys"]]
    kept = {"tokens": size["tokens"], "timing": timing, "limits": size["limits"]}
    return attention_speed(specs, size["site"], **kept, progress=run.progress)


LONG = {"site": Site(8, 64, 1), "tokens": (512, 1024, 2048, 4096, 8192, 16384)}
LINFORMER = Figure(
    "000-fig2",
    title="Time of a Linformer by length and k",
    about="""The report copies a figure of the Linformer's inference time over the sequence length, for several k, and
    never measures it. Attention alone, forward, and with its backward pass. Expected: time grows with the length and
    with k, and softmax's with the square of the length.""",
    durations={"full": "an hour on a GPU", "cpu": "10 min", "smoke": "seconds"},
    mistakes=("M5",),
    measure=measure_linformer,
    draw=lambda records, folder: benchmarks.speed_to_the_limit(records),
    scales={
        "full": LONG | {"keys": (128, 256, 512), "limits": Limits(), "rounds": ROUNDS, "device": None},
        "cpu": LONG | {"keys": (32, 128, 512), "limits": Limits(4 * 2**30, 10.0), "rounds": 5, "device": "cpu"},
        "smoke": {
            "site": Site(2, 16, 1),
            "tokens": (16, 32),
            "keys": (4, 8),
            "limits": Limits(),
            "rounds": 2,
            "device": "cpu",
        },
    },
    reduced={"cpu": "a processor, with limits of 10 seconds and 4 GiB", "smoke": "16 and 32 tokens"},
)

register(MNIST, CIFAR10, CIFAR100, HYBRID, LINFORMER)
