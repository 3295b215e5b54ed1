"""A trained model for use without linvit: an ONNX file, PyTorch's own .pt2, or a folder that transformers loads.

ONNX and .pt2 files take decoded pixels, uint8 (batch, channels, size, size), and give logits: the normalisation is
inside, where nobody can forget it, and a uint8 cannot be mistaken for numbers that are normalised already. What a user
has to know beside that (classes, layout) is in the file. Every export is compared with the model it was made of, on
batches of 1 and 3, before it gets its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from linvit import __version__
from linvit.attention.multihead import separate
from linvit.convert.linearize import NOTE
from linvit.convert.registries import register_transformers
from linvit.data import normalise
from linvit.errors import choices
from linvit.files import slug, write_atomically
from linvit.measure.race import quartiles, race
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore, repeated
from linvit.randomness import generator
from linvit.registry import parse_layers
from linvit.train import load
from linvit.train.checkpoint import on_hub

Format = Literal["onnx", "torch", "hf"]
NAMES = {"onnx": "model.onnx", "torch": "model.pt2", "hf": "hf"}  # inside the model's folder, if no other is given
EXTRAS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "hf": ("transformers",)}
TOLERANCE = {"onnx": 1e-4, "torch": 1e-4, "hf": 1e-5}  # of logits; for hf times the largest, if that is above one
CHECKED = (1, 3)  # batches
TIMED = (1, 32)
PATIENCE = 10.0  # seconds for timing, after which there are no more rounds than a race needs
ROUNDING = 1e-6  # of logits of hundreds and more, of the largest
LARGEST = 2 * 10**9  # bytes of one ONNX file: protobuf's limit
Pixels = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    path: Path
    format: str
    difference: float  # the largest between its logits and the model's
    note: str  # how it is used
    speed: dict[int, list[float]] = field(default_factory=dict)  # of onnxruntime over PyTorch's, by batch: quartiles


def export(
    folder: str | Path, format: Format = "onnx", out: str | Path | None = None, *, progress: Progress = ignore
) -> Exported:
    """The trained model of a folder, written for use elsewhere once it has shown the same logits."""
    if format not in NAMES:
        raise ValueError(f"unknown format '{format}'" + choices(format, NAMES))
    home = Path(slug(str(folder))) if on_hub(folder) else Path(folder)  # a folder org/name would hide the hub's model
    path = home / NAMES[format] if out is None else Path(out)
    if path.suffix != (wanted := Path(NAMES[format]).suffix) and wanted:
        raise ValueError(f"out={path} must end in {wanted}")
    if missing := [name for name in EXTRAS[format] if importlib.util.find_spec(name) is None]:
        raise ValueError(f"format={format} needs {missing[0]}, which is not installed: pip install 'linvit[{format}]'")
    model = load(folder)
    if model.config.causal:
        raise ValueError(f"{folder} is a next-pixel model: only models with classes are exported")
    if path.exists():
        raise ValueError(f"{path} is there already: delete it, or give another place with --out")
    with repeated(progress) as tell:
        return {"onnx": _onnx, "torch": _torch, "hf": _hf}[format](model, path, tell)


class FromPixels(nn.Module):
    """uint8 (B, C, H, W) → logits (B, classes), as a trained model was taught to see images."""

    def __init__(self, model: VisionTransformer):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(normalise(pixels, self.model.about["mean"], self.model.about["std"]))


def _onnx(model: VisionTransformer, path: Path, tell: Progress) -> Exported:
    import onnxruntime

    if (size := 4 * sum(p.numel() for p in model.state_dict().values())) > LARGEST:
        raise ValueError(f"an ONNX file of {size:,} bytes cannot be: {LARGEST:,} is the most that the format allows")
    eager, example = FromPixels(model), _pixels(model, 2)
    tell(0, 3, "tracing the model")
    with _silence("torch.onnx", "onnxscript", "onnx_ir"):
        program = torch.onnx.export(
            eager, (example,), dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["pixels"], output_names=["logits"],
        )  # fmt: skip
    assert program is not None
    program.model.metadata_props.update({key: json.dumps(value) for key, value in facts(model).items()})
    content = program.model_proto.SerializeToString()
    tell(1, 3, "comparing its logits")
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])

    def run(pixels: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])

    difference = _compared("onnx", model, run, eager)
    speed = _speed(model, run, eager, lambda done, total, what: tell(2, 3, f"timing: {what}"))
    write_atomically(path, content)
    return Exported(path, "onnx", difference, _note(model), speed)


def _torch(model: VisionTransformer, path: Path, tell: Progress) -> Exported:
    eager = FromPixels(model)
    tell(0, 2, "tracing the model")
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(eager, (_pixels(model, 2),), dynamic_shapes=({0: batch},))
    tell(1, 2, "comparing its logits")
    difference = _compared("torch", model, program.module(), eager)
    content = io.BytesIO()
    with _silence("torch.export"):
        torch.export.save(program, content, extra_files={"linvit.json": json.dumps(facts(model))})
    write_atomically(path, content.getvalue())
    return Exported(path, "torch", difference, _note(model) + ", with torch.export.load(path).module()")


def _hf(model: VisionTransformer, path: Path, tell: Progress) -> Exported:
    """Config, weights under the names that every version of transformers reads, and how images are prepared."""
    spec = _checked_for_hf(model)
    call = "from_pretrained({})" if spec == "softmax" else f'from_pretrained({{}}, attn_implementation="linvit-{spec}")'
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
        tell(0, 1, "comparing its logits in transformers")
        difference = _compared("hf", model, _hf_loaded(model, part, spec), FromPixels(model))
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    first = "" if spec == "softmax" else f'after linvit.register_transformers("{spec}"): '
    return Exported(path, "hf", difference, f"{first}ViTForImageClassification.{call.format('path')}")


def _checked_for_hf(model: VisionTransformer) -> str:
    """What transformers' ViT cannot be is refused; else the spec of its attention."""
    config = model.config
    specs = {str(spec) for spec in parse_layers(config.attention, config.depth)}
    inner = config.heads * (config.head_dim or config.dim // config.heads)
    own = next((key for key in model.state_dict() if ".attention." in key), "")
    for what, wrong in {
        f"stem={config.stem}": config.stem != "patch",
        f"pool={config.pool}": config.pool != "cls",
        f"prefix={config.prefix_tokens}": config.prefix_tokens != 1,
        f"layer_scale={config.layer_scale}": config.layer_scale is not None,
        f"head={config.head}": config.head != "linear",
        f"classes={config.classes}, only features": not config.classes,
        f"heads={config.heads} × head_dim={config.head_dim} (dim={config.dim})": inner != config.dim,
        f"attention={config.attention}, which differs between layers": len(specs) > 1,
        f"attention={config.attention}, whose {own} it has no place for": bool(own),
    }.items():
        if wrong:
            raise ValueError(f"format=hf: a ViT of transformers cannot have {what}; format=onnx or torch can")
    return specs.pop()


def _hf_config(model: VisionTransformer, spec: str) -> dict[str, Any]:
    config, classes = model.config, model.about["classes"]
    ours = {} if spec == "softmax" else {NOTE: spec}  # for `load`; transformers does not mind
    return ours | {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "dtype": "float32",
        "image_size": config.image_size, "patch_size": config.patch_size, "num_channels": config.channels,
        "hidden_size": config.dim, "num_hidden_layers": config.depth, "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_dim, "hidden_act": "gelu", "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias, "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": 0.0,
        "id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)},
    }  # fmt: skip


def _hf_processor(model: VisionTransformer) -> dict[str, Any]:
    size = model.config.image_size
    return {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": size, "width": size},
        "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(model.about["mean"]), "image_std": list(model.about["std"]),
    }  # fmt: skip


def _hf_tensors(model: VisionTransformer) -> dict[str, Tensor]:
    config, state = model.config, separate(model.state_dict())
    tokens = torch.zeros(1, model.tokens, config.dim) if model.position is None else model.position.detach()
    side, patch = config.channels, config.patch_size
    assert patch is not None  # of a patch stem
    tensors = {
        "vit.embeddings.cls_token": state["cls"],
        "vit.embeddings.position_embeddings": tokens,
        "vit.embeddings.patch_embeddings.projection.weight": state["stem.embed.weight"].view(-1, side, patch, patch),
        "vit.embeddings.patch_embeddings.projection.bias": state["stem.embed.bias"],
    }
    renamed = {
        "norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.output.dense",
        "attn.q_proj": "attention.attention.query", "attn.k_proj": "attention.attention.key",
        "attn.v_proj": "attention.attention.value", "mlp.0": "intermediate.dense", "mlp.3": "output.dense",
    }  # fmt: skip
    for key, value in state.items():
        part, _, kind = key.rpartition(".")
        if part in ("norm", "head"):
            tensors[f"{'vit.layernorm' if part == 'norm' else 'classifier'}.{kind}"] = value
        elif part.startswith("blocks."):
            _, layer, inside = part.split(".", 2)
            tensors[f"vit.encoder.layer.{layer}.{renamed[inside]}.{kind}"] = value
    return {name: value.contiguous() for name, value in tensors.items()}


def _hf_loaded(model: VisionTransformer, folder: Path, spec: str) -> Pixels:
    """What transformers makes of the folder, as whoever loads it is told to."""
    import transformers

    name = "eager" if spec == "softmax" else register_transformers(spec)
    transformers.utils.logging.disable_progress_bar()
    with _silence("transformers"):
        theirs, seen = transformers.ViTForImageClassification.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            folder, local_files_only=True, output_loading_info=True, attn_implementation=name
        )
    if strange := [*seen["missing_keys"], *seen["unexpected_keys"]]:
        raise ValueError(f"format=hf: transformers {transformers.__version__} does not take the weights {strange[0]}")
    mean, std = model.about["mean"], model.about["std"]
    return lambda pixels: theirs.eval()(normalise(pixels, mean, std)).logits


def _hf_card(model: VisionTransformer, spec: str, call: str) -> str:
    exact = spec == "softmax"
    register = "" if exact else f'import linvit\nlinvit.register_transformers("{spec}")\n'
    return f"""# {model.about["name"]}: vision transformer with {spec}

```python
{register}from transformers import ViTForImageClassification
model = ViTForImageClassification.{call}
```
{"" if exact else "With another attention the same weights give other logits."}
"""


def facts(model: VisionTransformer) -> dict[str, Any]:
    """What whoever uses an ONNX or .pt2 file has to know."""
    config, about = model.config, model.about
    return {
        "linvit": __version__, "attention": config.attention, "data": about["name"], "classes": list(about["classes"]),
        "pixels": f"uint8 (batch, channels={config.channels}, {config.image_size}, {config.image_size}), "
        f"{'grey' if config.channels == 1 else 'RGB'}, 0…255, resized to the square (bicubic), not normalised",
        "image_size": config.image_size, "channels": config.channels,
        "mean": list(about["mean"]), "std": list(about["std"]), "normalisation": "inside the model",
    }  # fmt: skip


def _note(model: VisionTransformer) -> str:
    config = model.config
    shape = f"(batch, {config.channels}, {config.image_size}, {config.image_size})"
    said = f"logits (batch, {config.classes})" if config.classes else f"features (batch, {config.dim})"
    return f"pixels uint8 {shape}, not normalised → {said}"


def _pixels(model: VisionTransformer, batch: int) -> Tensor:
    """Random images."""
    config = model.config
    shape = batch, config.channels, config.image_size, config.image_size
    return torch.randint(0, 256, shape, generator=generator("export", *shape), dtype=torch.uint8)


@torch.no_grad()
def _compared(format: str, model: VisionTransformer, exported: Pixels, eager: Pixels) -> float:
    """The largest difference between logits; a ValueError if it is too large, or either is not finite."""
    worst = 0.0
    for batch in CHECKED:
        pixels = _pixels(model, batch)
        ours, theirs = eager(pixels), exported(pixels)
        difference = float((ours - theirs).abs().max())
        largest = float(ours.abs().max())
        allowed = (
            TOLERANCE[format] * max(1.0, largest) if format == "hf" else max(TOLERANCE[format], ROUNDING * largest)
        )
        if not difference <= allowed:
            raise ValueError(
                f"format={format}: logits differ by {difference:.1e}, more than {allowed:.0e}, from the model's: "
                f"nothing was written (attention={model.config.attention})"
            )
        worst = max(worst, difference)
    return worst


def _speed(model: VisionTransformer, exported: Pixels, eager: Pixels, progress: Progress) -> dict[int, list[float]]:
    """How many times faster than the eager model it is: quartiles over rounds, all times from one race."""

    def run(call: Pixels, pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return call(pixels)

    calls = {
        (name, batch): partial(run, call, _pixels(model, batch))
        for name, call in {"exported": exported, "eager": eager}.items()
        for batch in TIMED
    }
    deadline = time.monotonic() + PATIENCE
    times = race(calls, device=torch.device("cpu"), progress=progress, deadline=deadline)
    return {n: quartiles(times.ratios(("eager", n), ("exported", n), by=times.clock)) for n in TIMED}


@contextlib.contextmanager
def _silence(*loggers: str) -> Iterator[None]:
    """Without the exporters' remarks, which are about their own insides."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    try:
        for name in loggers:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
