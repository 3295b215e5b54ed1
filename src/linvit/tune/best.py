"""best.toml: what a search found, as `train --config` and `compare --config` take it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from linvit.errors import choices, clear
from linvit.files import write_atomically

FORMAT = 1


class Winner(BaseModel):
    """The best trial of a variant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variant: str  # the spec as it was searched
    attention: str  # with what was found
    validation_accuracy: float  # of folds, over all images, each when it was held out
    trial: int
    options: dict[str, Any] = Field(default_factory=dict)  # of the model and the recipe


class Best(BaseModel):
    """The best trials of a search, the best variant first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    data: str
    epochs: float
    trials: int  # of every variant, or fewer
    seed: int
    start: str | None = None  # what every trial began with
    folds: int | None = None  # by which trials were judged
    winners: list[Winner] = Field(min_length=1, alias="winner")

    @classmethod
    def read(cls, path: Path | str) -> Best:
        try:
            found = cls.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ValueError(f"config {path}: there is no such file: `linvit tune` writes a best.toml") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
            why = clear(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"config {path} is not a best.toml of linvit tune ({why})") from None
        if found.format != FORMAT:
            raise ValueError(f"config {path} has format {found.format}, but this linvit reads {FORMAT}")
        return found

    def write(self, path: Path, about: str) -> None:
        import tomli_w

        found = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        write_atomically(path, f"# {about}\n{tomli_w.dumps(found)}")

    def of(self, attention: str | None) -> Winner:
        """A variant's, by the spec that was searched or found; without one, the best of all."""
        for winner in self.winners:
            if attention in (None, winner.variant, winner.attention):
                return winner
        known = [winner.variant for winner in self.winners]
        raise ValueError(f"attention '{attention}' was not searched" + choices(str(attention), known))

    def chosen(self, attention: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """All that `train` needs; what is given stays as it is."""
        winner = self.of(attention)
        length = {} if "steps" in given or "epochs" in given else {"epochs": self.epochs}
        return length | winner.options | dict(given) | {"attention": winner.attention}

    def shared(
        self, attentions: Sequence[str] | None, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
        """For `compare`: the options that all variants share, and each variant's attention with those of its own. What
        is given stays as it is."""
        winners = [self.of(spec) for spec in attentions] if attentions else self.winners
        every = [{name: v for name, v in winner.options.items() if name not in given} for winner in winners]
        shared = {name: v for name, v in every[0].items() if all(name in own and own[name] == v for own in every)}
        own = [{name: v for name, v in mine.items() if name not in shared} for mine in every]
        return shared, [(winner.attention, mine) for winner, mine in zip(winners, own, strict=True)]
