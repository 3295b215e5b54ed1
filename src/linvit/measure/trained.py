"""What a trained model's attention does: its error against softmax on its own q and k, maps of where it looks, and how
much of its accuracy is chance in drawing its random features."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import Attention, create_attention
from linvit.data import Split
from linvit.measure.accuracy import evaluate
from linvit.measure.error import CONTROL, CPU, attention_error, drawn, over_draws, refusals, refused, with_features
from linvit.measure.provenance import provenance
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

PAIRS = 2**24  # of tokens, over all heads, whose matrices are made at once: some 100 MB
DRAWS = 5


@torch.no_grad()
def captured(model: nn.Module, x: Tensor) -> Iterator[list[tuple[Attention, Tensor, Tensor, Tensor]]]:
    """(attention, q, k, v) of every layer for images x in evaluation mode, for few images at a time."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    found = []
    hooks = [a.register_forward_pre_hook(lambda module, inputs: found.append((module, *inputs[:3]))) for a in layers]
    was_training = model.training
    try:
        for part in x.split(max(1, PAIRS // max((a.site.heads * a.site.tokens**2 for a in layers), default=1))):
            found.clear()
            model.eval()(part)
            yield list(found)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def trained_error(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Means over layers and images: attention_error, attention_entropy, and the error uniform attention would make."""
    sums: dict[str, float] = dict.fromkeys(("attention_error", "attention_entropy", "attention_error_uniform"), 0.0)
    count = 0
    for attention, q, k, v in (layer for layers in captured(model, x) for layer in layers):
        site = {"heads": q.shape[1], "head_dim": q.shape[3], "tokens": q.shape[2], "causal": attention.site.causal}
        uniform = create_attention("uniform", **site)
        row = attention_error(attention, q, k, v)
        control = attention_error(uniform, *attention.normalised(q.float(), k.float()), v)
        row["attention_error_uniform"] = control["attention_error"]
        sums = {name: total + row[name] * len(q) for name, total in sums.items()}
        count += len(q)
    return {name: total / count for name, total in sums.items()} if count else {}


def over_layers(
    model: nn.Module, images: Tensor, specs: Iterable[str], *, name: str, own: str = "softmax", draws: int = 4,
    seed: int = 0, dtype: torch.dtype = torch.float64, device: torch.device = CPU, progress: Progress = ignore,
) -> Iterator[Record]:  # fmt: skip
    """Errors on the q, k and v that a trained model has in each of its layers for these images (normalised, as the
    model takes them): records of each layer (tag `layer`, from 1) and, without that tag, of the mean over layers.

    q and k are the model's own, with the attention that it was trained with; another one is put beside it, not in its
    place (`measure.depth` does that). That attention itself, which is called `own`, has its trained weights and its one
    draw; softmax is what is compared with.
    """
    if draws < 1:
        raise ValueError(f"draws={draws} must be at least 1")
    others = [spec for spec in dict.fromkeys([*specs, CONTROL]) if spec != own or own == "softmax"]
    batches = captured(model, images)  # few images at a time
    layers = next(batches, [])
    if not layers:
        raise ValueError(f"{name} has no attention that could be looked into")
    first, seen = layers[0][0].site, 0
    common = provenance(device, dtype)
    tags: dict[str, Tag] = {"model": name, "images": len(images), "tokens": first.tokens, "heads": first.heads,
                            "head_dim": first.head_dim, "seed": seed}  # fmt: skip
    wrong_ones = {spec: why for a, *_ in layers for spec, why in refusals(others, seed, _site(a)).items()}
    for spec, why in wrong_ones.items():
        yield refused(spec, why, common, tags)
    specs = [*([own] if own != "softmax" else []), *(spec for spec in others if spec not in wrong_ones)]
    sums: dict[tuple[str, int, str], list[float]] = {}
    for batch in itertools.chain([layers], batches):
        count = len(batch[0][1])
        for (i, (attention, q, k, v)), (j, spec) in itertools.product(enumerate(batch), enumerate(specs)):
            done = seen + count * (i + j / len(specs)) / len(batch)
            progress(int(100 * done / len(images)), 100, f"{spec} in layer {i + 1} of {len(batch)}")
            if spec == own != "softmax":
                looked, pair = [copy.deepcopy(attention).to(device)], (q.float(), k.float())  # it normalises itself
            else:
                looked = [drawn(spec, seed + draw, _site(attention), dtype, device) for draw in range(draws)]
                pair = attention.normalised(q.float(), k.float())
            inputs = [x.to(device) for x in (*pair, v)]
            for draw, other in enumerate(looked):
                for metric, value in attention_error(other, *inputs, dtype=dtype).items():
                    sums.setdefault((spec, i, metric), [0.0] * len(looked))[draw] += value * count
        seen += count
    for spec, metric in itertools.product(specs, ("attention_error", "attention_entropy", "output_error")):
        each = [[total / seen for total in sums[spec, layer, metric]] for layer in range(len(layers))]
        mine = {"attention": spec} | tags
        yield over_draws(metric, [statistics.fmean(draw) for draw in zip(*each, strict=True)], common, mine)
        for layer, values in enumerate(each, 1):
            yield over_draws(metric, values, common, mine | {"layer": layer})
    progress(1, 1, "done")


def over_features(
    model: nn.Module, images: Tensor, specs: Iterable[str], *, name: str, features: Sequence[int] = (16, 32, 64),
    draws: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64, device: torch.device = CPU,
    progress: Progress = ignore,
) -> Iterator[Record]:  # fmt: skip
    """`over_layers` of each spec with so many features, tagged with its `family` (the spec) and their number."""
    layers = next(captured(model, images[:1]), [])
    if not layers or min(features, default=0) < 1:
        raise ValueError(f"{name} must have attention to look into, and features={list(features)} be at least 1")
    site = _site(layers[0][0])
    made = {with_features(spec, count, **site): (spec, count) for spec in specs for count in features}
    found = over_layers(model, images, made, name=name, draws=draws, seed=seed, dtype=dtype, device=device,
                        progress=progress)  # fmt: skip
    for record in found:
        family, count = made.get(str(record.tags["attention"]), (CONTROL, None))
        yield record.tagged(family=family, features=count)


def _site(attention: Attention) -> dict[str, Any]:
    """Where another one would stand in its place, but for its seed."""
    site = asdict(attention.site)
    del site["seed"]
    return site


@torch.no_grad()
def attention_maps(model: nn.Module, x: Tensor) -> Tensor | None:
    """(B, rows, columns): how much the last layer's attention looks at each place, from CLS or from all tokens."""
    found = []
    for attention, q, k, _ in (layers[-1] for layers in captured(model, x) if layers):
        matrix = attention.attention_matrix(q, k).abs().mean(1)  # over heads
        prefix, grid = attention.site.prefix, attention.site.grid
        assert grid is not None
        looked = (matrix[:, 0] if prefix else matrix.mean(1))[:, prefix:].unflatten(1, grid)
        found.append(looked / looked.sum((1, 2), keepdim=True).clamp_min(1e-12))
    return torch.cat(found) if found else None


def redraws(attention: Attention) -> bool:
    """Whether it has random features: a redraw then changes what it holds."""
    before = {name: value.clone() for name, value in attention.state_dict().items()}
    attention.redraw(-1)
    return any(not torch.equal(value, before[name]) for name, value in attention.state_dict().items())


def redrawn(
    model: VisionTransformer, split: Split, classes: list[str], mean, std, device: torch.device | str = "cpu",
    draws: int = DRAWS,
) -> list[float]:  # fmt: skip
    """The accuracy with each of so many fresh draws of the random features, the last of which the model keeps.

    A draw is a function of the model's seed and a step. Training's steps count from 0: those below are nobody else's.
    """
    found = []
    for draw in range(draws):
        model.redraw(-1 - draw)
        found.append(evaluate(model, split, classes, mean, std, device).accuracy)
    return found
