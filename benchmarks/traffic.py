"""Kernels and memory traffic of one attention layer on a GPU, counted without one.

    python benchmarks/traffic.py

ViT-S at 384 px by default: 6 heads of 64, 577 tokens, 43 images, bfloat16, forward without gradients. q, k and v are
three tensors, or slices of one projection as in a model, which products of cuBLAS cannot always read where they are.

- eager: operations as they are dispatched on the `meta` device, which takes the path of a GPU with Triton.
- compiled: kernels that Inductor generates or calls, listed with what they read and write. The layer is lowered by
  Inductor's own passes, scheduler and Triton backend for fake tensors on "cuda", with the properties of an A100 in
  place of a device's. No kernel is run, and none is chosen by timing. A kernel's bytes are each buffer that it reads or
  writes, once: Inductor's own count, except for linvit's projection, which Inductor takes to read its own output.
  Products are cuBLAS calls with their inputs and outputs.
- triton: the tensors that linvit's own kernels are launched with.
- saved: what a compiled forward pass keeps for the backward pass, q, k and v included, in bytes for each token and
  head, as Inductor's partitioner decides on the meta device.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._triton
import triton
from torch import _guards
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_function
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from linvit.attention import accelerated, build_attention, fused
from linvit.attention.performer import Performer
from linvit.measure.advice import Workload
from linvit.measure.hardware import HARDWARE, count
from linvit.site import Site

SPECS = ("softmax", "performer-relu:m=64", "performer-exp:m=64")
A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-80GB",
    gcnArchName="",  # asked for by builds of PyTorch without CUDA
    major=8,
    minor=0,
    multi_processor_count=108,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
)


@contextlib.contextmanager
def device_properties() -> Iterator[None]:
    """What Inductor asks of a device while it lowers."""
    for_cuda = {"get_device_properties": A100, "get_device_capability": (8, 0), "current_device": 0}
    for_interface = for_cuda | {"get_compute_capability": 80, "is_available": True}
    answers: list[tuple[Any, str, Any]] = [(torch.cuda, name, value) for name, value in for_cuda.items()]
    answers += [(CudaInterface, name, value) for name, value in for_interface.items()]
    answers.append((CudaInterface.Worker, "get_device_properties", A100))
    answers.append((torch.utils._triton, "triton_hash_with_backend", "none"))
    answers.append((accelerated, "_has_triton", True))
    with contextlib.ExitStack() as patches:
        for owner, name, value in answers:
            patches.enter_context(mock.patch.object(owner, name, lambda *_, value=value: value, create=True))
        driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 80, 32))
        patches.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        torch.utils._triton.has_triton.cache_clear()  # what it found on this machine
        patches.callback(torch.utils._triton.has_triton.cache_clear)
        yield


class Kernel(NamedTuple):
    bytes: int
    reads: str = ""
    writes: str = ""


def compiled_kernels(spec: str, load: Workload, slices: bool) -> list[Kernel]:
    """Those that Inductor generates for the forward pass, and the products that it calls."""
    found: list[Kernel] = []

    def lower(module: torch.fx.GraphModule, inputs: Any) -> Any:
        with V.set_fake_mode(_guards.detect_fake_mode(inputs)):
            compile_fx._recursive_post_grad_passes(module, is_inference=True)
            graph = GraphLowering(module, example_inputs=inputs)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.run(*inputs)
                graph.codegen()
                nodes = [node for node in graph.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
                found.extend(described(node, graph) for node in nodes)
        return module.forward

    attention = build_attention(spec, load.site)
    with device_properties(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        attention.to("cuda:0")
        q, k, v = tensors(load, "cuda:0", slices)
        compiler: Any = lower
        aot_function(attention, compiler, inference_compiler=compiler, decompositions=select_decomp_table())(q, k, v)
    return found


def described(node: BaseSchedulerNode, graph: GraphLowering) -> Kernel:
    renamed = graph.scheduler.mutation_real_name  # what a kernel of linvit's writes into goes by another name then
    made = list(dict.fromkeys(renamed.get(name, name) for name in (x.get_name() for x in node.get_outputs())))
    reads = {renamed.get(dependency.name, dependency.name) for dependency in node.read_writes.reads}
    read = sorted(reads - set(made))
    size = node.get_read_write_buffers_sizes()
    if isinstance(node.node, UserDefinedTritonKernel):  # Inductor takes it to read what it writes
        size = sum(_bytes(graph, name) for name in (*read, *made))
    return Kernel(size, *(", ".join(f"{name} {_shape(graph, name)}" for name in names) for names in (read, made)))


def _bytes(graph: GraphLowering, name: str) -> int:
    buffer = graph.try_get_buffer(name)
    if buffer is None:
        return 0  # a constant: Ω
    return buffer.get_dtype().itemsize * math.prod(int(size) for size in buffer.get_size())


def _shape(graph: GraphLowering, name: str) -> str:
    buffer = graph.try_get_buffer(name)
    if buffer is None:
        return "constant"
    return f"{str(buffer.get_dtype()).removeprefix('torch.')}{[int(size) for size in buffer.get_size()]}"


def saved_bytes(spec: str, load: Workload, slices: bool) -> float:
    """For each token and head."""
    attention = build_attention(spec, load.site).to("meta")
    assert isinstance(attention, Performer)
    q, k, v = (x.requires_grad_() for x in tensors(load, "meta", slices))
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    attend = torch.compile(accelerated._checkpointed, backend="aot_eager_decomp_partition")
    prepared = attention.prepare(q, k)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attend(prepared.q, prepared.k, v, prepared.weight, prepared.bias, prepared.features)
    for x in (q, k, v):
        keep(x)
    return sum(kept.values()) / (load.batch * load.site.heads * load.site.tokens)


def triton_kernels(spec: str, load: Workload, slices: bool) -> list[Kernel]:
    """Of the forward pass: each tensor of a launch, once, and copies before it."""
    found: list[Kernel] = []

    def launch(kernel: Any, grid: Any, *given: Any, **constants: Any) -> None:
        used = {id(x): x.numel() * x.element_size() for x in given if isinstance(x, torch.Tensor)}
        found.append(Kernel(sum(used.values())))

    attention = build_attention(spec, load.site).to("meta")
    assert isinstance(attention, Performer)
    q, k, v = tensors(load, "meta", slices)
    with torch.no_grad(), mock.patch.object(fused, "_launch", launch):
        prepared = attention.prepare(q, k)
        copies = count(lambda: fused.triton_attention(prepared, v), HARDWARE["a100"])
    return found + [Kernel(copy.bytes) for copy in copies if "linear_attention" not in copy.name]


def tensors(load: Workload, device: str, slices: bool) -> list[torch.Tensor]:
    site, made = load.site, {"dtype": torch.bfloat16, "device": device}
    if slices:
        projection = torch.empty(load.batch, site.tokens, 3, site.heads, site.head_dim, **made)
        return [x.transpose(1, 2) for x in projection.unbind(2)]
    return [torch.empty(load.batch, site.heads, site.tokens, site.head_dim, **made) for _ in range(3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=577)
    parser.add_argument("--batch", type=int, default=43)
    parser.add_argument("--heads", type=int, default=6)
    given = parser.parse_args()
    load = Workload(Site(given.heads, 64, given.tokens), given.batch)
    print(f"compiled: Inductor's Triton backend, PyTorch {torch.__version__}, for an A100; counted, not run")
    print(f"{'attention':22}{'q, k, v':>12}{'path':>10}{'kernels':>9}{'MB':>7}{'saved':>7}")
    listed = {}
    for spec, slices in itertools.product(SPECS, (False, True)):
        attention, inputs = build_attention(spec, load.site).to("meta"), tensors(load, "meta", slices)
        with torch.no_grad():
            eager = count(lambda attention=attention, inputs=inputs: attention(*inputs), HARDWARE["a100"])
        paths, saved = {"eager": [Kernel(kernel.bytes) for kernel in eager]}, {}
        if spec != "softmax":
            listed[spec, slices] = compiled_kernels(spec, load, slices)
            paths |= {"compiled": listed[spec, slices], "triton": triton_kernels(spec, load, slices)}
            saved["compiled"] = f"{saved_bytes(spec, load, slices):.0f}"
        for name, found in paths.items():
            size, form = sum(kernel.bytes for kernel in found) / 1e6, "slices" if slices else "tensors"
            print(f"{spec:22}{form:>12}{name:>10}{len(found):>9}{size:>7.0f}{saved.get(name, ''):>7}")
    for (spec, slices), kernels in listed.items():
        print(f"\n{spec}, compiled, q, k and v as {'slices of one projection' if slices else 'tensors'}")
        for kernel in kernels:
            print(f"{kernel.bytes / 1e6:8.1f} MB  {kernel.reads} → {kernel.writes}")


if __name__ == "__main__":
    main()
