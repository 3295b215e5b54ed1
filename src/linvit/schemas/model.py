"""ModelConfig: everything that rebuilds a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from linvit.errors import choices
from linvit.registry import parse, parse_layers
from linvit.schemas.base import Frozen
from linvit.schemas.pixels import ImageSize, check_sides, sides
from linvit.site import Site

MAX_TRUNK = 64  # convolutions of a stem
STEM_OPTIONS: dict[str, dict[str, Any]] = {  # the options of each stem, with their defaults
    "patch": {"patch_size": 4, "crop": None},
    "conv": {"trunk": (64, 128, 256), "pools": 2},
    "resnet": {"trunk": (32, 64, 128)},
    "length-one": {"trunk": (64, 128, 256), "pools": 2},
    "next-pixel": {"levels": 256, "order": "raster"},
    "masked-pixel": {"levels": 256},
}
ACTIVATIONS: dict[str, set[str]] = {"relu": set(), "gelu": set(), "elu": {"alpha"}}  # with the options they take
BLOCK_OPTIONS = (
    "block",
    "heads",
    "head_dim",
    "mlp_dim",
    "mlp",
    "rope",
    "qkv_bias",
    "dropout",
    "drop_path",
    "layer_scale",
    "prefix",
)
DATA_OPTIONS = ("image_size", "channels", "classes")  # taken from the data, never set by a user


def _several(value: Any) -> Any:
    """A single width is a list of one."""
    return [value] if isinstance(value, (int, str)) else value


class ModelConfig(Frozen):
    """A vision transformer. Whether its attention exists and fits is checked by `linvit.models.model_config`."""

    image_size: ImageSize = Field(32, description="Side of the images in pixels, or HEIGHTxWIDTH.")
    channels: int = Field(3, ge=1, description="Channels of the images.")
    classes: int = Field(10, ge=0, description="Classes; 0: no head, the model returns features.")
    stem: Literal["patch", "conv", "resnet", "pixel", "length-one", "next-pixel", "masked-pixel"] = Field(
        "patch",
        description="How images become tokens: patch, conv, resnet, pixel, length-one, next-pixel or masked-pixel.",
    )
    patch_size: int | None = Field(None, ge=1, description="Side of a patch, for stem=patch.")
    crop: bool | None = Field(
        None, description="Leave out the last rows and columns that fill no patch, for stem=patch."
    )
    trunk: Annotated[tuple[PositiveInt, ...] | None, BeforeValidator(_several)] = Field(
        None, min_length=1, description="Widths of a convolutional stem."
    )
    pools: int | None = Field(None, ge=0, description="Max-pools of a conv or length-one stem.")
    activation: str = Field("relu", description="Of a convolutional stem: relu, gelu, elu or elu:alpha=0.5.")
    levels: int | None = Field(
        None, ge=2, le=256, description="Values per channel of a next-pixel or masked-pixel model."
    )
    order: Literal["raster", "reversed"] | None = Field(None, description="Pixel order of a next-pixel model.")
    dim: int = Field(128, ge=1, description="Width of the tokens.")
    depth: int = Field(6, ge=0, le=10_000, description="Number of layers; 0: the stem alone.")
    heads: int = Field(8, ge=1, description="Attention heads.")
    head_dim: int | None = Field(None, ge=1, description="Width of a head. [default: dim / heads]")
    mlp_dim: int = Field(256, ge=1, description="Hidden width of the MLPs.")
    mlp: Literal["gelu", "gelu-tanh", "swiglu", "swiglu-norm", "geglu"] = Field(
        "gelu", description="MLP: gelu, gelu-tanh (approximated); gated: swiglu, swiglu-norm (with a norm), geglu."
    )
    attention: str = Field("softmax", description="One spec, or one per layer: a@2+b@4.")
    pool: Literal["cls", "mean", "norm-mean", "cls-mean", "all", "attention"] = Field(
        "mean",
        description="What the head sees: the first prefix token, the mean of the image tokens, that of the normalised "
        "ones, cls and mean, all, or what a learned query attends to.",
    )
    prefix: int | None = Field(
        None, ge=0, description="Learned tokens before the image's. [default: 1 if pool has cls]"
    )
    positions: Literal["learned", "sincos", "none"] = Field("learned", description="Position embeddings.")
    rope: Literal["2d", "dinov3", "eva02"] | None = Field(
        None, description="Rotary positions in every block, whatever its attention: 2d, dinov3 or eva02."
    )
    block: Literal["standard", "002", "002-exp"] = Field(
        "standard", description="The layer; 002 and 002-exp are report 002's: no MLP, and a norm after the residual."
    )
    qkv_bias: bool = Field(True, description="Whether the q, k, v projection has a bias.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the layer norms.")
    layer_scale: float | None = Field(None, gt=0, description="Initial LayerScale factor. [default: no LayerScale]")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention outputs and MLPs.")
    emb_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the embedded tokens.")
    drop_path: float = Field(0.0, ge=0, lt=1, description="Stochastic depth of the last block.")
    head: Literal["linear", "wide"] = Field("linear", description="The classifier: linear, or an MLP 2048-1024.")
    seed: int = Field(0, ge=0, description="Seed of the initial weights and random features.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return self.channels, *sides(self.image_size)

    @property
    def widths(self) -> tuple[int, ...]:
        """The trunk of a stem that has one."""
        return self.trunk or ()

    @property
    def prefix_tokens(self) -> int:
        if self.pixels:
            return 0
        return int(self.pool.startswith("cls")) if self.prefix is None else self.prefix

    @property
    def mlp_inner(self) -> int:
        """Outputs of an MLP's first linear map: a gated one has gates and values."""
        return 2 * self.mlp_dim if "glu" in self.mlp else self.mlp_dim

    @property
    def causal(self) -> bool:
        """Each token attends to itself and earlier ones; its logits predict the next pixel."""
        return self.stem == "next-pixel"

    @property
    def pixels(self) -> bool:
        """Its logits are of every token, and predict the token's level."""
        return self.stem in ("next-pixel", "masked-pixel")

    @property
    def outputs(self) -> int:
        """The number of logits."""
        return (self.levels or 0) if self.pixels else self.classes

    @property
    def features(self) -> int:
        """The width of the head's input."""
        if self.pixels:
            return self.dim
        return self.dim * {"cls-mean": 2, "all": self.image_tokens}.get(self.pool, 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the image tokens."""
        height, width = sides(self.image_size)
        size, patch, convolutions, pools = self.image_size, self.patch_size, len(self.widths), self.pools or 0
        if patch and (min(height, width) < patch or ((height % patch or width % patch) and not self.crop)):
            fit = ", ".join(str(p) for p in range(2, max(height, width)) if height % p == width % p == 0) or "1"
            raise ValueError(
                f"patch_size={patch} does not divide image_size={size}: choose a patch_size of {fit}, or another "
                "image_size"
            )
        if pools > convolutions:
            raise ValueError(f"pools={pools} must be between 0 and the number of convolutions, {convolutions}")
        if not min(height, width) >> pools:
            raise ValueError(f"image_size={size} cannot be halved pools={pools} times")
        match self.stem:
            case "pixel":
                return self.channels * height, width
            case "next-pixel" | "masked-pixel":
                return height, self.channels * width
            case "length-one":
                return 1, 1
            case "resnet":  # each stage after the first halves it, rounding up
                return -(-height >> convolutions - 1), -(-width >> convolutions - 1)
            case "conv":  # an odd map loses its last row and column to a pool
                return height >> pools, width >> pools
            case "patch":
                return height // (patch or 1), width // (patch or 1)

    @property
    def image_tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def tokens(self) -> int:
        """Prefix and image tokens."""
        return self.prefix_tokens + self.image_tokens

    @property
    def site(self) -> Site:
        """Where the attention of its first layer is."""
        head_dim = self.head_dim or max(1, self.dim // self.heads)
        return Site(
            self.heads, head_dim, self.tokens, self.grid, self.prefix_tokens, seed=self.seed, causal=self.causal
        )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, options: dict[str, Any]) -> dict[str, Any]:
        own = STEM_OPTIONS.get(options.get("stem", "patch"), {})
        return options | {name: value for name, value in own.items() if options.get(name) is None}

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        check_sides(self.image_size)
        for name, why in without_effect(dict(self)).items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={getattr(self, name)} has no effect: {why}: leave it out")
        _check_activation(self.activation)
        if len(self.widths) > MAX_TRUNK:
            raise ValueError(f"trunk has {len(self.widths):,} widths, more than the maximum of {MAX_TRUNK}")
        parse_layers(self.attention, self.depth) or parse_layers(self.attention.split("@")[0], 1)
        if self.block != "standard" and self.causal:
            raise ValueError(f"block={self.block} is not causal: leave it out for stem=next-pixel")
        if self.pool.startswith("cls") and not self.prefix_tokens:
            raise ValueError(f"pool={self.pool}: prefix=0 has no token: use pool=mean")
        if self.pool.startswith("cls") and not self.depth:
            raise ValueError(f"pool={self.pool}: depth=0 leaves a cls token that has seen no image: use pool=mean")
        if self.pool == "attention" and (not self.depth or self.dim % self.heads):
            raise ValueError(
                f"pool=attention needs blocks, and a dim that is a multiple of heads, not depth={self.depth}, "
                f"dim={self.dim} and heads={self.heads}"
            )
        if self.rope and self.depth and (self.causal or self.site.head_dim % 4):
            why = "stem=next-pixel" if self.causal else f"head_dim={self.site.head_dim}"
            raise ValueError(f"rope={self.rope} needs image tokens and a head_dim that is a multiple of 4, not {why}")
        if self.head != "linear" and not self.outputs:
            raise ValueError(f"head={self.head} has no effect: classes=0 has no head: leave it out")
        if self.depth and self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}: give head_dim")
        _ = self.grid  # a size that does not fit is an error
        return self


def _check_activation(text: str) -> None:
    spec = parse(text)
    if spec.name not in ACTIVATIONS:
        raise ValueError(f"activation={text}" + choices(spec.name, ACTIVATIONS))
    for name, value in spec.options.items():
        if name not in ACTIVATIONS[spec.name]:
            raise ValueError(f"activation={text}: {spec.name} has no option '{name}'")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"activation={text}: {name} must be a number above 0")


def without_effect(options: Mapping[str, Any]) -> dict[str, str]:
    """Options that change nothing given these, and why."""
    stem, depth = str(options.get("stem", "patch")), str(options.get("depth"))
    own = {name for options in STEM_OPTIONS.values() for name in options} - set(STEM_OPTIONS.get(stem, {}))
    unused = {name: f"stem={stem} has no {name}" for name in sorted(own)}
    if stem in ("patch", "pixel", "next-pixel", "masked-pixel"):
        unused["activation"] = f"stem={stem} has no convolutions"
    if stem in ("next-pixel", "masked-pixel"):
        unused |= dict.fromkeys(("pool", "prefix"), f"stem={stem} has logits for every token, and no others")
    if (block := str(options.get("block", "standard"))) != "standard":
        own = ("mlp_dim", "mlp", "drop_path", "layer_scale")
        unused |= dict.fromkeys(own, f"block={block} has no MLP and one branch")
    if depth == "1":
        unused["drop_path"] = "depth=1 has only the first block, which is never dropped"
    return unused | (dict.fromkeys(BLOCK_OPTIONS, "depth=0 has no blocks") if depth == "0" else {})
