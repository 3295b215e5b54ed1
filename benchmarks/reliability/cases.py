"""Kinds of spoilt input, and the commands that read them: KINDS has a function for each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from reliability.corpus import MODEL, SHAPE, SYNTHETIC, Canary
from reliability.mutations import (
    WORDS,
    Spoil,
    as_bytes,
    number,
    spoil_bytes,
    spoil_json,
    spoil_lines,
    spoil_safetensors,
    spoil_spec,
    spoil_text,
)

TRAIN = ["--set", "steps=1", *MODEL, "--out", "out"]
OF_PHOTOS = ["--from", "scratch", "--image-size", "8", *TRAIN]
SPOILERS: dict[str, Spoil] = {
    ".json": as_bytes(spoil_json),
    ".jsonl": as_bytes(spoil_lines),
    ".toml": as_bytes(spoil_text),
    ".csv": as_bytes(spoil_text),
    ".tsv": as_bytes(spoil_text),
    ".txt": as_bytes(spoil_text),
    ".safetensors": spoil_safetensors,
}


@dataclass
class Case:
    """What a kind of input is made from: a random generator, the valid inputs, and a folder of its own."""

    dice: Random
    corpus: Path
    home: Path

    def copy(self, name: str, to: str = "") -> Path:
        """A valid input, to be spoilt."""
        source, target = self.corpus / name, self.home / (to or Path(name).name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            return shutil.copytree(source, target)
        return Path(shutil.copy(source, target))

    def spoil(self, path: Path, spoiler: Spoil | None = None) -> None:
        spoiler = spoiler or SPOILERS.get(path.suffix, spoil_bytes)
        path.write_bytes(spoiler(self.dice, path.read_bytes()))

    def spoil_one(self, folder: Path, *patterns: str) -> None:
        self.spoil(self.dice.choice(sorted(path for pattern in patterns for path in folder.glob(pattern))))

    @property
    def canary(self) -> Canary:
        return Canary(self.home / "canary")


KINDS: dict[str, Callable[[Case], list[str]]] = {}


def kind(make: Callable[[Case], list[str]]) -> Callable[[Case], list[str]]:
    """The words of a command, after the inputs that it reads are made."""
    KINDS[make.__name__] = make
    return make


@kind
def specs(case: Case) -> list[str]:
    return ["train", SYNTHETIC, "-a", _spec(case.dice), *TRAIN]


def _spec(dice: Random) -> str:
    from linvit.attention import attention_names, attention_options

    name = dice.choice(sorted(attention_names()))
    parts = []
    for key, option in dice.sample(sorted(attention_options(name).items()), dice.randrange(3)):
        allowed = getattr(option.annotation, "__args__", ())
        plausible = [str(value) for value in allowed if isinstance(value, str)] or ["true", "2", "0.5", "4"]
        parts.append(f"{key}={number(dice) if dice.random() < 0.4 else dice.choice(plausible)}")
    text = name + ":" * bool(parts) + ",".join(parts)
    if dice.random() < 0.2:
        text = f"{text}@{number(dice)}+softmax@{number(dice)}"
    return spoil_spec(dice, text) if dice.random() < 0.3 else text


@kind
def settings(case: Case) -> list[str]:
    """One to three options of model and recipe."""
    from linvit.schemas.model import ModelConfig
    from linvit.schemas.recipe import Recipe

    fields = ModelConfig.model_fields | Recipe.model_fields
    chosen = case.dice.sample(sorted({*fields} - {"epochs", "steps", "compile"}), case.dice.choice([1, 1, 2, 3]))
    pairs = ["steps=1", *(pair for pair in SHAPE if pair.partition("=")[0] not in chosen)]
    for name in chosen:
        options = [str(value) for value in getattr(fields[name].annotation, "__args__", ()) if isinstance(value, str)]
        value = case.dice.choice([number(case.dice), number(case.dice), *options, *case.dice.sample(WORDS, 2)])
        pairs.append(f"{spoil_spec(case.dice, name) if case.dice.random() < 0.1 else name}={value}")
    words = [word for pair in pairs for word in ("--set", pair.replace("\0", ""))]
    return ["train", SYNTHETIC, *words, "--device", "cpu", "-q", "--out", "out"]


VERBS: dict[str, list[str]] = {
    "train": ["train", SYNTHETIC, *TRAIN],
    "compare": ["compare", SYNTHETIC, "--epochs", "1", *MODEL, "--dry-run"],
    "tune": ["tune", SYNTHETIC, "--epochs", "1", *MODEL, "--dry-run"],
    "convert": ["convert", "CORPUS/run", "--data", "CORPUS/photos", "--device", "cpu", "--dry-run"],
    "evaluate": ["evaluate", "CORPUS/run", "-q"],
    "predict": ["predict", "CORPUS/photos/dark/00.png", "--model", "CORPUS/run", "-q"],
    "export": ["export", "CORPUS/run", "--format", "hf", "--out", "out"],
    "publish": ["publish", "CORPUS/run", "me/it", "--dry-run"],
    "report": ["report", "CORPUS/study", "CORPUS/study", "--out", "out"],
    "advise": ["advise", "64", "--for", "h100"],
    "list": ["list", "metrics"],
    "reproduce": ["reproduce"],
    "job": ["job", "CORPUS/jobs", "1", "--dry-run"],
    "bench error": ["bench", "error", "--tokens", "16", "-a", "performer-relu:m=4"],
    "bench angle": ["bench", "angle"],
}


@kind
def options(case: Case) -> list[str]:
    """A valid command with one to three more options, or another argument."""
    from linvit.cli._parser import request_parser
    from linvit.requests import BY_VERB

    dice, verb = case.dice, case.dice.choice(sorted(VERBS))
    words = [word.replace("CORPUS", str(case.corpus)) for word in VERBS[verb]]
    actions = [
        a for a in request_parser(BY_VERB[verb])._actions if a.option_strings and a.dest not in ("help", "track")
    ]
    for action in dice.sample(actions, min(len(actions), dice.choice([1, 1, 2, 3]))):
        flag = dice.choice(action.option_strings)
        while flag in words and dice.random() < 0.8:  # once is enough for most
            at = words.index(flag)
            del words[at : at + 1 + (action.nargs != 0)]
        plausible = str(action.metavar or "").split("|")
        value = dice.choice([number(dice), number(dice), dice.choice(WORDS), dice.choice(plausible), _spec(dice)])
        words += [flag] if action.nargs == 0 else [flag, value]
    if dice.random() < 0.3:
        at = dice.randrange(len(verb.split()), len(words))
        words[at] = spoil_spec(dice, words[at])
    if "--budget" in words and "--dry-run" not in words:
        words.append("--dry-run")
    return [word.replace("\0", "") for word in words]


@kind
def images(case: Case) -> list[str]:
    folder = case.copy("photos")
    for path in case.dice.sample(sorted(folder.glob("*/*")), case.dice.choice([1, 2, 6])):
        case.spoil(path)
    words = [["predict", "photos", "--model", str(case.corpus / "run"), "-q"], ["train", "photos", *OF_PHOTOS]]
    return [*case.dice.choice(words), *case.dice.choice([[], ["--skip-bad"]])]


@kind
def arrays(case: Case) -> list[str]:
    """.npz: its bytes, or arrays of other types and shapes, or pickles, or impossible sizes."""
    path, dice = case.copy("set.npz"), case.dice
    if dice.random() < 0.5:
        case.spoil(path)
    else:
        with np.load(path) as file:
            held: dict[str, Any] = dict(file)
        name = dice.choice(sorted(held))
        odd = np.zeros(
            dice.choice([(), (0,), (24, 8, 8, 3), (24, 8), (24,)]), dice.choice(["f8", "U3", "M8[s]", "c16", "?"])
        )
        pickled = np.array([case.canary], object)
        held[name] = dice.choice([odd, pickled, np.broadcast_to(np.uint8(0), (2**28,)), held[name] * np.nan])
        np.savez_compressed(path, **held)
    return ["train", "set.npz", *TRAIN]


@kind
def parquet(case: Case) -> list[str]:
    import pyarrow
    from pyarrow import parquet as writer

    path, dice = case.copy("set.parquet"), case.dice
    if dice.random() < 0.5:
        case.spoil(path)
    else:
        table = writer.read_table(path)
        rows = len(table)
        odd = [["a"] * rows, [0.5] * rows, [None] * rows, [-1] * rows, [[0, 5]] * rows, [2**62] * rows, [b"\0"] * rows]
        name = dice.choice(["image", "label"])
        columns = {key: table[key] for key in table.column_names if key != name} | {name: dice.choice(odd)}
        writer.write_table(pyarrow.table(columns), path)
    return ["train", "set.parquet", *OF_PHOTOS]


@kind
def tables(case: Case) -> list[str]:
    case.copy("photos")
    path = case.copy(case.dice.choice(["set.csv", "set.tsv"]))
    case.spoil(path)
    return ["train", path.name, *OF_PHOTOS, *case.dice.choice([[], ["--skip-bad"], ["--task", "multi-label"]])]


@kind
def named(case: Case) -> list[str]:
    """IDX, CIFAR's pickles and archives, and tiny-imagenet as a folder and as an archive."""
    name = case.dice.choice(["mnist", "cifar10", "tiny-imagenet", "packed cifar10", "packed tiny-imagenet"])
    packed, name = name.startswith("packed"), name.split()[-1]
    folder = {"mnist": "mnist", "cifar10": "cifar10", "tiny-imagenet": "tiny-imagenet-200"}[name]
    if packed:
        folder = "packed/cifar10" if name == "cifar10" else "packed/tiny-imagenet-200.zip"
    copy = case.copy(f"named/{folder}", f"named/{Path(folder).name}")
    if name == "cifar10" and not packed and case.dice.random() < 0.3:
        import pickle

        (copy / "cifar-10-batches-py/data_batch_1").write_bytes(pickle.dumps(case.canary, case.dice.randrange(5)))
    elif copy.is_file():
        case.spoil(copy)
    else:
        case.spoil_one(copy, "**/*[!.]*.*", "**/*ubyte", "**/*batch*/*") if copy.is_dir() else None
    return ["train", name, "--data-root", "named", *OF_PHOTOS]


@kind
def models(case: Case) -> list[str]:
    """Configuration and weights of a trained model, linvit's or Hugging Face's."""
    folder = case.copy(case.dice.choice(["run", "run", "hf"]), "model")
    inside = folder / "best" if (folder / "best").exists() else folder
    if case.dice.random() < 0.1:  # a pickle in place of weights
        (inside / "model.safetensors").unlink()
        name = case.dice.choice(["model.safetensors", "pytorch_model.bin", "model.pt"])
        torch.save({"weight": case.canary}, inside / name)
    else:
        case.spoil_one(inside, "*.json", "*.safetensors")
    photos = str(case.corpus / "photos")
    return case.dice.choice(
        [
            ["evaluate", "model", photos, "-q"],
            ["predict", photos, "--model", "model", "-q"],
            ["evaluate", "model", "--summary"],
            ["export", "model", "--format", "hf", "--out", "out"],
            ["train", photos, "--from", "model", "--set", "steps=1", "--device", "cpu", "-q", "--out", "out"],
            ["convert", "model", "--to", "performer-relu:m=4", "--data", photos, "--stages", "none", "--device", "cpu"]
            + ["-q", "--out", "out"],
            ["publish", "model", "me/it", "--dry-run"],
        ]
    )


@kind
def runs(case: Case) -> list[str]:
    """A training that is resumed from spoilt files."""
    folder = case.copy("other", "out")
    case.spoil_one(folder, "*.json", "*.jsonl", "*/config.json", "*/*.safetensors")
    if case.dice.random() < 0.7:  # it has not finished
        (folder / "records.jsonl").unlink(missing_ok=True)
    longer = ["--save-every", "0", "--set", "epochs=1"]
    return ["train", SYNTHETIC, "-a", "performer-relu:m=4", *longer, *MODEL, "--out", "out"]


@kind
def studies(case: Case) -> list[str]:
    """Result folders whose pages are built again, or which are continued."""
    dice, name = case.dice, case.dice.choice(["study", "study", "search", "conversion", "jobs"])
    folder = case.copy(name, "out")
    case.spoil_one(folder, "*.json", "*.jsonl")
    report, short = ["report", "out"], ["--set", "epochs=1", *MODEL]
    again = {
        "study": ["compare", SYNTHETIC, "-a", "softmax", *short, "--seeds", "1", "--no-controls", "--dry-run"]
        + ["--jobs", "1", "--threads", "1", "--out", "out"],
        "search": ["tune", SYNTHETIC, "-a", "softmax", *short, "--trials", "2", "--jobs", "1", "--out", "out"],
        "conversion": report,
        "jobs": ["job", "out", "1", "-q"],
    }
    return dice.choice([report, again[name]])


@kind
def toml(case: Case) -> list[str]:
    """--space and --config."""
    if case.dice.random() < 0.5:
        case.spoil(case.copy("space.toml"))
        return ["tune", SYNTHETIC, "-a", "performer-relu", "--space", "space.toml", "--epochs", "1", *MODEL] + [
            "--trials", "1", "--jobs", "1", "--dry-run", "--out", "out"
        ]  # fmt: skip
    case.spoil(case.copy("search/best.toml"))
    verb = case.dice.choice([["train"], ["compare", "--dry-run", "--seeds", "1"]])
    return [verb[0], SYNTHETIC, *verb[1:], "--config", "best.toml", "--set", "steps=1", "-q", "--out", "out"]
