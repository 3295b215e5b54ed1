"""How an attention's error grows through a model's layers (the paper's figure 14): in softmax's place, with the same
weights, on the same images."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from linvit.attention.exact import Softmax
from linvit.attention.linformer import share_layerwise
from linvit.measure.error import must_be_right, over_draws
from linvit.measure.peers import create
from linvit.measure.provenance import provenance
from linvit.models import VisionTransformer, model_config
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record, Tag

CONTROL = "uniform"
UNTRAINED = "untrained"


def untrained(
    *, depth: int = 12, tokens: int = 256, heads: int = 4, head_dim: int = 32, images: int = 4, seed: int = 0
) -> tuple[VisionTransformer, Tensor]:
    """A softmax model as it is before training, whose q and k are about N(0, 1), and normal images for it."""
    side = math.isqrt(tokens)
    if side**2 != tokens:
        raise ValueError(f"tokens={tokens} must be a square, such as {side**2}: they are the patches of an image")
    config = model_config(image_size=2 * side, patch_size=2, channels=3, classes=0, dim=heads * head_dim, heads=heads,
                          depth=depth, mlp_dim=4 * heads * head_dim, pool="mean", seed=seed)  # fmt: skip
    shape = images, 3, 2 * side, 2 * side
    return VisionTransformer(config).eval(), torch.randn(shape, generator=generator("depth", seed))


def with_attention(model: VisionTransformer, spec: str, seed: int = 0) -> VisionTransformer:
    """A copy of a softmax model with another attention in every layer."""
    changed = copy.deepcopy(model)
    for block, old in zip(changed.blocks, changed.attentions(), strict=True):
        if not isinstance(old, Softmax) or old.q_norm is not None or old.dwc is not None:
            raise ValueError(f"layer {old.site.layer + 1} of the model is not plain softmax, which others stand for")
        block.attn.attention = create(spec, **asdict(replace(old.site, seed=seed)))  # type: ignore[union-attr]
    share_layerwise(changed.attentions())
    return changed.eval()


@torch.no_grad()
def measure(
    model: VisionTransformer, images: Tensor, specs: Iterable[str], *, name: str = UNTRAINED, draws: int = 4,
    seed: int = 0, progress: Progress = ignore,
) -> Iterator[Record]:  # fmt: skip
    """`depth_error`: ‖h − h_softmax‖ / ‖h_softmax‖ of the tokens after each layer (tag `layer`, from 1), mean over
    draws of random features. `images` are normalised, as the model takes them. The control is measured always."""
    if draws < 1:
        raise ValueError(f"draws={draws} must be at least 1")
    specs = list(dict.fromkeys([*specs, CONTROL]))
    for spec in specs:
        with_attention(model, spec, seed)  # a bad spec is an error before anything is measured
    must_be_right(specs, seed, model.attentions()[0].site)
    exact, common = _after_each_layer(model.eval(), images), provenance(images.device, images.dtype)
    for i, spec in enumerate(specs):
        found = []
        for draw in range(draws):
            progress(i * draws + draw, len(specs) * draws, f"{spec}, draw {draw + 1}")
            tokens = _after_each_layer(with_attention(model, spec, seed + draw), images)
            found.append([((a - b).norm() / b.norm()).item() for a, b in zip(tokens, exact, strict=True)])
        for layer, values in enumerate(zip(*found, strict=True), 1):
            tags: dict[str, Tag] = {"attention": spec, "model": name, "layer": layer, "images": len(images),
                                    "tokens": model.tokens, "seed": seed}  # fmt: skip
            yield over_draws("depth_error", values, common, tags)
    progress(1, 1, "done")


def _after_each_layer(model: VisionTransformer, images: Tensor) -> list[Tensor]:
    tokens = [model.embed(images)]
    for block in model.blocks:
        tokens.append(block(tokens[-1]))
    return tokens[1:]
