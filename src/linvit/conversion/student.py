"""The student: the teacher's model with another attention, and the weights that it inherits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linvit.attention import is_linear
from linvit.models import ModelConfig, VisionTransformer, model_config
from linvit.registry import Spec, parse_layers
from linvit.schemas.conversion import Inherit


def make_student(teacher: VisionTransformer, attention: str, inherit: Inherit, seed: int) -> VisionTransformer:
    """The teacher with this attention, and its weights where they fit. In layers that change, `inherit` leaves q and k
    (not-qk) or all of the attention (mlp) untrained. New weights start close to softmax: a Linformer pools keys, and a
    convolution adds nothing yet, and a gate is open."""
    config, tensors = teacher.config, teacher.state_dict()
    model = VisionTransformer(changed_config(config, attention=attention, seed=seed)).eval()
    for block in model.blocks:
        block.attn.near_softmax()  # type: ignore[union-attr, operator]
    old, new = (parse_layers(text, config.depth) for text in (config.attention, attention))
    changed = {f"blocks.{i}" for i, spec in enumerate(new) if spec != old[i]}
    for key, value in model.state_dict().items():
        given = tensors.get(key)
        if given is None or given.shape != value.shape:
            continue
        block, _, part = key.partition(".attn.")
        if inherit == "all" or not part or block not in changed:
            value.copy_(given)
        elif inherit == "not-qk" and part.startswith("qkv."):
            v = slice(2 * len(value) // 3, None)
            value[v] = given[v]
        elif inherit == "not-qk":
            value.copy_(given)
    return model


def changed_config(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The configuration with these changes, checked."""
    return model_config(**config.model_dump(exclude_defaults=True) | changes)


def linear_layers(specs: Sequence[Spec]) -> int:
    """How many take time in proportion to the number of tokens."""
    return sum(is_linear(spec) for spec in specs)
