"""A trained model for use without linvit: an ONNX file, PyTorch's own .pt2, or a folder that transformers loads.

ONNX and .pt2 files take decoded pixels, uint8 (batch, channels, size, size), normalise them and return logits; their
metadata hold the classes and the layout of pixels. Before an export gets its name, its logits are compared with those
of the model, on batches of 1 and 3.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from linvit import __version__
from linvit.attention import BASELINE
from linvit.attention.multihead import OF_SPEC, separate
from linvit.conversion.linearize import NOTE
from linvit.conversion.registries import register_transformers
from linvit.data import normalise
from linvit.errors import choices
from linvit.files import slug, write_atomically
from linvit.measure.race import quartiles, race
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore, repeated
from linvit.randomness import generator
from linvit.registry import parse_layers
from linvit.schemas.pixels import sides
from linvit.training.checkpoint import load, on_hub

Format = Literal["onnx", "torch", "hf"]
NAMES = {"onnx": "model.onnx", "torch": "model.pt2", "hf": "hf"}  # inside the model's folder, by default
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "hf": ("transformers",)}
TOLERANCE = {"onnx": 1e-4, "torch": 1e-4, "hf": 1e-5}  # of logits; for hf relative to the largest, if that is above 1
ROUNDING = 1e-6  # of the largest logit, which is allowed as well
CHECKED, TIMED = (1, 3), (1, 32)  # batch sizes
TIMING_SECONDS = 10.0  # after which timing ends as soon as it can
MAX_ONNX_BYTES = 2 * 10**9  # protobuf's limit
Pixels = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    path: Path
    format: str
    difference: float  # the largest between its logits and the model's
    note: str  # how to use it
    speed: dict[int, list[float]] = field(default_factory=dict)  # of onnxruntime over PyTorch, by batch: quartiles


def export(
    folder: str | Path, format: Format = "onnx", out: str | Path | None = None, *, progress: Progress = ignore
) -> Exported:
    """Export the trained model of a folder, after checking that the export gives the same logits."""
    if format not in NAMES:
        raise ValueError(f"unknown format '{format}'" + choices(format, NAMES))
    home = Path(slug(str(folder))) if on_hub(folder) else Path(folder)  # a folder org/name would hide the hub's model
    path, suffix = home / NAMES[format] if out is None else Path(out), Path(NAMES[format]).suffix
    if suffix and path.suffix != suffix:
        raise ValueError(f"out={path} must end in {suffix}")
    if missing := [name for name in PACKAGES[format] if importlib.util.find_spec(name) is None]:
        raise ValueError(f"format={format} needs {missing[0]}, which is not installed: pip install 'linvit[{format}]'")
    model = load(folder)
    if model.config.pixels:
        raise ValueError(f"{folder} is a {model.config.stem} model: only models with classes are exported")
    if path.exists():
        raise ValueError(f"{path} exists: delete it, or choose another --out")
    with repeated(progress) as shown:
        return {"onnx": _onnx, "torch": _torch, "hf": _hf}[format](model, path, shown)


class FromPixels(nn.Module):
    """uint8 (B, C, H, W) → logits (B, classes)."""

    def __init__(self, model: VisionTransformer):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(normalise(pixels, self.model.about["mean"], self.model.about["std"]))


def _onnx(model: VisionTransformer, path: Path, progress: Progress) -> Exported:
    import onnxruntime

    if (size := 4 * sum(p.numel() for p in model.state_dict().values())) > MAX_ONNX_BYTES:
        raise ValueError(f"the model takes {size:,} bytes, but an ONNX file has at most {MAX_ONNX_BYTES:,}")
    eager, shapes = FromPixels(model), ({0: torch.export.Dim("batch")},)
    progress(0, 3, "tracing the model")
    with _silence():
        names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["logits"]}
        program = torch.onnx.export(
            eager, (_pixels(model, 2),), dynamo=True, verbose=False, dynamic_shapes=shapes, **names
        )
    assert program is not None
    program.model.metadata_props.update({key: json.dumps(value) for key, value in facts(model).items()})
    content = program.model_proto.SerializeToString()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])

    def run(pixels: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])

    progress(1, 3, "comparing logits")
    difference = _compared("onnx", model, run, eager)
    speed = _speed(model, run, eager, lambda done, total, what: progress(2, 3, f"timing: {what}"))
    write_atomically(path, content)
    return Exported(path, "onnx", difference, _note(model), speed)


def _torch(model: VisionTransformer, path: Path, progress: Progress) -> Exported:
    eager, batch = FromPixels(model), torch.export.Dim("batch", min=1)
    progress(0, 2, "tracing the model")
    program = torch.export.export(eager, (_pixels(model, 2),), dynamic_shapes=({0: batch},))
    progress(1, 2, "comparing logits")
    difference = _compared("torch", model, program.module(), eager)
    content = io.BytesIO()
    with _silence():
        torch.export.save(program, content, extra_files={"linvit.json": json.dumps(facts(model))})
    write_atomically(path, content.getvalue())
    return Exported(path, "torch", difference, _note(model) + ", with torch.export.load(path).module()")


def _hf(model: VisionTransformer, path: Path, progress: Progress) -> Exported:
    """Configuration, weights by names that every version of transformers reads, and how images are prepared."""
    spec = _checked_for_hf(model)
    call, first = "from_pretrained({})", ""
    if spec != BASELINE:
        call = f'from_pretrained({{}}, attn_implementation="linvit-{spec}")'
        first = f'after linvit.register_transformers("{spec}"): '
    files: dict[str, bytes | str] = {
        "config.json": json.dumps(_hf_config(model, spec), indent=1, ensure_ascii=False) + "\n",
        "model.safetensors": save(_hf_tensors(model), {"format": "pt"}),
        "preprocessor_config.json": json.dumps(_hf_processor(model), indent=1) + "\n",
        "README.md": _hf_card(model, spec, call.format('"path/to/this/folder"')),
    }
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        for name, content in files.items():
            write_atomically(part / name, content)
        progress(0, 1, "comparing logits in transformers")
        difference = _compared("hf", model, _hf_loaded(model, part, spec), FromPixels(model))
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Exported(path, "hf", difference, f"{first}ViTForImageClassification.{call.format('path')}")


def _checked_for_hf(model: VisionTransformer) -> str:
    """The spec of its attention; a ValueError if transformers' ViT cannot represent the model."""
    config = model.config
    specs = {str(spec) for spec in parse_layers(config.attention, config.depth)}
    inner = config.heads * (config.head_dim or config.dim // config.heads)
    own = next((key for key in model.state_dict() if OF_SPEC.search(key)), "")
    for what, wrong in {
        f"stem={config.stem}": config.stem != "patch",
        f"pool={config.pool}": config.pool != "cls",
        f"prefix={config.prefix_tokens}": config.prefix_tokens != 1,
        f"mlp={config.mlp}": config.mlp != "gelu",
        f"rope={config.rope}": config.rope is not None,
        f"layer_scale={config.layer_scale}": config.layer_scale is not None,
        f"head={config.head}": config.head != "linear",
        f"classes={config.classes}, only features": not config.classes,
        f"heads={config.heads} × head_dim={config.head_dim} (dim={config.dim})": inner != config.dim,
        f"attention={config.attention}, which differs between layers": len(specs) > 1,
        f"attention={config.attention}, whose {own} it cannot store": bool(own),
    }.items():
        if wrong:
            raise ValueError(f"format=hf: a ViT of transformers cannot have {what}; format=onnx or torch can")
    return specs.pop()


def _hf_config(model: VisionTransformer, spec: str) -> dict[str, Any]:
    config, classes = model.config, model.about["classes"]
    ours = {} if spec == BASELINE else {NOTE: spec}  # for `load`; transformers ignores it
    return ours | {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "dtype": "float32",
        "image_size": config.image_size if isinstance(config.image_size, int) else sides(config.image_size),
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: i for i, name in enumerate(classes)},
    }


def _hf_processor(model: VisionTransformer) -> dict[str, Any]:
    height, width = sides(model.config.image_size)
    whole: dict[str, Any] = {"height": height, "width": width}
    kind: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": whole}
    if model.about["resize"] == "crop":  # of an image of any shape, the crop lies within this
        kind = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": max(height, width)}}
        kind |= {"do_center_crop": True, "crop_size": whole}
    return kind | {
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(model.about["mean"]),
        "image_std": list(model.about["std"]),
    }


HF_PARTS = {  # of a block
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "attn.q_proj": "attention.attention.query",
    "attn.k_proj": "attention.attention.key",
    "attn.v_proj": "attention.attention.value",
    "mlp.0": "intermediate.dense",
    "mlp.3": "output.dense",
}


def _hf_tensors(model: VisionTransformer) -> dict[str, Tensor]:
    config, state, home = model.config, separate(model.state_dict()), "vit.embeddings."
    assert config.patch_size is not None  # of a patch stem
    filters = state["stem.embed.weight"].view(config.dim, config.channels, config.patch_size, config.patch_size)
    positions = torch.zeros(1, model.tokens, config.dim) if model.position is None else model.position.detach()
    tensors = {f"{home}cls_token": state["cls"], f"{home}position_embeddings": positions}
    tensors |= {f"{home}patch_embeddings.projection.weight": filters}
    tensors |= {f"{home}patch_embeddings.projection.bias": state["stem.embed.bias"]}
    for key, value in state.items():
        part, _, kind = key.rpartition(".")
        if part in ("norm", "head"):
            tensors[f"{'vit.layernorm' if part == 'norm' else 'classifier'}.{kind}"] = value
        elif part.startswith("blocks."):
            _, layer, inside = part.split(".", 2)
            tensors[f"vit.encoder.layer.{layer}.{HF_PARTS[inside]}.{kind}"] = value
    return {name: value.contiguous() for name, value in tensors.items()}


def _hf_loaded(model: VisionTransformer, folder: Path, spec: str) -> Pixels:
    """The model that transformers loads from the folder, as its card says."""
    import transformers

    name = "eager" if spec == BASELINE else register_transformers(spec)
    transformers.utils.logging.disable_progress_bar()
    with _silence():
        theirs, seen = transformers.ViTForImageClassification.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            folder, local_files_only=True, output_loading_info=True, attn_implementation=name
        )
    if strange := [*seen["missing_keys"], *seen["unexpected_keys"]]:
        raise ValueError(f"format=hf: transformers {transformers.__version__} does not take the weights {strange[0]}")
    mean, std = model.about["mean"], model.about["std"]
    return lambda pixels: theirs.eval()(normalise(pixels, mean, std)).logits


ZOOMS = "Training used the largest centre crop of this aspect ratio; transformers' processor crops more of each image."


def _hf_card(model: VisionTransformer, spec: str, call: str) -> str:
    exact = spec == BASELINE
    register = "" if exact else f'import linvit\nlinvit.register_transformers("{spec}")\n'
    return f"""# {model.about["name"]}: vision transformer with {spec}

```python
{register}from transformers import ViTForImageClassification
model = ViTForImageClassification.{call}
```
{"" if exact else "With another attention the same weights give other logits."}
{ZOOMS if model.about["resize"] == "crop" and isinstance(model.config.image_size, str) else ""}
"""


FITTED = {"crop": "resized to cover this size, the centre cut out", "squeeze": "resized to this size"}


def facts(model: VisionTransformer) -> dict[str, Any]:
    """What a user of an ONNX or .pt2 file has to know."""
    config, about, (channels, height, width) = model.config, model.about, model.config.image_shape
    return {
        "linvit": __version__,
        "attention": config.attention,
        "data": about["name"],
        "classes": list(about["classes"]),
        "pixels": f"uint8 (batch, channels={channels}, {height}, {width}), "
        f"{'grey' if channels == 1 else 'RGB'}, 0…255, {FITTED[about['resize']]} (bicubic), not normalised",
        "resize": about["resize"],
        "image_size": config.image_size,
        "channels": channels,
        "mean": list(about["mean"]),
        "std": list(about["std"]),
        "normalisation": "inside the model",
    }


def _note(model: VisionTransformer) -> str:
    config = model.config
    shape = f"(batch, {', '.join(map(str, config.image_shape))})"
    output = f"logits (batch, {config.classes})" if config.classes else f"features (batch, {config.dim})"
    return f"pixels uint8 {shape}, not normalised → {output}"


def _pixels(model: VisionTransformer, batch: int) -> Tensor:
    """Random images."""
    shape = batch, *model.config.image_shape
    return torch.randint(0, 256, shape, generator=generator("export", *shape), dtype=torch.uint8)


@torch.no_grad()
def _compared(format: str, model: VisionTransformer, exported: Pixels, eager: Pixels) -> float:
    """The largest difference between logits; a ValueError if it is too large, or any logit is not finite."""
    worst, tolerance = 0.0, TOLERANCE[format]
    for batch in CHECKED:
        pixels = _pixels(model, batch)
        ours, theirs = eager(pixels), exported(pixels)
        difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
        allowed = tolerance * max(1.0, largest) if format == "hf" else max(tolerance, ROUNDING * largest)
        if not difference <= allowed:
            raise ValueError(
                f"format={format}: logits differ by {difference:.1e}, more than {allowed:.0e}, from the model's: "
                f"nothing was written (attention={model.config.attention})"
            )
        worst = max(worst, difference)
    return worst


def _speed(model: VisionTransformer, exported: Pixels, eager: Pixels, progress: Progress) -> dict[int, list[float]]:
    """How many times as fast as the eager model it is, by batch size: quartiles over rounds."""
    eager, calls = torch.inference_mode()(eager), {}
    for batch in TIMED:
        pixels = _pixels(model, batch)
        calls |= {("exported", batch): partial(exported, pixels), ("eager", batch): partial(eager, pixels)}
    deadline = time.monotonic() + TIMING_SECONDS
    times = race(calls, device=torch.device("cpu"), progress=progress, deadline=deadline)
    return {n: quartiles(times.ratios(("eager", n), ("exported", n), by=times.clock)) for n in TIMED}


@contextmanager
def _silence() -> Iterator[None]:
    """Without the exporters' own log messages and warnings, which do not concern the user."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
