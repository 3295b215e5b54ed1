"""Where an experiment's images are found: what a worker on another machine needs to have the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from linvit import data as data_package
from linvit.data import Dataset, Fold, folded
from linvit.progress import Progress, ignore


class Source(BaseModel):
    """A data set's name or path, with the options it is read with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str
    root: str | None = None
    image_size: int | None = None
    multiple_of: int = 4
    channels: int | None = None  # other than the images' own: what a model that is started from takes
    limit: int | None = None
    skip_bad: bool = False
    fold: Fold | None = None  # held out; None: the set's own splits

    @classmethod
    def of(cls, data: str | Path, root: str | Path | None = None, patch_size: Any = None, **options: Any) -> Source:
        """`data`: a registered name or a path; paths are stored absolute. Mixed sizes are made to fit `patch_size`."""
        named = isinstance(data, str) and data.partition(":")[0] in data_package.DATASETS
        fits = int(patch_size) if str(patch_size or "").isdecimal() else 4  # what is no number, the model will refuse
        place = _absolute(data) if not named and Path(data).expanduser().exists() else str(data)
        home = None if root is None else _absolute(root)
        return cls(data=place, root=home, multiple_of=max(1, fits), **options)

    def open(self, progress: Progress = ignore) -> Dataset:
        options = self.model_dump(exclude={"data", "fold"})
        found = data_package.load_data(self.data, progress=progress, **options)
        return found if self.fold is None else folded(found, self.fold)

    def folded(self, fold: Fold | None) -> Source:
        """The same images with this fold held out; None: as they are."""
        return self.model_copy(update={"fold": fold})


def open_data(data: str | Path | Dataset, progress: Progress = ignore, **options: Any) -> tuple[Dataset, Source | None]:
    """The images, and how to find them again; None if they were given as they are."""
    if isinstance(data, Dataset):
        return data, None
    source = Source.of(data, **options)
    return source.open(progress), source


def _absolute(place: str | Path) -> str:
    return str(Path(place).expanduser().resolve())
