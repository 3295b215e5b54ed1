"""From a teacher to its student: the same model with other attentions, and what it inherits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from linvit.attention import attention_options, create_attention
from linvit.data import Dataset, Split, normalise
from linvit.data.splits import stratified, thin
from linvit.measure.error import attention_error
from linvit.measure.trained import captured
from linvit.models import ModelConfig, VisionTransformer, model_config
from linvit.models.resize import resized
from linvit.registry import Spec, parse_layers
from linvit.train.checkpoint import Stored, built
from linvit.train.use import class_numbers

Inherit = Literal["all", "not-qk", "mlp"]
HELD = 0.25  # of the training images, at most, are kept for the search and its decision
SEEN = 0.7  # of the validation images, where the teacher was trained on the training images
SEARCHED, DECIDED = 512, 4096  # images, at most, that guide the search and that decide
NEAR, ALIKE = 0.05, 1.1  # an output error that is small enough, and one that is as small as another
LOOKED_AT = 16  # images whose q and k choose the number of features


@dataclass(frozen=True)
class Images:
    """The data as teacher and student see them: the teacher's normalisation, and training images kept apart."""

    data: Dataset  # without those
    search: Split  # guides the search
    decide: Split  # decides

    def part(self, name: str) -> Split:
        return getattr(self, name) if name in ("search", "decide") else getattr(self.data, name)


def images_for(dataset: Dataset, about: dict[str, Any], held: bool, seen: bool, seed: int) -> Images:
    """`held`: whether some images are to be kept for a search; `seen`: the teacher was trained on the training images,
    so that these must be of the validation images: of those it knows by heart a student loses fewer."""
    part, share = ("validation", SEEN) if seen else ("train", HELD)
    source, nothing = dataset.validation if seen else dataset.train, np.zeros(0, np.int64)
    kept, search, decide = np.arange(len(source)), nothing, nothing
    if held:
        kept, taken = stratified(kept, source.labels, share, "held out", seed)
        search = thin(taken, source.labels, min(SEARCHED, len(taken) // 4), "search", seed)
        decide = thin(np.setdiff1d(taken, search), source.labels, DECIDED, "decide", seed)
        kept = np.setdiff1d(np.arange(len(source)), np.concatenate([search, decide]))
    mean, std = tuple(about["mean"]), tuple(about["std"])
    same = (mean, std) == (tuple(dataset.mean), tuple(dataset.std)) and not held
    text = repr((dataset.identity, mean, std, kept.tolist(), *([part] if seen else []))).encode()
    identity = dataset.identity if same else hashlib.sha256(text).hexdigest()[:32]
    mine = replace(dataset, mean=mean, std=std, identity=identity, **{part: source.some(kept)})
    return Images(mine, source.some(search), source.some(decide))


def fitted(
    stored: Stored, dataset: Dataset, image_size: int | None = None, patch_size: int | None = None
) -> VisionTransformer:
    """The teacher for these images, or for theirs scaled: positions for their size and that of patches, and of its
    classes those that the data have."""
    config = stored.config
    if not config.depth:
        raise ValueError(f"{stored.folder} has depth=0: there is no attention to convert")
    if config.causal:
        raise ValueError(f"{stored.folder} is a next-pixel model: only models with classes are converted")
    if dataset.channels != config.channels:
        wanted, found = config.channels, dataset.channels
        raise ValueError(f"the images of {dataset.name} have {found} channels, but {stored.folder} takes {wanted}")
    if not stored.about["classes"]:
        raise ValueError(f"{stored.folder} has no head, only features: `linvit train DATA --from` it first")
    number = class_numbers(dataset, stored.about["classes"])
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in stored.tensors.items()}
    size, patch = image_size or dataset.image_size, patch_size or config.patch_size
    tensors = resized(tensors, config, size, patch)
    last = max((key.rpartition(".")[0] for key in tensors if key.startswith("head.")), default="")
    for name in ("weight", "bias"):
        tensors[f"{last}.{name}"] = tensors[f"{last}.{name}"][torch.from_numpy(number)]
    config = _changed(config, {"image_size": size, "patch_size": patch, "classes": len(dataset.classes)})
    about = stored.about | {"classes": dataset.classes}
    return built(replace(stored, config=config, about=about), tensors)


def _changed(config: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    given = config.model_dump(exclude_defaults=True) | changes
    return model_config(**given)


def student_of(teacher: VisionTransformer, attention: str, inherit: Inherit, seed: int) -> VisionTransformer:
    """The teacher's model with this attention, and its weights where they fit. In layers that change, `inherit` leaves
    q and k, or all of the attention, new. What is new starts near softmax: a Linformer pools keys, and a convolution of
    v adds nothing yet."""
    if inherit not in get_args(Inherit):
        raise ValueError(f"inherit={inherit} must be one of {', '.join(get_args(Inherit))}")
    config, tensors = teacher.config, teacher.state_dict()
    model = VisionTransformer(_changed(config, {"attention": attention, "seed": seed})).eval()
    own, old, specs = model.state_dict(), *(parse_layers(text, config.depth) for text in (config.attention, attention))
    for one in model.attentions():
        one.near_softmax()
    changed = {f"blocks.{i}" for i, spec in enumerate(specs) if spec != old[i]}
    for key, value in own.items():
        there = tensors.get(key)
        if there is None or there.shape != value.shape:
            continue
        block, _, part = key.partition(".attn.")
        if inherit == "all" or not part or block not in changed:
            value.copy_(there)
        elif inherit == "not-qk" and part.startswith("qkv."):
            first = 2 * len(value) // 3
            value[first:] = there[first:]
        elif inherit == "not-qk":
            value.copy_(there)
    return model


def some_images(images: Split, about: dict[str, Any], count: int = LOOKED_AT) -> Tensor:
    """A few of them, normalised as the model is used to; those of a folder lie class by class."""
    return normalise(images.batch(images.order(0, 0)[:count])[0], about["mean"], about["std"])


def feature_counts(model: VisionTransformer, spec: Spec, images: Split, about: dict[str, Any]) -> list[Spec]:
    """The spec for every layer. Where it leaves the number of features m open, m is the smallest of d/2, d, 2d and 4d
    (d: head_dim) whose output, on the teacher's q, k and v of a few images, is near to softmax's, or as near as 4d
    features come: none are paid for where they buy nothing."""
    if "m" not in attention_options(spec.name) or "m" in spec.options or spec.options.get("projection") == "none":
        return [spec] * model.config.depth
    first = next(captured(model, some_images(images, about).to(next(model.parameters()).device)))
    d = first[0][0].site.head_dim
    counts = sorted({max(1, d // 2), d, 2 * d, 4 * d})
    errors = [[_error(Spec(spec.name, {**spec.options, "m": m}), *layer) for m in counts] for layer in first]
    enough = (
        next(m for m, error in zip(counts, row, strict=True) if error <= max(NEAR, ALIKE * row[-1])) for row in errors
    )
    return [Spec(spec.name, {**spec.options, "m": m}) for m in enough]


def _error(spec: Spec, attention: Any, q: Tensor, k: Tensor, v: Tensor) -> float:
    site = attention.site
    made = create_attention(
        spec, heads=site.heads, head_dim=site.head_dim, tokens=site.tokens, grid=site.grid, prefix=site.prefix,
        layer=site.layer, seed=site.seed,
    )  # fmt: skip
    found = attention_error(made.to(q.device), q, k, v)["output_error"]
    return found if np.isfinite(found) else float("inf")


def linear_layers(specs: Sequence[Spec]) -> int:
    """How many take time in proportion to the number of tokens."""
    return sum(spec.name != "softmax" for spec in specs)
