"""ModelConfig: everything that rebuilds a model, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from linvit.attention import attention_options
from linvit.errors import choices
from linvit.models.cost import check_fits
from linvit.registry import check_options, parse, parse_layers

LONGEST_TRUNK = 64
OF_STEM: dict[str, dict[str, Any]] = {  # their own options, and what those are if not given
    "patch": {"patch_size": 4},
    "conv": {"trunk": (64, 128, 256), "pools": 2},
    "resnet": {"trunk": (32, 64, 128)},
    "length-one": {"trunk": (64, 128, 256), "pools": 2},
    "next-pixel": {"levels": 256, "order": "raster"},
}
ACTIVATIONS: dict[str, set[str]] = {"relu": set(), "gelu": set(), "elu": {"alpha"}}  # with the options they take
OF_BLOCKS = ("heads", "head_dim", "mlp_dim", "qkv_bias", "dropout", "drop_path", "layer_scale", "prefix")


class ModelConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    image_size: int = Field(32, ge=4, le=8192)
    channels: int = Field(3, ge=1)
    classes: int = Field(10, ge=0)  # 0: no head, the features are what comes out
    stem: Literal["patch", "conv", "resnet", "pixel", "length-one", "next-pixel"] = "patch"
    patch_size: int | None = Field(None, ge=1)
    trunk: tuple[PositiveInt, ...] | None = Field(None, min_length=1)  # widths of a convolutional stem
    pools: int | None = Field(None, ge=0)  # of a conv or length-one stem
    activation: str = "relu"  # of a convolutional stem: relu, gelu, elu or elu:alpha=0.5
    levels: int | None = Field(None, ge=2, le=256)  # of a next-pixel stem: how many values of a channel it tells apart
    order: Literal["raster", "reversed"] | None = None  # of a next-pixel stem: from the first pixel on, or the last
    dim: int = Field(128, ge=1)
    depth: int = Field(6, ge=0, le=10_000)
    heads: int = Field(8, ge=1)
    head_dim: int | None = Field(None, ge=1)
    mlp_dim: int = Field(256, ge=1)
    attention: str = "softmax"
    pool: Literal["cls", "mean", "cls-mean", "all"] = (
        "mean"  # the first prefix token, the image tokens' mean, both; all
    )
    prefix: int | None = Field(None, ge=0)  # learned tokens before the image's; without it 1 where pool has cls, else 0
    positions: Literal["learned", "sincos", "none"] = "learned"
    qkv_bias: bool = True
    norm_eps: float = Field(1e-5, gt=0)
    layer_scale: float | None = Field(None, gt=0)  # initial factor of each channel of each branch; None: no factors
    dropout: float = Field(0.0, ge=0, lt=1)
    emb_dropout: float = Field(0.0, ge=0, lt=1)
    drop_path: float = Field(0.0, ge=0, lt=1)
    head: Literal["linear", "wide"] = "linear"
    seed: int = Field(0, ge=0)

    @property
    def widths(self) -> tuple[int, ...]:
        """The trunk of a stem that has one."""
        return self.trunk or ()

    @property
    def prefix_tokens(self) -> int:
        if self.causal:
            return 0
        return int(self.pool.startswith("cls")) if self.prefix is None else self.prefix

    @property
    def causal(self) -> bool:
        """Each token sees itself and those before; the logits of each are of the next pixel."""
        return self.stem == "next-pixel"

    @property
    def outputs(self) -> int:
        """The width of the logits."""
        return (self.levels or 0) if self.causal else self.classes

    @property
    def features(self) -> int:
        """The width of what the head sees."""
        if self.causal:
            return self.dim
        return self.dim * {"cls-mean": 2, "all": self.image_tokens}.get(self.pool, 1)

    @property
    def image_tokens(self) -> int:
        from linvit.models.cost import grid

        rows, columns = grid(self)
        return rows * columns

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, options: dict[str, Any]) -> dict[str, Any]:
        own = OF_STEM.get(options.get("stem", "patch"), {})
        return options | {name: value for name, value in own.items() if options.get(name) is None}

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for name, why in without_effect(dict(self)).items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={getattr(self, name)} has no effect: {why}: leave it out")
        _check_activation(self.activation)
        if len(self.widths) > LONGEST_TRUNK:
            raise ValueError(f"trunk has {len(self.widths):,} widths, more than the {LONGEST_TRUNK} there may be")
        for spec in parse_layers(self.attention, self.depth) or parse_layers(self.attention.split("@")[0], 1):
            check_options(spec, attention_options(spec.name))
        if self.pool.startswith("cls") and not self.prefix_tokens:
            raise ValueError(f"pool={self.pool}: prefix=0 has no token: use pool=mean")
        if self.pool.startswith("cls") and not self.depth:
            raise ValueError(f"pool={self.pool}: depth=0 leaves a cls token that has seen no image: use pool=mean")
        if self.head != "linear" and not self.outputs:
            raise ValueError(f"head={self.head} has no effect: classes=0 has no head: leave it out")
        if self.depth and self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}: give head_dim")
        check_fits(self)
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
    """The options that change nothing beside these, and why."""
    stem, depth = str(options.get("stem", "patch")), str(options.get("depth"))
    own = {name for options in OF_STEM.values() for name in options} - set(OF_STEM.get(stem, {}))
    idle = {name: f"stem={stem} has no {name}" for name in sorted(own)}
    if stem in ("patch", "pixel", "next-pixel"):
        idle["activation"] = f"stem={stem} has no convolutions"
    if stem == "next-pixel":
        idle |= dict.fromkeys(("pool", "prefix"), "stem=next-pixel has logits for every token, and no others")
    if depth == "1":
        idle["drop_path"] = "depth=1 has the first block alone, which is never dropped"
    return idle | (dict.fromkeys(OF_BLOCKS, "depth=0 has no blocks") if depth == "0" else {})
