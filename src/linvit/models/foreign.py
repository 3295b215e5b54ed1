"""Vision transformers from elsewhere, read as linvit's: Hugging Face's ViT, DeiT and DINOv2, timm's and torchvision's.

A layout is a table from its keys to linvit's. The files' headers tell the geometry, config.json what shapes cannot; all
of it is checked before a weight is read. What linvit's model cannot compute is refused, never approximated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linvit.attention.multihead import fuse
from linvit.errors import choices
from linvit.models import ModelConfig, model_config

# Keys without "vit." and the like → linvit's; `#` is a layer's number, `*` weight or bias, and what maps to nothing
# belongs to other tasks.
HUGGING_FACE = {
    r"embeddings\.(cls|distillation)_token": r"\1",
    r"embeddings\.register_tokens": "registers",
    r"embeddings\.position_embeddings": "position",
    r"embeddings\.patch_embeddings\.projection\.*": r"stem.embed.\1",
    r"(?:encoder\.layer|layers)\.#\.(?:layernorm_before|norm1)\.*": r"blocks.\1.norm1.\2",
    r"(?:encoder\.layer|layers)\.#\.(?:layernorm_after|norm2)\.*": r"blocks.\1.norm2.\2",
    r"(?:encoder\.layer|layers)\.#\.attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.*":
        r"blocks.\1.attn.\2_proj.\3",
    r"(?:encoder\.layer|layers)\.#\.attention\.(?:output\.dense|o_proj)\.*": r"blocks.\1.attn.proj.\2",
    r"(?:encoder\.layer|layers)\.#\.attention\.linvit\.(.+)": r"blocks.\1.attn.attention.\2",
    r"(?:encoder\.layer|layers)\.#\.(?:intermediate\.dense|mlp\.fc1)\.*": r"blocks.\1.mlp.0.\2",
    r"(?:encoder\.layer|layers)\.#\.(?:output\.dense|mlp\.fc2)\.*": r"blocks.\1.mlp.3.\2",
    r"(?:encoder\.layer|layers)\.#\.layer_scale([12])\.lambda1": r"blocks.\1.scale\2",
    r"layernorm\.*": r"norm.\1",
    r"classifier\.*": r"head.\1",
    r"embeddings\.mask_token|pooler\.dense\.*": "",
}  # fmt: skip
TIMM = {
    r"cls_token": "cls",
    r"reg_token": "registers",
    r"pos_embed": "position",
    r"patch_embed\.proj\.*": r"stem.embed.\1",
    r"blocks\.#\.(norm[12]|attn\.qkv|attn\.proj)\.*": r"blocks.\1.\2.\3",
    r"blocks\.#\.mlp\.fc1\.*": r"blocks.\1.mlp.0.\2",
    r"blocks\.#\.mlp\.fc2\.*": r"blocks.\1.mlp.3.\2",
    r"blocks\.#\.ls([12])\.gamma": r"blocks.\1.scale\2",
    r"(?:fc_)?norm\.*": r"norm.\1",
    r"head\.*": r"head.\1",
}
TORCHVISION = {
    r"class_token": "cls",
    r"encoder\.pos_embedding": "position",
    r"conv_proj\.*": r"stem.embed.\1",
    r"encoder\.layers\.encoder_layer_#\.ln_([12])\.*": r"blocks.\1.norm\2.\3",
    r"encoder\.layers\.encoder_layer_#\.self_attention\.in_proj_*": r"blocks.\1.attn.qkv.\2",
    r"encoder\.layers\.encoder_layer_#\.self_attention\.out_proj\.*": r"blocks.\1.attn.proj.\2",
    r"encoder\.layers\.encoder_layer_#\.mlp\.(?:0|linear_1)\.*": r"blocks.\1.mlp.0.\2",
    r"encoder\.layers\.encoder_layer_#\.mlp\.(?:3|linear_2)\.*": r"blocks.\1.mlp.3.\2",
    r"encoder\.ln\.*": r"norm.\1",
    r"heads\.head\.*": r"head.\1",
}
HEADS = {  # by the size in a name, where no configuration says it
    "tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16, "giant": 16, "gigantic": 16, "medium": 8,
    "b": 12, "l": 16, "h": 16,
}  # fmt: skip
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
HALVES = 0.5, 0.5
FLOATS = ("F64", "F32", "F16", "BF16")
MODEL_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers")
PREFIX_TOKENS = ("cls", "distillation", "registers")

Shapes = Mapping[str, tuple[int, ...]]


class Said(NamedTuple):
    """What shapes cannot tell."""

    heads: int
    norm_eps: float
    pool: str
    positioned: tuple[str, ...] | None  # the prefix tokens that have positions; None: all or none of them
    labels: Any  # a list, a dictionary by number, or None
    mean: Any
    std: Any
    attention: str = "softmax"


def is_foreign(about: Any) -> bool:
    """Whether a config.json is that of a model from elsewhere."""
    theirs = ("model_type", "architecture", "num_heads")
    return isinstance(about, dict) and "model" not in about and any(key in about for key in theirs)


def read_foreign(
    folder: Path, said: Mapping[str, Any], name: str
) -> tuple[ModelConfig, dict[str, Any], Callable[[], dict[str, Tensor]]]:
    """A folder's configuration as linvit's, its name, classes, mean and std, and what reads its weights; `said` is
    config.json."""
    with _blaming(folder):
        header = _header(folder)
        table, facts = _layout(folder, said, header)
        keys = _renamed(header, table)
        shapes = {new: header[old][0] for new, old in keys.items()}
        config, positioned = _configured(facts, shapes, said)
        _check_shapes(_wanted(config, shapes, positioned), shapes, keys)
        for old in keys.values():
            if header[old][1] not in FLOATS:
                raise ValueError(f"{old} holds {header[old][1]}: quantised weights are not read, only floats")
        about = {"name": name, "classes": _classes(folder, facts, config.classes)}
        about |= {name: _numbers(name, getattr(facts, name), config.channels) for name in ("mean", "std")}

    def weights() -> dict[str, Tensor]:
        with _blaming(folder):
            return _assembled(_read(folder, keys), positioned)

    return config, about, weights


@contextmanager
def _blaming(folder: Path) -> Iterator[None]:
    """What is wrong is one line that names the folder."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder}: a file of weights is damaged ({error})") from None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def download(name: str) -> Path:
    """A model of the Hugging Face hub, `org/name`: its JSON and safetensors, in the hub's own cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError(f"{name} does not exist here; from the hub it needs: pip install 'linvit[hf]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "model*.safetensors", "classes.txt"],
                                      ignore_patterns=["*/*"]))  # fmt: skip
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} does not exist here, and the hub did not give it ({why})") from None


def _weights(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if not index.exists():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        also = f"; {others[0]} is a pickle, which is never read: save it as safetensors" if others else ""
        raise ValueError(f"there is no model.safetensors{also}")
    names = _json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index.name} has no weight_map")
    if strange := [name for name in names.values() if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"{index.name} names '{strange[0]}', which is no file beside it")
    return [folder / name for name in sorted(set(names.values()))]


def _header(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor; safetensors itself checks that they fit the size of the file."""
    found = {}
    for path in _weights(folder):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(key)
                found[key] = tuple(part.get_shape()), str(part.get_dtype())
    return found


def _read(folder: Path, keys: Mapping[str, str]) -> dict[str, Tensor]:
    old = {value: key for key, value in keys.items()}
    tensors = {}
    for path in _weights(folder):
        with safe_open(path, "pt") as file:
            tensors |= {old[key]: file.get_tensor(key).float() for key in file.keys() if key in old}  # noqa: SIM118
    return tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds {type(found).__name__}, not an object")
    return found


def _renamed(header: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, str]:
    """linvit's key → the file's, for all that the model needs."""
    owner = rf"(?:(?:{'|'.join(MODEL_TYPES)})\.)?"
    patterns = [
        (re.compile(f"{owner}(?:{key})".replace("#", "([0-9]+)").replace("*", "(weight|bias)")), new)
        for key, new in table.items()
    ]
    keys: dict[str, str] = {}
    for old, (shape, _) in header.items():
        match, new = next(((m, new) for pattern, new in patterns if (m := pattern.fullmatch(old))), (None, ""))
        if match is None:
            raise ValueError(f"{old} {shape} has no place in linvit's vision transformer")
        if not new:
            continue
        if (key := match.expand(new)) in keys:
            raise ValueError(f"{old} and {keys[key]} are both linvit's {key}")
        keys[key] = old
    return keys


def _layout(folder: Path, said: Mapping[str, Any], header: Mapping[str, Any]) -> tuple[dict[str, str], Said]:
    if said.get("quantization_config"):
        raise ValueError(f"quantization_config={said['quantization_config']!r}: quantised weights are not read")
    if "conv_proj.weight" in header:
        return TORCHVISION, _torchvision(said)
    if "patch_embed.proj.weight" in header:
        return TIMM, _timm(said, header)
    if "model_type" in said:
        return HUGGING_FACE, _hugging_face(folder, said, header)
    raise ValueError(f"architecture={said.get('architecture')!r} has neither timm's nor torchvision's keys of a ViT")


def _hugging_face(folder: Path, said: Mapping[str, Any], header: Mapping[str, Any]) -> Said:
    kind = said["model_type"]
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type={kind!r} is not read" + choices(str(kind), MODEL_TYPES))
    for field, only in {"hidden_act": "gelu", "use_swiglu_ffn": False, "add_cross_attention": False}.items():
        if said.get(field, only) != only:
            raise ValueError(f"{field}={said[field]!r} is not what linvit computes: {only!r}")
    beside = folder / "preprocessor_config.json"
    pixels = _json(beside) if beside.exists() else {}
    mean, std = HALVES if kind == "vit" else IMAGENET
    if pixels.get("do_normalize") is False:
        pixels |= {"image_mean": 0.0, "image_std": 1.0}
    return Said(
        heads=_whole(said, "num_attention_heads"),
        norm_eps=said.get("layer_norm_eps", 1e-6 if kind.startswith("dinov2") else 1e-12),
        pool="cls-mean" if kind.startswith("dinov2") and "classifier.weight" in header else "cls",
        positioned=("cls", "distillation"),
        labels=said.get("id2label"),
        mean=pixels.get("image_mean", mean),
        std=pixels.get("image_std", std),
        attention=said.get("linvit_attention", "softmax"),
    )


def _timm(said: Mapping[str, Any], header: Mapping[str, Any]) -> Said:
    name, arguments, cfg = str(said.get("architecture")), _object(said, "model_args"), _object(said, "pretrained_cfg")
    if not re.match(r"(vit|deit3?|flexivit)_", name) or re.search("rope|relpos|quickgelu|rpn", name):
        raise ValueError(f"architecture={name!r} is not a plain vision transformer: vit_…, deit_… and deit3_… are read")
    for field in ("act_layer", "norm_layer", "mlp_layer", "attn_layer", "block_fn", "embed_layer"):
        if arguments.get(field):
            raise ValueError(f"model_args: {field}={arguments[field]!r} is not what linvit computes")
    pool = arguments.get("global_pool", said.get("global_pool", "token"))
    if pool not in ("token", "avg"):
        raise ValueError(f"global_pool={pool!r} is not read: token or avg")
    if pool == "avg" and "fc_norm.weight" not in header:
        raise ValueError("global_pool='avg' without fc_norm normalises before the mean, linvit only after it")
    return Said(
        heads=arguments.get("num_heads") or _heads(name, r"_([a-z]+)"),
        norm_eps=1e-6,
        pool="cls" if pool == "token" else "mean",
        positioned=None,
        labels=said.get("label_names") or cfg.get("label_names"),
        mean=cfg.get("mean", IMAGENET[0]),
        std=cfg.get("std", IMAGENET[1]),
    )


def _torchvision(said: Mapping[str, Any]) -> Said:
    given = said.get("heads", said.get("num_heads"))
    return Said(
        heads=given if given is not None else _heads(str(said.get("architecture")), r"_([blh])_"),
        norm_eps=1e-6,
        pool="cls",
        positioned=("cls",),
        labels=said.get("label_names") or said.get("classes"),
        mean=said.get("mean", IMAGENET[0]),
        std=said.get("std", IMAGENET[1]),
    )


def _heads(architecture: str, size: str) -> int:
    found = re.search(size, architecture)
    if found is None or found[1] not in HEADS:
        raise ValueError(
            f"architecture={architecture!r}: how many heads this has is not known: write num_heads into config.json"
        )
    return HEADS[found[1]]


def _object(said: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = said.get(field) or {}
    if not isinstance(value, dict):
        raise ValueError(f"config.json: {field}={value!r} must be an object")
    return value


def _whole(said: Mapping[str, Any], field: str) -> int:
    value = said.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {field}={value!r} must be a whole number of at least 1")
    return value


def _classes(folder: Path, said: Said, count: int) -> list[str]:
    """One name for each output: the first words of classes.txt, the configuration's labels, or numbers."""
    listed, names = folder / "classes.txt", said.labels
    if listed.exists():
        names = [line.split()[0] for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not isinstance(names, list):
        known = names if isinstance(names, dict) else {}
        names = [known.get(str(i), i) for i in range(count)]
    if count and len(names) != count:
        raise ValueError(f"there are {len(names)} names of classes, but the head has {count} outputs")
    names = [str(name) for name in names[:count]]
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    return [name if first[name] == i else f"{name} ({i})" for i, name in enumerate(names)]  # a name is one class


def _numbers(name: str, given: Any, channels: int) -> list[float]:
    """The mean or std of each channel; one number is that of all."""
    if given in IMAGENET and channels != 3:  # nobody said so, and those are of colours
        given = 0.5
    least = 0.0 if name == "std" else -math.inf
    numbers = given if isinstance(given, list) else [given] * channels
    if len(numbers) != channels or not all(isinstance(x, (int, float)) and least < x < math.inf for x in numbers):
        raise ValueError(f"{name}={given!r} must be {channels} numbers, one for each channel")
    return [float(x) for x in numbers]


def _configured(facts: Said, shapes: Shapes, said: Mapping[str, Any]) -> tuple[ModelConfig, int]:
    """The model, and how many of its prefix tokens have positions."""

    def shape(key: str, dimensions: int) -> tuple[int, ...]:
        found = shapes.get(key)
        if found is None:
            raise ValueError(f"there is nothing for linvit's {key}")
        if len(found) != dimensions or not all(found):
            raise ValueError(f"{key} has shape {found}, where {dimensions} dimensions were expected")
        return found

    dim, channels, patch, width = shape("stem.embed.weight", 4)
    if patch != width:
        raise ValueError(f"patches of {patch} × {width} pixels are not read: only square ones")
    prefix = {key: shape(key, 3)[1] for key in PREFIX_TOKENS if key in shapes}
    count = shape("position", 3)[1]
    positioned, side = _grid(count, prefix, facts.positioned)
    size = said.get("image_size", side * patch)
    if any(one != side * patch for one in (size if isinstance(size, list) else [size])):
        raise ValueError(f"image_size={size}, but {count} positions of patches of {patch} px are for {side * patch} px")
    depth = 1 + max((int(key.split(".")[1]) for key in shapes if key.startswith("blocks.")), default=-1)
    inner = shape("blocks.0.attn.proj.weight", 2)[1]
    if not isinstance(facts.heads, int) or facts.heads < 1 or inner % facts.heads:
        raise ValueError(f"{facts.heads!r} heads do not divide a width of {inner}")
    config = model_config(
        image_size=side * patch, patch_size=patch, channels=channels, dim=dim, depth=depth, heads=facts.heads,
        head_dim=None if inner == dim else inner // facts.heads, mlp_dim=shape("blocks.0.mlp.0.weight", 2)[0],
        classes=shape("head.weight", 2)[0] if "head.weight" in shapes else 0,
        pool=facts.pool, prefix=sum(prefix.values()), norm_eps=facts.norm_eps, attention=facts.attention,
        qkv_bias=any(key.startswith("blocks.0.attn.q") and key.endswith("bias") for key in shapes),
        layer_scale=1.0 if "blocks.0.scale1" in shapes else None,
    )  # fmt: skip
    return config, positioned


def _grid(count: int, prefix: Mapping[str, int], positioned: tuple[str, ...] | None) -> tuple[int, int]:
    """How many of the prefix tokens are among so many positions, and the side of the square that the rest makes."""
    some = sum(prefix.get(key, 0) for key in positioned or PREFIX_TOKENS)
    for embedded in (some,) if positioned else (some, 0):
        side = math.isqrt(max(0, count - embedded))
        if side and side**2 == count - embedded:
            return embedded, side
    raise ValueError(f"{count} positions with {some} prefix tokens are not those of a square image")


def _wanted(config: ModelConfig, shapes: Shapes, positioned: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, as the layouts have them: the stem a convolution, q, k, v together or apart."""
    dim, inner = config.dim, config.heads * (config.head_dim or config.dim // config.heads)

    def linear(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})

    together = "blocks.0.attn.qkv.weight" in shapes
    block = linear("mlp.0", dim, config.mlp_dim) | linear("mlp.3", config.mlp_dim, dim)
    block |= linear("attn.proj", inner, dim)
    for name in ("qkv",) if together else ("q_proj", "k_proj", "v_proj"):
        block |= linear(f"attn.{name}", dim, 3 * inner if together else inner, config.qkv_bias)
    block |= dict.fromkeys(("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"), (dim,))
    block |= {} if config.layer_scale is None else {"scale1": (dim,), "scale2": (dim,)}
    patch = config.patch_size or 1
    wanted = {f"blocks.{i}.{key}": shape for i in range(config.depth) for key, shape in block.items()}
    wanted |= {"stem.embed.weight": (dim, config.channels, patch, patch), "stem.embed.bias": (dim,)}
    wanted |= {"norm.weight": (dim,), "norm.bias": (dim,)}
    wanted |= {"position": (1, positioned + (config.image_size // patch) ** 2, dim)}
    wanted |= {key: (1, shapes[key][1], dim) for key in PREFIX_TOKENS if key in shapes}
    return wanted | (linear("head", config.features, config.classes) if config.classes else {})


def _check_shapes(wanted: Shapes, shapes: Shapes, keys: Mapping[str, str]) -> None:
    for key, shape in wanted.items():
        if key not in shapes:
            raise ValueError(f"there is nothing for linvit's {key} {shape}")
        if shapes[key] != shape:
            raise ValueError(f"{keys[key]} has shape {shapes[key]}, but the rest of the model asks for {shape}")
    for key in shapes:
        if key not in wanted and ".attn.attention." not in key:  # an attention's own weights are its own affair
            raise ValueError(f"{keys[key]} {shapes[key]} has no place in linvit's vision transformer")


def _assembled(tensors: dict[str, Tensor], positioned: int) -> dict[str, Tensor]:
    """The tensors as linvit's model holds them. A prefix token without a position has one that is zero."""
    tokens = [tensors.pop(key) for key in PREFIX_TOKENS if key in tensors]
    position = tensors["position"]
    if tokens:
        tensors["cls"] = torch.cat(tokens, 1)
        bare = position.new_zeros(1, tensors["cls"].shape[1] - positioned, position.shape[2])
        tensors["position"] = torch.cat([position[:, :positioned], bare, position[:, positioned:]], 1)
    tensors["stem.embed.weight"] = tensors["stem.embed.weight"].flatten(1)
    return fuse(tensors)
