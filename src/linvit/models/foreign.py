"""Vision transformers from elsewhere, read as linvit's: Hugging Face's, timm's and torchvision's.

A layout is a table from its keys to linvit's (`linvit.models.layouts`). The files' headers tell the geometry,
config.json what shapes cannot, and where both speak they must agree; all of it is checked before a weight is read. What
linvit's model cannot compute is refused, never approximated.
"""

from __future__ import annotations

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
from linvit.files import parse_json
from linvit.models import ModelConfig, model_config
from linvit.models.layouts import (
    CLIP,
    GATED,
    HEADS,
    HUGGING_FACE,
    HUGGING_FACE_KINDS,
    IMAGENET,
    PLAIN,
    SAID_BY_HUGGING_FACE,
    SAID_BY_TIMM,
    SIZES,
    TIMM,
    TORCHVISION,
    UNGATED,
    UNUSED_POOLING,
)
from linvit.schemas.pixels import ImageSize, join_sides, parse_size, sides

FLOATS = ("F64", "F32", "F16", "BF16")
PREFIX_TOKENS = ("cls", "distillation", "registers")

Shapes = Mapping[str, tuple[int, ...]]


class Said(NamedTuple):
    """What shapes cannot tell, and what they must agree with."""

    heads: int
    norm_eps: float
    pool: str
    positioned: tuple[str, ...] | None  # the prefix tokens that have positions; None: all or none of them
    labels: tuple[str, Any]  # the field, and its list, dictionary by number, or None
    mean: Any
    std: Any
    stated: Mapping[str, tuple[str, Any]]  # a field → what of the model it says, and the value; None: it says nothing
    scale: float = 1.0  # of pixels in [0, 1], before mean and std
    attention: str = "softmax"
    size: Any = None  # of the images, where it is said
    activation: str = "gelu"  # of an MLP
    gate: str = "silu"  # of a gated one
    rope: str | None = None
    learned: bool = True  # whether there are learned positions
    unbiased: str = ""  # which of q, k and v have no bias though others may
    resize: str = "crop"
    antialias: bool = True  # when positions are interpolated


def is_foreign(about: Any) -> bool:
    """Whether a config.json is not linvit's, and so that of a model from elsewhere."""
    return isinstance(about, dict) and not {"format", "model"} & about.keys()


def read_foreign(
    folder: Path, said: Mapping[str, Any], name: str
) -> tuple[ModelConfig, dict[str, Any], Callable[[], dict[str, Tensor]], bool]:
    """A folder's configuration as linvit's, its name, classes, mean, std and resize, what reads its weights, and
    whether its positions are interpolated with antialiasing; `said` is config.json."""
    with _blaming(folder):
        header = _header(folder)
        table, facts = _layout(folder, said, header)
        keys = _renamed(header, table)
        shapes = {new: header[old][0] for new, old in keys.items()}
        if len(shapes.get("position", ())) == 2:  # a table, as of nn.Embedding
            shapes["position"] = 1, *shapes["position"]
        config, positioned = _configured(facts, shapes, keys, table)
        _check_stated(facts, config, shapes)
        _check_shapes(_wanted(config, facts, shapes, positioned), shapes, keys, table)
        for old in keys.values():
            if header[old][1] not in FLOATS:
                raise ValueError(f"{old} holds {header[old][1]}: quantised weights are not supported, only floats")
        about: dict[str, Any] = {"name": name, "classes": _classes(folder, facts, config.classes)}
        for what in ("mean", "std"):  # (scale·x − mean) / std = (x − mean/scale) / (std/scale)
            about[what] = [n / facts.scale for n in _numbers(what, getattr(facts, what), config.channels)]
        about["resize"] = facts.resize

    def weights() -> dict[str, Tensor]:
        with _blaming(folder):
            return _assembled(_read(folder, keys), positioned)

    return config, about, weights, facts.antialias


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
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "model*.safetensors", "classes.txt"], ignore_patterns=["*/*"]
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} does not exist here, and could not be downloaded from the hub ({why})") from None


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
        raise ValueError(f"{index.name} names '{strange[0]}', which is not in the same folder")
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
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if key in old:
                    tensors[old[key]] = _finite(key, file.get_tensor(key).float())
    return tensors


def _finite(key: str, value: Tensor) -> Tensor:
    extremes = value.aminmax() if value.numel() else ()  # NaN is both; one pass, and nothing is copied
    if strange := [float(x) for x in extremes if not math.isfinite(x)]:
        raise ValueError(f"{key} holds {strange[0]}: weights must be finite in float32")
    return value


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds {type(found).__name__}, not an object")
    return found


def _renamed(header: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, str]:
    """linvit's key → the file's, for all that the model needs."""
    owner = rf"(?:(?:{'|'.join(HUGGING_FACE_KINDS)}|vision_model)\.)?"
    patterns = [
        (re.compile(f"{owner}(?:{key})".replace("#", "([0-9]+)").replace("*", "(weight|bias)")), new)
        for key, new in table.items()
    ]
    keys: dict[str, str] = {}
    for old, (shape, _) in header.items():
        match, new = next(((m, new) for pattern, new in patterns if (m := pattern.fullmatch(old))), (None, ""))
        if match is None:
            raise ValueError(f"{old} {shape} has no counterpart in linvit's vision transformer")
        if not new:
            continue
        if (key := match.expand(new)) in keys:
            raise ValueError(f"{old} and {keys[key]} are both linvit's {key}")
        keys[key] = old
    if not any(".mlp.gate." in key for key in keys):  # a map up without gates is the only one
        keys = {key.replace(".mlp.up.", ".mlp.0."): old for key, old in keys.items()}
    return keys


def _layout(folder: Path, said: Mapping[str, Any], header: Mapping[str, Any]) -> tuple[dict[str, str], Said]:
    if said.get("quantization_config"):
        raise ValueError(f"quantization_config={said['quantization_config']!r}: quantised weights are not supported")
    if "conv_proj.weight" in header:
        return TORCHVISION, _torchvision(said)
    if "patch_embed.proj.weight" in header:
        return TIMM, _timm(said, header)
    if "model_type" in said:
        facts = _hugging_face(folder, said, header)
        return (HUGGING_FACE if facts.pool == "attention" else UNUSED_POOLING | HUGGING_FACE), facts
    if not {"architecture", "heads", "num_heads"} & said.keys():
        raise ValueError(
            "config.json is not a linvit model's configuration, and says neither model_type (Hugging Face) nor "
            "architecture (timm, torchvision) nor heads (torchvision)"
        )
    raise ValueError(
        f"architecture={said.get('architecture')!r} has neither timm's nor torchvision's keys of a ViT; for Hugging "
        "Face's, config.json says model_type"
    )


def _hugging_face(folder: Path, said: Mapping[str, Any], header: Mapping[str, Any]) -> Said:
    name = said["model_type"]
    if name not in HUGGING_FACE_KINDS:
        raise ValueError(f"model_type={name!r} is not supported" + choices(str(name), HUGGING_FACE_KINDS))
    kind = HUGGING_FACE_KINDS[name]
    about = {**said, **_object(said, "vision_config")}
    for field, only in {"add_cross_attention": False, "rope_theta": 100.0}.items():
        if about.get(field, only) != only:
            raise ValueError(f"{field}={about[field]!r} is not supported by linvit: {only!r}")
    gated = about.get("use_swiglu_ffn", about.get("use_gated_mlp", False))
    activation = str(about.get("hidden_act", kind.activation))
    if activation not in (known := GATED if gated and kind.rope else UNGATED):
        raise ValueError(f"hidden_act={activation!r} is not supported by linvit" + choices(activation, known))
    beside = folder / "preprocessor_config.json"
    pixels = _json(beside) if beside.exists() else {}
    if pixels.get("do_normalize") is False:
        pixels |= {"image_mean": 0.0, "image_std": 1.0}
    classified = any(key.endswith("classifier.weight") for key in header)
    pooled = classified or any(".probe" in f".{key}" for key in header) or kind.pool != "attention"
    stated = {field: (what, about.get(field)) for field, what in SAID_BY_HUGGING_FACE.items()}
    return Said(
        heads=_whole({"num_attention_heads": kind.heads} | about, "num_attention_heads"),
        norm_eps=about.get("layer_norm_eps", kind.norm_eps),
        pool=kind.pool_classified if classified or not pooled else kind.pool,
        positioned=("cls", "distillation"),
        labels=_labels((said, "id2label")),
        mean=pixels.get("image_mean", kind.mean_std[0]),
        std=pixels.get("image_std", kind.mean_std[1]),
        stated=stated | {field: ("gated", about.get(field)) for field in ("use_swiglu_ffn", "use_gated_mlp")},
        scale=_scale(pixels),
        attention=said.get("linvit_attention", "softmax"),
        size=about.get("image_size", 224 if kind.rope else None),
        activation=activation,
        gate=activation if kind.rope else "silu",
        rope=kind.rope,
        learned=kind.rope is None,
        unbiased="".join(c for c, field, usual in kind.biases if not about.get(field, usual)),
        resize=_resize(pixels),
        antialias=kind.antialias,
    )


def _resize(pixels: Mapping[str, Any]) -> str:
    """A processor that is given height and width squeezes, unless it crops afterwards."""
    size = pixels.get("size")
    return "squeeze" if isinstance(size, dict) and "height" in size and not pixels.get("do_center_crop") else "crop"


def _scale(pixels: Mapping[str, Any]) -> float:
    """What pixels in [0, 1] are multiplied by: the factor is that of pixels up to 255."""
    factor = pixels.get("rescale_factor", 1 / 255) if pixels.get("do_rescale", True) else 1
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(f"preprocessor_config.json: rescale_factor={factor!r} must be a number above 0")
    return 1.0 if math.isclose(255 * factor, 1, rel_tol=1e-6) else 255 * factor  # 1/255 may be float32's


def _timm(said: Mapping[str, Any], header: Mapping[str, Any]) -> Said:
    given, arguments = said.get("architecture"), _object(said, "model_args")
    name = str(given)
    cfg = {**said, **_object(said, "pretrained_cfg")}  # older files have all of it at the top
    if not re.match(r"(vit|deit3?|flexivit|eva02)_", name) or re.search("rope|relpos|quickgelu|rpn|dinov3", name):
        raise ValueError(
            f"architecture={given!r} is not a plain vision transformer: use vit_…, deit_…, deit3_… or eva02_…"
        )
    for field in ("act_layer", "norm_layer", "mlp_layer", "attn_layer", "block_fn", "embed_layer"):
        if arguments.get(field):
            raise ValueError(f"model_args: {field}={arguments[field]!r} is not supported by linvit")
    eva = name.startswith("eva02_")
    pool = arguments.get("global_pool", said.get("global_pool", "avg" if eva else "token"))
    if pool not in ("token", "avg"):
        raise ValueError(f"global_pool={pool!r} is not supported: token or avg")
    mean = "mean" if "fc_norm.weight" in header else "norm-mean"
    heads = arguments.get("num_heads", said.get("num_heads"))
    stated = {f"model_args.{field}": (what, arguments.get(field)) for field, what in SAID_BY_TIMM.items()}
    stated |= {"num_features": ("dim", said.get("num_features")), "num_classes": ("classes", said.get("num_classes"))}
    if plain := re.fullmatch(PLAIN, name):
        for field, value in zip(("embed_dim", "depth"), SIZES[plain[1]], strict=True):
            if arguments.get(field) is None:
                stated[f"architecture={name!r} without model_args: {field}"] = SAID_BY_TIMM[field], value
    return Said(
        heads=heads if heads is not None else _heads(name, r"_([a-z]+)"),
        norm_eps=1e-6,
        pool="cls" if pool == "token" else mean,
        positioned=None,
        labels=_labels((said, "label_names"), (cfg, "label_names"), (cfg, "labels")),
        mean=cfg.get("mean", (CLIP if eva else IMAGENET)[0]),
        std=cfg.get("std", (CLIP if eva else IMAGENET)[1]),
        stated=stated,
        size=arguments.get("img_size"),
        rope="eva02" if eva else None,
        unbiased="k" if eva else "",
    )


def _torchvision(said: Mapping[str, Any]) -> Said:
    given, name = said.get("heads", said.get("num_heads")), str(said.get("architecture"))
    stated = {}
    if given is None and (plain := re.fullmatch(r"vit_([blh])_\d+", name)):
        for what, value in zip(("dim", "depth"), SIZES[plain[1]], strict=True):
            stated[f"architecture={name!r} without heads: {what}"] = what, value
    return Said(
        heads=given if given is not None else _heads(name, r"_([blh])_"),
        norm_eps=1e-6,
        pool="cls",
        positioned=("cls",),
        size=said.get("image_size"),
        labels=_labels((said, "label_names"), (said, "classes")),
        mean=said.get("mean", IMAGENET[0]),
        std=said.get("std", IMAGENET[1]),
        stated=stated,
    )


def _heads(architecture: str, size: str) -> int:
    found = re.search(size, architecture)
    if found is None or found[1] not in HEADS:
        raise ValueError(f"architecture={architecture!r}: the number of heads is unknown: add num_heads to config.json")
    return HEADS[found[1]]


def _object(said: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = said.get(field) or {}
    if not isinstance(value, dict):
        raise ValueError(f"config.json: {field}={value!r} must be an object")
    return value


def _whole(said: Mapping[str, Any], field: str) -> int:
    value = said.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {field}={value!r} must be an integer of at least 1")
    return value


WORDNET = re.compile(r"n\d{8}(\s|$)")  # an id, which a description may follow
GAPPED = ("label_names", "labels")  # of timm, which may leave out numbers that have no name


def _labels(*places: tuple[Mapping[str, Any], str]) -> tuple[str, Any]:
    """The first that is there; a bare number of classes names none."""
    found = ((field, said[field]) for said, field in places if said.get(field))
    return next(((field, names) for field, names in found if not isinstance(names, int)), ("", None))


def _classes(folder: Path, said: Said, count: int) -> list[str]:
    """One name for each output: the lines of classes.txt, the configuration's labels, or numbers."""
    listed, (field, names) = folder / "classes.txt", said.labels
    if listed.exists():
        field = listed.name
        names = [line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
        if all(WORDNET.match(name) for name in names):  # ImageNet's folders have the id alone
            names = [name.split()[0] for name in names]
    if not count:
        return []
    names = list(range(count)) if names is None else names
    if not isinstance(names, (list, dict)):
        raise ValueError(f"{field}={names!r} must be the names of classes")
    if isinstance(names, dict) and field in GAPPED and {*names} <= {*map(str, range(count))}:
        names = {str(i): names.get(str(i), i) for i in range(count)}
    if len(names) != count:
        raise ValueError(f"{field}: there are {len(names)} names of classes, but the head has {count} outputs")
    if isinstance(names, dict):
        if bare := [i for i in range(count) if str(i) not in names]:
            raise ValueError(f"{field} names {count} classes, but not {bare[0]}, which is one of the head's outputs")
        names = [names[str(i)] for i in range(count)]
    names = [str(name) for name in names]
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    return [name if first[name] == i else f"{name} ({i})" for i, name in enumerate(names)]  # a name is one class


def _numbers(name: str, given: Any, channels: int) -> list[float]:
    """The mean or std of each channel; one number is that of all."""
    if given in (*IMAGENET, *CLIP) and channels != 3:  # nobody said so, and those are of colours
        given = 0.5
    least = 0.0 if name == "std" else -math.inf
    numbers = given if isinstance(given, list) else [given] * channels
    if len(numbers) != channels or not all(isinstance(x, (int, float)) and least < x < math.inf for x in numbers):
        raise ValueError(f"{name}={given!r} must be {channels} numbers, one for each channel")
    return [float(x) for x in numbers]


def _configured(
    facts: Said, shapes: Shapes, keys: Mapping[str, str], table: Mapping[str, str]
) -> tuple[ModelConfig, int]:
    """The model, and how many of its prefix tokens have positions."""

    def shape(key: str, dimensions: int) -> tuple[int, ...]:
        found = shapes.get(key)
        if found is None:
            raise ValueError(f"there is no {_in_file(key, keys, table)}")
        if len(found) != dimensions or not all(found):
            raise ValueError(f"{keys[key]} has shape {found}, where {dimensions} dimensions were expected")
        return found

    dim, channels, patch, width = shape("stem.embed.weight", 4)
    if patch != width:
        raise ValueError(f"patches of {patch} × {width} pixels are not supported: only square ones")
    prefix = {key: shape(key, 3)[1] for key in PREFIX_TOKENS if key in shapes and math.prod(shapes[key])}
    if facts.learned:
        positioned, size = _positioned(facts, shape("position", 3)[1], prefix, patch)
    else:
        height, width = sides(parse_size(facts.size))
        positioned, size = 0, join_sides(height // patch * patch, width // patch * patch)
    layers = {int(key.split(".")[1]): keys[key] for key in shapes if key.startswith("blocks.")}
    depth = len(layers)
    if gaps := sorted(set(range(depth)) - set(layers)):
        raise ValueError(f"{layers[max(layers)]} is of layer {max(layers)}, but there is no layer {gaps[0]}")
    inner = shape("blocks.0.attn.proj.weight", 2)[1]
    if not isinstance(facts.heads, int) or facts.heads < 1 or inner % facts.heads:
        raise ValueError(f"{facts.heads!r} heads do not divide a width of {inner}")
    config = model_config(
        image_size=size,
        patch_size=patch,
        channels=channels,
        dim=dim,
        depth=depth,
        heads=facts.heads,
        head_dim=None if inner == dim else inner // facts.heads,
        mlp_dim=shape("blocks.0.mlp.3.weight", 2)[1],
        mlp=_mlp(facts, shapes),
        classes=shape("head.weight", 2)[0] if "head.weight" in shapes else 0,
        pool=facts.pool,
        prefix=sum(prefix.values()),
        norm_eps=facts.norm_eps,
        attention=facts.attention,
        positions="learned" if facts.learned else "none",
        rope=facts.rope,
        qkv_bias=bool(_biased(shapes)),
        layer_scale=1.0 if "blocks.0.scale1" in shapes else None,
    )
    return config, positioned


def _gated(shapes: Shapes) -> bool:
    """Whether the first map of an MLP has gates, beside or in one with its values."""
    first, last = (shapes.get(f"blocks.0.mlp.{i}.weight", (0, 0)) for i in (0, 3))
    return "blocks.0.mlp.gate.weight" in shapes or first[0] == 2 * last[1] > 0


def _mlp(facts: Said, shapes: Shapes) -> str:
    if not _gated(shapes):
        return UNGATED[facts.activation]
    return GATED[facts.gate] + ("-norm" if "blocks.0.mlp.1.norm.weight" in shapes else "")


def _biased(shapes: Shapes) -> set[str]:
    """Which of q, k and v, together or apart, have a bias in any layer."""
    found = (re.fullmatch(r"blocks\.[0-9]+\.attn\.(qkv|[qkv]_proj)\.bias", key) for key in shapes)
    return {match[1] for match in found if match}


def _check_stated(facts: Said, config: ModelConfig, shapes: Shapes) -> None:
    """Weights that are not all there look like those of a smaller model: what is said of it must be so."""
    found = config.model_dump() | {"registers": shapes["registers"][1] if "registers" in shapes else 0}
    found |= {"gated": _gated(shapes)}
    for field, (what, value) in facts.stated.items():
        if value is None or (what == "classes" and not config.classes):  # without a head there are features
            continue
        parts = [parse_size(value)] if what == "image_size" else value if isinstance(value, list) else [value]
        if any(one != found[what] for one in parts):
            raise ValueError(f"{field}={value!r}, but the weights have {found[what]}")


def _positioned(facts: Said, count: int, prefix: Mapping[str, int], patch: int) -> tuple[int, ImageSize]:
    """How many of the prefix tokens are among so many positions, and the size of images for which the others are: the
    one that is stated, or else a square."""
    some = sum(prefix.get(key, 0) for key in facts.positioned or PREFIX_TOKENS)
    stated = None if facts.size is None else parse_size(facts.size)
    for embedded in (some,) if facts.positioned else (some, 0):
        size = patch * math.isqrt(max(0, count - embedded)) if stated is None else stated
        if math.prod(sides(size)) == (count - embedded) * patch**2 > 0 and not any(n % patch for n in sides(size)):
            return embedded, size
    if stated is not None:
        raise ValueError(
            f"image_size={facts.size}, but {count} positions of patches of {patch} px are for images of another size"
        )
    raise ValueError(
        f"{count} positions with {some} prefix tokens are not those of a square image, and no image_size is stated"
    )


def _wanted(config: ModelConfig, facts: Said, shapes: Shapes, positioned: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, as the layouts have them: the stem a convolution, q, k, v and gates and values
    together or apart."""
    dim, inner = config.dim, config.heads * (config.head_dim or config.dim // config.heads)

    def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name: str, width: int = dim) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    apart = {name: "blocks.0." + name + ".weight" in shapes for name in ("mlp.gate", "attn.q_proj")}
    first = ("mlp.gate", "mlp.up") if apart["mlp.gate"] else ("mlp.0",)
    block = linear("attn.proj", inner, dim) | linear("mlp.3", config.mlp_dim, dim) | norm("norm1") | norm("norm2")
    for name in first:
        block |= linear(f"{name}", dim, config.mlp_inner // len(first))
    block |= norm("mlp.1.norm", config.mlp_dim) if config.mlp == "swiglu-norm" else {}
    together = not apart["attn.q_proj"]
    for name in ("qkv",) if together else ("q_proj", "k_proj", "v_proj"):
        block[f"attn.{name}.weight"] = (3 if together else 1) * inner, dim
    biases = {f"{c}_proj" for c in "qkv" if c not in facts.unbiased}
    for name in {"qkv"} if together and not facts.unbiased else biases if config.qkv_bias else ():
        if config.qkv_bias:
            block[f"attn.{name}.bias"] = ((3 if name == "qkv" else 1) * inner,)
    block |= {} if config.layer_scale is None else {"scale1": (dim,), "scale2": (dim,)}
    patch = config.patch_size or 1
    wanted = {f"blocks.{i}.{key}": shape for i in range(config.depth) for key, shape in block.items()}
    wanted |= {"stem.embed.weight": (dim, config.channels, patch, patch), "stem.embed.bias": (dim,)} | norm("norm")
    wanted |= {"position": (1, positioned + config.image_tokens, dim)} if facts.learned else {}
    wanted |= {key: (1, shapes[key][1], dim) for key in PREFIX_TOKENS if key in shapes}
    if config.pool == "attention":
        pool = linear("proj", dim, dim) | linear("qkv", dim, 3 * dim) | norm("norm") | {"probe": (1, 1, dim)}
        pool |= linear("mlp.0", dim, config.mlp_inner) | linear("mlp.3", config.mlp_dim, dim)
        wanted |= {f"pooling.{key}": shape for key, shape in pool.items()}
    return wanted | (linear("head", config.features, config.classes) if config.classes else {})


def _in_file(key: str, keys: Mapping[str, str], table: Mapping[str, str]) -> str:
    """What the file would call a tensor that it lacks: as in another layer, as the weight of this bias or the bias of
    this weight, or as in the table where that is a plain name."""
    if key.startswith("blocks."):
        _, number, tail = key.split(".", 2)
        if alike := [old for other, old in keys.items() if re.fullmatch(r"blocks\.[0-9]+\." + re.escape(tail), other)]:
            return re.sub(r"(?<=[._])[0-9]+(?=\.)", number, alike[0], count=1)
    for end, twin in (("weight", "bias"), ("bias", "weight")):
        if key.endswith(end) and (old := keys.get(key.removesuffix(end) + twin)):
            return old.removesuffix(twin) + end
    plain = (pattern.replace("\\", "") for pattern, new in table.items() if new == key)
    return next(plain, f"tensor for linvit's {key}")


def _check_shapes(wanted: Shapes, shapes: Shapes, keys: Mapping[str, str], table: Mapping[str, str]) -> None:
    for key, shape in wanted.items():
        if key not in shapes:
            raise ValueError(f"there is no {_in_file(key, keys, table)} {shape}")
        if shapes[key] != shape:
            raise ValueError(f"{keys[key]} has shape {shapes[key]}, but the rest of the model requires {shape}")
    for key in shapes:
        if key not in wanted and ".attn.attention." not in key:  # an attention's own weights are its own affair
            raise ValueError(f"{keys[key]} {shapes[key]} has no counterpart in linvit's vision transformer")


def _assembled(tensors: dict[str, Tensor], positioned: int) -> dict[str, Tensor]:
    """The tensors as linvit's model holds them. A prefix token without a position has one that is zero."""
    tokens = [tensors.pop(key) for key in PREFIX_TOKENS if key in tensors]
    if tokens:
        tensors["cls"] = torch.cat(tokens, 1)
    if "position" in tensors:
        position = tensors["position"].view(1, -1, tensors["position"].shape[-1])
        bare = sum(one.shape[1] for one in tokens) - positioned
        parts = position[:, :positioned], position.new_zeros(1, bare, position.shape[2]), position[:, positioned:]
        tensors["position"] = torch.cat(parts, 1)
    tensors["stem.embed.weight"] = tensors["stem.embed.weight"].flatten(1)
    for key in [key for key in tensors if re.search(r"\.attn\.[qkv]_proj\.bias$", key)]:
        for other in "qkv":  # one that the file has not is zero
            tensors.setdefault(re.sub(r"[qkv]_proj", f"{other}_proj", key), torch.zeros_like(tensors[key]))
    for key in [key for key in tensors if ".mlp.gate." in key]:
        pair = tensors.pop(key), tensors.pop(key.replace(".gate.", ".up."))
        tensors[key.replace(".gate.", ".0.")] = torch.cat(pair)
    return fuse(tensors)
