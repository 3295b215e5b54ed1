"""Two-scale attention: near tokens exactly, far tokens as one summary for each cell of the grid, in one softmax.

The grid is cut into cells of c × c tokens. A query sees the tokens of its own band, the c rows that its cell is in, and
of the bands within `reach` of it; the prefix tokens; and of every other cell one key k_c, one value v_c and a bias b_c.
The sum of a cell's scores is convex in q,

    L_c(q) = log Σ_{j∈c} exp(q·k_j/√d)

and `far=tangent` replaces it by its tangent at the mean query q̄ plus the mean of its second-order term over queries:

    w_j = softmax_{j∈c}(q̄·k_j/√d)      k_c = Σ w_j k_j      v_c = Σ w_j v_j
    b_c = L_c(q̄) − q̄·k_c/√d + ½ Σ_i var(q)_i var_w(k)_i / d

`far=bands` does so for the queries of each band, which are more alike: more accurate, and slower. `far=mean` is the
tangent at q = 0: means, and the log of the number of tokens. `far=auto` is `bands` on grids so small that `cell=auto`
keeps softmax, where cells save keys but no time, and `tangent` on larger ones. Each is exact where all keys of a cell
are equal, does not change when one vector is added to all keys, and has rows that sum to one.

A band is a run of tokens, so that its keys are joined with those of the cells by copying, and all bands are one call of
fused softmax attention with a bias for each key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention.base import PRECISE, Attention, Switches, register, softmax_attention
from linvit.attention.halves import ADDED_CHANNELS, RATIO, doubled, fused_softmax, transformed, wide
from linvit.kernels.base import positive, tracing
from linvit.site import Cost, Site

LOWEST = -1e30  # bias of a dropped key: its weight is zero, and differences are not NaN
# The time of what softmax does not have to do, in keys of fused softmax: of summaries and copies, and of padding if a
# side does not divide the grid. `cell=auto` minimises this forecast. `benchmarks/twoscale.py cells` measures them: 240
# to 480, and 200 to 300 more with padding, from 20 × 20 to 64 × 64 tokens on an Intel Xeon, one thread.
SUMMARY_KEYS, PADDING_KEYS = 300, 200
Far = Literal["auto", "tangent", "bands", "mean"]
BIAS_PARTS = 3  # of a bias in half precision: 24 bits in bfloat16, as many as in float32
SIDES = range(2, 33)  # of a cell, that cell=auto chooses from


class Cut(NamedTuple):
    """A grid as down × across cells of side × side tokens; the last ones may extend over its edges."""

    rows: int
    columns: int
    side: int
    reach: int

    @property
    def down(self) -> int:
        return -(-self.rows // self.side)

    @property
    def across(self) -> int:
        return -(-self.columns // self.side)

    @property
    def exact(self) -> bool:
        """Whether no cell is summarised, or each is a single token."""
        return self.side == 1 or self.down <= 2 * self.reach + 1

    def seen(self, band: int) -> range:
        """The bands that the queries of a band see exactly: at an edge as many as elsewhere."""
        first = min(max(band - self.reach, 0), self.down - 2 * self.reach - 1)
        return range(first, first + 2 * self.reach + 1)

    def keys(self) -> float:
        """Of an image token, on average, without the prefix."""
        if self.exact:
            return self.rows * self.columns
        far, found = (self.down - 2 * self.reach - 1) * self.across, 0
        for band in range(self.down):
            near = sum(self._height(other) for other in self.seen(band)) * self.columns
            found += self._height(band) * (near + far)
        return found / self.rows

    def _height(self, band: int) -> int:
        return min(self.side, self.rows - band * self.side)

    def scores(self) -> float:
        """Of an image token, those that are computed: for its keys, for the summaries of what it sees exactly, which
        are dropped, and for tokens beyond the edge of the grid."""
        if self.exact:
            return self.rows * self.columns
        keys = (2 * self.reach + 1) * self.side * self.columns + self.down * self.across
        return keys * self.down * self.side / self.rows

    def overhead(self) -> int:
        """The time of what softmax does not have to do, in keys."""
        padded = self.rows % self.side or self.columns % self.side
        return 0 if self.exact else SUMMARY_KEYS + (PADDING_KEYS if padded else 0)


@register("twoscale")
class TwoScale(Attention):
    """cell: side of a cell, and height of a band, in tokens; auto takes the least time, and is softmax on a small grid.
    reach: how many bands above and below its own a query sees exactly. far: what stands for the tokens of a cell; auto
    is bands on grids where cell=auto is softmax, else tangent.

    Prefix tokens (CLS) see all tokens and are seen by all.
    """

    formula = "softmax over near tokens and far cells (q·k/√d + b) v"
    estimates = "softmax"
    invariants = "rows sum to one and are not negative; adding one vector to all keys changes nothing"
    precision = "half"
    linear = False
    can_be_causal = False
    why_not_causal = "a cell has later tokens in it"
    near: Tensor
    without_effect = {"exact_cls": "prefix tokens see all tokens already"}  # noqa: RUF012

    def __init__(
        self,
        site: Site,
        switches: Switches = Switches(),  # noqa: B008 (frozen)
        *,
        cell: int | Literal["auto"] = "auto",
        reach: int = 0,
        far: Far = "auto",
    ):
        super().__init__(site, switches)
        if site.grid is None:
            raise ValueError("cells are squares of image tokens: give grid=(rows, columns)")
        self.cut, self.far = _cut(site.grid, cell, reach), _resolved_far(site.grid, reach, far)
        self.is_softmax = self.cut.exact
        if not self.cut.exact:
            bands = range(self.cut.down)
            near = torch.tensor([[band in self.cut.seen(own) for band in bands] for own in bands])
            # (bands, cells, 1): whether the queries of a band see the tokens of a cell
            self.register_buffer("near", near.repeat_interleave(self.cut.across, 1)[..., None], persistent=False)

    @classmethod
    def own_cost(cls, site: Site, *, cell: int | Literal["auto"] = "auto", reach: int = 0, far: Far = "auto") -> Cost:
        """Without a grid, from the share of keys that a square one of about as many tokens leaves."""
        image, d = site.tokens - site.prefix, site.head_dim
        side = max(1, round(math.sqrt(image)))
        grid = site.grid or (side, side)
        cut, far = _cut(grid, cell, reach), _resolved_far(grid, reach, far)
        scores = image * cut.scores() / (cut.rows * cut.columns)
        pairs = image * (scores + site.prefix) + site.prefix * site.tokens
        summaries = 0 if cut.exact else 4 * image * (cut.down if far == "bands" else 1)
        width = d * site.heads
        return Cost(macs=round((2 * pairs + summaries) * width), overhead=2 * image * cut.overhead() * width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        cut, first, n = self.cut, self.site.prefix, q.shape[2]
        if n - first > cut.rows * cut.columns:
            raise ValueError(f"{n} tokens do not fit grid={self.site.grid} with prefix={first}")
        if cut.exact:
            return softmax_attention(q, k, v, mask)
        missing = first + cut.down * cut.side * cut.columns - n
        kept = _kept(mask, q, missing) if missing or mask is not None else None
        if missing:
            q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
        (first_q, image_q), first_and_image_k, first_and_image_v = (
            x.split([first, x.shape[2] - first], 2) for x in (q, k, v)
        )
        out = self._image(image_q, first_and_image_k, first_and_image_v, kept)
        if first:
            out = torch.cat([softmax_attention(first_q, k, v, kept), out], 2)
        out = out[:, :, :n]
        return out if mask is None else torch.where(mask.any(1)[:, None, None, None], out, 0.0)

    def _image(self, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], kept: Tensor | None) -> Tensor:
        """The outputs of the image's tokens: bands are heads of one call of fused attention. k and v: of the prefix,
        and of the image."""
        far_k, far_v, bias = self._far(q, k[1], v[1], kept)
        tokens = [bias.new_zeros(1, 1, x.shape[2], 1) for x in k]
        if kept is not None:
            of_kept = torch.where(kept, 0.0, LOWEST).to(bias)[:, None, :, None]
            tokens = of_kept.split([x.shape[2] for x in k], 2)
        bias = torch.where(self.near, LOWEST, bias)
        if q.dtype not in PRECISE:
            q, k = torch.cat([q, q], -1), [F.pad(x, (0, x.shape[-1])) for x in k]
            far_k, far_v = doubled(far_k, far_v, q.dtype)
            bias = torch.cat([bias - math.log(1 + RATIO), bias + math.log(RATIO / (1 + RATIO))], -2)
        bias = self._joined(tokens, bias).squeeze(-1)
        keys, values = self._joined(k, far_k).flatten(1, 2), self._joined(v, far_v).flatten(1, 2)
        q = q.unflatten(2, (self.cut.down, -1)).flatten(1, 2)
        learned = slice(k[0].shape[2], k[0].shape[2] + far_k.shape[3])
        out = _biased(q, keys, values, bias.flatten(1, 2)[:, :, None], learned)
        return out.unflatten(1, (-1, self.cut.down)).flatten(2, 3)

    def _joined(self, tokens: Sequence[Tensor], far: Tensor) -> Tensor:
        """What the queries of each band see: the prefix (B, H, prefix, e), all cells (B, H, bands or 1, cells, e) and
        the image's tokens near (B, H, tokens, e) → (B, H, bands, keys, e)."""
        prefix, image = tokens
        bands = image.unflatten(2, (self.cut.down, -1))
        if self.cut.reach:
            seen = [self.cut.seen(band) for band in range(self.cut.down)]
            bands = torch.stack([bands[:, :, s.start : s.stop].flatten(2, 3) for s in seen], 2)
        each = *far.shape[:2], self.cut.down, -1, -1
        return torch.cat([x.expand(each) for x in (prefix[:, :, None], far, bands)], 3)

    def _far(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the cells, (B, H, bands, cells, d), and biases, (B, H, bands, cells, 1), for each band or
        one for all, from the image's tokens. kept: (B, prefix + tokens)."""
        dtype = wide(k)
        if kept is None:
            kept = torch.ones(1, 1, k.shape[2], 1, device=k.device, dtype=dtype)
        else:
            kept = kept[:, None, self.site.prefix :, None].to(dtype)
        dropped = torch.where(self._cells(kept) > 0, 0.0, LOWEST).to(dtype)
        keys, values = (self._cells(x).to(dtype) for x in (k, v))
        mean, spread = self._queries(q.to(dtype), kept)

        def products(x: Tensor, of_bands: Tensor) -> Tensor:  # (B, H, cells, c², bands)
            return (x.flatten(2, 3) @ of_bands.transpose(2, 3)).unflatten(2, x.shape[2:4])

        scores = products(keys, mean)
        total = (scores + dropped).logsumexp(3, keepdim=True)
        share = (scores + dropped - total).exp()
        far_k, far_v = (share.transpose(3, 4) @ x for x in (keys, values))  # (B, H, cells, bands, d)
        second = (share * (products(keys * keys, spread) / 2 - scores)).sum(3)
        bias = total.squeeze(3) + second - (far_k.square() * (spread / 2)[:, :, None]).sum(-1)
        far_k, far_v, bias = (x.transpose(2, 3) for x in (far_k, far_v, bias.clamp_min(LOWEST)[..., None]))
        return far_k, far_v, bias

    def _queries(self, q: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of q/√d, of all queries or in each band, (B, H, bands, d); dropped queries are zero."""
        if self.far == "mean":
            zero = q.new_zeros(*q.shape[:2], 1, q.shape[3])
            return zero, zero
        q, kept = (x.unflatten(2, (self.cut.down if self.far == "bands" else 1, -1)) for x in (q, kept))
        x, count = q * q.shape[-1] ** -0.5, kept.sum(3).clamp_min(1)
        mean = x.sum(3) / count
        return mean, (x * x).sum(3) / count - mean.square()

    def _cells(self, x: Tensor) -> Tensor:
        """Image tokens (B, H, tokens, e) → (B, H, cells, tokens of one, e), zero where there is none."""
        cut = self.cut
        x = x.unflatten(2, (-1, cut.columns))
        if missing := -cut.columns % cut.side:
            x = F.pad(x, (0, 0, 0, missing))
        cells = x.unflatten(3, (-1, cut.side)).unflatten(2, (-1, cut.side)).transpose(3, 4)
        return cells.flatten(4, 5).flatten(2, 3)


def _cut(grid: tuple[int, int], cell: int | Literal["auto"], reach: int) -> Cut:
    positive("reach", reach, at_least=0)
    if cell != "auto":
        positive("cell", cell, at_least=1)
        return Cut(*grid, cell, reach)

    return min((Cut(*grid, side, reach) for side in (1, *SIDES)), key=lambda cut: cut.scores() + cut.overhead())


def _resolved_far(grid: tuple[int, int], reach: int, far: Far) -> Far:
    if far != "auto":
        return far
    return "bands" if _cut(grid, "auto", reach).exact else "tangent"


def _kept(mask: Tensor | None, q: Tensor, missing: int) -> Tensor:
    """(B, tokens of the whole grid): where there is a token, and it is kept."""
    kept = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device) if mask is None else mask
    return F.pad(kept, (0, missing), value=False)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, learned: slice) -> Tensor:
    """softmax(q kᵀ/√d + bias) v with a bias for each key, (B, H, 1, keys), of which only `learned` has a gradient."""
    if q.dtype not in PRECISE:
        return _with_bias_in_channels(q, k, v, bias)
    fused = q.device.type == "cpu" and v.shape[-1] == q.shape[-1] and not (tracing() or transformed())
    if bias.requires_grad and fused:
        return _BiasedAttention.apply(q, k, v, bias, learned)  # type: ignore[return-value]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q).expand(-1, -1, q.shape[2], -1))


def _with_bias_in_channels(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """For half precision, which would round a bias of 50 by up to 0.1: the bias is the sum of three channels of k that
    are multiplied by ones in q. FlashAttention, which takes no bias, can then be used. q is [q, q], (…, 2d)."""
    d, most = q.shape[-1] // 2, torch.finfo(q.dtype).max
    rest, parts = (bias * math.sqrt(d)).mT.clamp(-most, most), []
    for _ in range(BIAS_PARTS):
        parts.append(rest.to(k.dtype))
        rest = rest - parts[-1]
    ones = q.new_ones(1, 1, 1, BIAS_PARTS).expand(*q.shape[:-1], -1)
    q, k = (F.pad(torch.cat([x, *more], -1), (0, ADDED_CHANNELS - BIAS_PARTS)) for x, more in ((q, [ones]), (k, parts)))
    return fused_softmax(q, k, v, d)


class _BiasedAttention(torch.autograd.Function):
    """Fused attention on a CPU, whose own backward pass has no gradient of a bias."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, learned: slice) -> Tensor:  # type: ignore[override]
        mask = bias.expand(-1, -1, q.shape[2], -1)
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
        ctx.save_for_backward(q, k, v, bias, out, total)
        ctx.learned = learned
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, bias, out, total = ctx.saved_tensors
        of_qkv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, total, 0.0, False, attn_mask=bias.expand(-1, -1, q.shape[2], -1)
        )
        k, v, bias = k[:, :, ctx.learned], v[:, :, ctx.learned], bias[..., ctx.learned]
        log_weights = q @ k.mT * q.shape[-1] ** -0.5 + (bias - total[..., None])
        change = gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)
        of_bias = torch.zeros_like(ctx.saved_tensors[3])
        of_bias[..., ctx.learned] = (log_weights.exp_() * change).sum(2, keepdim=True)
        return *of_qkv, of_bias, None
