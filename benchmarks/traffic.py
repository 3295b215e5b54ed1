"""Kernels and memory traffic of one attention layer on a GPU, counted without one.

    python benchmarks/traffic.py

ViT-S at 384 px by default: 6 heads of 64, 577 tokens, 43 images, bfloat16, forward. Eager operations are counted as
they are dispatched (on the `meta` device, which takes the GPU's path). Compiled ones are these operations joined as a
compiler joins them, everything between two products being one kernel: a model of Inductor, not its own count. Triton's
are the tensors that linvit's kernels are launched with.
"""

from __future__ import annotations

import argparse

import torch

from linvit.attention import build_attention
from linvit.measure.advice import Workload
from linvit.measure.hardware import HARDWARE, count, fused
from linvit.site import Site

SPECS = ("softmax", "performer-relu:m=64", "performer-exp:m=64")


def triton_kernels(load: Workload, features: int) -> dict[str, int]:
    """Bytes of each of the forward kernels."""
    site, groups = load.site, load.batch * load.site.heads
    tensor = groups * site.tokens * site.head_dim * 2
    sums, omega = 4 * groups * features * (site.head_dim + 1), 4 * features * site.head_dim
    return {"keys": 2 * tensor + omega + sums, "queries": 2 * tensor + omega + sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=577)
    parser.add_argument("--batch", type=int, default=43)
    parser.add_argument("--heads", type=int, default=6)
    given = parser.parse_args()
    load = Workload(Site(given.heads, 64, given.tokens), given.batch)
    print(f"{'attention':24}{'path':>12}{'kernels':>9}{'MB':>8}")
    for spec in SPECS:
        attention = build_attention(spec, load.site).to("meta")
        shape = given.batch, given.heads, given.tokens, 64
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(3))
        with torch.no_grad():
            eager = count(lambda attention=attention, q=q, k=k, v=v: attention(q, k, v), HARDWARE["a100"])
        paths = {"eager": [kernel.bytes for kernel in eager]}
        if spec != "softmax":
            paths["compiled"] = [kernel.bytes for kernel in fused(eager)]
            paths["triton"] = list(triton_kernels(load, 64).values())
        for name, found in paths.items():
            print(f"{spec:24}{name:>12}{len(found):>9}{sum(found) / 1e6:>8.0f}")


if __name__ == "__main__":
    main()
