"""`linearize(model, "performer-exp:m=64")`: replace the attention inside a trained model of any supported library.

The model keeps its class, its forward signature and its parameters under their keys. Softmax is the module's own
attention, so that replacing and restoring it changes no bit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from linvit.attention import BASELINE, Attention, attentions, build_attention
from linvit.attention.base import precise, share_layerwise, softmax_attention
from linvit.conversion.adapters import LINVIT, find, grid_of, places
from linvit.measure.error import attention_error
from linvit.measure.trained import captured
from linvit.models import VisionTransformer
from linvit.registry import Spec, join_layers, parse_layers
from linvit.site import Site

SOFTMAX = Spec(BASELINE)
NOTE = "linvit_attention"  # what `load` looks for in config.json

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Linearized:
    """What replacing an attention changed."""

    attention: str  # of all layers, as one spec
    copied: list[str]  # keys of the state dict with the same values as before
    created: list[str]  # new keys, and keys with new values
    dropped: list[str]  # keys that are gone, and keys with new values
    # layer → attention_error and output_error against softmax, on the q, k, v that the model has with softmax
    distance: dict[int, dict[str, float]] = field(default_factory=dict)


def linearize(
    model: Model, spec: str, layers: str | int | Sequence[int] = "all", images: Tensor | None = None, seed: int = 0
) -> tuple[Model, Linearized]:
    """Replace the attention of a vision transformer of transformers (ViT, DeiT, DINOv2, DINOv3, SigLIP), timm,
    torchvision or linvit, in place.

    spec: an attention for all of these layers, or one for each of them (`softmax@2+performer-relu:m=32@4`).
    layers: "all", numbers, or text such as "0-5,11". images: a batch of inputs on which distances are measured.
    """
    places = find(model)
    if images is not None:
        _check(model, images)
    chosen = _numbers(layers, len(places))
    specs = dict(zip(chosen, parse_layers(spec, len(chosen)), strict=True))
    where, made = _place(model), {}
    for i, one in specs.items():
        kind, module = places[i]
        if one != SOFTMAX or kind is LINVIT:
            heads, head_dim = getattr(module, kind.heads), int(module.head_dim)  # type: ignore[arg-type]
            site = Site(heads, head_dim, **where, layer=i, seed=seed)
            made[i] = build_attention(one, site, inside=kind is LINVIT)
            if kind is LINVIT:
                _same_around(made[i], module.attention, one)  # type: ignore[arg-type]
            if made[i].switches.rope and (kind.rotary or getattr(module, "rope", None) is not None):
                raise ValueError(f"spec '{one}': the model already has rotary positions: leave out rope")
    share_layerwise(made.values())
    for i, one in made.items():
        one.near_softmax()
        _inherit(one, getattr(places[i][1], places[i][0].slot, None))
    going = [getattr(places[i][1], places[i][0].slot, None) for i in chosen]
    staying = [a for a in attentions(model) if a not in going]
    if orphans := [a.site.layer for a in staying if a.shared and a.shared[0] in going]:
        raise ValueError(f"layers={layers!r}: layer {orphans[0]} shares its projections with a layer that is replaced")
    before = model.state_dict()
    for i in chosen:  # no error after this
        kind, module = places[i]
        if i in made:
            kind.put(module, made[i])
        else:
            kind.restore(module)
    ours = [kind is LINVIT or hasattr(module, kind.slot) for kind, module in places]
    attention = _note(model, [specs.get(i, None if ours[i] else SOFTMAX) for i in range(len(places))])
    after = model.state_dict()
    copied = {key: value for key, value in after.items() if key in before and _same(value, before[key])}
    return model, Linearized(
        attention=attention,
        copied=list(copied),
        created=[key for key in after if key not in copied],
        dropped=[key for key in before if key not in copied],
        distance={} if images is None else _distances(model, images),
    )


def _same_around(new: Attention, old: Attention, spec: Spec) -> None:
    """A ValueError for another gate or cpe than the layer has: it keeps those, and their weights."""
    for name in ("gate", "cpe"):
        one, other = (getattr(attention.switches, name) or "none" for attention in (new, old))
        if one != other:
            raise ValueError(
                f"spec '{spec}' has {name}={one}, but layer {old.site.layer} has {name}={other}, which linearize keeps"
            )


def _inherit(new: nn.Module, old: nn.Module | None) -> None:
    """Weights that both have in the same shape are kept, such as the convolutions of `dwc`."""
    there = old.state_dict() if old is not None else {}
    for key, value in new.state_dict().items():
        if key in there and there[key].shape == value.shape:
            value.copy_(there[key])


def _same(new: Tensor, old: Tensor) -> bool:
    return new.dtype == old.dtype and torch.equal(new, old)


@torch.no_grad()
def _check(model: nn.Module, images: Tensor) -> None:
    """An error for images that the model does not accept, before anything is changed."""
    if images.ndim != 4 or not images.is_floating_point():
        shape = tuple(images.shape)
        raise ValueError(f"images: {images.dtype} of shape {shape} is not a batch of normalised images (B, C, H, W)")
    if getattr(model, "main_input_name", "pixel_values") != "pixel_values":
        raise ValueError(f"images: {type(model).__name__} is not called with images alone: pass its vision_model")
    for _ in captured(model, images[:1]):
        pass


def _numbers(layers: str | int | Sequence[int], depth: int) -> list[int]:
    if layers == "all":
        return list(range(depth))
    layers = [layers] if isinstance(layers, int) else layers
    parts = layers.split(",") if isinstance(layers, str) else [str(i) for i in layers]
    chosen: list[int] = []
    for part in parts:
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        last = int(found[2] or found[1]) if found else depth
        if found is None or not int(found[1]) <= last < depth:
            raise ValueError(f"layers={layers!r}: '{part}' is not among layers 0 to {depth - 1} (all, or e.g. 0-2,5)")
        chosen += range(int(found[1]), last + 1)
    return sorted(set(chosen))


def _place(model: Any) -> dict[str, Any]:
    """Tokens, their grid, and the number of tokens before it, as each library stores them."""
    if isinstance(model, VisionTransformer):
        grid, prefix = model.stem.grid, model.config.prefix_tokens
    elif hasattr(model, "patch_embed"):  # timm
        grid, prefix = model.patch_embed.grid_size, model.num_prefix_tokens
    elif hasattr(model, "class_token"):  # torchvision
        grid, prefix = grid_of(model.image_size, model.patch_size), 1
    elif (there := places(getattr(model, "config", None))) is not None:
        grid, prefix = there
    else:
        raise ValueError(f"{type(model).__name__} is not a whole vision transformer: pass the whole model")
    causal = isinstance(model, VisionTransformer) and model.config.causal
    return {"tokens": prefix + grid[0] * grid[1], "grid": tuple(grid), "prefix": prefix, "causal": causal}


def _note(model: Any, changed: list[Spec | None]) -> str:
    """Store which attention the model has now, in its configuration if it has one. None: the layer keeps what is stored
    for it. What is stored for a layer that has softmax by now, e.g. loaded by another library, does not count."""
    ours = isinstance(model, VisionTransformer)
    holder = model if ours or not hasattr(model, "config") else model.config
    known = model.config.attention if ours else getattr(holder, NOTE, str(SOFTMAX))
    attention = join_layers([new or old for new, old in zip(changed, parse_layers(known, len(changed)), strict=True)])
    if ours:
        model.config = model.config.model_copy(update={"attention": attention})
    else:
        setattr(holder, NOTE, attention)
    return attention


def _distances(model: nn.Module, images: Tensor) -> dict[int, dict[str, float]]:
    """Means over images. Every layer passes softmax's output on, so that each is measured alone."""
    hooks = [attention.register_forward_hook(_as_softmax) for attention in attentions(model)]
    sums: dict[int, dict[str, float]] = defaultdict(dict)
    try:
        for layers in captured(model, images):
            for attention, q, k, v in layers:
                found, row = attention_error(attention, q, k, v), sums[attention.site.layer]
                for name in ("attention_error", "output_error"):
                    if name in found:
                        row[name] = row.get(name, 0.0) + found[name] * len(q) / len(images)
    finally:
        for hook in hooks:
            hook.remove()
    return dict(sums)


def _as_softmax(attention: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return softmax_attention(*precise(*inputs[:3]), mask=None, causal=attention.site.causal).to(output.dtype)  # type: ignore[misc]
