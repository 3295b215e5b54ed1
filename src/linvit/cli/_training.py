"""What `linvit train` says when it is done, and how verbs read `--set`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from linvit.cli._output import rows
from linvit.progress import duration

if TYPE_CHECKING:
    from linvit.train import Trained


def summary(trained: Trained) -> dict[str, Any]:
    return {
        "folder": str(trained.folder),
        "test_accuracy": trained.test_accuracy,
        "test_accuracy_final": trained.value("test_accuracy", "final"),
        "validation_accuracy": trained.value("validation_accuracy"),
        "diverged": trained.diverged or None,
        "skipped": trained.data.skipped,
        "records": rows(trained.records),
    }


def print_summary(trained: Trained, already: bool) -> None:
    from linvit.measure.accuracy import wilson

    folder = trained.folder
    if already:
        print(f"{folder}: this experiment is finished; nothing was left to do")
    if trained.data.skipped:
        print(f"skipped        {trained.data.skipped} unreadable images")
    best, final = trained.find("test_accuracy", "best"), trained.find("test_accuracy", "final")
    if best is None or final is None or best.value is None:
        return
    low, high = wilson(best.value, best.n)
    print(f"test accuracy  {best.value:.4f} [{low:.4f}, {high:.4f}], n = {best.n}, one seed: best on validation")
    print(f"               {final.value:.4f}: after the last step")
    seconds = duration(trained.value("train_seconds") or 0)
    print(f"model          {best.tags['attention']}, {trained.value('parameters'):,} parameters, trained in {seconds}")
    print(f"folder         {folder} (the model: {folder / 'best'})")
    print(f"use it         linvit predict IMAGE --model {folder}")
    print(f"               linvit evaluate {folder} · linvit.load('{folder}') in Python")


def explain_divergence(trained: Trained) -> int:
    """What to try, and the exit code."""
    step = trained.value("diverged")
    kept = f"the best model until then is in {trained.folder / 'best'}" if trained.model else "no epoch was finished"
    print(
        f"linvit: diverged at step {step:.0f}: {trained.diverged} is not finite; {kept}. "
        "Try a lower --lr, --set warmup=0.3, --set clip_norm=0.5 or an attention with qk_norm=true; and another --out",
        file=sys.stderr,
    )
    return 1


def settings(pairs: list[str] | None, **flags: Any) -> dict[str, Any]:
    """The flags that were given and the texts `key=value`, where a value with commas is a list. What they mean is
    checked by the library."""
    chosen = {key: value for key, value in flags.items() if value is not None}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not (key and equals and value):
            raise ValueError(f"--set {pair}: write KEY=VALUE, e.g. --set dropout=0.1")
        if key in ELSEWHERE:
            raise ValueError(f"--set {pair}: use --{key.replace('_', '-')}")
        if key in NOT_OPTIONS:
            raise ValueError(f"unknown option '{key}'")
        if key in chosen:
            raise ValueError(f"--set {pair}: {key} is given twice")
        chosen[key] = [part for part in value.split(",") if part] if "," in value else value
    return chosen


ELSEWHERE = (
    "data", "attention", "attentions", "seed", "seeds", "image_size", "limit", "skip_bad", "out", "device", "data_root",
    "budget", "match", "jobs", "threads", "controls", "runner", "with_scratch",
)  # fmt: skip
NOT_OPTIONS = (  # but arguments of the functions
    "progress", "listeners", "checkpoint_seconds", "command", "hear", "test", "variants", "source", "start", "task",
    "dataset", "trials", "space", "sampler", "pruner", "storage", "join", "dry_run", "say", "config",
)  # fmt: skip
