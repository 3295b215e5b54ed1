"""What torch.compile makes of linear attention on a GPU, from tensors without numbers: nothing is run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from linvit.attention import accelerated, build_attention
from linvit.attention.performer import Performer
from linvit.measure.advice import Workload
from linvit.site import Site

without_triton = importlib.util.find_spec("triton") is None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(without_triton, reason="Triton is not installed")]
TRAFFIC = Path(__file__).parents[2] / "benchmarks/traffic.py"


@pytest.mark.parametrize("spec", ["performer-relu:m=64", "performer-exp:m=64"])
def check_one_graph_forward_and_one_backward(spec):
    """Each with the projection's Triton kernel, for q and for k, for slices of one projection that need gradients."""
    found = importlib.util.spec_from_file_location("traffic", TRAFFIC)
    assert found is not None
    assert found.loader is not None
    traffic = importlib.util.module_from_spec(found)
    found.loader.exec_module(traffic)
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    load = Workload(Site(2, 64, 101), 2)
    attention = build_attention(spec, load.site)
    assert isinstance(attention, Performer)
    with traffic.device_properties(), FakeTensorMode(allow_non_fake_inputs=True):
        attention.to("cuda:0")
        q, k, v = (x.requires_grad_() for x in traffic.tensors(load, "cuda:0", True))
        attend = torch.compile(accelerated._checkpointed, backend=backend, fullgraph=True)
        out = attend(q, k, v, None, None, attention.prepare(q, k).features)
        gradients = torch.autograd.grad(out, [q, k, v], torch.empty_like(out))
    assert out.dtype == torch.bfloat16
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    assert [sum("triton_kernel_wrapper" in name for name in graph) for graph in graphs] == [2, 2]
