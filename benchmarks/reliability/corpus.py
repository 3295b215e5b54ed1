"""Small valid inputs of every kind that linvit reads, for `inputs.py` to spoil."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from reliability import forked

SHAPE = ["stem=patch", "patch_size=4", "dim=8", "depth=1", "heads=2", "mlp_dim=16", "batch_size=8", "pad_crop=0"]
SETS = [word for pair in SHAPE for word in ("--set", pair)]
MODEL = [*SETS, "--device", "cpu", "-q"]
SYNTHETIC = "synthetic:classes=2,images=48,size=8,channels=1"
KINDS = ("png", "jpg", "webp", "gif", "bmp", "tiff")
SIDE = 16


class Canary:
    """A pickle that makes a folder when it is loaded, so that nobody can miss it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def make_corpus(home: Path) -> None:
    """Everything, once."""
    if (home / "whole").exists():
        return
    shutil.rmtree(home, ignore_errors=True)
    source = np.random.default_rng(7)
    make_photos(home / "photos", images=24, side=SIDE)
    _arrays(home, source)
    _tables(home)
    _named(home / "named", source)
    _results(home)
    (home / "whole").touch()


def make_photos(home: Path, images: int, side: int) -> None:
    """Two classes, dark and light, of noise in all formats."""
    source = np.random.default_rng(7)
    for name, low in (("dark", 0), ("light", 90)):
        (home / name).mkdir(parents=True)
        for i in range(images // 2):
            pixels = source.integers(low, low + 160, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / name / f"{i:02d}.{KINDS[i % len(KINDS)]}")


def _arrays(home: Path, source: np.random.Generator) -> None:
    import pyarrow
    from pyarrow import parquet

    images, labels = source.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8), np.arange(24) % 2
    np.savez(home / "set.npz", x_train=images, y_train=labels, x_test=images[:6], y_test=labels[:6])
    files = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted(home.glob("photos/*/*"))]
    table = pyarrow.table({"image": files, "label": [i // 12 for i in range(24)]})
    parquet.write_table(table, home / "set.parquet")


def _tables(home: Path) -> None:
    rows = [(path.relative_to(home), path.parent.name) for path in sorted(home.glob("photos/*/*"))]
    for suffix, mark in (("csv", ","), ("tsv", "\t")):
        lines = [f"path{mark}label{mark}split", *(f"{path}{mark}{name}{mark}train" for path, name in rows)]
        (home / f"set.{suffix}").write_text("\n".join(lines) + "\n")
    (home / "space.toml").write_text(
        "[options]\nlr = { low = 1e-3, high = 1e-1, log = true }\nwarmup = [0.0, 0.1]\n[attention]\nm = [4, 8]\n"
        "[fixed]\nweight_decay = 0.1\n"
    )


def _named(home: Path, source: np.random.Generator) -> None:
    """IDX, batches of CIFAR as Python and binary files in a tar.gz, and tiny-imagenet."""
    mnist, cifar, tiny = home / "mnist", home / "cifar10", home / "tiny-imagenet-200"
    mnist.mkdir(parents=True)
    for name, count in (("train", 24), ("t10k", 12)):
        pixels, labels = source.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10
        images = struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes()
        (mnist / f"{name}-images-idx3-ubyte").write_bytes(images)
        packed = gzip.compress(struct.pack(">2I", 0x801, count) + labels.tobytes(), mtime=0)
        (mnist / f"{name}-labels-idx1-ubyte.gz").write_bytes(packed)
    batch = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3]}
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    python = {name: pickle.dumps(batch, protocol=2) for name in names}
    python["batches.meta"] = pickle.dumps({b"label_names": [str(i).encode() for i in range(10)]}, protocol=2)
    (cifar / "cifar-10-batches-py").mkdir(parents=True)
    for name, content in python.items():
        (cifar / "cifar-10-batches-py" / name).write_bytes(content)
    binary = {f"{name}.bin": bytes(4 * 3073) for name in names} | {"batches.meta.txt": b"0\n1\n2\n3\n"}
    (home / "packed" / "cifar10").mkdir(parents=True)
    with tarfile.open(home / "packed/cifar10/cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, content in binary.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    for i in range(2):
        (tiny / f"train/n{i}/images").mkdir(parents=True)
        for k in range(8):
            pixels = source.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tiny / f"train/n{i}/images/{k}.png")
    (tiny / "val/images").mkdir(parents=True)
    for k in range(2):
        Image.fromarray(source.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(tiny / f"val/images/{k}.png")
    (tiny / "wnids.txt").write_text("n0\nn1\n")
    (tiny / "words.txt").write_text("n0\tcat, tom\nn1\tdog\n")
    (tiny / "val/val_annotations.txt").write_text("0.png\tn0\t0\t0\n1.png\tn1\t0\t0\n")
    with zipfile.ZipFile(home / "packed/tiny-imagenet-200.zip", "w") as archive:
        for path in sorted(tiny.rglob("*.*")):
            archive.write(path, path.relative_to(home))


def _results(home: Path) -> None:
    """What linvit itself leaves: runs, a study, a search, a conversion and an exported model."""
    photos, length = str(home / "photos"), ["--set", "epochs=1"]
    scratch = ["--from", "scratch", "--image-size", "8"]
    saved = [*length, *MODEL, "--save-every", "0"]
    for words in (
        ["train", photos, "-a", "softmax", "--set", "pool=cls", *scratch, *saved, "--out", "run"],
        ["train", SYNTHETIC, "-a", "performer-relu:m=4", *saved, "--out", "other"],
        ["export", "run", "--format", "hf", "--out", "hf"],
        ["compare", SYNTHETIC, "-a", "softmax", "-a", "performer-relu:m=4", *length, *MODEL]
        + ["--seeds", "1", "--no-controls", "--jobs", "1", "--threads", "1", "--out", "study"],
        ["compare", SYNTHETIC, "-a", "softmax", *length, *MODEL, "--seeds", "2", "--no-controls", "--jobs-file"]
        + ["--out", "jobs"],
        ["tune", SYNTHETIC, "-a", "softmax", *length, *MODEL, "--trials", "2", "--jobs", "1", "--out", "search"],
        ["convert", "run", "--to", "performer-relu:m=4", "--data", photos, "--set", "steps=3", "--device", "cpu"]
        + ["--save-every", "0", "-q", "--out", "conversion"],
    ):
        environment = {"LINVIT_CACHE": str(home / "cache")}
        done = forked.run(words, home, forked.Limits(900), environment, forked.measure_quickly)
        if done.code:
            raise RuntimeError(f"linvit {' '.join(words)}: {done}: {(home / 'stderr').read_text()}")
