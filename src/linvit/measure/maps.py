"""Where a trained model looks: the attention matrix of every layer and head for one image (the paper's figures 10 and
11), by feeding v = I; with its own attention, and with others on the same q and k."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from linvit.files import slug, write_atomically
from linvit.measure.error import entropy, must_pass, variation
from linvit.measure.peers import create
from linvit.measure.provenance import provenance
from linvit.measure.trained import Subject
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

MAX_NUMBERS = 2**27  # numbers that all maps of one attention may have: half a GB


@dataclass(frozen=True)
class Maps:
    attention: str
    weights: np.ndarray  # float32 (layers, heads, N, N): rows are queries
    records: list[Record]


@torch.no_grad()
def model_maps(
    subject: Subject, specs: Iterable[str] = (), *, image: int = 0, seed: int = 0, progress: Progress = ignore
) -> Iterator[Maps]:
    """The maps of the model's own attention, then of each other one on the same q and k, for one of its images.

    Records, for each layer and head (from 1): `map_entropy`, the mean entropy of the rows of |A| as they are when they
    sum to one, and `map_error`, the mean total variation between the rows of A and the model's own.
    """
    if len(subject.images) <= image:
        raise ValueError(f"image={image}: there are only {len(subject.images)} images, from 0")
    seen = replace(subject, images=subject.images[image : image + 1])
    layers, own, name = next(seen.layers()), subject.own, subject.name
    numbers = sum(q.shape[1] * q.shape[2] ** 2 for _, q, _, _ in layers)
    if numbers > MAX_NUMBERS:
        raise ValueError(f"the maps of {name} have {numbers:,} numbers, more than {MAX_NUMBERS:,}: use a smaller model")
    if len({q.shape for _, q, _, _ in layers}) > 1:
        raise ValueError(f"the layers of {name} differ in heads or tokens: their maps do not make a grid")
    specs = [spec for spec in dict.fromkeys(specs) if spec != own]
    must_pass(specs, layers[0][0].site, seed)
    others = {spec: [create(spec, replace(a.site, seed=seed)).eval() for a, *_ in layers] for spec in specs}
    for attention in (*(a for a, *_ in layers), *(a for each in others.values() for a in each)):
        attention.require_matrix()
    common = provenance(torch.device("cpu"), torch.float64)  # which some devices do not have
    reference = None
    for i, spec in enumerate([own, *specs]):
        found = []
        for layer, (attention, q, k, _) in enumerate(layers):
            progress(i * len(layers) + layer, (1 + len(specs)) * len(layers), f"{spec}, layer {layer + 1}")
            one = attention if spec == own else others[spec][layer].to(q.device)
            if spec != own:
                q, k = attention.normalised(q.float(), k.float())
            found.append(copy.deepcopy(one).cpu().double().attention_matrix(q.cpu().double(), k.cpu().double())[0])
        weights = torch.stack(found)
        reference = weights if reference is None else reference
        tags: dict[str, Tag] = {"attention": spec, "model": name, "image": image, "seed": seed}
        records = []
        values = {
            ("map_entropy", "nat"): entropy(weights).mean(-1),
            ("map_error", "fraction"): variation(weights, reference).mean(-1),
        }
        for (metric, unit), each in values.items():
            for (layer, head), value in np.ndenumerate(each.numpy()):
                place = tags | {"layer": layer + 1, "head": head + 1}
                records.append(Record(metric, float(value), unit, weights.shape[-1], **common, tags=place))
        yield Maps(spec, weights.float().numpy(), records)
    progress(1, 1, "done")


def store_maps(maps: Maps, folder: Path) -> Record:
    """Write the matrices into a file in the folder; the record that names it."""
    file, name = io.BytesIO(), f"maps-{slug(maps.attention)}.npz"
    np.savez_compressed(file, maps=maps.weights)
    write_atomically(folder / name, file.getvalue())
    tags = {key: value for key, value in maps.records[0].tags.items() if key not in ("layer", "head")}
    count = maps.weights.shape[0] * maps.weights.shape[1]
    like = maps.records[0]
    return replace(like, metric="attention_maps", value=count, unit="count", n=1, artefact=name, tags=tags)
