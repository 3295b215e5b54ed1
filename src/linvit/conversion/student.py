"""The student: the teacher's model with another attention, and the weights that it inherits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from linvit.attention import role_of
from linvit.conversion.images import few_images
from linvit.conversion.kernels import FIT_IMAGES, fit_kernels
from linvit.models import ModelConfig, VisionTransformer, model_config
from linvit.registry import Spec, parse, parse_layers
from linvit.schemas.conversion import Inherit

if TYPE_CHECKING:
    from linvit.conversion.context import Context

KEPT_OPTIONS = ("dwc", "qk_norm", "rope", "gate", "cpe")  # of the teacher's attention, which has weights for them


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


def zero_shot(c: Context, layers: str, inherit: Inherit = "all") -> VisionTransformer:
    """The student before any stage."""
    model = make_student(c.teacher, layers, inherit, c.conversion.seed).to(c.device)
    if inherit == "all":  # otherwise its q and k are not the teacher's
        x = few_images(c.images.dataset.train, c.stored.about, FIT_IMAGES).to(c.device)
        fit_kernels(model, c.teacher, x, c.progress)
    return model


def in_place_of_softmax(spec: str | Spec, old: Sequence[Spec]) -> list[Spec]:
    """The teacher's layers with this attention where they have softmax, and the options that come with weights."""
    new = parse(spec)
    kept = [{name: one.options[name] for name in KEPT_OPTIONS if name in one.options} for one in old]
    return [
        Spec(new.name, {**new.options, **options}) if role_of(one) == "baseline" else one
        for one, options in zip(old, kept, strict=True)
    ]


def changed_config(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The configuration with these changes, checked."""
    return model_config(**config.model_dump(exclude_defaults=True) | changes)


def replaced_layers(specs: Sequence[Spec]) -> int:
    """How many have another attention than the baseline."""
    return sum(role_of(spec) != "baseline" for spec in specs)
