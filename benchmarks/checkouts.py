"""Is this checkout as fast and as frugal on a CPU as another one?

    git worktree add /tmp/old COMMIT
    python benchmarks/checkouts.py /tmp/old      # about ten minutes on one quiet core

For each attention and number of tokens, each checkout has a process of its own with the same small model. The two take
turns, in random order, at evaluating one batch and at a training step on it; ratios are taken inside a round. Memory is
the growth of a process's peak while it does so. Writes checkouts.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SPECS = ("softmax", "performer-relu:m=64", "performer-exp:m=64")
TOKENS = (64, 197, 577, 1025)
TASKS = ("forward", "training step")
BATCH_TOKENS = 2048  # of a batch, about
SHORTEST = 0.2  # seconds of one timing
MODEL: dict[str, Any] = {"patch_size": 4, "classes": 10, "dim": 192, "heads": 3, "mlp_dim": 384, "depth": 2, "seed": 0}
HERE = Path(__file__).resolve().parent.parent


def tasks(spec: str, tokens: int) -> dict[str, Callable[[], object]]:
    """Of the linvit that this process imports."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import linvit
    from linvit.schemas.recipe import Recipe
    from linvit.training.optimizers import make_optimizer

    side = math.isqrt(tokens)
    model = linvit.create_model(image_size=4 * side, prefix=tokens - side**2, attention=spec, **MODEL)
    batch = max(1, BATCH_TOKENS // tokens)
    source = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 4 * side, 4 * side, generator=source)
    labels = torch.randint(10, (batch,), generator=source)
    optimizer = make_optimizer(Recipe.model_validate({"lr": 1e-6}), model)

    @torch.no_grad()
    def forward() -> None:
        model(images)

    def step() -> None:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return dict(zip(TASKS, (forward, step), strict=True))


def worker(spec: str, tokens: int, threads: int) -> None:
    """Times the task that each line of input names; its first line of output has the memory of each."""
    import torch

    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    calls, memory, repeats = tasks(spec, tokens), {}, {}
    for name, call in calls.items():
        before = _peak()
        call()
        call()
        memory[name] = _peak() - before
        start = time.perf_counter()
        call()
        repeats[name] = max(1, math.ceil(SHORTEST / (time.perf_counter() - start)))
    print(json.dumps(memory), flush=True)
    for line in sys.stdin:
        name = line.strip()
        start = clock()
        for _ in range(repeats[name]):
            calls[name]()
        print((clock() - start) / repeats[name], flush=True)


def _peak() -> int:
    """Bytes of this process's memory at its highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Side:
    """A process that uses the linvit of one checkout."""

    def __init__(self, checkout: Path, spec: str, tokens: int, threads: int):
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--worker", spec, str(tokens), "--threads", str(threads)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=checkout, **pipes)
        self.memory: dict[str, int] = json.loads(self._line())

    def seconds(self, task: str) -> float:
        assert self.process.stdin is not None
        print(task, file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended without an answer")
        return line

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(old: Path, spec: str, tokens: int, rounds: int, threads: int) -> list[str]:
    """A row of the table for each task."""
    sides = {checkout: Side(checkout, spec, tokens, threads) for checkout in (HERE, old)}
    turns = [(task, checkout) for task in TASKS for checkout in sides]
    times: dict[tuple[str, Path], list[float]] = {turn: [] for turn in turns}
    for _ in range(rounds):
        random.shuffle(turns)
        for task, checkout in turns:
            times[task, checkout].append(sides[checkout].seconds(task))
    for side in sides.values():
        side.close()
    rows = []
    for task in TASKS:
        ratios = [then / now for now, then in zip(times[task, HERE], times[task, old], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        milliseconds = " | ".join(f"{1e3 * statistics.median(times[task, side]):.2f}" for side in (old, HERE))
        memory = " | ".join(f"{sides[side].memory[task] / 1e6:.0f}" for side in (old, HERE))
        rows.append(
            f"| `{spec}` | {tokens} | {task} | {milliseconds} | {middle:.3f} ({low:.3f}–{high:.3f}) | {memory} |"
        )
    return rows


def commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-a", "--attention", action="append", help="only these")
    parser.add_argument("--tokens", type=int, action="append", help="only these")
    parser.add_argument("--worker", nargs=2, metavar=("SPEC", "TOKENS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        return worker(given.worker[0], int(given.worker[1]), given.threads)
    if given.old is None or not (given.old / "src/linvit").is_dir():
        parser.error(f"{given.old} is not a checkout of linvit")
    from linvit.measure.provenance import cpu_name

    old, rows = given.old.resolve(), []
    for spec in given.attention or SPECS:
        for tokens in given.tokens or TOKENS:
            rows += compare(old, spec, tokens, given.rounds, given.threads)
            print(*rows[-len(TASKS) :], sep="\n", flush=True)
    clock = "CPU time" if given.threads == 1 else "wall time"
    text = f"""# This checkout against an older one

Commits {commit(HERE)} (new) and {commit(old)} (old) on {cpu_name()}, {given.threads} thread(s), {clock}, {given.rounds}
rounds in turns. A model of two layers, 192 channels and three heads, batches of about {BATCH_TOKENS} tokens. Speed is
old time over new time, median (quartiles) of the ratios of rounds; memory is the growth of the process's peak.

| attention | tokens | | ms, old | ms, new | speed, new over old | MB, old | MB, new |
|---|---|---|---|---|---|---|---|
"""
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "checkouts.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
