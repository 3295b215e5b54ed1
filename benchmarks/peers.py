"""linvit's linear attention against performer-pytorch, PyTorch's fused softmax, and the matrix products alone.

    python benchmarks/peers.py --out docs/benchmarks       # about fifteen minutes on two cores; --quick: two
    python benchmarks/peers.py --out docs/benchmarks --only latency     # one section, the others as they were

Every ratio is of CPU times measured alternately in one process (`linvit.measure.race`), the median over rounds of the
round's ratio; only the latencies of single small calls are by the wall's clock. Outputs and gradients are first
compared with float64 (the peer's with the operation it documents), and no op that is wrong is timed. Memory is the
peak of a fresh process minus what it held before (`linvit.measure.memory`). Writes peers.md and peers.json.
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "passive"  # before torch: threads that wait must not count as work

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linvit.attention import Attention, create_attention
from linvit.attention.pieces import BLOCK
from linvit.measure.gate import wrong
from linvit.measure.peers import PerformerPytorch, create, peer_specs
from linvit.measure.provenance import cpu_name
from linvit.measure.race import Call, Times, quartiles, race
from linvit.models import create_model
from linvit.randomness import generator
from linvit.records import commit, versions
from linvit.site import Site

HEADS = 8
KERNELS = ("exp", "relu")
GOALS = {  # (kernel, m) → how many times faster than performer-pytorch, forward+backward, d = 64
    ("exp", 256): 2.5,
    ("exp", 64): 1.6,
    ("exp", 16): 1.2,
    ("relu", 256): 2.0,
    ("relu", 64): 1.2,
    ("relu", 16): 1.0,
}
DIRECT = "scaled_dot_product_attention"
LATENCY_GOALS = {  # (call, tokens) → beside the direct call
    **{("softmax", tokens): "≤ +20 µs" for tokens in (64, 128, 256)},
    ("performer-relu", 64): "≤ 1.2×",
    ("performer-relu", 256): "≤ 0.36×",
    ("performer-exp", 64): "≤ 1.65×",
    ("performer-exp", 256): "≤ 0.45×",
}
CPU = torch.device("cpu")
SHORTEST = 0.02  # seconds of one timing


def summary(values: list[float]) -> dict[str, float]:
    return dict(zip(("low", "median", "high"), (round(value, 3) for value in quartiles(values)), strict=True))


def ratio(times: Times[str], over: str, under: str) -> dict[str, float]:
    """Median and quartiles of over/under, round by round."""
    return summary(times.ratios(over, under, by="cpu"))


def both(function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> Call:
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def forward(function: Callable[..., Tensor], inputs: list[Tensor]) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function(*inputs)

    return call


def deployed(function: Callable[..., Tensor], *inputs: Tensor) -> Call:
    """As `linvit predict` calls a model."""
    return torch.inference_mode()(functools.partial(function, *inputs))


def ours(kernel: str, m: int, d: int, tokens: int, causal: bool = False) -> Attention:
    return create_attention(f"performer-{kernel}:m={m}", heads=HEADS, head_dim=d, tokens=tokens, causal=causal)


def peer(kernel: str, m: int, d: int, causal: bool = False) -> Callable[..., Tensor]:
    """performer-pytorch's own module, without what linvit puts around it."""
    (spec,) = peer_specs(f"performer-pytorch:m={m},kernel={kernel}", [], Site(HEADS, d, 1))
    made = create(spec, Site(HEADS, d, 1, causal=causal))
    assert isinstance(made, PerformerPytorch)
    if not causal:  # its causal fallback adds an ε that its definition has not
        inputs, gradient = data(128, d)
        checked(made, inputs, gradient)
    return made.module


def checked(attention: Attention, inputs: list[Tensor], gradient: Tensor) -> Attention:
    q, k, v = inputs
    if why := wrong(attention, q, k, v, gradient):
        raise SystemExit(f"refused to time {attention}: {why}")
    return attention


def data(tokens: int, d: int, batch: int = 1, heads: int = HEADS) -> tuple[list[Tensor], Tensor]:
    *inputs, gradient = torch.randn(4, batch, heads, tokens, d, generator=generator("peers", tokens, d))
    return [x.requires_grad_() for x in inputs], gradient


def floor(tokens: int, d: int, m: int) -> Call:
    """The ten products of forward and backward and nothing else, into memory that is there, in blocks like ours."""
    heads = min(HEADS, max(1, BLOCK["cpu"] // (tokens * m)))
    x, y, v, g = (torch.randn(HEADS, tokens, d) for _ in range(4))
    omega, u, w = torch.randn(m, d), torch.randn(heads, tokens, m), torch.randn(heads, tokens, m)
    s, ds = torch.randn(heads, m, d), torch.randn(heads, m, d)
    out = torch.empty(heads, tokens, d)

    def call() -> None:
        for h in range(0, HEADS, heads):
            at = slice(h, h + heads)
            for rows in (x, y):  # Ωq, Ωk
                torch.mm(rows[at].flatten(0, 1), omega.t(), out=u.view(-1, m))
            torch.bmm(u.transpose(1, 2), v[at], out=s)
            torch.bmm(u, s, out=out)
            torch.bmm(u.transpose(1, 2), g[at], out=ds)
            for a, b in ((g, s), (v, ds)):  # gradients of features, and of q and k
                torch.bmm(a[at], b.transpose(1, 2), out=w)
                torch.mm(w.view(-1, m), omega, out=out.view(-1, d))
            torch.bmm(u, ds, out=out)

    return call


def table_cells(quick: bool, rounds: int) -> list[dict]:
    rows = []
    lengths = (64, 256) if quick else (64, 256, 1024, 4096)
    for d in (64, 32):
        for kernel in KERNELS:
            for m in (16, 64, 256):
                for tokens in lengths:
                    inputs, gradient = data(tokens, d)
                    mine = checked(ours(kernel, m, d, tokens), inputs, gradient)
                    other = peer(kernel, m, d)
                    n = rounds if tokens * m < 1 << 19 else max(5, rounds // 2)
                    contest = {
                        "ours both": both(mine, inputs, gradient),
                        "peer both": both(other, inputs, gradient),
                        "ours forward": forward(mine, inputs),
                        "peer forward": forward(other, inputs),
                        "floor": floor(tokens, d, m),
                    }
                    times = race(contest, device=CPU, rounds=n, shortest=SHORTEST)
                    row = {
                        "kernel": kernel,
                        "d": d,
                        "m": m,
                        "tokens": tokens,
                        "rounds": n,
                        "both": ratio(times, "peer both", "ours both"),
                        "forward": ratio(times, "peer forward", "ours forward"),
                        "floor": ratio(times, "ours both", "floor"),
                        "ours_ms": round(statistics.median(times.of("ours both", by="cpu")) * 1e3, 3),
                    }
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    return rows


def causal_cells(quick: bool, rounds: int) -> list[dict]:
    rows = []
    for kernel in KERNELS:
        for m in (64, 256):
            for tokens in (256,) if quick else (256, 1024, 4096):
                inputs, gradient = data(tokens, 64)
                mine = checked(ours(kernel, m, 64, tokens, causal=True), inputs, gradient)
                n = max(3, rounds // 4) if tokens > 1024 else max(3, rounds // 2)
                contest = {
                    "ours": both(mine, inputs, gradient),
                    "peer": both(peer(kernel, m, 64, causal=True), inputs, gradient),
                }
                times = race(contest, device=CPU, rounds=n, shortest=SHORTEST)
                row = {"kernel": kernel, "m": m, "tokens": tokens, "rounds": n, "both": ratio(times, "peer", "ours")}
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def flatness(quick: bool, rounds: int) -> list[dict]:
    """Cost of equal numbers of tokens as sequences grow, relative to the shortest."""
    lengths = (1024, 4096) if quick else (1024, 4096, 16384, 65536)
    rows = []
    for kernel in KERNELS:
        calls = {}
        for tokens in lengths:
            inputs, gradient = data(tokens, 64, batch=lengths[-1] // tokens, heads=2)
            mine = create_attention(f"performer-{kernel}:m=64", heads=2, head_dim=64, tokens=tokens)
            calls[str(tokens)] = both(mine, inputs, gradient)
        times = race(calls, device=CPU, rounds=max(5, rounds // 2), shortest=SHORTEST)
        for tokens in lengths[1:]:
            row = {"kernel": kernel, "tokens": tokens, "cost": ratio(times, str(tokens), str(lengths[0]))}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def against_softmax(quick: bool, rounds: int) -> list[dict]:
    rows = []
    for kernel in KERNELS:
        for tokens in (1024,) if quick else (1024, 4096):
            inputs, gradient = data(tokens, 64)
            mine = checked(ours(kernel, 64, 64, tokens), inputs, gradient)
            softmax = torch.nn.functional.scaled_dot_product_attention
            contest = {"ours": both(mine, inputs, gradient), "softmax": both(softmax, inputs, gradient)}
            times = race(contest, device=CPU, rounds=max(5, rounds // 3), shortest=SHORTEST)
            row = {"kernel": kernel, "m": 64, "tokens": tokens, "both": ratio(times, "softmax", "ours")}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def latencies(quick: bool, rounds: int) -> list[dict]:
    """One forward call without gradients at the lengths of small images, and of a whole model: what one waits for."""
    d, m, rows = 64, 32, []
    for tokens in (64,) if quick else (64, 128, 256):
        inputs, gradient = data(tokens, d)
        softmax = create_attention("softmax", heads=HEADS, head_dim=d, tokens=tokens)
        contest = {
            DIRECT: torch.nn.functional.scaled_dot_product_attention,
            "softmax": checked(softmax, inputs, gradient),
            **{f"performer-{kernel}": checked(ours(kernel, m, d, tokens), inputs, gradient) for kernel in KERNELS},
            **{f"performer-pytorch, {kernel}": peer(kernel, m, d) for kernel in KERNELS},
        }
        inputs = [x.detach() for x in inputs]
        calls = {name: deployed(function, *inputs) for name, function in contest.items()}
        rows += contested(calls, tokens, rounds)
    image, calls = torch.randn(1, 3, 32, 32, generator=generator("peers", "image")), {}
    for attention in ("softmax", *(f"performer-{kernel}:m={m}" for kernel in KERNELS)):
        model = create_model(attention=attention).eval()
        calls[f"default model, {attention.split(':')[0]}"] = deployed(model, image)
        tokens = model.tokens
    return rows + contested(calls, tokens, rounds)


def contested(calls: dict[str, Call], tokens: int, rounds: int) -> list[dict]:
    """The latency of each call, beside the first of them."""
    times, rows = race(calls, device=CPU, rounds=max(5, 2 * rounds), shortest=SHORTEST), []
    first = next(iter(calls))
    for name in calls:
        pairs = zip(times.of(name, by="wall"), times.of(first, by="wall"), strict=True)
        row = {
            "tokens": tokens,
            "call": name,
            "goal": LATENCY_GOALS.get((name, tokens), ""),
            "µs": summary([1e6 * seconds for seconds in times.of(name, by="wall")]),
            "more": summary([1e6 * (mine - direct) for mine, direct in pairs]),
            "ratio": summary(times.ratios(name, first, by="wall")),
        }
        print(json.dumps(row, ensure_ascii=False), flush=True)
        rows.append(row)
    return rows


LATENCY = """
import json, sys, torch  # before peers, which would send waiting threads to sleep
sys.path.insert(0, {here!r})
import peers
torch.set_num_threads({threads})
print(json.dumps(peers.latencies({quick}, {rounds})))
"""


def latency(quick: bool, rounds: int, threads: int) -> list[dict]:
    """In a process of its own whose threads wait as they do by default: to wake them takes longer than a small call."""
    script = LATENCY.format(here=str(Path(__file__).parent), threads=threads, quick=quick, rounds=rounds)
    usual = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, env=usual)
    *shown, found = done.stdout.splitlines()
    print("\n".join(shown), flush=True)
    return json.loads(found)


MEMORY = """
import sys, torch
from linvit.measure.memory import extra_memory
sys.path.insert(0, {here!r})
import peers
torch.set_num_threads({threads})
inputs, gradient = peers.data({tokens}, 64)
small, small_gradient = peers.data(64, 64)
make = lambda n: peers.ours({kernel!r}, {m}, 64, n) if {who!r} == "ours" else peers.peer({kernel!r}, {m}, 64)
peers.both(make(64), small, small_gradient)()  # libraries load their own memory here
attention = make({tokens})
print(extra_memory(peers.both(attention, inputs, gradient)))
"""


def memory(quick: bool, threads: int) -> list[dict]:
    rows = []
    tokens = 1024 if quick else 4096
    for kernel in KERNELS:
        for m in (64, 256):
            peak = {}
            for who in ("ours", "peer"):
                script = MEMORY.format(
                    here=str(Path(__file__).parent), threads=threads, tokens=tokens, kernel=kernel, m=m, who=who
                )
                done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
                peak[who] = int(done.stdout.split()[-1])
            row = {"kernel": kernel, "m": m, "tokens": tokens, **peak, "ratio": round(peak["ours"] / peak["peer"], 3)}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def goals(found: dict) -> list[tuple[str, str, str, bool]]:
    """(case, goal, measured, reached)."""
    cells, rows = found["cells"], []

    def cell(test: Callable[[dict], bool], key: str) -> list[tuple[float, dict]]:
        return sorted(((row[key]["median"], row) for row in cells if test(row)), key=lambda pair: pair[0])

    def at(row: dict) -> str:
        return f"{row['kernel']}, d = {row['d']}, m = {row['m']}, L = {row['tokens']}"

    for (kernel, m), goal in GOALS.items():
        least = 256 if kernel == "exp" else 64
        each = cell(
            lambda r, k=kernel, w=m, n=least: (r["d"], r["kernel"], r["m"]) == (64, k, w) and r["tokens"] >= n, "both"
        )
        span = f"{each[0][0]:.2f}–{each[-1][0]:.2f}×"
        case = f"performer-{kernel} vs performer-pytorch, d = 64, L ≥ {least}, m = {m}"
        rows.append((case, f"≥ {goal}×", span, each[0][0] >= goal))
    slowest = min(cell(lambda r: True, "both")[0], cell(lambda r: True, "forward")[0], key=lambda pair: pair[0])
    rows.append(("slowest of all, forward or both", "≥ 1×", f"{slowest[0]:.2f}× ({at(slowest[1])})", slowest[0] >= 1))
    for kernel, goal in (("exp", 1.7), ("relu", 1.5)):
        each = cell(lambda r, k=kernel: r["kernel"] == k and r["m"] >= 64, "floor")
        span = f"{each[0][0]:.2f}–{each[-1][0]:.2f}× (worst: {at(each[-1][1])})"
        rows.append((f"{kernel} against the GEMM floor, m ≥ 64", f"≤ {goal}×", span, each[-1][0] <= goal))
    for row in found["memory"]:
        if row["m"] == 256:
            text = f"{row['ratio']:.2f}× ({row['ours'] / 2**20:.0f} of {row['peer'] / 2**20:.0f} MiB)"
            rows.append(
                (
                    f"{row['kernel']}: peak extra memory, L = {row['tokens']}, m = 256",
                    "≤ 0.2×",
                    text,
                    row["ratio"] <= 0.2,
                )
            )
    slow = min(found["causal"], key=lambda row: row["both"]["median"])
    fast = max(found["causal"], key=lambda row: row["both"]["median"])
    span = f"{slow['both']['median']:.1f}–{fast['both']['median']:.1f}×"
    rows.append(("causal vs performer-pytorch's fallback, m ≥ 64", "≥ 8×", span, slow["both"]["median"] >= 8))
    worst = max(found["flatness"], key=lambda row: abs(row["cost"]["median"] - 1))
    costs = [row["cost"]["median"] for row in found["flatness"]]
    text = f"{min(costs):.2f}–{max(costs):.2f}× (worst: {worst['kernel']}, L = {worst['tokens']})"
    rows.append(
        ("cost per token, from L = 1,024 to 65,536", "within 20 %", text, abs(worst["cost"]["median"] - 1) <= 0.2)
    )
    for row in found["softmax"]:
        if row["tokens"] == 4096:
            text = f"{row['both']['median']:.1f}×"
            rows.append(
                (f"{row['kernel']} vs fused softmax, L = 4096, m = 64", "≥ 18×", text, row["both"]["median"] >= 18)
            )
    return rows


def markdown(found: dict) -> str:
    about = found["about"]
    lines = [
        "# Speed compared with other packages",
        "",
        f"Measured on {about['cpu']}, {about['threads']} threads, {about['dtype']}, {about['versions']},",
        f"performer-pytorch {about['performer-pytorch']}, commit {about['commit']}. Made by `{about['command']}`.",
        "Ratios of CPU times measured alternately in one process, medians over rounds; 8 heads, batch 1."
        + about.get("note", ""),
        "",
        "| case (forward + backward) | goal | measured | reached |",
        "|---|---|---|---|",
        *(f"| {case} | {goal} | {text} | {'yes' if good else '**no**'} |" for case, goal, text, good in goals(found)),
        "",
        "## Speed relative to performer-pytorch, by kernel and size",
        "",
        "Median (quartiles). The last column divides linvit's forward + backward time by that of the ten matrix "
        "products alone.",
        "",
        "| kernel | d | m | L | forward + backward | forward | ÷ GEMM floor |",
        "|---|---|---|---|---|---|---|",
    ]

    def show(cell: dict) -> str:
        return f"{cell['median']:.2f} ({cell['low']:.2f}–{cell['high']:.2f})"

    for row in found["cells"]:
        parts = (
            row["kernel"],
            row["d"],
            row["m"],
            row["tokens"],
            *(show(row[k]) for k in ("both", "forward", "floor")),
        )
        lines.append("| " + " | ".join(map(str, parts)) + " |")
    lines += [
        "",
        "## Causal, relative to performer-pytorch's fallback",
        "",
        "| kernel | m | L | times as fast |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['kernel']} | {r['m']} | {r['tokens']} | {show(r['both'])} |" for r in found["causal"]]
    lines += ["", "## Cost per token by length", "", "| kernel | L | relative to L = 1,024 |", "|---|---|---|"]
    lines += [f"| {r['kernel']} | {r['tokens']} | {show(r['cost'])} |" for r in found["flatness"]]
    lines += [
        "",
        "## Latency of one forward call",
        "",
        f"Batch 1, d = 64, m = 32, no gradients, {found['waits']['threads']} threads with default waiting,",
        f"wall time, commit {found['waits']['commit']}. Compared with the direct call, for models with softmax:",
        "lower is faster.",
        "",
        "| L | call | µs | µs more | × | goal |",
        "|---|---|---|---|---|---|",
    ]
    for r in found["latency"]:
        waits = (f"{r[key]['median']:.0f} ({r[key]['low']:.0f}–{r[key]['high']:.0f})" for key in ("µs", "more"))
        lines.append(f"| {r['tokens']} | {r['call']} | {' | '.join(waits)} | {show(r['ratio'])} | {r['goal']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    from importlib.metadata import version

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short lengths only")
    sections: dict[str, Callable[[], list[dict]]] = {
        "memory": lambda: memory(options.quick, options.threads),
        "latency": lambda: latency(options.quick, options.rounds, options.threads),
        "softmax": lambda: against_softmax(options.quick, options.rounds),
        "causal": lambda: causal_cells(options.quick, options.rounds),
        "flatness": lambda: flatness(options.quick, options.rounds),
        "cells": lambda: table_cells(options.quick, options.rounds),
    }
    parser.add_argument("--only", choices=["latency"], help="measure this again, and keep the rest of --out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only:
        found: dict[str, Any] = json.loads((options.out / "peers.json").read_text())
        found[options.only] = sections[options.only]()
    else:
        about = {
            "cpu": cpu_name(),
            "threads": options.threads,
            "dtype": "float32",
            "versions": versions(),
            "performer-pytorch": version("performer-pytorch"),
            "commit": commit(),
            "rounds": options.rounds,
            "command": f"python benchmarks/peers.py --rounds {options.rounds}",
        }
        found = {"about": about, **{name: section() for name, section in sections.items()}}
    found["waits"] = {"threads": options.threads, "commit": commit()}  # latency may be measured alone
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "peers.md").write_text(markdown(found))
    for case, goal, text, good in goals(found):
        print(f"{'  ' if good else '✗ '}{case}: {text} (goal {goal})")


if __name__ == "__main__":
    main()
