"""How long this checkout and another one train until they are as accurate: the same commands, in turns.

    git worktree add /tmp/old COMMIT
    python benchmarks/time_to_accuracy.py /tmp/old --model deit-tiny --out docs/benchmarks      # an hour of one core

Both train with their own defaults and the same seeds, one thread each, one after the other in random order. Where this
checkout is at least as accurate, the ratio of the times is an upper bound of the ratio of the times to the other's
accuracy. Time is CPU time of the training, validation included. Interrupted runs resume from --runs. Writes
time_to_accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from linvit.measure.provenance import cpu_name
from linvit.records import commit

HERE = Path(__file__).resolve().parent.parent
NAMES = ("old", "new")
MODEL = "MODEL"  # stands for --model
CASES = {
    "CIFAR-10 from scratch, 2 epochs": ["cifar10", "--epochs", "2"],
    "CIFAR-10 as patches from scratch, 2 epochs": ["cifar10", "--size", "tiny", "--epochs", "2"],
    "100 classes of photos from a shipped backbone, 64 px": ["tiny-imagenet", "--limit", "20000", "--epochs", "1"],
    "100 classes of photos from DeiT-Tiny, 112 px": [
        *("tiny-imagenet", "--from", MODEL, "-a", "softmax", "--image-size", "112"),
        *("--limit", "3000", "--epochs", "1"),
    ],
}


def trained(checkout: Path, words: list[str], folder: Path) -> dict[str, float]:
    """CPU seconds, and the accuracy on test images."""
    kept = folder / "time_to_accuracy.json"
    if not kept.exists():
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_WAIT_POLICY": "passive"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "linvit", "train", *words, "--threads", "1", "--quiet", "--out", str(folder)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        records = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
        accuracy = next(r["value"] for r in records if r["metric"] == "test_accuracy")
        kept.write_text(json.dumps({"seconds": seconds, "accuracy": accuracy}))
    return json.loads(kept.read_text())


def row(case: str, found: dict[str, list[dict[str, float]]]) -> str:
    times = {name: statistics.mean(one["seconds"] for one in found[name]) for name in NAMES}
    accuracies = {name: statistics.mean(one["accuracy"] for one in found[name]) for name in NAMES}
    ratios = [new["seconds"] / old["seconds"] for old, new in zip(found["old"], found["new"], strict=True)]
    gains = [new["accuracy"] - old["accuracy"] for old, new in zip(found["old"], found["new"], strict=True)]
    spread = f"{100 * min(gains):+.1f} to {100 * max(gains):+.1f}"
    return (
        f"| {case} | {times['old']:.0f} s | {times['new']:.0f} s | {statistics.median(ratios):.2f} | "
        f"{accuracies['old']:.1%} | {accuracies['new']:.1%} | {spread} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, help="another checkout of linvit")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--runs", type=Path, default=Path("runs/time-to-accuracy"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", type=int, help="numbers of the cases, from 0")
    parser.add_argument("--model", help="folder of a trained model, for the cases that start from one")
    options = parser.parse_args()
    checkouts, order, rows = {"old": options.old.resolve(), "new": HERE}, random.Random(0), []
    for number, (case, words) in enumerate(CASES.items()):
        skipped = MODEL in words and not options.model
        if skipped or (options.cases is not None and number not in options.cases):
            continue
        words = [options.model if word is MODEL else word for word in words]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
        for seed in range(options.seeds):
            for name in order.sample(NAMES, 2):
                folder = options.runs.resolve() / f"{number}-{name}-seed{seed}"
                found[name].append(trained(checkouts[name], [*words, "--seed", str(seed)], folder))
                print(case, name, "seed", seed, found[name][-1], flush=True)
        rows.append(row(case, found))
    old = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.old, capture_output=True, text=True, check=True
    ).stdout
    words = ["OLD", *(["--model MODEL"] if options.model else [])]
    words += ["--cases", *map(str, options.cases)] if options.cases else []
    text = f"""# Time to accuracy against an older checkout

`python benchmarks/time_to_accuracy.py {" ".join(words)}`,
commits {commit()[:7]} (new) and {old[:7]} (old) on {cpu_name()}, one
thread, CPU time, {options.seeds} seeds in turns. Both train with their defaults. Time is the mean over seeds, its ratio
the median of those with the same seed; the difference in test accuracy is the range over seeds.

| training | old | new | time, new / old | accuracy, old | accuracy, new | difference, points |
|---|---|---|---|---|---|---|
"""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "time_to_accuracy.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
