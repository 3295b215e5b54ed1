"""Forecasts for devices that are not here: what is counted, and whether they agree with published times."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.attention import attention_names, build_attention, with_size
from linvit.measure import hardware
from linvit.measure.advice import Workload, layer_call
from linvit.measure.hardware import (
    HARDWARE,
    Hardware,
    Kernel,
    ModelForecast,
    Part,
    Seconds,
    attention_share,
    count,
    forecast_model,
    fused,
    layer_seconds,
    model_seconds,
    seconds,
)
from linvit.measure.speed import break_even
from linvit.models import model_config
from linvit.requests import AdviseRequest
from linvit.site import Site

A800 = HARDWARE["a800"]
SLOW = Hardware("slow", 1e9, 1e8, 1e6, 1e9, least=0.0, launch=1e-3)
# Milliseconds on an A800, bfloat16, 2 × 16 heads of 64 (fla-org/flash-bidirectional-linear-attention): softmax and
# plain linear attention without features, forward and forward + backward.
PUBLISHED = {
    1024: {"softmax": (0.074, 0.406), "plain": (0.084, 0.476)},
    4096: {"softmax": (0.784, 3.18), "plain": (0.178, 1.02)},
    16384: {"softmax": (11.75, 44.2), "plain": (0.550, 3.56)},
}
BREAK_EVEN = {False: 1140, True: 1210}  # between its lengths by a power law


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention in the seven operations that were timed."""
    total = k.mean(-2, keepdim=True).mT
    sums = k.mT @ (v * (1 / k.shape[-2]))
    return (q @ sums) / (q @ total + 1e-6)


def on_a800(name: str, tokens: int, backward: bool) -> float:
    attend = {"plain": plain, "softmax": softmax}[name]
    inputs = [meta(2, 16, tokens, 64, grad=backward) for _ in "qkv"]

    def call() -> None:
        out = attend(*inputs)
        if backward:
            for x, gradient in zip(inputs, torch.autograd.grad(out, inputs, torch.empty_like(out)), strict=True):
                torch.empty_like(x).add_(gradient)  # the benchmark accumulates gradients

    return seconds(count(call, A800), A800).total


@pytest.mark.parametrize("backward", [False, True])
def test_the_break_even_of_plain_linear_attention_is_the_published_one(backward: bool) -> None:
    lengths = [round(256 * 2 ** (i / 4)) for i in range(17)]
    ratios = {n: on_a800("softmax", n, backward) / on_a800("plain", n, backward) for n in lengths}
    published = {n: row["softmax"][backward] / row["plain"][backward] for n, row in PUBLISHED.items()}
    assert break_even(published) == pytest.approx(BREAK_EVEN[backward], rel=0.01)
    assert break_even(ratios) == pytest.approx(BREAK_EVEN[backward], rel=0.3)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["softmax", "plain"])
@pytest.mark.parametrize("tokens", PUBLISHED)
def test_times_are_near_the_published_ones(tokens: int, name: str, backward: bool) -> None:
    found, published = 1e3 * on_a800(name, tokens, backward), PUBLISHED[tokens][name][backward]
    assert abs(math.log(found / published)) < math.log(1.5)


def test_bytes_and_products_are_those_of_the_operations() -> None:
    """Against arithmetic, with a different prime for each dimension."""
    a, b, bias = meta(7, 11), meta(11, 13), meta(13)

    def call() -> Tensor:
        product = a @ b  # read 7·11 + 11·13, written 7·13
        view = product.t().unsqueeze(0).expand(5, -1, -1)
        assert view.shape == (5, 13, 7)
        return (product + bias).float()  # read 7·13 + 13, written 7·13; read 7·13, written 7·13 as float32

    found = count(call, A800)
    assert [kernel.name for kernel in found] == ["mm", "add", "_to_copy"]
    assert [kernel.bytes for kernel in found] == [2 * (77 + 143 + 91), 2 * (91 + 13 + 91), 2 * 91 + 4 * 91]
    assert [kernel.flops for kernel in found] == [2 * 7 * 11 * 13, 0, 0]
    assert [kernel.half for kernel in found] == [True, True, True]


def test_what_is_repeated_is_read_once_and_what_is_overwritten_is_not_read() -> None:
    x, y = meta(3, 5), meta(5)
    assert count(lambda: x + y.expand(3, 5), A800)[0].bytes == 2 * (15 + 5 + 15)
    assert count(lambda: x.copy_(y), A800)[0].bytes == 2 * (5 + 15)
    assert count(lambda: x.add_(y), A800)[0].bytes == 2 * (15 + 5 + 15)
    assert count(lambda: x.zero_(), A800)[0].bytes == 2 * 15
    assert count(lambda: x * x, A800)[0].bytes == 2 * (15 + 15)


def test_a_kernel_takes_the_longest_of_its_limits() -> None:
    reads = (Part(1, 0, 550),)
    assert Kernel("pass", reads, ()).seconds(SLOW) == pytest.approx(550 / 0.55e6)
    assert Kernel("product", reads, (), flops=6e8).seconds(SLOW) == pytest.approx(10.0)
    assert Kernel("product", reads, (), flops=6e8, half=True).seconds(SLOW) == pytest.approx(1.0)
    assert Kernel("tiny", (), ()).seconds(A800) == hardware.LEAST
    assert seconds([Kernel("tiny", (), ())] * 3, SLOW) == (0.0, pytest.approx(3e-3))


def test_the_host_or_the_device_decides() -> None:
    assert Seconds(2.0, 3.0).total == 3.0
    assert Seconds(2.0, 3.0).launch_bound
    assert not Seconds(4.0, 3.0).launch_bound
    assert Seconds(1.0, 2.0).plus(Seconds(3.0, 5.0), 2) == (7.0, 12.0)


def test_softmax_is_counted_as_flash_attention_with_and_without_gradients() -> None:
    b, h, n, d = 2, 3, 577, 8
    q, k, v = (meta(b, h, n, d, grad=True) for _ in "qkv")
    forward = count(lambda: softmax(q, k, v), A800)
    assert [kernel.name for kernel in forward] == ["flash"]
    assert forward[0].bytes == 4 * 2 * b * h * n * d
    assert forward[0].flops == 4 * n**2 * d * b * h
    assert forward[0].share == pytest.approx(0.35)
    causal = count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), A800)
    assert causal[0].flops == forward[0].flops / 2
    both = count(lambda: softmax(q, k, v).sum().backward(), A800)
    (back,) = [kernel for kernel in both if kernel.name == "flash_backward"]
    assert back.flops == 2.5 * forward[0].flops


def test_softmax_is_not_fused_where_it_cannot_be() -> None:
    q, k, v = (meta(1, 2, 31, 8, dtype=torch.float32) for _ in "qkv")
    found = count(lambda: softmax(q, k, v), HARDWARE["m3"])
    assert len(found) > 3
    assert sum(kernel.flops for kernel in found) == 4 * 31**2 * 8 * 2
    assert max(kernel.bytes for kernel in found) >= 2 * 4 * 2 * 31**2  # scores are written and read


def test_the_share_of_fused_softmax_grows_with_the_tokens() -> None:
    for tokens, share in hardware.ATTENTION.items():
        assert attention_share(tokens) == pytest.approx(share)
    found = [attention_share(n) for n in range(1, 20_000, 37)]
    assert found == sorted(found)
    assert found[-1] == 0.6
    fast = Kernel("flash", (), (), flops=1e12, half=True, share=0.6, tokens=16384)
    assert fast.seconds(HARDWARE["h100"]) == pytest.approx(1e12 / (0.41 * 989e12))  # its own limit


def test_fused_operations_read_what_comes_from_outside_and_write_what_is_used() -> None:
    x, w = meta(5, 7), meta(7, 11)

    def call() -> Tensor:
        y = (x * 2).exp()  # one kernel: reads x, writes y
        return ((y @ w).relu() + 1).sum(-1)  # the product; one kernel: reads it, writes the sum of rows

    assert [kernel.name for kernel in count(call, A800)] == ["mul", "exp", "mm", "relu", "add", "sum"]
    first, product, last = fused(count(call, A800))
    assert first.bytes == 2 * (35 + 35)
    assert product.bytes == 2 * (35 + 77 + 55)
    assert last.bytes == 2 * (55 + 5)
    assert product.flops == 2 * 5 * 7 * 11


def test_nothing_is_fused_across_a_reduction_over_rows_or_into_the_backward_pass() -> None:
    x = meta(5, 7, grad=True)
    rows = fused(count(lambda: x.exp() / x.exp().sum(0), A800))
    assert ["sum" in kernel.name.split("+") for kernel in rows].count(True) == 1
    assert len(rows) == 3  # exp; exp and its sum; the quotient
    both = fused(count(lambda: x.exp().sin().sum(-1).backward(meta(5)), A800))
    assert both[0].name == "exp+sin+sum"
    assert len(both) == 2  # forward, backward


@pytest.mark.parametrize("spec", ["performer-exp:m=13", "performer-relu:m=16", "performer-hyp:m=8"])
@pytest.mark.parametrize("mode", ["forward", "both"])
def test_fusing_keeps_products_and_saves_traffic(spec: str, mode: str) -> None:
    load = Workload(Site(3, 16, 101, prefix=1).at(101), 2, mode)
    attention = build_attention(spec, load.site).to("meta")
    kernels = count(layer_call(attention, load, meta(2, 101, 144), meta(2, 101, 48)), A800)
    found = fused(kernels)
    assert sum(k.flops for k in found) == sum(k.flops for k in kernels)
    assert sum(k.bytes for k in found) < 0.8 * sum(k.bytes for k in kernels)
    assert len(found) < 0.6 * len(kernels)


@pytest.mark.parametrize("name", attention_names())
@pytest.mark.parametrize("on", ["a100", "m3"])
def test_every_attention_has_a_forecast_that_grows(name: str, on: str) -> None:
    spec, device = with_size(name, 16, 65), HARDWARE[on]
    for mode in ("forward", "both"):
        few, many = (
            layer_seconds(spec, Workload(Site(2, 16, n, prefix=1).at(n), 64, mode), device) for n in (65, 1025)
        )
        assert few.device <= many.device
        assert few.host <= many.host
        assert many.device > 0 or name == "identity"  # whose output is a view


@pytest.mark.parametrize("training", [False, True])
def test_equal_blocks_are_counted_once(training: bool) -> None:
    config = model_config(image_size=28, patch_size=4, dim=48, heads=3, depth=5, mlp_dim=96)
    whole = seconds(count(hardware._model_call(config, 3, training, torch.bfloat16), A800), A800)
    found = model_seconds(config, 3, training, A800)
    assert found.host == pytest.approx(whole.host)
    assert found.device == pytest.approx(whole.device, rel=0.01)


def test_models_compute_products_in_half_precision_and_keep_norms_in_float32() -> None:
    config = model_config(image_size=28, patch_size=4, dim=48, heads=3, depth=1, mlp_dim=96)
    kernels = count(hardware._model_call(config, 2, False, torch.bfloat16), A800)
    products = [kernel for kernel in kernels if kernel.flops]
    assert len(products) >= 6  # stem, qkv, attention, projection, two of the MLP, head
    assert all(kernel.half for kernel in products)
    norms = [kernel for kernel in kernels if kernel.name == "native_layer_norm"]
    assert norms
    assert not any(kernel.half for kernel in norms)


@pytest.mark.parametrize("stem", ["patch", "conv", "resnet", "pixel"])
def test_models_of_every_stem_are_counted(stem: str) -> None:
    config = model_config("nano", image_size=8, stem=stem, **({"patch_size": 4} if stem == "patch" else {}))
    for training in (False, True):
        assert model_seconds(config, 2, training, HARDWARE["l4"]).device > 0


@pytest.fixture(scope="module")
def small() -> ModelForecast:
    config = model_config("small", image_size=16 * 16, patch_size=16)
    return forecast_model(config, ["performer-relu:m=32", "linformer:k=16"], HARDWARE["a100"], batch=16)


def test_a_model_is_its_rest_and_its_layers(small: ModelForecast) -> None:
    whole = model_seconds(small.config.model_copy(update={"attention": "softmax"}), 16, True, small.on)
    found = small.model("softmax", "training")
    assert found.device == pytest.approx(whole.device, rel=0.1)
    assert found.host == pytest.approx(whole.host, rel=0.1)
    assert small.speed("softmax", "training") == 1
    assert small.share("inference") == pytest.approx(1 - 1 / small.speed("identity", "inference"))
    assert small.model("softmax", "latency").launch_bound
    assert not small.model("softmax", "training", max(small.lengths("softmax"))).launch_bound


def test_the_break_even_of_a_model_is_where_its_layers_cross(small: ModelForecast) -> None:
    for spec in ("performer-relu:m=32", "linformer:k=16"):
        even = small.break_even(spec, "training")
        assert even is not None
        assert even == float(f"{even:.2g}")
        for n in small.lengths(spec):
            if not 0.8 < n / even < 1.25:
                assert (small.ratio(spec, "training", n) > 1) is (n > even)
    assert min(small.lengths("linformer:k=16")) >= 16


def test_a_faster_device_is_never_slower() -> None:
    load = Workload(Site(6, 64, 1025, prefix=1).at(1025), 16, "both")
    for spec in ("softmax", "performer-exp:m=32", "linformer:k=16"):
        h100, a100, l4 = (layer_seconds(spec, load, HARDWARE[name]).device for name in ("h100", "a100", "l4"))
        assert h100 < a100 < l4


def test_progress_ends_and_the_request_knows_every_device() -> None:
    seen: list[float] = []
    config = model_config("nano", image_size=16, patch_size=4)
    forecast_model(config, [], HARDWARE["t4"], batch=2, progress=lambda done, total, what: seen.append(done / total))
    assert seen == sorted(seen)
    assert seen[-1] == 1
    names = get_args(get_args(AdviseRequest.model_fields["hardware"].annotation)[0])
    assert set(names) == set(HARDWARE) - {"a800"}


def test_what_does_not_fit_is_refused() -> None:
    config = model_config("small", image_size=512, patch_size=16)
    hardware.check_memory(config, hardware.suitable_batch(config), HARDWARE["t4"])
    with pytest.raises(ValueError, match=r"batch=100000: a training step needs about .*, but NVIDIA T4 has 14\.9 GiB"):
        hardware.check_memory(config, 100_000, HARDWARE["t4"])
