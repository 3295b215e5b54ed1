"""A model's layers as a table: what comes out of each, and how many parameters it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from linvit.attention import Attention
from linvit.models.vit import VisionTransformer
from linvit.registry import parse_layers


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str
    shape: tuple[int, ...]  # of what comes out for one image; of a parameter beside the layers, its own
    parameters: int
    times: int = 1  # blocks that have the same


@torch.no_grad()
def summary(model: VisionTransformer) -> list[Layer]:
    """In the order in which an image passes: layers with parameters, and attentions. Blocks that are alike are one."""
    config, shapes = model.config, {}
    outer = {f"{name}.": part for name, part in model.named_modules() if isinstance(part, Attention)}
    parts = {
        name: part
        for name, part in model.named_modules()
        if name
        and not name.startswith(tuple(outer))
        and (f"{name}." in outer or next(part.parameters(recurse=False), None) is not None)
    }

    def seen(name: str):
        def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            shapes[name] = tuple(output.shape[1:])

        return look

    hooks = [part.register_forward_hook(seen(name)) for name, part in parts.items()]
    was_training = model.training
    try:
        device = next(model.parameters()).device
        model.eval()(torch.zeros(1, *config.image_shape, device=device))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    counted: set[int] = set()  # layers may share parameters

    def count(part: nn.Module, recurse: bool) -> int:
        new = {id(p): p.numel() for p in part.parameters(recurse) if p.requires_grad and id(p) not in counted}
        counted.update(new)
        return sum(new.values())

    own = [Layer(name, "parameter", tuple(p.shape[1:]), p.numel()) for name, p in model.named_parameters(recurse=False)]
    specs = {
        f"blocks.{i}.attn.attention": str(spec) for i, spec in enumerate(parse_layers(config.attention, config.depth))
    }
    rows = [
        Layer(name, specs.get(name, type(part).__name__), shapes.get(name, ()), count(part, f"{name}." in outer))
        for name, part in parts.items()
    ]
    stem = [row for row in rows if row.name.partition(".")[0] == "stem"]
    rest = [row for row in rows if row.name.partition(".")[0] not in ("stem", "blocks")]
    return [*stem, *own, *_blocks(rows), *rest]


def _blocks(rows: list[Layer]) -> list[Layer]:
    """One row for a layer of several blocks after each other that do not differ."""
    blocks = groupby((row for row in rows if row.name.startswith("blocks.")), key=lambda row: row.name.split(".")[1])
    named = [(i, [replace(row, name=row.name.removeprefix(f"blocks.{i}")) for row in block]) for i, block in blocks]
    found = []
    for same, group in groupby(named, key=lambda pair: pair[1]):
        first, *more = [i for i, _ in group]
        place = f"blocks.{first}" if not more else f"blocks.{first}–{more[-1]}"
        found += [replace(row, name=place + row.name, times=1 + len(more)) for row in same]
    return found
