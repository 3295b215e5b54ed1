"""The paper's figures that are measured on whole models: times by length and by depth, and errors through depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linvit.data import load_data, normalise
from linvit.devices import pick_device
from linvit.measure.depth import depth_errors
from linvit.measure.error import Draws
from linvit.measure.lengths import model_times
from linvit.measure.memory import Limits
from linvit.measure.models import side_by_side
from linvit.measure.race import ROUNDS
from linvit.measure.timing import Timing
from linvit.measure.trained import Subject
from linvit.models import model_config
from linvit.pipeline.train import train
from linvit.records import Record
from linvit.report import benchmarks
from linvit.studies import paper_charts
from linvit.studies.declaration import MINUTES, Figure, Options, register
from linvit.studies.pinned import pinned
from linvit.studies.quiet import marked
from linvit.studies.run import Reproduction
from linvit.training.checkpoint import load

RACED = ("softmax", "performer-exp:m=64", "performer-relu:m=64", "linformer:k=64", "identity")


def measure_lengths(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    shape: dict[str, Any] = {"stem": "masked-pixel", "channels": 1, "positions": "sincos", **size["shape"]}
    timing = Timing(rounds=size["rounds"], device=pick_device(size["device"] or run.request.device))
    kept = {"sides": size["sides"], "timing": timing, "limits": size["limits"]}
    return model_times(RACED, shape, **kept, progress=run.progress)


SIDES = (16, 32, 64, 128, 256)  # 256 to 65,536 tokens
LENGTHS = Figure(
    "paper-fig3-models",
    title="Speed of whole models up to the limit of memory",
    about="""Whole models as in the paper: every token one of 256 values, inference and training steps, up to a limit of
    time or memory, with v itself as the lower bound. Expected: Performers stay near the bound, and reach lengths at
    which softmax takes too long; the paper's V100 times cannot be compared.""",
    durations={"full": "an hour on a GPU", "cpu": "15 min", "smoke": "seconds"},
    measure=measure_lengths,
    draw=lambda records, folder: benchmarks.models_to_the_limit(records),
    scales={
        "full": {
            "shape": {"dim": 512, "depth": 6, "heads": 8, "mlp_dim": 2048},
            "sides": SIDES,
            "limits": Limits(),
            "rounds": ROUNDS,
            "device": None,
        },
        "cpu": {
            "shape": {"dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256},
            "sides": SIDES,
            "limits": Limits(6 * 2**30, 15.0),
            "rounds": 5,
            "device": "cpu",
        },
        "smoke": {
            "shape": {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16},
            "sides": (8, 16),
            "limits": Limits(),
            "rounds": 2,
            "device": "cpu",
        },
    },
    reduced={"cpu": "a processor, 2 layers of width 128, limits of 15 seconds and 6 GiB", "smoke": "64 and 256 tokens"},
)


def measure_depth(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    """In a model that is trained for it, whose queries and keys are not those of chance."""
    shape = {"stem": "patch", "patch_size": size["patch"], "dim": 64, "heads": 4, "mlp_dim": 128}
    shape |= {"depth": size["depth"], "epochs": size["epochs"]}
    options = {"device": run.request.device, "data_root": run.request.data_root, "out": folder / "model", "test": False}
    options |= pinned(size["data"], "classification", shape)
    trained = train(size["data"], attention="softmax", limit=size["limit"], **options)
    model = load(trained.folder / "best")
    data = load_data(size["data"], root=run.request.data_root)
    pixels, _ = data.test.batch(slice(0, 16))
    images = normalise(pixels, tuple(model.about["mean"]), tuple(model.about["std"]))
    subject = Subject(model.eval(), images, "trained")
    specs = [f"performer-{name}:m={m}" for m in (32, 128) for name in ("exp", "hyp", "trig")]
    return depth_errors(subject, specs, draws=Draws(size["draws"]), progress=run.progress)


DEPTH = Figure(
    "paper-fig14",
    title="Error through depth",
    about="""How the error of a softmax estimate accumulates through the layers of a model that was trained with
    softmax, with uniform attention for reference. Expected: the error grows with depth, falls with the number of
    features, and is smaller for `hyp` than for `exp`.""",
    durations=MINUTES | {"full": "an hour on a GPU", "cpu": "10 min"},
    measure=measure_depth,
    draw=lambda records, folder: benchmarks.depth(records),
    scales={
        "full": {"data": "cifar10", "limit": None, "epochs": 30, "depth": 12, "patch": 2, "draws": 15},
        "cpu": {"data": "cifar10", "limit": 10_000, "epochs": 4, "depth": 12, "patch": 4, "draws": 5},
        "smoke": {"data": "digits", "limit": 40, "epochs": 1, "depth": 2, "patch": 2, "draws": 2},
    },
    reduced={"cpu": "64 tokens, 10,000 images, 4 epochs, 5 draws", "smoke": "2 layers of 16 tokens, on digits"},
)

# variant of a record → its attention and number of layers
LAYERED: Mapping[str, tuple[str, int]] = {
    f"{spec}, {layers} layers": (spec, layers)
    for spec in ("softmax", "performer-exp:m=64", "performer-relu:m=64", "identity")
    for layers in (1, 2, 4, 8, 12)
}


def measure_layers(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    shape = {"image_size": size["side"], "patch_size": 4, "dim": size["dim"], "heads": 4, "mlp_dim": 2 * size["dim"]}
    configs = {
        name: model_config(**shape, depth=layers, attention=spec)
        for name, (spec, layers) in LAYERED.items()
        if layers in size["depths"]
    }
    timing = Timing(batch=size["batch"], rounds=size["rounds"], device=pick_device(run.request.device))
    return marked(lambda: side_by_side(configs, baselines={}, timing=timing, progress=run.progress))


LAYERS = Figure(
    "paper-fig20-21",
    title="Training steps by the number of layers",
    about="""Training steps of whole models by the number of layers, with v itself as the lower bound. Expected: lines
    whose slopes are the cost of a layer; at 1,024 tokens Performers are close to the bound. (The paper's captions refer
    to a list that is missing.)""",
    durations={"full": "minutes on a GPU", "cpu": "15 min", "smoke": "seconds"},
    measure=measure_layers,
    draw=lambda records, folder: paper_charts.layers(records, LAYERED),
    scales={
        "full": {"depths": (1, 2, 4, 8, 12), "side": 128, "dim": 512, "batch": 16, "rounds": 30},
        "cpu": {"depths": (1, 2, 4), "side": 128, "dim": 128, "batch": 4, "rounds": 15},
        "smoke": {"depths": (1, 2), "side": 16, "dim": 16, "batch": 2, "rounds": 2},
    },
    reduced={"cpu": "1,024 tokens, width 128, 1 to 4 layers", "smoke": "16 tokens, width 16"},
)

register(LENGTHS, DEPTH, LAYERS)
