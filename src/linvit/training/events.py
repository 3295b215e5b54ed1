"""Events of a training. They are plain data and can be sent as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Began:
    """The training starts, or resumes at a step."""

    text: str
    step: int
    total: int


@dataclass(frozen=True)
class Noted:
    """A message for the user."""

    text: str


@dataclass(frozen=True)
class Progressed:
    """How far work other than training has come."""

    done: int
    total: int
    what: str


@dataclass(frozen=True)
class Stepped:
    step: int
    total: int
    loss: float  # of this epoch so far, as is the accuracy
    accuracy: float
    images_per_second: float
    seconds_left: float
    epoch: float  # finished
    epochs: float  # in all


@dataclass(frozen=True)
class Validated(Stepped):
    row: dict[str, float]  # the line of log.jsonl


@dataclass(frozen=True)
class Diverged:
    step: int
    layer: str  # the first with a non-finite output


@dataclass(frozen=True)
class Tested:
    """Test result of the selected model."""

    step: int  # after which it was
    row: dict[str, float]


Event = Began | Noted | Progressed | Stepped | Validated | Diverged | Tested
ASKING = (Progressed, Stepped)  # after which a listener may end a training
Listener = Callable[[Event], None]
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Began, Noted, Progressed, Stepped, Validated, Diverged, Tested)
}


def tell(listeners: Sequence[Listener], event: Event) -> None:
    for listener in listeners:
        listener(event)


def to_json(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__} | asdict(event)


def from_json(row: dict[str, Any]) -> Event:
    return KINDS[row["event"]](**{key: value for key, value in row.items() if key != "event"})
