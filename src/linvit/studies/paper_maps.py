"""The paper's figures about what attention looks at: maps, and tokens that it treats alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import altair as alt
import numpy as np
import torch

from linvit.data import load_data, normalise
from linvit.measure.maps import model_maps, store_maps
from linvit.measure.provenance import provenance
from linvit.measure.tokens import attended, frequencies, nearness, similarity
from linvit.measure.trained import Subject, captured
from linvit.models import model_config
from linvit.models.stems import to_levels
from linvit.pipeline.train import train
from linvit.records import Record
from linvit.report import benchmarks
from linvit.schemas.experiment import BACKBONES
from linvit.studies import paper_charts
from linvit.studies.declaration import MINUTES, Figure, Options, register
from linvit.studies.pinned import pinned
from linvit.studies.run import Reproduction
from linvit.training.checkpoint import load

PHOTO = {"data": "tiny-imagenet", "image": 0}
LEVELS = 20  # as many as there are standard amino acids


def measure_maps(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    model = load(BACKBONES / "softmax")
    data = load_data(size["data"], root=run.request.data_root, image_size=model.config.image_size, channels=3)
    pixels, _ = data.test.batch(slice(0, size["image"] + 1))
    images = normalise(pixels, tuple(model.about["mean"]), tuple(model.about["std"]))
    subject, others = Subject(model, images, "the backbone that ships"), ["performer-hyp:m=64", "performer-relu:m=64"]
    for found in model_maps(subject, others, image=size["image"], progress=run.progress):
        yield from found.records
        yield store_maps(found, folder)


def draw_maps(records: Sequence[Record], folder: Path) -> alt.VConcatChart:
    weights = {}
    for record in records:
        if record.artefact:
            with np.load(folder / record.artefact) as stored:
                weights[str(record.tags["attention"])] = stored["maps"]
    trained = next(iter(weights.values()))  # the model's own
    side = math.isqrt(trained.shape[-1])
    heads = [paper_charts.two_heads(trained, side)] if trained[0].size else []
    return alt.vconcat(benchmarks.maps(weights, records), *heads, spacing=40, title=alt.TitleParams(MAPS.title))


MAPS = Figure(
    "paper-fig10-11",
    title="Attention maps of a trained model",
    about="""Where a trained model looks: the matrices of every layer and head for one photo, by softmax and by its
    estimates on the same q and k; and two heads in detail, the one that looks most at neighbours and the one that looks
    most at fixed tokens. Expected: some heads look nearby, some at fixed places; `hyp` resembles softmax, ReLU is
    flat.""",
    measure=measure_maps,
    draw=draw_maps,
    scales={"full": PHOTO, "cpu": PHOTO, "smoke": {"data": "digits", "image": 0}},
    reduced={"full": "photos in place of proteins", "cpu": "photos in place of proteins", "smoke": "a digit"},
)


def measure_frequencies(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    common = provenance(torch.device("cpu"), torch.float32)
    for name in size["data"]:
        data = load_data(name, root=run.request.data_root, limit=size["limit"])
        config = model_config(
            stem="masked-pixel", image_size=data.image_size, channels=data.channels, levels=LEVELS, dim=8, depth=0
        )
        n = len(data.train) * config.tokens
        for level, share in enumerate(frequencies(data.train, config)):
            yield Record(
                "token_frequency", float(share), "fraction", n, **common, tags={"dataset": name, "level": level}
            )


FREQUENCIES = Figure(
    "paper-fig9",
    title="Frequencies of tokens",
    about="""The paper's histogram of amino acids, of pixels in 20 levels of grey in their place. Expected: digits are
    black and white, photos have every level.""",
    durations=dict.fromkeys(MINUTES, "seconds"),
    measure=measure_frequencies,
    draw=lambda records, folder: paper_charts.histograms(records),
    scales={
        "full": {"data": ("mnist", "cifar10:grey=true"), "limit": None},
        "cpu": {"data": ("mnist", "cifar10:grey=true"), "limit": None},
        "smoke": {"data": ("digits",), "limit": 40},
    },
    reduced={
        "full": "pixels in place of proteins",
        "cpu": "pixels in place of proteins",
        "smoke": "40 images, digits",
    },
)


@torch.no_grad()
def measure_similarity(size: Options, folder: Path, run: Reproduction) -> Iterator[Record]:
    """Of a model that is trained on hidden pixels, on whole images."""
    shape = {"levels": LEVELS, "depth": size["depth"], "epochs": size["epochs"]}
    options = {"device": run.request.device, "data_root": run.request.data_root, "out": folder / "model", "test": False}
    options |= pinned(size["data"], "masked-pixel", shape) | {"image_size": size["side"], "limit": size["limit"]}
    with torch.enable_grad():
        trained = train(size["data"], attention=size["attention"], task="masked-pixel", **options)
    model = load(trained.folder / "best")
    data = load_data(size["data"], root=run.request.data_root, image_size=size["side"])
    x = normalise(data.test.batch(slice(0, size["images"]))[0], (0.0,), (1.0,))
    given: dict[int, torch.Tensor] = {}
    levels, seen = to_levels(x, model.config), 0
    for batch in captured(model, x):
        count = len(batch[0][1])
        for layer, (attention, q, k, _) in enumerate(batch):
            found = count * attended(attention.attention_matrix(q, k), levels[seen : seen + count], LEVELS)
            given[layer] = given.get(layer, torch.zeros_like(found)) + found
        seen += count
    alike, near = similarity(each / seen for each in given.values()), nearness(LEVELS)
    common = provenance(torch.device("cpu"), torch.float32)
    for (level, other), value in np.ndenumerate(alike):
        known = {"expected": float(near[level, other]), "images": seen, "attention": size["attention"]}
        tags = {"model": f"trained on {data.name}", "level": level, "other": other, **known}
        found = None if math.isnan(value) else float(value)
        yield Record("token_similarity", found, "", seen, **common, tags=tags)


PIXELS = {"data": "cifar10:grey=true", "side": 16, "attention": "performer-relu:m=64"}
SIMILARITY = Figure(
    "paper-fig13",
    title="Similarity of tokens, from attention",
    about="""Which tokens attention treats alike, as in the paper's figure of amino acids: a bidirectional Performer is
    trained on hidden pixels in 20 levels of grey, and two levels are alike if the same heads attend to them. What is
    known of amino acids by other means (BLOSUM) is here how near two levels are. No expectation.""",
    durations=MINUTES | {"full": "an hour on a GPU"},
    measure=measure_similarity,
    draw=lambda records, folder: paper_charts.similarities(records),
    scales={
        "full": PIXELS | {"limit": None, "epochs": 20, "depth": 6, "images": 256},
        "cpu": PIXELS | {"limit": 4_000, "epochs": 4, "depth": 3, "images": 64},
        "smoke": {
            "data": "digits",
            "side": 8,
            "attention": "performer-relu:m=8",
            "limit": 40,
            "epochs": 1,
            "depth": 1,
            "images": 4,
        },
    },
    reduced={
        "full": "pixels in place of proteins",
        "cpu": "pixels in place of proteins, 256 tokens, 4,000 images, 4 epochs",
        "smoke": "one layer, 40 digits",
    },
)

register(MAPS, FREQUENCIES, SIMILARITY)
