"""How an attention's error grows through a model's layers (the paper's figure 14): in softmax's place, with the same
weights, on the same images."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from linvit.attention import CONTROL
from linvit.attention.base import share_layerwise
from linvit.measure.error import Draws, must_pass, over_draws
from linvit.measure.peers import create
from linvit.measure.provenance import provenance
from linvit.measure.trained import Subject
from linvit.models import VisionTransformer, model_config
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Tag
from linvit.site import Site

UNTRAINED = "untrained"


def untrained(site: Site, *, depth: int = 12, images: int = 4) -> Subject:
    """A softmax model as it is before training, whose q and k are about N(0, 1), and normal images for it."""
    side, dim = math.isqrt(site.tokens), site.heads * site.head_dim
    if side**2 != site.tokens:
        raise ValueError(f"tokens={site.tokens} must be a square, such as {side**2}: they are the patches of an image")
    config = model_config(
        image_size=2 * side,
        patch_size=2,
        classes=0,
        dim=dim,
        heads=site.heads,
        depth=depth,
        mlp_dim=4 * dim,
        seed=site.seed,
    )
    shape = images, 3, 2 * side, 2 * side
    x = torch.randn(shape, generator=generator("depth", site.seed))
    return Subject(VisionTransformer(config).eval(), x, UNTRAINED)


def with_attention(model: VisionTransformer, spec: str, seed: int = 0) -> VisionTransformer:
    """A copy of a softmax model with another attention in every layer."""
    changed = copy.deepcopy(model)
    for block, old in zip(changed.blocks, changed.attentions(), strict=True):
        if old.role != "baseline" or not old.bare:
            raise ValueError(
                f"layer {old.site.layer + 1} of the model is not plain softmax, which the attention would replace"
            )
        block.attn.attention = create(spec, replace(old.site, seed=seed))  # type: ignore[union-attr]
    share_layerwise(changed.attentions())
    return changed.eval()


@torch.no_grad()
def depth_errors(
    subject: Subject,
    specs: Iterable[str],
    *,
    draws: Draws = Draws(),  # noqa: B008 (frozen)
    progress: Progress = ignore,
) -> Iterator[Record]:
    """`depth_error`: ‖h − h_softmax‖ / ‖h_softmax‖ of the tokens after each layer (tag `layer`, from 1), mean over
    draws of random features. The control is measured always."""
    model, images, seed = subject.model, subject.images, draws.seed
    assert isinstance(model, VisionTransformer)
    specs = list(dict.fromkeys([*specs, CONTROL]))
    for spec in specs:
        with_attention(model, spec, seed)  # a bad spec is an error before anything is measured
    must_pass(specs, model.attentions()[0].site, seed)
    exact, common = _after_each_layer(model.eval(), images), provenance(images.device, images.dtype)
    tags: dict[str, Tag] = {"model": subject.name, "images": len(images), "tokens": model.tokens, "seed": seed}
    for i, spec in enumerate(specs):
        found = []
        for draw in range(draws.count):
            progress(i * draws.count + draw, len(specs) * draws.count, f"{spec}, draw {draw + 1}")
            tokens = _after_each_layer(with_attention(model, spec, seed + draw), images)
            found.append([((a - b).norm() / b.norm()).item() for a, b in zip(tokens, exact, strict=True)])
        for layer, values in enumerate(zip(*found, strict=True), 1):
            yield over_draws("depth_error", values, common, {"attention": spec, "layer": layer, **tags})
    progress(1, 1, "done")


def _after_each_layer(model: VisionTransformer, images: Tensor) -> list[Tensor]:
    tokens = [model.embed(images)]
    for block in model.blocks:
        tokens.append(block(tokens[-1]))
    return tokens[1:]
