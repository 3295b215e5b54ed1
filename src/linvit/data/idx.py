"""MNIST and Fashion-MNIST: 28×28 grey, 60,000 train and 10,000 test images, in IDX files, gzipped or plain."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from linvit.data.download import Remote, fetch, homes
from linvit.data.sources import DATASETS, Arrays, check_labels, stack

MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
FASHION_CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"]
FASHION_CLASSES += ["Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
LARGEST = 1 << 30  # bytes in one file, unpacked
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# of the gzipped files, in the order of FILES
MNIST_MD5 = ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432")
MNIST_MD5 += ("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c")
FASHION_MD5 = ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe")
FASHION_MD5 += ("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310")


@DATASETS.register("mnist")
def mnist(root: Path) -> Arrays:
    return _load(root, "mnist", "MNIST", MNIST, MNIST_MD5, [str(i) for i in range(10)])


@DATASETS.register("fashion-mnist")
def fashion_mnist(root: Path) -> Arrays:
    return _load(root, "fashion-mnist", "FashionMNIST", FASHION, FASHION_MD5, FASHION_CLASSES)


def _load(root: Path, dataset: str, torchvision: str, url: str, md5s: tuple[str, ...], classes: list[str]) -> Arrays:
    places = [*homes(root, dataset, torchvision), root / torchvision / "raw"]
    names = [name for pair in FILES.values() for name in pair]
    folder = next((place for place in places if all(_file(place, name).exists() for name in names)), places[0])
    remotes = {name: Remote(f"{url}{name}.gz", md5) for name, md5 in zip(names, md5s, strict=True)}
    fetch(dataset, folder, [remote for name, remote in remotes.items() if not (folder / name).exists()])
    files = {split: [_file(folder, name) for name in pair] for split, pair in FILES.items()}
    return stack({split: _pair(*pair, classes=len(classes)) for split, pair in files.items()}, classes)


def _file(folder: Path, name: str) -> Path:
    return folder / (name if (folder / name).exists() else f"{name}.gz")


def _pair(images_path: Path, labels_path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(f"{images_path}: has {len(images)} images, but {labels_path.name} has {len(labels)} labels")
    check_labels(labels_path, labels, classes)
    return images[:, None], labels


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """IDX: two zero bytes, the type (8 = uint8), the number of dimensions, each as a big-endian uint32, the data."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        try:
            if file.read(4) != bytes([0, 0, 8, dimensions]):
                raise ValueError("this is not an IDX file of the right kind")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            size = math.prod(shape)
            body = file.read(size + 1) if size <= LARGEST else b""  # one byte more than it should have
            if len(body) != size or not size:
                raise ValueError(f"its header states {size:,} bytes")
        except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
            raise ValueError(f"{path}: is corrupt ({error}): delete it to download it again") from None
    return np.frombuffer(body, np.uint8).reshape(shape)
