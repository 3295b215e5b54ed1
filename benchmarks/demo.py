"""Does `make demo` decide the same with other seeds? Its command line, run with ten seeds.

    python benchmarks/demo.py --out docs/benchmarks      # about 4 core-minutes for each seed

A seed decides initial weights, the order of images, augmentation, random features, and which images each fold holds
out. The studies stay in --runs; the same command resumes them. Writes demo.json and demo.md. --jobs 1 trains one model
at a time, on a machine that is shared.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from linvit.records import commit
from linvit.report import study_result

ROOT = Path(__file__).parents[1]
MARGINS = (0.01, 0.02, 0.03)  # at which each study is judged


def demo_command() -> list[str]:
    """The words that `make demo` gives to linvit, without its output folder."""
    rule = re.search(r"^demo:.*\n((?:\t.*\\\n)*\t.*\n)", (ROOT / "Makefile").read_text(), re.M)
    assert rule is not None
    words = shlex.split(rule[1].replace("\\\n", " "))[1:]
    at = words.index("--out")
    return words[:at] + words[at + 2 :]


def verdict(folder: Path, seed: int) -> dict[str, Any]:
    """What the study of one seed says: in words, in numbers, and with each margin."""
    result = study_result(folder)
    found: dict[str, Any] = {"seed": seed} | {name.lower(): text for name, text in result.answer}
    found["limitations"] = result.limitations
    found["headline"] = {
        f"{margin:.0%}": one.headline + (f": {one.chosen.label}" if one.chosen else "")
        for margin in MARGINS
        for one in [study_result(folder, margin)]
    }
    found["variants"] = {
        v.label: {
            "accuracy": v.best and v.best.mean,
            "loses_at_most": v.standing.loses_at_most,
            **{name: v.get(name) for name in ("inference_vs_softmax", "train_step_vs_softmax")},
        }
        for v in result.summary.variants
    }
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    names = list(found[0]["variants"])
    head = ["seed", *names, *(f"{name} loses at most" for name in names[:2]), "inference speed"]
    head += [f"margin {margin:.0%}" for margin in MARGINS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for one in found:
        of = one["variants"]
        cells = [str(one["seed"]), *(f"{100 * of[name]['accuracy']:.2f} %" for name in names)]
        cells += [f"{100 * of[name]['loses_at_most']:.2f}" for name in names[:2]]
        cells += [f"{of[names[1]]['inference_vs_softmax']:.2f}×", *one["headline"].values()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--runs", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first seed")
    parser.add_argument("--jobs", type=int, help="trainings at a time, with one thread each")
    options = parser.parse_args()
    words = demo_command()
    if options.jobs:
        words += ["--jobs", str(options.jobs), "--threads", "1"]
    found = []
    for seed in range(options.first, options.first + options.seeds):
        folder = options.runs / f"seed-{seed}"
        run = [sys.executable, "-m", "linvit", *words, "--seed", str(seed), "--out", str(folder)]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        found.append(verdict(folder, seed))
        text = ["# The demo with other seeds", (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()]
        text += ["\n".join(table(found)), f"linvit {commit()}."]
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "demo.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
        (options.out / "demo.json").write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"seed {seed}: {found[-1]['use']}", flush=True)


if __name__ == "__main__":
    main()
