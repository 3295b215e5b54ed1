"""Where a trained model looks: the attention matrix of every layer and head for one image (the paper's figures 10 and
11), by feeding v = I; with its own attention, and with others on the same q and k."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from linvit.measure.error import must_be_right
from linvit.measure.peers import create
from linvit.measure.provenance import provenance
from linvit.measure.trained import captured
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

LARGEST = 2**27  # numbers that all maps of one attention may have: half a GB


@dataclass(frozen=True)
class Maps:
    attention: str
    weights: np.ndarray  # float32 (layers, heads, N, N): rows are queries
    records: list[Record]


@torch.no_grad()
def measure(
    model: nn.Module, image: Tensor, specs: Iterable[str] = (), *, own: str, name: str, seed: int = 0,
    progress: Progress = ignore,
) -> Iterator[Maps]:  # fmt: skip
    """The maps of the model's own attention (which is called `own`), then of each other one, for one image (C, H, W),
    normalised as the model takes it.

    Records, for each layer and head (from 1): `map_entropy`, the mean entropy of the rows of |A| as they are when they
    sum to one, and `map_error`, the mean total variation between the rows of A and the model's own.
    """
    layers = next(captured(model, image[None]), [])
    if not layers:
        raise ValueError(f"{name} has no attention that could be looked into")
    numbers = sum(q.shape[1] * q.shape[2] ** 2 for _, q, _, _ in layers)
    if numbers > LARGEST:
        raise ValueError(f"the maps of {name} have {numbers:,} numbers, more than {LARGEST:,}: take a smaller model")
    if len({q.shape for _, q, _, _ in layers}) > 1:
        raise ValueError(f"the layers of {name} differ in heads or tokens: their maps do not make a grid")
    specs = [spec for spec in dict.fromkeys(specs) if spec != own]
    must_be_right(specs, seed, layers[0][0].site)
    others = {spec: [create(spec, **asdict(replace(a.site, seed=seed))).eval() for a, *_ in layers] for spec in specs}
    common = provenance(image.device, torch.float64)
    reference = None
    for i, spec in enumerate([own, *specs]):
        found = []
        for layer, (attention, q, k, _) in enumerate(layers):
            progress(i * len(layers) + layer, (1 + len(specs)) * len(layers), f"{spec}, layer {layer + 1}")
            one = attention if spec == own else others[spec][layer].double()
            if spec != own:
                q, k = attention.normalised(q.float(), k.float())
            found.append(one.attention_matrix(q.double(), k.double())[0])
        weights = torch.stack(found)
        reference = weights if reference is None else reference
        tags: dict[str, Tag] = {"attention": spec, "model": name, "seed": seed}
        records = []
        rows = weights.abs() / weights.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        values = {
            ("map_entropy", "nat"): torch.special.entr(rows).sum(-1).mean(-1),
            ("map_error", "fraction"): 0.5 * (weights - reference).abs().sum(-1).mean(-1),
        }
        for (metric, unit), each in values.items():
            for (layer, head), value in np.ndenumerate(each.numpy()):
                place = tags | {"layer": layer + 1, "head": head + 1}
                records.append(Record(metric, float(value), unit, weights.shape[-1], **common, tags=place))
        yield Maps(spec, weights.float().numpy(), records)
    progress(1, 1, "done")
