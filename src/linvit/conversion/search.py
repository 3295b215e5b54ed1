"""Which layers can be replaced: a greedy search in both directions, by the loss on a few images; and the upper bound of
the drop in accuracy, by which other images decide.

A mix names for every layer the model that its block comes from: 0 is the teacher, the others are kinds of students. All
models share stem, positions, final norm and head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.data import Split, normalise
from linvit.devices import autocast
from linvit.models import VisionTransformer

Mix = tuple[int, ...]
Move = tuple[int, int]  # (layer, kind)
T = TypeVar("T")


class MixScore(NamedTuple):
    """Higher is better. On few images, the likelihood distinguishes mixes better than accuracy does."""

    likelihood: float  # minus the cross-entropy
    accuracy: float


Scores = Callable[[Mix, Sequence[Mix]], list[MixScore]]  # of mixes, each a change of the first argument
MOVES_AT_ONCE = 2  # evaluated together, of those that may be the best
RISK = 0.05  # probability, at most, that an accepted candidate loses more than is allowed


def greedy(
    layers: int,
    savings: Sequence[float],
    scores: Scores,
    *,
    enough: float = math.inf,
    useless: float = -math.inf,
    least: float = 0.0,
) -> dict[int, tuple[Mix, MixScore]]:
    """The time saved, in whole layers → the better mix of two directions, and its score. One direction starts with the
    fastest kind everywhere and moves to slower kinds or back to softmax where that gains most for the time it takes.
    The other starts with softmax and moves to faster kinds where that loses least for the time it saves.

    savings: of each kind, the time that it saves in a layer; 0 of the teacher, 1 of the fastest. The first direction
    stops at an accuracy that is `enough`, the second below one that is `useless`. A mix that saves less than `least` is
    not returned, and with one the second direction, which begins there, is left out.
    """
    found: dict[int, tuple[Mix, MixScore]] = {}
    forward = () if least > 0 else _forward(layers, savings, scores, useless)
    for mix, score in [*_backward(layers, savings, scores, enough, least), *forward]:
        whole = whole_layers(mix, savings)
        if whole not in found or score > found[whole][1]:
            found[whole] = mix, score
    return dict(sorted(found.items()))


def saved(mix: Mix, savings: Sequence[float]) -> float:
    """Time, in layers of the fastest kind."""
    return math.fsum(savings[kind] for kind in mix)


def whole_layers(mix: Mix, savings: Sequence[float]) -> int:
    """The same without a fraction; only the teacher saves none."""
    return max(math.floor(saved(mix, savings) + 1e-6), int(any(mix)))


def _backward(
    layers: int, savings: Sequence[float], scores: Scores, enough: float, least: float
) -> Iterator[tuple[Mix, MixScore]]:
    fastest = max(range(1, len(savings)), key=lambda kind: (savings[kind], -kind))
    mix: Mix = (fastest,) * layers
    (score,) = scores(mix, [mix])
    alike = [kind for kind, saving in enumerate(savings) if kind != fastest and saving == savings[fastest]]
    gains: dict[Move, float] = {}
    while moves := [(i, kind) for i in range(layers) for kind in alike if mix[i] == fastest]:
        best, changed = _best(mix, score, moves, savings, gains, scores)
        if best <= score:
            break
        mix, score = changed, best
    gains = {}
    if saved(mix, savings) < least:
        return
    yield mix, score
    while score.accuracy < enough:
        slower = [(i, kind) for i in range(layers) for kind, saving in enumerate(savings) if saving < savings[mix[i]]]
        moves = [move for move in slower if saved(_moved(mix, *move), savings) >= least]
        if not moves:
            break
        score, mix = _best(mix, score, moves, savings, gains, scores)
        yield mix, score


def _forward(layers: int, savings: Sequence[float], scores: Scores, useless: float) -> Iterator[tuple[Mix, MixScore]]:
    mix: Mix = (0,) * layers
    (score,) = scores(mix, [mix])
    yield mix, score
    gains: dict[Move, float] = {}
    while score.accuracy >= useless:
        moves = [(i, kind) for i in range(layers) for kind, saving in enumerate(savings) if saving > savings[mix[i]]]
        if not moves:
            break
        score, changed = _best(mix, score, moves, savings, gains, scores)
        layer = next(i for i in range(layers) if mix[i] != changed[i])
        gains = {move: gain for move, gain in gains.items() if move[0] != layer}  # they were relative to softmax
        mix = changed
        yield mix, score


def _best(
    mix: Mix,
    score: MixScore,
    moves: Sequence[Move],
    savings: Sequence[float],
    gains: dict[Move, float],
    scores: Scores,
) -> tuple[MixScore, Mix]:
    """The best of the moves for the time that it takes or saves; of equal ones the last, since late layers tolerate a
    change best.

    `gains` are those of earlier steps. Replacing a layer loses more the more layers are replaced, and restoring softmax
    gains less the more layers have it. So a move's earlier gain bounds its gain now, and a move whose bound is below
    another's gain is not evaluated (lazy greedy search). Where the bound does not hold, a step may be slightly worse.
    """
    tried: dict[Move, MixScore] = {}

    def worth(move: Move) -> float:
        difference = abs(savings[move[1]] - savings[mix[move[0]]])
        return gains[move] / (difference or 1.0) if move in gains else math.inf

    while True:
        most = max((worth(move) for move in tried), default=-math.inf)
        left = sorted((move for move in moves if move not in tried), key=lambda move: -worth(move))
        promising = [move for move in left[:MOVES_AT_ONCE] if worth(move) >= most]
        batch = [move for move in left if move not in gains] or promising
        if not batch:
            break
        new = scores(mix, [_moved(mix, *move) for move in batch])
        tried |= dict(zip(batch, new, strict=True))
        gains |= {move: one.likelihood - score.likelihood for move, one in zip(batch, new, strict=True)}
    move = max(tried, key=lambda move: (worth(move), tried[move].accuracy, move))
    return tried[move], _moved(mix, *move)


def _moved(mix: Mix, layer: int, kind: int) -> Mix:
    return (*mix[:layer], kind, *mix[layer + 1 :])


def evaluations(layers: int, kinds: int) -> int:
    """About how many mixes `greedy` scores: each move once, and a few in every step."""
    return 2 + layers * 2 * kinds + MOVES_AT_ONCE * layers * (1 + kinds)


@dataclass(frozen=True)
class Blocks:
    """Models whose blocks can be mixed, and the images that mixes are scored on."""

    models: Sequence[VisionTransformer]  # the teacher first
    split: Split
    mean: Sequence[float]
    std: Sequence[float]
    batch: int = 64
    dtype: torch.dtype = torch.float32  # of autocast

    @torch.inference_mode()
    def logits(self, base: Mix, mixes: Sequence[Mix]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Labels and the logits of each mix, batch by batch. The base's tokens are reused up to the first layer in
        which a mix differs from it."""
        shell, device = self.models[0], next(self.models[0].parameters()).device
        for start in range(0, len(self.split), self.batch):
            images, labels = self.split.batch(slice(start, start + self.batch))
            with autocast(device, self.dtype):
                tokens = [shell.embed(normalise(images.to(device), self.mean, self.std))]
                for i, kind in enumerate(base):
                    tokens.append(self.models[kind].blocks[i](tokens[-1]))
                found = [shell.classify(self._tokens(tokens, base, mix)) for mix in mixes]
            yield labels.to(device), found

    def _tokens(self, tokens: list[Tensor], base: Mix, mix: Mix) -> Tensor:
        first = next((i for i, (a, b) in enumerate(zip(base, mix, strict=True)) if a != b), len(mix))
        x = tokens[first]
        for i in range(first, len(mix)):
            x = self.models[mix[i]].blocks[i](x)
        return x

    def scores(self, base: Mix, mixes: Sequence[Mix]) -> list[MixScore]:
        right, loss = np.zeros(len(mixes)), np.zeros(len(mixes))
        for labels, outputs in self.logits(base, mixes):
            right += [(logits.argmax(-1) == labels).sum().item() for logits in outputs]
            loss += [F.cross_entropy(logits.float(), labels, reduction="sum").item() for logits in outputs]
        n = len(self.split)
        return [MixScore(float(-b), float(a)) for a, b in zip(right / n, loss / n, strict=True)]


@dataclass(frozen=True)
class Drop:
    """Of n images, the teacher is right on the fraction `accuracy`; it alone on `lost`, the student alone on `won`."""

    n: int
    accuracy: float
    lost: int
    won: int

    @classmethod
    def between(cls, teacher: np.ndarray, student: np.ndarray) -> Drop:
        """From whether each is right."""
        lost, won = int((teacher & ~student).sum()), int((student & ~teacher).sum())
        return cls(len(teacher), float(teacher.mean()), lost, won)

    @property
    def value(self) -> float:
        return (self.lost - self.won) / self.n

    def bound(self, risk: float = RISK) -> float:
        """One-sided upper limit of the drop: Wald's for a paired difference, with one image more in either discordant
        cell (Bonett and Price), so that agreement on a few images proves little."""
        n, lost, won = self.n + 2, self.lost + 1, self.won + 1
        difference = (lost - won) / n
        spread = math.sqrt(max(0.0, (lost + won) / n - difference**2) / n)
        return difference + NormalDist().inv_cdf(1 - risk) * spread

    def interval(self) -> tuple[float, float]:
        """95 %, two-sided."""
        return -replace(self, lost=self.won, won=self.lost).bound(0.025), self.bound(0.025)

    def within(self, share: float, risk: float = RISK) -> bool:
        """Whether at most this share of the teacher's accuracy is lost, by the bound."""
        return self.bound(risk) <= share * self.accuracy


def images_needed(share: float, candidates: int) -> int:
    """The fewest images that can show that the first of the candidates loses at most this share, if teacher and student
    are right on all of them."""
    return max(2, math.ceil(NormalDist().inv_cdf(1 - RISK / candidates) * math.sqrt(2) / share) - 2)


def passing(candidates: Sequence[T], share: float, drop: Callable[[T, float], Drop]) -> list[T]:
    """The candidates that are shown to stay within the share; `drop` is called with a candidate and its risk.

    Each candidate has an equal part of the risk, and one that passes hands its risk on to the next (the fallback
    procedure). So in at most 5 % of searches a candidate that loses more is accepted, however many there are and
    however similar, since neither the candidates nor their order depend on the images that decide.
    """
    passed, risk = [], 0.0
    for candidate in candidates:
        risk += RISK / len(candidates)
        if drop(candidate, risk).within(share, risk):
            passed.append(candidate)
        else:
            risk = 0.0
    return passed
