"""Sources: from a name or a path with options to images, here or on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linvit import data as data_package
from linvit.data import Dataset, folded
from linvit.data.dataset import Listing
from linvit.files import parse_json
from linvit.progress import Progress, ignore
from linvit.schemas.experiment import Resize, Source


def source_of(
    data: str | Path, root: str | Path | None = None, patch_size: Any = None, resize: Resize = "crop", **options: Any
) -> Source:
    """`data`: a registered name or a path; paths are stored absolute. Images of mixed sizes are made to fit
    `patch_size`."""
    named = isinstance(data, str) and data.partition(":")[0] in data_package.DATASETS
    multiple = int(patch_size) if str(patch_size or "").isdecimal() else 4  # anything else, the model will refuse
    place = _absolute(data) if not named and Path(data).expanduser().exists() else str(data)
    home = None if root is None else _absolute(root)
    return Source(data=place, root=home, multiple_of=max(1, multiple), resize=resize, **options)


def open_source(source: Source, progress: Progress = ignore, listing: Listing | None = None) -> Dataset:
    """listing: what a survey has found of this source already."""
    options = source.model_dump(exclude={"data", "fold"})
    found = data_package.load_data(source.data, progress=progress, listing=listing, **options)
    return found if source.fold is None else folded(found, source.fold)


def open_data(data: str | Path | Dataset, progress: Progress = ignore, **options: Any) -> tuple[Dataset, Source | None]:
    """The images, and how to find them again; None if they were given as a Dataset."""
    if isinstance(data, Dataset):
        return data, None
    source = source_of(data, **options)
    return open_source(source, progress), source


def stored_source(home: Path) -> tuple[Source, str]:
    """How to find the data of a stored model's run, and their identity."""
    names = ("experiment.json", "convert.json")
    for path in (folder / name for folder in (home, home.parent) for name in names):
        try:
            document = parse_json(path.read_text(encoding="utf-8"))
            return Source.model_validate(document["source"]), document["data"]["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise ValueError(f"{home}: the data that the model was trained on are not stored with it: give a name or a path")


def _absolute(place: str | Path) -> str:
    return str(Path(place).expanduser().resolve())
