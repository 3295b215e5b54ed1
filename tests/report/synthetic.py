"""Made-up studies to test the report with: no number here was measured."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from linvit.metrics import METRICS
from linvit.records import Record, Records

ATTENTIONS = ("softmax", "performer-exp:m=64", "performer-relu:m=64,projection=none", "performer-theta:m=32",
              "linformer:k=16")  # fmt: skip
TRUE = {"softmax": 0.978, "performer-exp:m=64": 0.972, "performer-relu:m=64,projection=none": 0.977,
        "performer-theta:m=32": 0.974, "linformer:k=16": 0.951}  # fmt: skip
SPEED = {"softmax": 1.0, "performer-exp:m=64": 1.32, "performer-relu:m=64,projection=none": 1.71,
         "performer-theta:m=32": 1.18, "linformer:k=16": 1.86}  # fmt: skip


def record(metric, value, *, artefact="", n=1, **tags) -> Record:
    """`attention` names the variant too."""
    if "attention" in tags:
        tags = {"variant": tags["attention"]} | tags
    return Record(metric, value, unit=METRICS[metric].unit, n=n, artefact=artefact,
                  device="cpu", threads=2, dtype="float32",
                  versions="linvit 0.1.0, torch 2.13.0", commit="0123456789ab", time=1.7e9, tags=tags)  # fmt: skip


def study(
    folder: Path, attentions=ATTENTIONS, seeds=(0, 1, 2), classes=tuple("0123456789"), *, artefacts=True, speeds=True,
    diverged=(), channels=1, name="digits", command="linvit compare digits --seeds 3", side=8, warnings=(), truth=None,
    gain=0.01, images=10_000, sd=0.0025, **more,
) -> Path:  # fmt: skip
    """A complete study: everything a comparison may write. `diverged` names (attention, seed) pairs, `truth`
    accuracies, `gain` what the second half of the training brought (by attention, or one for all; None: unknown)."""
    truth = TRUE | (truth or {})
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    info = {
        "format": 3, "commands": [command], "started": 1.7e9, "finished": 1.7e9 + 260,
        "dataset": {"name": name, "classes": list(classes), "image_size": side, "channels": channels, "train": 1293,
                    "validation": 144, "test": images},
        "variants": [{"id": name, "label": name, "attention": name} for name in attentions],
        "seeds": {name: list(seeds) for name in attentions}, "epochs": 30, "steps": 630, "budget": None,
        "model": {"dim": 64, "depth": 4, "heads": 4, "patch_size": 2}, "recipe": {"optimizer": "adamw", "lr": 1e-3},
        "match": True, "warnings": list(warnings),
        "machine": {"cpu": "Example CPU", "cores": 2, "memory": "8 GiB", "device": "cpu", "os": "Linux"},
        "seconds": {"measuring": 60.0, "all": 260.0}, **more,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(info))
    found: list[Record] = []
    for i, attention in enumerate(attentions):
        right, speed = truth.get(attention, 0.96 - 0.005 * i), SPEED.get(attention, 1 + 0.1 * i)
        for seed in seeds:
            found += _trained(
                folder, attention, seed, right, list(classes), rng, artefacts, (attention, seed) in diverged, images, sd
            )
        more = gain.get(attention) if isinstance(gain, dict) else gain
        if more is not None:
            whole = [r.value for r in found if r.metric == "test_accuracy" and r.tags["attention"] == attention]
            found.append(record("half_accuracy", (whole[0] or 0.5) - more, attention=attention, seed=min(seeds)))
        if speeds:
            found += _measured(attention, speed, i)
    if artefacts:
        found += _pictures(folder, attentions, len(classes), channels, side, rng)
    Records(folder / "records.jsonl").append(found)
    return folder


def _trained(folder, attention, seed, truth, classes, rng, artefacts, diverged, images, sd) -> list[Record]:
    place = f"run-{zlib.crc32(attention.encode()):08x}-{seed}"
    if diverged:
        return [record("diverged", 412, attention=attention, seed=seed, layer="blocks.2.attention"),
                record("test_accuracy", None, attention=attention, seed=seed, selection="best", n=images)]  # fmt: skip
    accuracy = truth + 0.002 * np.random.default_rng(seed).normal() + sd * rng.normal()
    said = _said(accuracy, attention, images, len(classes), rng)
    accuracy = float(np.mean(said["predicted"] == said["labels"])) if artefacts else accuracy
    found = [
        record("test_accuracy", accuracy, n=images, attention=attention, seed=seed, selection="best"),
        record("test_accuracy", accuracy - 0.003, n=images, attention=attention, seed=seed, selection="final"),
        record("validation_accuracy", accuracy + 0.004, n=144, attention=attention, seed=seed),
        record("test_loss", 0.1, n=images, attention=attention, seed=seed, selection="best"),
    ]
    for i, name in enumerate(classes):
        base = 0.99 - 0.006 * i + 0.01 * rng.normal() - 4 * (0.98 - truth) * (i % 3) / 3
        for metric in ("precision", "recall", "f1"):
            value = float(np.clip(base + 0.004 * rng.normal(), 0, 1))
            found.append(record(metric, value, attention=attention, seed=seed, selection="best", **{"class": name}))
    if artefacts:
        (folder / place).mkdir(exist_ok=True)
        epochs = np.arange(1, 31)
        falls = np.exp(-epochs / 7) * (1 + 0.04 * rng.normal(size=30))
        lines = [{"epoch": int(e), "step": int(e) * 21, "train_loss": 0.05 + 2.2 * f, "validation_loss": 0.09 + 2.0 * f,
                  "validation_accuracy": float(np.clip(truth - 0.8 * f, 0, 1)), "learning_rate": 1e-3, "seconds": 1.0,
                  "gradient_norm": 0.4 + 3 * f,
                  **({f"learned.{i}.tau": 1 + 0.1 * (i + 1) * (1 - f) + 0.01 * seed for i in (0, 2)}
                     if "theta" in attention else {})}
                 for e, f in zip(epochs, falls, strict=True)]  # fmt: skip
        (folder / place / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        matrix = rng.poisson(0.12, (len(classes), len(classes))) + np.diag(rng.poisson(35, len(classes)))
        np.savez_compressed(folder / place / "predictions.npz", **said)
        (folder / place / "confusion.json").write_text(json.dumps({"matrix": matrix.tolist()}))
        recalls = [np.mean((said["predicted"] == c)[said["labels"] == c]) for c in np.unique(said["labels"])]
        best = {"attention": attention, "seed": seed, "selection": "best"}
        found += [record("predictions", None, **best, n=images, artefact=f"{place}/predictions.npz"),
                  record("balanced_accuracy", float(np.mean(recalls)), **best, n=images)]  # fmt: skip
        found += [record("learning_curve", 30, attention=attention, seed=seed, artefact=f"{place}/log.jsonl"),
                  record("confusion", 360, attention=attention, seed=seed, selection="best",
                         artefact=f"{place}/confusion.json")]  # fmt: skip
    return found


def _said(accuracy, attention, images, classes, rng) -> dict[str, np.ndarray]:
    """What a model said: right on the easier images, most of which are easy for every variant and seed."""
    own = np.random.default_rng(zlib.crc32(attention.encode()))
    hard = np.random.default_rng(7).normal(size=images) + 0.3 * own.normal(size=images) + 0.2 * rng.normal(size=images)
    labels = np.arange(images) % classes
    wrong = np.argsort(hard)[round(accuracy * images) :]
    predicted = labels.copy()
    predicted[wrong] = (labels[wrong] + 1) % classes
    return {"predicted": predicted.astype(np.int32), "labels": labels.astype(np.int32)}


def _measured(attention, speed, i) -> list[Record]:
    step, identity = 0.0182 / speed, 2.1
    once = {
        "parameters": 201_482 + 420 * i, "macs": 3.6e6 * (1 - 0.06 * i), "inference_throughput": 5200.0 * speed,
        "inference_latency": 0.0021 / speed, "train_step_vs_softmax": speed * 0.95, "inference_vs_softmax": speed,
        "inference_vs_identity": speed / identity, "latency_vs_softmax": speed * 1.04,
        "latency_vs_identity": speed / identity * 1.02, "train_step_vs_identity": speed / identity * 0.9,
        "peak_memory": 231e6 - 9e6 * i,
        "attention_error": 0.0 if attention == "softmax" else 0.08 + 0.09 * i,
        "attention_error_uniform": 0.31 + 0.01 * i,
        "attention_entropy": 2.1 + 0.1 * i, "break_even_tokens": None if attention == "softmax" else 180.0 * i,
    }  # fmt: skip
    found = [record(metric, value, attention=attention) for metric, value in once.items()]
    found.append(record("train_step", step, attention=attention, low=step * 0.96, high=step * 1.07, n=30))
    for mode, factor in (("forward", 1), ("both", 2.8)):
        for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
            quadratic, linear = 2e-9 * tokens**2 + 2e-5, 4e-7 * tokens * (1 + 0.3 * i) + 3e-5
            value = factor * (quadratic if attention == "softmax" else linear)
            found.append(record("attention_time", value, attention=attention, tokens=tokens, mode=mode))
    return found


def _pictures(folder, attentions, classes, channels, side, rng) -> list[Record]:
    count, grid = 16, 4
    y, x = np.mgrid[0:side, 0:side] / side
    shapes = [127 + 120 * np.sin(6 * (x * np.cos(a) + y * np.sin(a)) + a) for a in range(count)]
    pixels = np.stack([np.stack([np.roll(shape, 2 * c, 0) for c in range(channels)], -1) for shape in shapes])
    labels = rng.integers(0, classes, count)
    arrays = {"images": pixels.astype(np.uint8), "labels": labels}
    for name in attentions:
        wrong = rng.random(count) < 0.2
        arrays[f"predictions/{name}"] = np.where(wrong, (labels + 1) % classes, labels)
        arrays[f"confidence/{name}"] = rng.uniform(0.5, 1, count).astype(np.float32)
        arrays[f"maps/{name}"] = (
            rng.dirichlet(np.full(grid * grid, 0.6), count).reshape(count, grid, grid).astype(np.float32)
        )
    np.savez(folder / "examples.npz", **arrays)
    augmented = np.stack([np.roll(pixels[0], k, axis=1) for k in range(6)]).astype(np.uint8)
    np.savez(folder / "illustration.npz", original=pixels[0].astype(np.uint8), grid=[grid, grid], augmented=augmented)
    layers = [
        {"name": "stem.embed", "kind": "Linear", "shape": [16, 64], "parameters": 320, "times": 1},
        {"name": "blocks.0–3.attn.qkv", "kind": "Linear", "shape": [16, 192], "parameters": 12_480, "times": 4},
    ]
    (folder / "models.json").write_text(json.dumps(dict.fromkeys(attentions, layers)))
    return [record("examples", count, artefact="examples.npz"), record("illustration", 1, artefact="illustration.npz"),
            record("model_summary", len(attentions), artefact="models.json")]  # fmt: skip
