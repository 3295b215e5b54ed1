"""Base classes of stored documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from linvit.errors import clear
from linvit.files import parse_json, write_atomically


class Frozen(BaseModel):
    """A value: hashable where its fields are, and never changed in place."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Document(BaseModel):
    """What a result folder holds one of, in a file named after its kind; `settings` tells two of them apart."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    kind: ClassVar[str]
    current_format: ClassVar[int]

    format: int

    @classmethod
    def path(cls, folder: Path) -> Path:
        return folder / f"{cls.kind}.json"

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            content.pop("id", None)
            document = cls.model_validate(content)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            why = clear(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"{path} cannot be read by this version of linvit ({why}): choose another --out") from None
        if document.format != cls.current_format:
            raise ValueError(
                f"{path} has format {document.format}, but this version of linvit reads format {cls.current_format}: "
                "choose another --out"
            )
        return document

    def save(self, folder: Path) -> None:
        text = json.dumps(self.stored(), indent=1, ensure_ascii=False)
        write_atomically(self.path(folder), text + "\n")

    def stored(self) -> dict[str, Any]:
        """The content of the file."""
        return self.model_dump(mode="json")

    def settings(self) -> dict[str, Any]:
        """All that decides the results, defaults included."""
        raise NotImplementedError
