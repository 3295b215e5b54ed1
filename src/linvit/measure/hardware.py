"""Forecast times of attention layers and models on other devices, from their data sheets: nothing is measured.

A module is run once on PyTorch's `meta` device, on which tensors have shapes but no numbers and linvit takes the path
that it takes on a GPU. Every operation is recorded with the bytes it reads and writes and the products it computes
(`count`). Then

    kernel = max(least, bytes / bandwidth, FLOPs / rate)
    device = Σ kernel        host = launch · number of kernels        seconds = max(device, host)

since the host runs ahead of the device: where it needs longer, the device waits and time does not depend on the size.
Fused softmax is one kernel with a share of the peak rate that grows with the tokens. Where linvit compiles an attention
(`compiles`), operations between two products are one kernel that reads what comes from outside and writes what others
use (`fused`). All else is counted as eager PyTorch runs it.

No device reaches the figures of its data sheet. The shares below are the same for all devices, but for a limit
of fused softmax on the H100. They were set to the published times of plain linear attention and of FlashAttention on an
A800 (bfloat16, 2 × 16 heads of 64, 1,024 to 16,384 tokens). The shares of fused softmax at 4,097 and 16,384 tokens are
its published forward times there, which are therefore met by construction; linear attention has no constant of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from linvit.attention import BASELINE, LIMIT, Attention, build_attention, resolve
from linvit.attention.performer import Performer
from linvit.measure.advice import Workload, layer_call, step_bytes, workloads
from linvit.measure.race import BASELINES
from linvit.measure.speed import break_even
from linvit.metrics import size as in_bytes
from linvit.models import ModelConfig, VisionTransformer
from linvit.progress import Progress, ignore

BANDWIDTH = 0.55  # share of the memory bandwidth that passes over tensors reach
PRODUCTS = 0.6  # share of the peak rate that matrix products and convolutions reach
ATTENTION = {197: 0.24, 577: 0.35, 1025: 0.45, 4097: 0.56, 16384: 0.60}  # that of fused softmax, by tokens
BACKWARD = 0.8  # rate of fused softmax's backward pass relative to its forward pass
LAUNCH = 13e-6  # seconds of the host for one operation of eager PyTorch
LEAST = 2.5e-6  # seconds of the smallest kernel

SIDES, STEPS = (6, 128), 16  # of square grids at which attentions are compared: from, to, and how many
MAX_TOKENS = SIDES[1] ** 2 + 1
BATCH_TOKENS, MAX_BATCH = 32_768, 256


@dataclass(frozen=True)
class Hardware:
    """One device; rates in FLOP/s of dense matrix products with float32 sums, bandwidth and memory in bytes."""

    name: str
    half: float
    float32: float  # with TF32 where it exists, which linvit allows
    bandwidth: float
    memory: float
    dtype: torch.dtype = torch.bfloat16  # of models, as linvit chooses it there
    attention: float = 1.0  # upper limit of the share of the peak rate that fused softmax reaches
    fuses: bool = True  # has fused softmax, and a compiler for linvit's linear attention
    launch: float = LAUNCH
    least: float = LEAST


# Rates are of dense products: data sheets that state rates with sparsity state twice as much. The figures are those of
# the vendors' data sheets, as the pages named here repeat them; each was compared with its page.
HARDWARE = {
    # glennklockwood.com/garden/processors/A100, which cites nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "a100": Hardware("NVIDIA A100 80GB", 312e12, 156e12, 2.039e12, 80e9),
    # glennklockwood.com/garden/processors/h100: 989.4, 494.7 and 3.35 TB/s (SXM5). Fused softmax: the published rate of
    # cuDNN at 4,096 tokens, 408 TFLOP/s
    "h100": Hardware("NVIDIA H100 SXM", 989e12, 494e12, 3.35e12, 80e9, attention=0.41),
    # store.sourcecode.com and grokipedia.com/page/NVIDIA_L4_vs_L40S repeat the data sheet: 242 and 120 with sparsity,
    # 300 GB/s. At its boost clock it would be 125 and 63 (hmc-tech.com/gpu/nvidia-l4-vs-nvidia-a100-40gb)
    "l4": Hardware("NVIDIA L4", 121e12, 60e12, 0.3e12, 24e9),
    # sysrqmts.com/en/gpus/nvidia/tesla/t4: 65.13 (float16; it has no bfloat16), 8.14 and 320 GB/s
    "t4": Hardware("NVIDIA T4", 65e12, 8.1e12, 0.32e12, 16e9, torch.float16),
    # waredb.com/processor/nvidia-geforce-rtx-4090: 165.15 with sums in float32, 82.58 in TF32 and 1,008 GB/s
    "4090": Hardware("NVIDIA GeForce RTX 4090", 165e12, 82.6e12, 1.008e12, 24e9),
    # Apple states 100 GB/s and no rates. hmc-tech.com/gpu/apple_10_core_m3: 10 cores × 128 units × 2 FLOP × 1.398 GHz,
    # in float16 no more; PyTorch uses no other units, and models are float32 there
    "m3": Hardware("Apple M3", 3.58e12, 3.58e12, 0.1e12, 16e9, torch.float32, fuses=False),
    # What the model was checked with. hmc-tech.com/gpu/nvidia-a800-vs-nvidia-t40: 311.87 and 155.94; bandwidth as A100
    "a800": Hardware("NVIDIA A800 80GB", 312e12, 156e12, 2.039e12, 80e9),
}


class Part(NamedTuple):
    """Of a tensor's memory, what an operation reads or writes."""

    storage: int
    offset: int
    bytes: int
    maker: int = -1  # the operation that wrote it; −1: it was there before


@dataclass(frozen=True)
class Kernel:
    name: str
    reads: tuple[Part, ...]
    writes: tuple[Part, ...]
    flops: float = 0.0
    half: bool = False  # products of half precision
    share: float = PRODUCTS  # of the peak rate
    tokens: int = 0  # of fused softmax
    level: int = 0  # operations of different levels cannot be one kernel
    ends: bool = False  # what uses its result is of the next level

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in (*self.reads, *self.writes))

    def seconds(self, on: Hardware) -> float:
        share = min(self.share, on.attention) if self.tokens else self.share
        products = self.flops / (share * (on.half if self.half else on.float32))
        return max(on.least, self.bytes / (BANDWIDTH * on.bandwidth), products)


class Seconds(NamedTuple):
    """What some kernels take the device, and their launches the host."""

    device: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return max(self)

    @property
    def launch_bound(self) -> bool:
        return self.host > self.device

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        return Seconds(self.device + times * other.device, self.host + times * other.host)


def seconds(kernels: Sequence[Kernel], on: Hardware) -> Seconds:
    return Seconds(sum(kernel.seconds(on) for kernel in kernels), on.launch * len(kernels))


ALLOCATIONS = ("empty", "new_empty", "lift_fresh", "is_same_size", "_local_scalar")
OVERWRITE = {"copy_", "fill_", "zero_"}  # what they change they do not read
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "prod", "var", "var_mean"}


class Counter(TorchDispatchMode):
    """Records the kernels of what runs on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._kept: list[Any] = []  # an address belongs to one storage as long as that is alive
        self._makers: dict[int, int] = {}
        self._first, self._backward = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name == "logsumexp":  # one operation, but as many kernels as it is made of
            with self:
                return _logsumexp(*args, **kwargs)
        out = func(*args, **kwargs)
        given, made = ([x for x in tree_leaves(xs) if _counts(x)] for xs in ((args, kwargs), out))
        changed = func._schema.is_mutable
        old = {_address(x) for x in given}
        if not made or name.startswith(ALLOCATIONS) or not (changed or any(_address(x) not in old for x in made)):
            return out  # a view, or nothing
        formula = flop_registry.get(func._overloadpacket)
        shapes = args[:2] if func._overloadname == "dtype" else args  # a product whose third argument is its dtype
        flops = formula(*shapes, **kwargs, out_val=out) if formula else 0
        read = given[1:] if name in OVERWRITE else given
        self.add(name, read, made, flops, ends=bool(flops) or _across_rows(name, args, kwargs))
        return out

    def add(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor], flops: float, **about: Any) -> None:
        backward = torch._C._current_graph_task_id() != -1
        if backward and not self._backward:
            self._first = max((kernel.level for kernel in self.kernels), default=0) + 1
        self._backward = backward
        reads = tuple(dict.fromkeys(self._part(x) for x in given))
        makers = [self.kernels[part.maker] for part in reads if part.maker >= 0]
        level = max([self._first, *(maker.level + maker.ends for maker in makers)])
        self._makers |= {_address(x): len(self.kernels) for x in made}
        writes = tuple(dict.fromkeys(self._part(x) for x in made))
        half = any(x.element_size() == 2 for x in given)
        self.kernels.append(Kernel(name, reads, writes, flops, half, level=level, **about))

    def _part(self, x: Tensor) -> Part:
        self._kept.append(x.untyped_storage())
        numbers = math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or not n)
        return Part(_address(x), int(x.storage_offset()), numbers * x.element_size(), self._makers.get(_address(x), -1))


def _counts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """In the operations of PyTorch's own implementation."""
    top = x.amax(dim, keepdim=True)
    top = top.masked_fill(top.abs() == torch.inf, 0)
    return (x - top).exp_().sum(dim, keepdim=keepdim).log_().add_(top if keepdim else top.squeeze(dim))


def _across_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it reduces another dimension than the last: all rows must be done before its result can be used."""
    if name not in REDUCTIONS:
        return False
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or []
    return args[0].ndim - 1 not in [dim % args[0].ndim for dim in dims if not isinstance(dim, bool)]


class _FusedSoftmax(TorchFunctionMode):
    """Records scaled_dot_product_attention as the kernels of FlashAttention."""

    def __init__(self, counter: Counter):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v, *rest = args
        causal = bool((kwargs or {}).get("is_causal") or (len(rest) > 2 and rest[2]))
        return _Flash.apply(q, k, v, self.counter, causal)


class _Flash(torch.autograd.Function):
    """Shapes only. The backward pass computes five products of N × N × d, the forward pass two."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, counter: Counter, causal: bool) -> Tensor:  # type: ignore[override]
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        ctx.counter, ctx.causal = counter, causal
        _count_flash(counter, "flash", [q, k, v], [out], 2, causal)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        found = [torch.empty_like(x) for x in (q, k, v)]
        ctx.counter.add("flash_rows", [out, *gradients], [out.new_empty(*out.shape[:-1], 1)], 0)
        _count_flash(ctx.counter, "flash_backward", [q, k, v, out, *gradients], found, 5, ctx.causal)
        return *found, None, None


def _count_flash(
    counter: Counter, name: str, given: Sequence[Tensor], made: Sequence[Tensor], products: int, causal: bool
) -> None:
    q, k, *_ = given
    tokens = k.shape[-2]
    flops = 2 * products * q.numel() * tokens * (0.5 if causal else 1)
    share = attention_share(tokens) * (BACKWARD if products > 2 else 1)
    counter.add(name, given, made, flops, share=share, tokens=tokens, ends=True)


def attention_share(tokens: int) -> float:
    """Of the peak rate, what fused softmax reaches: straight lines over the logarithm of the tokens."""
    places, shares = zip(*ATTENTION.items(), strict=True)
    if tokens <= places[0]:
        return shares[0] * tokens / places[0]
    if tokens >= places[-1]:
        return shares[-1]
    i = next(i for i, place in enumerate(places) if tokens <= place)
    part = math.log(tokens / places[i - 1]) / math.log(places[i] / places[i - 1])
    return shares[i - 1] + part * (shares[i] - shares[i - 1])


def count(call: Callable[[], Any], on: Hardware) -> list[Kernel]:
    """The kernels of a call whose tensors are on the meta device, as eager PyTorch launches them on the device."""
    counter = Counter()
    with counter:
        if on.fuses:
            with _FusedSoftmax(counter):
                call()
        else:
            call()
    return counter.kernels


def fused(kernels: Sequence[Kernel]) -> list[Kernel]:
    """As a compiler would have them: operations without products that use each other's results at one level are one
    kernel, which reads what others made and writes what others use."""
    group = list(range(len(kernels)))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    users: dict[Part, set[int]] = {}
    for i, kernel in enumerate(kernels):
        for part in kernel.reads:
            users.setdefault(part._replace(offset=0, bytes=0), set()).add(i)
            made = part.maker >= 0 and not kernel.flops and not kernels[part.maker].ends
            if made and kernels[part.maker].level == kernel.level:
                group[root(i)] = root(part.maker)
    members: dict[int, list[int]] = {}
    for i in range(len(kernels)):
        members.setdefault(root(i), []).append(i)
    return [_joined([kernels[i] for i in own], set(own), users) for own in members.values()]


def _joined(kernels: Sequence[Kernel], own: set[int], users: dict[Part, set[int]]) -> Kernel:
    def leaves(part: Part) -> bool:
        """Whether others use it, or nobody: then it is a result."""
        found = users.get(part._replace(offset=0, bytes=0), set())
        return not found or not found <= own

    if len(kernels) == 1:
        return kernels[0]
    reads = dict.fromkeys(part for kernel in kernels for part in kernel.reads if part.maker not in own)
    writes = dict.fromkeys(part for kernel in kernels for part in kernel.writes if leaves(part))
    return replace(kernels[0], name="+".join(kernel.name for kernel in kernels), reads=(*reads,), writes=(*writes,))


class _Autocast(TorchFunctionMode):
    """What torch.autocast does on a GPU, which the meta device has not: products in half precision, norms in
    float32."""

    HALF = (F.linear, F.conv2d, torch.matmul)
    WIDE = (F.layer_norm,)

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = self.dtype if func in self.HALF else torch.float32 if func in self.WIDE else None
        if dtype is not None:
            args = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        return func(*args, **(kwargs or {}))


def layer_seconds(spec: str, load: Workload, on: Hardware) -> Seconds:
    """Of an attention layer, from its projection to the joined heads, as `advice` times it."""
    site, dtype = load.site, on.dtype
    width = site.heads * site.head_dim
    attention = build_attention(spec, site).to("meta")
    projection, gradient = (torch.empty(load.batch, site.tokens, n * width, dtype=dtype, device="meta") for n in (3, 1))
    kernels = count(layer_call(attention, load, projection, gradient), on)
    return seconds(fused(kernels) if compiles(attention, on) else kernels, on)


def compiles(attention: Attention, on: Hardware) -> bool:
    """Whether linvit compiles it on this device: `accelerated_attention`, which only Performers use."""
    return on.fuses and isinstance(attention, Performer) and not attention.site.causal


def model_seconds(config: ModelConfig, batch: int, training: bool, on: Hardware) -> Seconds:
    """Of a model for a batch of images. Equal blocks are counted once."""
    if config.depth <= 2:
        return seconds(count(_model_call(config, batch, training, on.dtype), on), on)
    few = [config.model_copy(update={"depth": depth}) for depth in (1, 2)]
    one, two = (model_seconds(each, batch, training, on) for each in few)
    return two.plus(two.plus(one, -1), config.depth - 2)


def _model_call(config: ModelConfig, batch: int, training: bool, dtype: torch.dtype) -> Callable[[], Any]:
    model = VisionTransformer(config).to("meta").train(training)
    images = torch.empty(batch, *config.image_shape, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def forward() -> Tensor:
        with nullcontext() if dtype == torch.float32 else _Autocast(dtype):
            return model(images)

    def step() -> None:
        logits = forward().float().flatten(0, -2)
        F.cross_entropy(logits, torch.empty(len(logits), dtype=torch.long, device="meta")).backward()
        optimizer.step()

    return step if training else torch.no_grad()(forward)


@dataclass(frozen=True)
class ModelForecast:
    """Seconds of one model on a device with any of some attentions in all of its layers, at its own size and at
    others. Tasks are those of `advice`."""

    config: ModelConfig
    batch: int
    on: Hardware
    rest: Mapping[str, Seconds]  # of the model without attention, by task
    layers: Mapping[tuple[str, str, int], Seconds]  # by attention, task and tokens

    @property
    def tokens(self) -> int:
        return self.config.tokens

    @property
    def longest(self) -> int:
        return max(tokens for _, _, tokens in self.layers)

    def lengths(self, spec: str) -> list[int]:
        """At which it is compared with softmax."""
        return sorted({tokens for one, _, tokens in self.layers if one == spec})

    def layer(self, spec: str, task: str, tokens: int | None = None) -> Seconds:
        return self.layers[spec, task, self.tokens if tokens is None else tokens]

    def model(self, spec: str, task: str, tokens: int | None = None) -> Seconds:
        """With other numbers of tokens, all but attention takes the device time in proportion to them."""
        rest = self.rest[task]
        if tokens is not None:
            rest = rest._replace(device=rest.device * tokens / self.tokens)
        return rest.plus(self.layer(spec, task, tokens), self.config.depth)

    def ratio(self, spec: str, task: str, tokens: int | None = None) -> float:
        """How many times faster than softmax a layer is."""
        return self.layer(BASELINE, task, tokens).total / self.layer(spec, task, tokens).total

    def speed(self, spec: str, task: str, tokens: int | None = None) -> float:
        """How many times faster than with softmax the whole model is."""
        return self.model(BASELINE, task, tokens).total / self.model(spec, task, tokens).total

    def share(self, task: str) -> float:
        """Of the time with softmax, what attention takes."""
        return max(0.0, 1 - self.model(LIMIT, task).total / self.model(BASELINE, task).total)

    def break_even(self, spec: str, task: str) -> float | None:
        """About the tokens from which on its layers stay faster than softmax's: the fewest of `lengths` if they always
        are, None if they are not with the most."""
        return self._crossing({n: self.ratio(spec, task, n) for n in self.lengths(spec)})

    def pays_from(self, spec: str, task: str, gain: float) -> float | None:
        """About the tokens from which on the whole model is `gain` times as fast as with softmax."""
        return self._crossing({n: self.speed(spec, task, n) / gain for n in self.lengths(spec)})

    def _crossing(self, ratios: Mapping[int, float]) -> float | None:
        """Of two digits, rounded so that it stays on its side of the model's own tokens."""
        exact = break_even(ratios)
        if exact is None or exact == min(ratios):
            return exact
        unit = 10.0 ** max(0, math.floor(math.log10(exact)) - 1)
        return max(float(min(ratios)), (math.ceil if exact > self.tokens else math.floor)(exact / unit) * unit)


def forecast_model(
    config: ModelConfig, specs: Iterable[str], on: Hardware, *, batch: int, progress: Progress = ignore
) -> ModelForecast:
    loads, limit = workloads(config, batch), config.model_copy(update={"attention": LIMIT})
    wanted = [
        (spec, task, tokens)
        for spec in dict.fromkeys([*BASELINES, *specs])
        for tokens in _lengths(spec, config)
        for task in loads
    ]
    rest: dict[str, Seconds] = {}
    for task, load in loads.items():
        whole = model_seconds(limit, load.batch, load.mode == "both", on)
        rest[task] = whole.plus(layer_seconds(LIMIT, load, on), -config.depth)
    layers: dict[tuple[str, str, int], Seconds] = {}
    for i, (spec, task, tokens) in enumerate(wanted):
        progress(i, len(wanted), f"counting the operations of {spec} at {tokens:,} tokens")
        layers[spec, task, tokens] = layer_seconds(spec, loads[task].at(tokens), on)
    progress(len(wanted), len(wanted), "counting operations")
    return ModelForecast(config, batch, on, rest, layers)


def _lengths(spec: str, config: ModelConfig) -> list[int]:
    """Of square grids behind the model's prefix, and the model's own; where keys are projected, at least as many."""
    kind, _, options = resolve(spec)
    fewest, prefix = options.get(kind.size_option or "") or 1, config.prefix_tokens
    sides = {round(SIDES[0] * (SIDES[1] / SIDES[0]) ** (i / (STEPS - 1))) for i in range(STEPS)}
    return sorted(n for n in {*(side**2 + prefix for side in sides), config.tokens} if n >= fewest)


def suitable_batch(config: ModelConfig) -> int:
    """As many images as keep a large device busy."""
    return max(1, min(MAX_BATCH, BATCH_TOKENS // config.tokens))


def check_memory(config: ModelConfig, batch: int, on: Hardware) -> None:
    needed = step_bytes(config, batch) * on.dtype.itemsize / 4
    if needed > on.memory:
        raise ValueError(
            f"batch={batch}: a training step needs about {in_bytes(needed)}, but {on.name} has {in_bytes(on.memory)}"
        )
