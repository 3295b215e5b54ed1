"""One vision transformer: stem → tokens → blocks of (any attention, MLP) → pool → head.

Parameter names are the same for every attention, and every common parameter is initialised from its name and the seed:
two variants with one seed start from the same weights wherever they have weights in common.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor, nn

from linvit.attention import attention_options
from linvit.attention.base import Attention
from linvit.attention.linformer import Linformer
from linvit.attention.multihead import MultiHead
from linvit.models.stems import ConvStem, LengthOneStem, PatchStem, PixelStem, ResNetStem, Stem
from linvit.randomness import generator
from linvit.registry import check_options, parse_layers


class ModelConfig(BaseModel):
    """Everything that rebuilds a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    image_size: int = Field(32, ge=4)
    channels: int = Field(3, ge=1)
    classes: int = Field(10, ge=1)
    stem: Literal["patch", "conv", "resnet", "pixel", "length-one"] = "patch"
    patch_size: int = Field(4, ge=1)
    trunk: tuple[PositiveInt, ...] | None = Field(None, min_length=1)  # widths of a conv or resnet stem
    pools: int = Field(2, ge=0)  # of a conv stem
    dim: int = Field(128, ge=1)
    depth: int = Field(6, ge=0)
    heads: int = Field(8, ge=1)
    head_dim: int | None = Field(None, ge=1)
    mlp_dim: int = Field(256, ge=1)
    attention: str = "softmax"
    pool: Literal["cls", "mean"] = "mean"
    positions: Literal["learned", "sincos", "none"] = "learned"
    qkv_bias: bool = True
    dropout: float = Field(0.0, ge=0, lt=1)
    emb_dropout: float = Field(0.0, ge=0, lt=1)
    drop_path: float = Field(0.0, ge=0, lt=1)
    head: Literal["linear", "wide"] = "linear"
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for spec in parse_layers(self.attention, self.depth) or parse_layers(self.attention.split("@")[0], 1):
            check_options(spec, attention_options(spec.name))
        if self.depth == 0 and self.pool == "cls":
            raise ValueError("depth=0 leaves a cls token that has seen no image: use pool=mean")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}: give head_dim")
        return self


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); in training either branch may be dropped per sample."""

    def __init__(self, config: ModelConfig, attention: MultiHead, drop_path: float):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(config.dim), attention
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, config.mlp_dim),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.mlp_dim, config.dim),
            nn.Dropout(config.dropout),
        )
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._maybe(self.attn(self.norm1(x)))
        return x + self._maybe(self.mlp(self.norm2(x)))

    def _maybe(self, branch: Tensor) -> Tensor:
        if not (self.training and self.drop_path):
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)


class VisionTransformer(nn.Module):
    @torch.random.fork_rng([])  # PyTorch's own initialisation, soon overwritten, must not use the caller's numbers
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.about: dict[str, Any] = {}  # of a trained one: name of the data, classes, mean and std
        self.stem = _stem(config)
        prefix = 1 if config.pool == "cls" else 0
        tokens = prefix + math.prod(self.stem.grid)
        self.cls = nn.Parameter(torch.zeros(1, 1, config.dim)) if prefix else None
        self.position: Tensor | None
        if config.positions == "sincos":
            self.register_buffer("position", _sincos(self.stem.grid, config.dim, prefix), persistent=False)
        elif config.positions == "learned" and config.stem != "pixel":  # a pixel stem has its own
            self.position = nn.Parameter(torch.zeros(1, tokens, config.dim))
        else:
            self.position = None
        self.dropout = nn.Dropout(config.emb_dropout)
        self.blocks = nn.ModuleList()
        for i, spec in enumerate(parse_layers(config.attention, config.depth)):
            attention = MultiHead(
                config.dim,
                heads=config.heads,
                head_dim=config.head_dim,
                tokens=tokens,
                attention=spec,
                grid=self.stem.grid,
                prefix=prefix,
                layer=i,
                seed=config.seed,
                qkv_bias=config.qkv_bias,
                dropout=config.dropout,
            )
            self.blocks.append(Block(config, attention, config.drop_path * i / max(1, config.depth - 1)))
        self.norm = nn.LayerNorm(config.dim)
        self.head = _head(config)
        self.tokens = tokens
        initialise(self, config.seed)
        _share_layerwise(self.attentions())

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, classes)."""
        config = self.config
        if x.shape[1:] != (config.channels, config.image_size, config.image_size):
            wanted = f"({config.channels}, {config.image_size}, {config.image_size})"
            raise ValueError(f"images have shape {tuple(x.shape[1:])}, but the model takes {wanted}")
        x = self.stem(x)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        if self.position is not None:
            x = x + self.position
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        x = x[:, 0] if self.cls is not None else x.mean(1)
        return self.head(self.norm(x))

    def attentions(self) -> list[Attention]:
        return [block.attn.attention for block in self.blocks]  # type: ignore[union-attr]

    def redraw(self, step: int) -> None:
        """New random features in every layer; called from the training loop."""
        for attention in self.attentions():
            attention.redraw(step)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def macs(self) -> int:
        """Multiply–accumulates of one image's forward pass."""
        n, total = self.tokens, self.stem.macs()
        for block in self.blocks:
            linear = (block.attn.qkv, block.attn.proj, block.mlp[0], block.mlp[3])  # type: ignore[union-attr,index]
            total += n * sum(layer.weight.numel() for layer in linear) + block.attn.attention.macs(n)  # type: ignore[union-attr]
        return total + sum(m.weight.numel() for m in self.head.modules() if isinstance(m, nn.Linear))


def _stem(config: ModelConfig) -> Stem:
    size, channels, dim = config.image_size, config.channels, config.dim
    match config.stem:
        case "patch":
            return PatchStem(size, config.patch_size, channels, dim)
        case "conv":
            return ConvStem(size, channels, dim, config.trunk or (64, 128, 256), config.pools)
        case "resnet":
            return ResNetStem(size, channels, dim, config.trunk or (32, 64, 128))
        case "pixel":
            return PixelStem(size, channels, dim, positions=config.positions == "learned")
        case "length-one":
            return LengthOneStem(size, channels, dim)


def _head(config: ModelConfig) -> nn.Module:
    if config.head == "linear":
        return nn.Linear(config.dim, config.classes)
    widths = (config.dim, 2048, 1024)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU(), nn.Dropout(0.5))]
    return nn.Sequential(*layers, nn.Linear(widths[-1], config.classes))


def _sincos(grid: tuple[int, int], dim: int, prefix: int) -> Tensor:
    """(1, prefix + rows·columns, dim): a quarter of the channels each for sin and cos of rows and columns."""
    if dim % 4:
        raise ValueError(f"positions=sincos needs dim to be a multiple of 4, not {dim}")
    frequency = 10_000.0 ** (-torch.arange(dim // 4) / (dim // 4))
    y, x = (torch.arange(n)[:, None] * frequency for n in grid)
    y = y[:, None].expand(*grid, -1)
    x = x[None].expand(*grid, -1)
    table = torch.cat([y.sin(), y.cos(), x.sin(), x.cos()], -1).flatten(0, 1)
    return F.pad(table, (0, 0, prefix, 0))[None]


def _share_layerwise(attentions: list[Attention]) -> None:
    """Layerwise Linformer projections belong to the model: the first layer owns them."""
    layers: list[Linformer] = [a for a in attentions if isinstance(a, Linformer) and a.sharing == "layerwise"]
    for other in layers[1:]:
        other.share(layers[0])


@torch.no_grad()
def initialise(model: VisionTransformer, seed: int) -> None:
    """Every weight from its name and the seed; branches into the residual stream start small, by depth."""
    shrink = 1 / math.sqrt(2 * max(1, model.config.depth))
    for name, module in model.named_modules():
        if isinstance(module, Attention) or ".attention." in name:
            continue  # seeded by its own site
        source = generator("init", seed, name)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            fan = module.weight[0].numel()
            gain = shrink if name.endswith(("attn.proj", "mlp.3")) else 1.0
            gain *= math.sqrt(2) if isinstance(module, nn.Conv2d) else 1.0
            module.weight.copy_(torch.randn(module.weight.shape, generator=source) * (gain / math.sqrt(fan)))
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, PixelStem):
            module.weight.copy_(torch.randn(module.weight.shape, generator=source))
            if module.position is not None:
                module.position.copy_(0.02 * torch.randn(module.position.shape, generator=source))
    for name in ("cls", "position"):
        value = getattr(model, name)
        if isinstance(value, nn.Parameter):
            spread = (
                0.7 if name == "position" else 0.02
            )  # positions as loud as content: mean pooling forgets quiet ones
            value.copy_(spread * torch.randn(value.shape, generator=generator("init", seed, name)))
    if isinstance(model.head, nn.Linear):
        model.head.weight.mul_(0.1)  # first predictions near uniform
