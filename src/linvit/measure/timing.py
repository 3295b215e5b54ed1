"""How attentions are called to be timed or weighed; where they sit in a model is a Site."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.attention import Attention
from linvit.devices import check_bfloat16
from linvit.measure.peers import create
from linvit.measure.race import ROUNDS, Call
from linvit.randomness import generator
from linvit.records import Tag
from linvit.site import Site

CPU = torch.device("cpu")
MODES = ("forward", "both")  # both: forward and backward
GRAPH = "graph"  # forward, as one CUDA graph: what is left without the cost of launching operations


@dataclass(frozen=True, kw_only=True)
class Timing:
    batch: int = 1
    rounds: int = ROUNDS
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("batch", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.dtype == torch.bfloat16:
            check_bfloat16("dtype=bfloat16", self.device)

    def attention(self, spec: str, site: Site) -> Attention:
        return create(spec, site).to(self.device)

    def inputs(self, site: Site) -> Tensor:
        """q, k, v and a gradient of the output, (4, B, H, N, D)."""
        shape = 4, self.batch, site.heads, site.tokens, site.head_dim
        made = torch.randn(shape, generator=generator("speed", site.seed, site.tokens))
        return made.to(self.device, self.dtype)

    def input_bytes(self, site: Site) -> int:
        """The size of `inputs`."""
        return 4 * self.batch * site.heads * site.tokens * site.head_dim * self.dtype.itemsize

    def tags(self, site: Site) -> dict[str, Tag]:
        """All but the tokens."""
        own = {name: getattr(site, name) for name in ("heads", "head_dim", "prefix")}
        return {**own, "batch": self.batch, "seed": site.seed}


def graphed(call: Call) -> Call | None:
    """The call as a CUDA graph; None where it cannot be captured."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return None
    return graph.replay
