"""One vision transformer: stem → tokens → blocks of (any attention, MLP) → pool → head.

Parameter names are the same for every attention, and every common parameter is initialised from its name and the seed:
two variants with one seed start from the same weights wherever they have weights in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.attention.base import Attention, share_layerwise
from linvit.attention.grid import DepthwiseConvolution
from linvit.attention.multihead import MultiHead
from linvit.kernels.projections import Omega
from linvit.models.cost import check_fits, estimate
from linvit.models.stems import STEMS, PixelStem
from linvit.randomness import generator
from linvit.registry import parse_layers
from linvit.schemas.model import ModelConfig

LOUD = 0.7  # deviation of positions at the start, as loud as content: mean pooling forgets quiet ones


class Gate(nn.Module):
    """Gates and values (…, 2·width) → activation(gates) · values (…, width)."""

    def __init__(self, activation: nn.Module, norm: nn.Module | None = None):
        super().__init__()
        self.activation, self.norm = activation, norm

    def forward(self, x: Tensor) -> Tensor:
        gates, values = x.chunk(2, -1)
        out = self.activation(gates) * values
        return out if self.norm is None else self.norm(out)


def _mlp(config: ModelConfig) -> nn.Sequential:
    middle: dict[str, Callable[[], nn.Module]] = {
        "gelu": nn.GELU,
        "gelu-tanh": lambda: nn.GELU("tanh"),
        "swiglu": lambda: Gate(nn.SiLU()),
        "swiglu-norm": lambda: Gate(nn.SiLU(), nn.LayerNorm(config.mlp_dim, config.norm_eps)),
        "geglu": lambda: Gate(nn.GELU()),
    }
    return nn.Sequential(
        nn.Linear(config.dim, config.mlp_inner),
        middle[config.mlp](),
        nn.Dropout(config.dropout),
        nn.Linear(config.mlp_dim, config.dim),
        nn.Dropout(config.dropout),
    )


class AttentionPool(nn.Module):
    """One learned query attends (softmax) to all tokens; then an MLP with a residual."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.probe = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.qkv, self.proj = nn.Linear(config.dim, 3 * config.dim), nn.Linear(config.dim, config.dim)
        self.norm, self.mlp = nn.LayerNorm(config.dim, config.norm_eps), _mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) → (B, dim)."""
        dim = x.shape[-1]
        weight, bias = self.qkv.weight, self.qkv.bias
        q = F.linear(self.probe.expand(x.shape[0], -1, -1), weight[:dim], bias[:dim])
        parts = q, *F.linear(x, weight[dim:], bias[dim:]).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        out = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[:, 0]
        return out + self.mlp(self.norm(out))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)); in training either branch may be dropped per sample."""

    def __init__(self, config: ModelConfig, attention: MultiHead, drop_path: float):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(config.dim, config.norm_eps), attention
        self.norm2 = nn.LayerNorm(config.dim, config.norm_eps)
        self.mlp = _mlp(config)
        self.drop_path, self.scale1, self.scale2 = drop_path, None, None
        if config.layer_scale is not None:
            self.scale1, self.scale2 = (nn.Parameter(torch.full((config.dim,), config.layer_scale)) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn.positioned(x)
        return self._after(x, self.attn(self.norm1(x)))

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """A few tokens after those whose `state` is given."""
        out, state = self.attn.step(self.norm1(x), state)
        return self._after(x, out), state

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.branch(attended, self.scale1)
        return x + self.branch(self.mlp(self.norm2(x)), self.scale2)

    def branch(self, branch: Tensor, scale: Tensor | None) -> Tensor:
        """As it is added: scaled, and in training perhaps dropped."""
        branch = branch if scale is None else branch * scale
        if not (self.training and self.drop_path):
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_path
        return branch * kept / (1 - self.drop_path)


class ReportedBlock(nn.Module):
    """Report 002's layer, kept for reproduction: norm(x + attention(norm(x))), without an MLP. In its Algorithm 4
    (`exp`) the residual is taken after the first norm. Its projections start as small as PyTorch's own, on which the
    size of denominators depends."""

    def __init__(self, config: ModelConfig, attention: MultiHead):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(config.dim, config.norm_eps), attention
        self.norm2 = nn.LayerNorm(config.dim, config.norm_eps)
        self.exp = config.block == "002-exp"

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn.positioned(x)
        normed = self.norm1(x)
        return self.norm2((normed if self.exp else x) + self.attn(normed))


class VisionTransformer(nn.Module):
    """A vision transformer with any stem and any attention per layer.

    It is called with images (B, C, H, W) in float32, normalised as by `linvit.data.normalise` with `about["mean"]` and
    `about["std"]` of a trained model, and returns logits (B, classes)."""

    @torch.random.fork_rng([])  # PyTorch's own initialisation, soon overwritten, must not use the caller's numbers
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.about: dict[str, Any] = {}  # of a trained one: name of the data, classes, mean and std
        check_fits(config)
        self.stem = STEMS[config.stem](config)
        site = config.site
        prefix, tokens = site.prefix, site.tokens
        self.cls = nn.Parameter(torch.zeros(1, prefix, config.dim)) if prefix else None
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
                **vars(replace(site, layer=i)),
                attention=spec,
                rope=config.rope,
                qkv_bias=config.qkv_bias,
                dropout=config.dropout,
            )
            if config.block == "standard":
                self.blocks.append(Block(config, attention, config.drop_path * i / max(1, config.depth - 1)))
            else:
                self.blocks.append(ReportedBlock(config, attention))
        self.norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.pooling = AttentionPool(config) if config.pool == "attention" else None
        self.head = _head(config)
        self.tokens = tokens
        initialise(self, config.seed)
        share_layerwise(self.attentions())

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → logits (B, classes), or features where there are no classes; of a next-pixel
        or masked-pixel model, whose images are fractions of white, (B, N, levels), those of every token."""
        config = self.config
        if x.shape[1:] != config.image_shape:
            raise ValueError(f"images have shape {tuple(x.shape[1:])}, but the model takes {config.image_shape}")
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.classify(x)

    def embed(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → tokens (B, N, dim), with positions, before the first block."""
        x = self.stem(x)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        if self.position is not None:
            x = x + self.position
        return self.dropout(x)

    def classify(self, x: Tensor) -> Tensor:
        """Tokens after the last block → logits."""
        return self.head(self.norm(x) if self.config.pixels else self.pooled(x))

    def step(self, level: Tensor, place: int, states: Sequence[Any] | None = None) -> tuple[Tensor, list[Any]]:
        """Of a next-pixel model: the level (B,) of the token before the one at this place (at place 0, any), and the
        states after those before it → the logits (B, levels) of the token at this place, and the next states."""
        x = self.stem.embed(level)[:, None] * (place > 0)  # type: ignore[operator]
        if self.position is not None:
            x = x + self.position[:, place : place + 1]
        after = []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block.step(x, state)  # type: ignore[operator]
            after.append(state)
        return self.classify(x)[:, 0], after

    def pooled(self, x: Tensor) -> Tensor:
        """(B, N, dim) → what the head sees, (B, features). One vector is normalised once pooled, several before."""
        first = self.config.prefix_tokens
        if self.pooling is not None:
            return self.pooling(self.norm(x))
        if self.config.pool == "norm-mean":
            return self.norm(x)[:, first:].mean(1)
        if self.config.pool == "cls-mean":
            x = self.norm(x)
            return torch.cat([x[:, 0], x[:, first:].mean(1)], 1)
        if self.config.pool == "all":
            return self.norm(x[:, first:]).flatten(1)
        return self.norm(x[:, 0] if self.config.pool == "cls" else x[:, first:].mean(1))

    def attentions(self) -> list[Attention]:
        return [block.attn.attention for block in self.blocks]  # type: ignore[union-attr]

    def redraw(self, step: int) -> None:
        """New random features in every layer; called from the training loop."""
        for attention in self.attentions():
            attention.redraw(step)

    def reseed(self, seed: int) -> None:
        """Later draws of random features are those of a model with this seed; weights and features stay."""
        self.config = self.config.model_copy(update={"seed": seed})
        for module in self.modules():
            if isinstance(module, Omega):
                module.key = seed, module.key[1]

    @torch.no_grad()
    def learned(self) -> dict[tuple[int, str], float]:
        """Single numbers that attentions have learned, by layer and name."""
        found = {(i, name): x for i, one in enumerate(self.attentions()) for name, x in one.learned().items()}
        return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def macs(self) -> int:
        """Multiply–accumulates of one image's forward pass."""
        return estimate(self.config).macs


class Classifier(nn.Linear):
    """In the precision of its weights, under autocast too: with a head that was fitted to nearly equal features, logits
    are small differences of large numbers."""

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return super().forward(input)
        with torch.autocast(device, enabled=False):
            return super().forward(input.to(self.weight.dtype))


def _head(config: ModelConfig) -> nn.Module:
    if not config.outputs:
        return nn.Identity()
    if config.head == "linear":
        return (nn.Linear if config.pixels else Classifier)(config.features, config.outputs)
    widths = (config.features, 2048), (2048, 1024)
    layers = [m for a, b in widths for m in (nn.Linear(a, b), nn.GELU(), nn.Dropout(0.5))]
    return nn.Sequential(*layers, nn.Linear(1024, config.outputs))


def _sincos(grid: tuple[int, int], dim: int, prefix: int) -> Tensor:
    """(1, prefix + rows·columns, dim): a quarter of the channels each for sin and cos of rows and columns."""
    if dim % 4:
        raise ValueError(f"positions=sincos needs dim to be a multiple of 4, not {dim}")
    frequency = 10_000.0 ** (-torch.arange(dim // 4) / (dim // 4))
    y, x = (place[..., None] * frequency for place in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    table = torch.cat([y.sin(), y.cos(), x.sin(), x.cos()], -1).flatten(0, 1)
    return F.pad(table, (0, 0, prefix, 0))[None]


@torch.no_grad()
def initialise(model: VisionTransformer, seed: int) -> None:
    """Every weight from its name and the seed; branches into the residual stream start small, by depth."""
    shrink = 1 / math.sqrt(2 * max(1, model.config.depth))
    for name, module in model.named_modules():
        if isinstance(module, Attention | DepthwiseConvolution) or ".attention." in name:
            continue  # seeded by its own site
        source = generator("init", seed, name)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            fan = module.weight[0].numel()
            gain = shrink if name.endswith(("attn.proj", "mlp.3")) else 1.0
            if model.config.block != "standard" and name.startswith("blocks."):
                gain = 1 / math.sqrt(3)
            gain *= math.sqrt(2) if isinstance(module, nn.Conv2d) else 1.0
            module.weight.copy_(torch.randn(module.weight.shape, generator=source) * (gain / math.sqrt(fan)))
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.copy_(LOUD * torch.randn(module.weight.shape, generator=source))
        elif isinstance(module, PixelStem):
            module.weight.copy_(torch.randn(module.weight.shape, generator=source))
            if module.position is not None:
                module.position.copy_(0.02 * torch.randn(module.position.shape, generator=source))
    for block in model.blocks:
        block.attn.open_gate()  # type: ignore[union-attr, operator]
    for name in ("cls", "position", "pooling.probe"):
        value = dict(model.named_parameters()).get(name)
        if value is not None:
            spread = LOUD if name == "position" else 0.02
            value.copy_(spread * torch.randn(value.shape, generator=generator("init", seed, name)))
    if isinstance(model.head, nn.Linear):
        model.head.weight.mul_(0.1)  # first predictions near uniform
