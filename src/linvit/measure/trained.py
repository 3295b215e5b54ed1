"""What a trained model's attention does: its error against softmax on its own q and k, maps of where it looks, and how
much of its accuracy is chance in drawing its random features."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from linvit.attention import BASELINE, CONTROL, Attention, attentions, build_attention
from linvit.data import Split
from linvit.measure.accuracy import evaluate
from linvit.measure.error import Draws, attention_error, over_draws, passing, refusal, with_features
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.records import Record, Tag

MAX_PAIRS = 2**24  # of tokens, over all heads, whose matrices are made at once: some 100 MB
REDRAWS = 5


@dataclass(frozen=True)
class Subject:
    """A trained model, its name, and images as it takes them."""

    model: nn.Module
    images: Tensor
    name: str
    own: str = BASELINE  # the spec of the attention that it was trained with

    def layers(self) -> Iterator[list[tuple[Attention, Tensor, Tensor, Tensor]]]:
        """`captured`, of a model that has attention."""
        found = captured(self.model, self.images)
        first = next(found, [])
        if not first:
            raise ValueError(f"{self.name} has no attention with a matrix to inspect")
        return itertools.chain([first], found)


@torch.no_grad()
def captured(model: nn.Module, x: Tensor) -> Iterator[list[tuple[Attention, Tensor, Tensor, Tensor]]]:
    """(attention, q, k, v) of every layer for images x in evaluation mode, for few images at a time."""
    layers = attentions(model)
    found = []
    hooks = [a.register_forward_pre_hook(lambda module, inputs: found.append((module, *inputs[:3]))) for a in layers]
    was_training = model.training
    try:
        for part in x.split(max(1, MAX_PAIRS // max((a.site.heads * a.site.tokens**2 for a in layers), default=1))):
            found.clear()
            model.eval()(part)
            yield list(found)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def trained_error(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Means over images and those layers that have a matrix: attention_error, attention_entropy, and the error uniform
    attention would make."""
    sums: dict[str, float] = dict.fromkeys(("attention_error", "attention_entropy", "attention_error_uniform"), 0.0)
    count = 0
    for attention, q, k, v in (layer for layers in captured(model, x) for layer in layers if not layer[0].no_matrix):
        control = build_attention(CONTROL, replace(attention.site, tokens=q.shape[2], grid=None))
        row = attention_error(attention, q, k, v)
        uniform = attention_error(control, *attention.normalised(q.float(), k.float()), v)
        row["attention_error_uniform"] = uniform["attention_error"]
        sums = {name: total + row[name] * len(q) for name, total in sums.items()}
        count += len(q)
    return {name: total / count for name, total in sums.items()} if count else {}


def layer_errors(
    subject: Subject,
    specs: Iterable[str],
    *,
    draws: Draws = Draws(),  # noqa: B008 (frozen)
    progress: Progress = ignore,
) -> Iterator[Record]:
    """Errors on the q, k and v that a trained model has in each of its layers for its images: records of each layer
    (tag `layer`, from 1) and, without that tag, of the mean over layers.

    q and k are those that the model has with its own attention; others see them too, but do not change what later
    layers get (`measure.depth` does that). The model's own attention has its trained weights and its one draw; softmax
    is what is compared with.
    """
    own = subject.own if subject.own != BASELINE else None
    batches, images = subject.layers(), len(subject.images)
    layers = next(batches)
    first, seen = layers[0][0].site, 0
    common, tags = draws.where, {"model": subject.name, "images": images, **draws.tags(first)}
    others, refused = [spec for spec in [*specs, CONTROL] if spec != own], {}
    for attention, *_ in layers:
        others, more = passing(others, attention.site, draws)
        refused |= more
    yield from (refusal(spec, why, common, tags) for spec, why in refused.items())
    specs, sums = [*([own] if own else []), *others], dict[tuple[str, int, str], list[float]]()
    for batch in itertools.chain([layers], batches):
        count = len(batch[0][1])
        for (i, (attention, q, k, v)), (j, spec) in itertools.product(enumerate(batch), enumerate(specs)):
            done = seen + count * (i + j / len(specs)) / len(batch)
            progress(int(100 * done / images), 100, f"{spec} in layer {i + 1} of {len(batch)}")
            if spec == own:
                looked, pair = [copy.deepcopy(attention).to(draws.device)], (q.float(), k.float())  # it normalises them
            else:
                looked = [draws.attention(spec, attention.site, draw) for draw in range(draws.count)]
                pair = attention.normalised(q.float(), k.float())
            inputs = [x.to(draws.device) for x in (*pair, v)]
            for draw, other in enumerate(looked):
                for metric, value in attention_error(other, *inputs, dtype=draws.dtype).items():
                    sums.setdefault((spec, i, metric), [0.0] * len(looked))[draw] += value * count
        seen += count
    for spec, metric in itertools.product(specs, ("attention_error", "attention_entropy", "output_error")):
        here = [layer for layer in range(len(layers)) if (spec, layer, metric) in sums]  # not without a matrix
        if not here:
            continue
        each = [[total / seen for total in sums[spec, layer, metric]] for layer in here]
        mine: dict[str, Tag] = {"attention": spec, **tags}
        yield over_draws(metric, [statistics.fmean(draw) for draw in zip(*each, strict=True)], common, mine)
        for layer, values in zip(here, each, strict=True):
            yield over_draws(metric, values, common, mine | {"layer": layer + 1})
    progress(1, 1, "done")


def layer_feature_errors(
    subject: Subject,
    specs: Iterable[str],
    *,
    features: Sequence[int] = (16, 32, 64),
    draws: Draws = Draws(),  # noqa: B008 (frozen)
    progress: Progress = ignore,
) -> Iterator[Record]:
    """`layer_errors` of each spec with this many features, tagged with its `family` (the spec) and their number."""
    if min(features, default=0) < 1:
        raise ValueError(f"features={list(features)} must be at least 1")
    site = next(replace(subject, images=subject.images[:1]).layers())[0][0].site
    made = {with_features(spec, count, site): (spec, count) for spec in specs for count in features}
    for record in layer_errors(replace(subject, own=BASELINE), made, draws=draws, progress=progress):
        family, count = made.get(str(record.tags["attention"]), (CONTROL, None))
        yield record.tagged(family=family, features=count)


@torch.no_grad()
def attention_maps(model: nn.Module, x: Tensor) -> Tensor | None:
    """(B, rows, columns): how much the last layer's attention looks at each place, from CLS or from all tokens. None
    where it has no matrix."""
    found = []
    for attention, q, k, _ in (layers[-1] for layers in captured(model, x) if layers and not layers[-1][0].no_matrix):
        matrix = attention.attention_matrix(q, k).abs().mean(1)  # over heads
        prefix, grid = attention.site.prefix, attention.site.grid
        assert grid is not None
        looked = (matrix[:, 0] if prefix else matrix.mean(1))[:, prefix:].unflatten(1, grid)
        found.append(looked / looked.sum((1, 2), keepdim=True).clamp_min(1e-12))
    return torch.cat(found) if found else None


def redrawn(
    model: VisionTransformer, split: Split, classes: list[str], mean, std, device: torch.device | str = "cpu"
) -> list[float]:
    """The accuracy with each of REDRAWS new draws of the random features, the last of which the model keeps.

    A draw is a function of the model's seed and a step. Training's steps count from 0: those below are nobody else's.
    """
    found = []
    for draw in range(REDRAWS):
        model.redraw(-1 - draw)
        found.append(evaluate(model, split, classes, mean, std, device).accuracy)
    return found
