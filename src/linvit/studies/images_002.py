"""Report 002's figures of its images: the ten classes, a normalised image, augmentation step by step, and the channels.

They show images of the data set, so that they are drawn where they are made and never published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import torch

from linvit.data import load_data
from linvit.data.augment import Augment
from linvit.records import Record
from linvit.report.images import uri
from linvit.report.vega import data, panels, tooltips, x_axis, y_axis
from linvit.studies.declaration import Figure, Options, register
from linvit.studies.paper_measured import save_arrays
from linvit.studies.run import Reproduction

CHANNELS = ("red", "green", "blue")
SIDE, COLUMNS = 104, 5  # of a picture on the page; pictures in a row
PLAIN: dict[str, Any] = {"pad_crop": 0, "flip": "none"}


def measure(size: Options, folder: Path, run: Reproduction) -> list[Record]:
    """The first image of each class; what the recipe makes of one of them; and what a model sees of it."""
    dataset = load_data(size["data"], root=run.request.data_root, limit=size["limit"])
    images, labels = dataset.train.batch(slice(0, min(len(dataset.train), 500)))
    known = sorted(set(labels.tolist()))
    first = torch.tensor([labels.tolist().index(label) for label in known])
    classes = images[first].numpy().transpose(0, 2, 3, 1)
    chosen = size["image"] % len(known)
    one, label = images[first[chosen]][None], labels[first[chosen]][None]
    steps, mean, std = [], dataset.mean, dataset.std
    # the same random choices as in training: each step has those of all steps before it
    changed: list[dict[str, Any]] = [{}, {"pad_crop": 4}, {"pad_crop": 4, "flip": "random"}]
    for changes in changed:
        augment = Augment(**PLAIN | changes, mean=mean, std=std)
        steps.append(augment(one, label, first[chosen : chosen + 1], size["epoch"], 0)[0][0].numpy())
    pixels = [_pixels(step, mean, std) for step in steps]
    normalised = steps[-1].transpose(1, 2, 0)
    arrays = {"classes": classes, "steps": np.stack(pixels), "normalised": normalised}
    artefact = save_arrays(folder / "images.npz", **arrays, names=np.array([dataset.classes[i] for i in known]))
    return [Record("illustration", len(known), "count", len(known), artefact=artefact, tags={"dataset": dataset.name})]


def _pixels(x: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised values (C, H, W) as they are seen, uint8 (H, W, C)."""
    values = x * np.array(std)[:, None, None] + np.array(mean)[:, None, None]
    return (255 * values).round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def _pictures(named: Sequence[tuple[str, np.ndarray]]) -> alt.LayerChart | alt.FacetChart:
    """Small pictures with their names, COLUMNS to a row."""
    rows = [
        {"name": name, "picture": uri(image), "column": i % COLUMNS, "row": i // COLUMNS}
        for i, (name, image) in enumerate(named)
    ]
    lines, width = -(-len(rows) // COLUMNS), COLUMNS * (SIDE + 8)
    columns = x_axis("column", domain=[-0.5, COLUMNS - 0.5], axis=False)
    base = data(rows).encode(x=columns, y=y_axis("row", domain=[lines - 0.4, -0.6], axis=False))
    names = base.mark_text(dy=-SIDE / 2 - 8).encode(text="name:N")
    image = base.mark_image(width=SIDE, height=SIDE).encode(url="picture:N")
    return alt.layer(image, names).properties(width=width, height=lines * (SIDE + 26))


def _values(normalised: np.ndarray) -> alt.Chart:
    """How the values of each channel are spread, which is what a model gets."""
    rows = []
    for name, values in zip(CHANNELS, np.moveaxis(normalised, -1, 0), strict=False):
        counts, edges = np.histogram(values, bins=24, range=(-2.5, 2.5))
        middles = (edges[:-1] + edges[1:]) / 2
        rows += [{"channel": name, "at": float(x), "pixels": int(n)} for x, n in zip(middles, counts, strict=True)]
    inks = alt.Scale(domain=list(CHANNELS), range=["#C0392B", "#1E8449", "#1F618D"])
    base = data(rows).encode(x=x_axis("at", "normalised value"), y=y_axis("pixels", "pixels"))
    colour, tips = alt.Color("channel:N", scale=inks), tooltips("channel", ("at", "value", ".2f"), "pixels")
    return base.mark_line(interpolate="step", strokeWidth=2).encode(color=colour, tooltip=tips)


def draw(records: Sequence[Record], folder: Path) -> alt.VConcatChart:
    with np.load(folder / records[0].artefact) as stored:
        classes, steps, normalised, names = (stored[key] for key in ("classes", "steps", "normalised", "names"))
    low, high = normalised.min((0, 1)), normalised.max((0, 1))
    stretched = (255 * (normalised - low) / np.maximum(high - low, 1e-9)).astype(np.uint8)
    words = ("original", "random crop", "random flip", "normalised")
    every = [*zip(words, [*steps, stretched], strict=True)]
    only = [(name, steps[0] * (np.arange(3) == i).astype(np.uint8)) for i, name in enumerate(CHANNELS)]
    colour = steps.shape[-1] == 3
    charts = {
        "The classes (its Figure 5)": _pictures(
            [(str(name), image) for name, image in zip(names, classes, strict=True)]
        ),
        "Step by step, to the normalised image (Figures 6 and 7)": _pictures(every),
        **({"Channels (Figure 8)": _pictures(only)} if colour else {}),
        "Normalised values": _values(normalised).properties(width=520, height=160),
    }
    named = [panels({title: chart}, "") for title, chart in charts.items()]
    note = "A normalised image is shown with each channel stretched to its own range."
    title = alt.TitleParams(f"Images of {records[0].tags['dataset']}", subtitle=[note])
    return alt.vconcat(*named, spacing=24, title=title).resolve_scale(color="independent")


CIFAR = {"data": "cifar10", "limit": None, "image": 5, "epoch": 1}
register(
    Figure(
        "002-fig5-8",
        title="The images: classes, normalisation and augmentation",
        about="""Report 002's Figures 5 to 8: the ten classes, a normalised image, its augmentation step by step, and
        its channels with the spread of their values. No expectation. They show images of the data set, so that they
        are drawn where they are made and not published.""",
        durations=dict.fromkeys(("full", "cpu", "smoke"), "seconds"),
        measure=measure,
        draw=draw,
        scales={"full": CIFAR, "cpu": CIFAR, "smoke": {"data": "digits", "limit": 100, "image": 5, "epoch": 1}},
        reduced={"smoke": "digits"},
        shows_images=True,
    )
)
