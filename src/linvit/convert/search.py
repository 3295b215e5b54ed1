"""Which layers may be linear: greedy both ways, on the task itself; then a bound of the drop decides, on other images.

A mix names for every layer which model its block comes from: 0 is the teacher, the others are kinds of linear students.
All models share stem, positions, final norm and head.
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
from linvit.models import VisionTransformer

Mix = tuple[int, ...]
Move = tuple[int, int]  # of a layer, to a kind
T = TypeVar("T")


class Score(NamedTuple):
    """Of a mix; the larger first entry is the better. Few images tell likelihoods apart better than accuracies."""

    likelihood: float  # of the labels: minus the cross-entropy
    accuracy: float


Scores = Callable[[Mix, Sequence[Mix]], list[Score]]  # of the mixes, each a change of the first one
TRIED = 2  # moves at a time, of those that may be the best
RISK = 0.05  # that anything is let through which loses more than is allowed


def greedy(
    layers: int, kinds: int, scores: Scores, enough: float = math.inf, useless: float = -math.inf
) -> dict[int, tuple[Mix, Score]]:
    """How many layers are linear → the better of two mixes and its score: one from all-linear with softmax put back
    where it helps most, one from softmax with that layer made linear which hurts least. Of several linear kinds, the
    first is replaced by others where that helps, before softmax is put back. The first way ends at an accuracy that is
    `enough`, the second below one that is `useless`."""
    found: dict[int, tuple[Mix, Score]] = {}
    for mix, score in [*_back(layers, kinds, scores, enough), *_forth(layers, kinds, scores, useless)]:
        linear = layers - mix.count(0)
        if linear not in found or score > found[linear][1]:
            found[linear] = mix, score
    return dict(sorted(found.items()))


def _back(layers: int, kinds: int, scores: Scores, enough: float) -> Iterator[tuple[Mix, Score]]:
    mix: Mix = (1,) * layers
    (score,) = scores(mix, [mix])
    better: dict[Move, float] = {}
    while others := [(i, kind) for i in range(layers) for kind in range(2, kinds + 1) if mix[i] == 1]:
        best, at = _best(mix, score, others, better, scores)
        if best <= score:
            break
        mix, score = at, best
    yield mix, score
    gains: dict[Move, float] = {}
    while score.accuracy < enough and (linear := [(i, 0) for i in range(layers) if mix[i]]):
        score, mix = _best(mix, score, linear, gains, scores)
        yield mix, score


def _forth(layers: int, kinds: int, scores: Scores, useless: float) -> Iterator[tuple[Mix, Score]]:
    mix: Mix = (0,) * layers
    (score,) = scores(mix, [mix])
    yield mix, score
    gains: dict[Move, float] = {}
    while score.accuracy >= useless and (exact := [i for i in range(layers) if not mix[i]]):
        moves = [(i, kind) for i in exact for kind in range(1, kinds + 1)]
        score, mix = _best(mix, score, moves, gains, scores)
        yield mix, score


def _best(mix: Mix, score: Score, moves: Sequence[Move], gains: dict[Move, float], scores: Scores) -> tuple[Score, Mix]:
    """The best of the moves; of equal ones the last, since late layers give way first.

    `gains` are of earlier steps. A linear layer hurts more the more of them there are, and there is less to mend the
    more is softmax again: so what a move gained before is the most that it gains now, and where that is less than
    another gains now, it is not tried (lazy greedy search). Where it is not so, a step may be a little worse.
    """
    found: dict[Move, Score] = {}
    while True:
        most = max((gains[move] for move in found), default=-math.inf)
        left = sorted((move for move in moves if move not in found), key=lambda move: -gains.get(move, math.inf))
        tried = [move for move in left if move not in gains] or [move for move in left[:TRIED] if gains[move] >= most]
        if not tried:
            break
        new = scores(mix, [_put(mix, *move) for move in tried])
        found |= dict(zip(tried, new, strict=True))
        gains |= {move: one.likelihood - score.likelihood for move, one in zip(tried, new, strict=True)}
    move = max(found, key=lambda move: (found[move], move))
    return found[move], _put(mix, *move)


def _put(mix: Mix, layer: int, kind: int) -> Mix:
    return (*mix[:layer], kind, *mix[layer + 1 :])


def evaluations(layers: int, kinds: int) -> int:
    """How many mixes `greedy` asks for, roughly: each move once, and a few in every step."""
    return 2 + layers * 2 * kinds + TRIED * layers * (1 + kinds)


@dataclass(frozen=True)
class Blocks:
    """Models whose blocks can be mixed, and the images that tell how good a mix is."""

    models: Sequence[VisionTransformer]  # the first is the teacher
    split: Split
    mean: Sequence[float]
    std: Sequence[float]
    batch: int = 64

    @torch.inference_mode()
    def logits(self, base: Mix, mixes: Sequence[Mix]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Labels and the logits of each mix, batch by batch. Up to the first layer in which a mix differs from the
        base, the base's tokens are used again."""
        shell, device = self.models[0], next(self.models[0].parameters()).device
        for start in range(0, len(self.split), self.batch):
            images, labels = self.split.batch(slice(start, start + self.batch))
            tokens = [shell.embed(normalise(images.to(device), self.mean, self.std))]
            for i, kind in enumerate(base):
                tokens.append(self.models[kind].blocks[i](tokens[-1]))
            yield labels.to(device), [shell.classify(self._after(tokens, base, mix)) for mix in mixes]

    def _after(self, tokens: list[Tensor], base: Mix, mix: Mix) -> Tensor:
        first = next((i for i, (a, b) in enumerate(zip(base, mix, strict=True)) if a != b), len(mix))
        x = tokens[first]
        for i in range(first, len(mix)):
            x = self.models[mix[i]].blocks[i](x)
        return x

    def scores(self, base: Mix, mixes: Sequence[Mix]) -> list[Score]:
        right, loss = np.zeros(len(mixes)), np.zeros(len(mixes))
        for labels, every in self.logits(base, mixes):
            right += [(said.argmax(-1) == labels).sum().item() for said in every]
            loss += [F.cross_entropy(said.float(), labels, reduction="sum").item() for said in every]
        n = len(self.split)
        return [Score(float(-b), float(a)) for a, b in zip(right / n, loss / n, strict=True)]


@dataclass(frozen=True)
class Drop:
    """Of n images the teacher was right on `accuracy`; it alone on `lost`, the student alone on `won`."""

    n: int
    accuracy: float
    lost: int
    won: int

    @classmethod
    def of(cls, teacher: np.ndarray, student: np.ndarray) -> Drop:
        """From whether each was right."""
        lost, won = int((teacher & ~student).sum()), int((student & ~teacher).sum())
        return cls(len(teacher), float(teacher.mean()), lost, won)

    @property
    def value(self) -> float:
        return (self.lost - self.won) / self.n

    def bound(self, risk: float = RISK) -> float:
        """One-sided upper limit of the drop over images like these, both models on the same ones: Wald's for a paired
        difference, with one image more in either discordant cell (Bonett and Price), so that agreement on a few images
        proves little."""
        n, lost, won = self.n + 2, self.lost + 1, self.won + 1
        difference = (lost - won) / n
        spread = math.sqrt(max(0.0, (lost + won) / n - difference**2) / n)
        return difference + NormalDist().inv_cdf(1 - risk) * spread

    def interval(self) -> tuple[float, float]:
        """95 % of the drop, from both sides."""
        return -replace(self, lost=self.won, won=self.lost).bound(0.025), self.bound(0.025)

    def within(self, share: float, risk: float = RISK) -> bool:
        """Whether the bound allows no more than this share of the teacher's accuracy to be lost."""
        return self.bound(risk) <= share * self.accuracy


def images_needed(share: float, candidates: int) -> int:
    """So many images prove that the first of the candidates loses no more than this share, if teacher and student are
    right on all of them."""
    if not 0 < share < 1:
        raise ValueError(f"max_drop={share} must be a share of the teacher's accuracy, e.g. 0.01")
    return max(2, math.ceil(NormalDist().inv_cdf(1 - RISK / candidates) * math.sqrt(2) / share) - 2)


def passing(candidates: Sequence[T], share: float, look: Callable[[T, float], Drop]) -> list[T]:
    """Those that are shown to stay within the share, `look` being told at which risk.

    Each candidate has an equal part of the risk, and one that passes hands what it had to the next (the fallback
    procedure): however many there are and however alike, in at most 5 % of searches one is let through that loses more,
    since neither the candidates nor their order depend on the images that decide.
    """
    passed, risk = [], 0.0
    for candidate in candidates:
        risk += RISK / len(candidates)
        if look(candidate, risk).within(share, risk):
            passed.append(candidate)
        else:
            risk = 0.0
    return passed
