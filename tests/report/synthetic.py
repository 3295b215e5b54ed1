"""Made-up studies, searches and conversions to test the report with: no number here was measured."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from linvit.metrics import METRICS
from linvit.records import Record, Records
from linvit.requests import CompareRequest, ConvertRequest, TuneRequest
from linvit.schemas.conversion import Conversion
from linvit.schemas.experiment import DatasetRef, Start
from linvit.schemas.model import ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.schemas.search import Range, Search, SearchSpace
from linvit.schemas.study import DatasetFacts, Study, Variant

ATTENTIONS = (
    "softmax",
    "performer-exp:m=64",
    "performer-relu:m=64,projection=none",
    "performer-theta:m=32",
    "linformer:k=16",
)
TRUE = {
    "softmax": 0.978,
    "performer-exp:m=64": 0.972,
    "performer-relu:m=64,projection=none": 0.977,
    "performer-theta:m=32": 0.974,
    "linformer:k=16": 0.951,
}
SPEED = {
    "softmax": 1.0,
    "performer-exp:m=64": 1.32,
    "performer-relu:m=64,projection=none": 1.71,
    "performer-theta:m=32": 1.18,
    "linformer:k=16": 1.86,
}


def record(metric, value, *, artefact="", n=1, **tags) -> Record:
    """`attention` names the variant too."""
    if "attention" in tags:
        tags = {"variant": tags["attention"]} | tags
    return Record(
        metric,
        value,
        unit=METRICS[metric].unit,
        n=n,
        artefact=artefact,
        device="cpu",
        threads=2,
        dtype="float32",
        versions="linvit 0.1.0, torch 2.13.0",
        commit="0123456789ab",
        time=1.7e9,
        tags=tags,
    )


ROLES = {"softmax": "baseline", "uniform": "control", "identity": "control"}


def variant(attention: str, **more) -> Variant:
    return Variant(
        **{"id": attention, "label": attention, "attention": attention, "role": ROLES.get(attention, "candidate")}
        | more
    )


def dataset(name="digits", classes=tuple("0123456789"), side=8, channels=1, test=10_000) -> DatasetFacts:
    counts = {"train": 1293, "validation": 144, "test": test}
    return DatasetFacts(
        name=name, identity=f"{name} pixels", classes=list(classes), image_size=side, channels=channels, **counts
    )


def document(attentions=ATTENTIONS, seeds=(0, 1, 2), **more) -> Study:
    """A study of these attentions, with these seeds or some for each; `more` are fields of Study."""
    variants = more.pop("variants", [variant(name) for name in attentions])
    fields = {
        "requests": [CompareRequest.of(data="digits", seeds=3).stored()],
        "started": 1.7e9,
        "finished": 1.7e9 + 260,
        "dataset": dataset(),
        "variants": variants,
        "seeds": seeds if isinstance(seeds, dict) else {v.id: list(seeds) for v in variants},
        "epochs": 30,
        "steps": 630,
        "model": ModelConfig(image_size=8, channels=1, patch_size=2, dim=64, depth=4, heads=4, mlp_dim=128),
        "recipe": Recipe(optimizer="adamw", lr=1e-3),
        "machine": {"cpu": "Example CPU", "cores": 2, "memory": 8 * 2**30, "device": "cpu", "os": "Linux"},
        "seconds": {"measuring": 60.0, "all": 260.0},
    }
    return Study(**fields | more)


def study(
    folder: Path,
    attentions=ATTENTIONS,
    seeds=(0, 1, 2),
    classes=tuple("0123456789"),
    *,
    artefacts=True,
    speeds=True,
    diverged=(),
    channels=1,
    name="digits",
    side=8,
    truth=None,
    gain=0.01,
    images=10_000,
    sd=0.0025,
    **more,
) -> Path:
    """A complete study: everything a comparison may write. `diverged` names (attention, seed) pairs, `truth`
    accuracies, `gain` what the second half of the training brought (by attention, or one for all; None: unknown)."""
    truth = TRUE | (truth or {})
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    document(attentions, seeds, **{"dataset": dataset(name, classes, side, channels, images)} | more).save(folder)
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
        return [
            record("diverged", 412, attention=attention, seed=seed, layer="blocks.2.attention"),
            record("test_accuracy", None, attention=attention, seed=seed, selection="best", n=images),
        ]
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
        lines = [
            {
                "epoch": int(e),
                "step": int(e) * 21,
                "train_loss": 0.05 + 2.2 * f,
                "validation_loss": 0.09 + 2.0 * f,
                "validation_accuracy": float(np.clip(truth - 0.8 * f, 0, 1)),
                "learning_rate": 1e-3,
                "seconds": 1.0,
                "gradient_norm": 0.4 + 3 * f,
                **(
                    {f"learned.{i}.tau": 1 + 0.1 * (i + 1) * (1 - f) + 0.01 * seed for i in (0, 2)}
                    if "theta" in attention
                    else {}
                ),
            }
            for e, f in zip(epochs, falls, strict=True)
        ]
        (folder / place / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        matrix = rng.poisson(0.12, (len(classes), len(classes))) + np.diag(rng.poisson(35, len(classes)))
        np.savez_compressed(folder / place / "predictions.npz", **said)
        (folder / place / "confusion.json").write_text(json.dumps({"matrix": matrix.tolist()}))
        recalls = [np.mean((said["predicted"] == c)[said["labels"] == c]) for c in np.unique(said["labels"])]
        best = {"attention": attention, "seed": seed, "selection": "best"}
        found += [
            record("predictions", None, **best, n=images, artefact=f"{place}/predictions.npz"),
            record("balanced_accuracy", float(np.mean(recalls)), **best, n=images),
        ]
        found += [
            record("learning_curve", 30, attention=attention, seed=seed, artefact=f"{place}/log.jsonl"),
            record(
                "confusion", 360, attention=attention, seed=seed, selection="best", artefact=f"{place}/confusion.json"
            ),
        ]
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
        "parameters": 201_482 + 420 * i,
        "macs": 3.6e6 * (1 - 0.06 * i),
        "inference_throughput": 5200.0 * speed,
        "inference_latency": 0.0021 / speed,
        "train_step_vs_softmax": speed * 0.95,
        "inference_vs_softmax": speed,
        "inference_vs_identity": speed / identity,
        "latency_vs_softmax": speed * 1.04,
        "latency_vs_identity": speed / identity * 1.02,
        "train_step_vs_identity": speed / identity * 0.9,
        "peak_memory": 231e6 - 9e6 * i,
        "attention_error": 0.0 if attention == "softmax" else 0.08 + 0.09 * i,
        "attention_error_uniform": 0.31 + 0.01 * i,
        "attention_entropy": 2.1 + 0.1 * i,
    }
    even = None if attention == "softmax" else 180.0 * i
    found = [record(metric, value, attention=attention) for metric, value in once.items()]
    found.append(record("train_step", step, attention=attention, low=step * 0.96, high=step * 1.07, n=30))
    for mode, factor in (("forward", 1), ("both", 2.8)):
        found.append(record("break_even_tokens", even, attention=attention, mode=mode))
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
    return [
        record("examples", count, artefact="examples.npz"),
        record("illustration", 1, artefact="illustration.npz"),
        record("model_summary", len(attentions), artefact="models.json"),
    ]


OPTIONS = ({"lr": 0.001, "attention.m": 16}, {"lr": 0.01, "attention.m": 32}, {"lr": 0.003, "attention.m": 64})


def search(folder: Path, found: dict[str, list[float | None]], *, images=5000, hows=None, **more) -> Path:
    """A search: the accuracies of each variant's trials; `hows` says how (variant, number) ended."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "name": "x",
        "requests": [TuneRequest.of(data="digits", trials=3).stored()],
        "started": 1.7e9,
        "finished": 1.7e9 + 60,
        "dataset": dataset(),
        "variants": [variant(name) for name in found],
        "space": SearchSpace(
            name="<b>mine</b>", options={"lr": Range(low=1e-3, high=1e-2, log=True)}, attention={"m": [16, 32, 64]}
        ),
        "trials": 3,
        "defaults": True,
        "options": {"epochs": 4},
        "model": ModelConfig(),
        "recipe": Recipe(epochs=4.0),
        "storage": "sqlite:///x/trials.db",
    }
    Search(**fields | more).save(folder)
    records = []
    for name, accuracies in found.items():
        for i, accuracy in enumerate(accuracies):
            tags = {"variant": name, "trial": i, "seed": 0}
            how = (hows or {}).get((name, i), "complete" if accuracy is not None else "diverged")
            own = {"how": how, "why": None, "loss": 0.5, "options": json.dumps(OPTIONS[i % len(OPTIONS)])}
            records += [
                record("trial_accuracy", accuracy, n=images, **tags, **own),
                record("trial_seconds", 12.5, **tags),
                record("trial_steps", 40, **tags),
            ]
        records += [
            record("option_importance", share, n=9, variant=name, option=option)
            for option, share in (("lr", 0.7), ("attention.m", 0.3))
        ]
    Records(folder / "records.jsonl").append(records)
    return folder


def conversion(folder: Path, *, images=359, high=0.9, **more) -> Path:
    """A conversion with a search of layers, evaluated on larger images, too."""
    folder.mkdir(parents=True, exist_ok=True)
    mixed, linear = "softmax@1+performer-hyp@3", "performer-hyp"
    here = {"image_size": 12, "patch_size": 2}
    fields = {
        "data": DatasetRef(name="digits", identity="digits pixels"),
        "teacher": Start(folder="runs/teacher/best", sha256="ab" * 32),
        "to": (linear,),
        "stages": (2,),
        "max_drop": 0.05,
        "image_size": 12,
        "trained_on": "digits",
        "decided_on": "validation",
        "steps": {"stage 2": 1040},
        "request": ConvertRequest.of(model="runs/teacher", data="digits", to=linear).stored(),
        "started": 1.7e9,
    }
    Conversion(**fields | more).save(folder)
    found = [record("conversion_depth", 4)]
    models = (("teacher", "softmax", 0.99, 1.0), ("zero-shot", linear, 0.2, 0.21), ("stage 2", linear, 0.93, 0.94))
    for name, spec, accuracy, agreement in (*models, ("mix", mixed, 0.97, 0.98)):
        count = {"softmax": 0, mixed: 3}.get(spec, 4)
        tags = {"model": name, "split": "validation", "replaced": count, **here}
        found += [
            record("conversion_accuracy", accuracy, n=144, **tags).tagged(attention=spec),
            record("conversion_agreement", agreement, n=144, **tags).tagged(attention=spec),
            record("conversion_steps", 1040 if name == "stage 2" else 0, model=name, kept=7),
            record("conversion_seconds", 12.5, model=name),
        ]
    for name, spec, accuracy, count in (("teacher", "softmax", 0.985, 0), ("student", mixed, 0.965, 3)):
        tags = {"model": name, "split": "test", "replaced": count, **here} | ({"stage": "mix"} if count else {})
        found.append(record("conversion_accuracy", accuracy, n=images, **tags).tagged(attention=spec))
        for i, side in enumerate((12, 24, 48)):
            grown = {"model": name, "split": "growth", "image_size": side, "patch_size": 2}
            found.append(record("conversion_accuracy", accuracy - 0.1 * i, n=144, **grown))
    found.append(record("conversion_lost", 0.02, n=images, low=0.004, high=0.036))
    for i, spec in enumerate(("softmax", mixed, linear)):
        for side in (12, 24, 48):
            tags = {
                "model": spec,
                "image_size": side,
                "patch_size": 2,
                "replaced": (0, 3, 4)[i],
                "tokens": side**2 // 4,
            }
            ratio = (1, 0.8, 0.9)[i] * (side / 12) ** i
            found.append(record("conversion_speed", 4000 * ratio * 144 / side**2, **tags))
            found.append(record("conversion_vs_teacher", ratio, **tags, high=high if side == 12 else ratio))
    for count, spec, accuracy in (
        (0, "softmax", 0.99),
        (1, "softmax@3+performer-hyp@1", 0.985),
        (3, mixed, 0.97),
        (4, linear, 0.2),
    ):
        tags = {"model": spec, "mix": str(count), "split": "search", "replaced": count, "loss": 0.1, **here}
        found.append(record("conversion_accuracy", accuracy, n=100, **tags))
    for spec, drop, passed in ((linear, 0.79, False), (mixed, 0.02, True)):
        tags = {"mix": spec, "bound": drop + 0.02, "risk": 0.025, "of": 0.99, "lost": 3, "won": 1, "passed": passed}
        found.append(record("conversion_drop", drop, n=100, model=spec, **tags))
    Records(folder / "records.jsonl").append(found)
    return folder
