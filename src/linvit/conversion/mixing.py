"""max_drop: which layers are replaced. A mix takes each block from the teacher or from a student.

Two sets of held-out images are used. The images of the search find the best mix for each saving of time, and the mix
that is trained further. The images of the decision are read once, at the end, for these mixes and for the stages that
were trained from one of them. The order in which these are tested does not depend on them, so that all share one risk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from linvit.conversion.context import Context, StageResult, sizes
from linvit.conversion.search import Blocks, Drop, Mix, MixScore, evaluations, greedy, passing, saved
from linvit.conversion.student import make_student, replaced_layers, zero_shot
from linvit.ledger import key_of
from linvit.models import VisionTransformer
from linvit.records import Record, Tag
from linvit.registry import Spec, join_layers
from linvit.training.checkpoint import load

DISCORDANT = 0.1  # fraction of images on which only one of teacher and mix is right, roughly
FIRST_MIX, OTHER_MIX = "mix", "mix, decided"  # the mix that is trained further, and another one that was chosen


@dataclass(frozen=True)
class Kind:
    """What may take the place of the teacher's blocks."""

    layers: str  # the spec of every layer
    saving: float = 1.0  # time that it saves in a layer; 1 of the fastest kind
    folder: Path | None = None  # of the model that its blocks come from; None: the teacher's weights, nothing trained


@dataclass(frozen=True)
class Choice:
    """What the decision may choose."""

    name: str
    mix: Mix
    saved: float  # time, in layers of the fastest kind
    result: StageResult | None = None  # None: a mix that is not stored as a model yet


def mix_tag(mix: Mix) -> str:
    """Identifies a mix in a record: its spec is ambiguous if the teacher has the student's attention in some layers."""
    return "".join(map(str, mix))


class LayerSearch:
    """The search of one conversion, and its decision. min_saved: the time that a mix must save, in layers of the
    fastest kind; max_decided: the number of mixes that may be decided on."""

    def __init__(self, c: Context, kinds: Sequence[Kind], min_saved: float = 0.0, max_decided: int | None = None):
        self.c, self.kinds, self.min_saved, self.max_decided = c, list(kinds), min_saved, max_decided
        self.exact: Mix = (0,) * c.config.depth
        self.share = c.conversion.max_drop or 0.0
        self.savings = [0.0, *(kind.saving for kind in kinds)]

    @cached_property
    def specs(self) -> list[list[Spec]]:
        """Of each kind, the spec of every layer; the teacher is the first kind."""
        return [self.c.specs(text) for text in (self.c.config.attention, *(kind.layers for kind in self.kinds))]

    @cached_property
    def models(self) -> list[VisionTransformer]:
        c = self.c
        students = (load(kind.folder) if kind.folder else zero_shot(c, kind.layers) for kind in self.kinds)
        return [c.teacher, *(model.to(c.device) for model in students)]

    def name(self, mix: Mix) -> str:
        return join_layers([self.specs[kind][i] for i, kind in enumerate(mix)])

    def replaced(self, mix: Mix) -> int:
        return replaced_layers([self.specs[kind][i] for i, kind in enumerate(mix)])

    def saved(self, mix: Mix) -> float:
        return saved(mix, self.savings)

    def blocks(self, split: str) -> Blocks:
        data = self.c.images.dataset
        return Blocks(self.models, self.c.images.split(split), data.mean, data.std, self.c.batch, self.c.dtype)

    @cached_property
    def teacher_accuracy(self) -> float:
        """On the images of the search."""
        return self.scores(self.exact, [self.exact])[0].accuracy

    @cached_property
    def candidates(self) -> dict[int, tuple[Mix, MixScore]]:
        """The time saved, in whole layers → the best mix that the search found, and its score."""
        enough, useless = self.teacher_accuracy, self.teacher_accuracy * (1 - self.share) - 2 * self.slack
        layers = len(self.exact)
        return greedy(layers, self.savings, self.scores, enough=enough, useless=useless, least=self.min_saved)

    def scores(self, base: Mix, mixes: Sequence[Mix]) -> list[MixScore]:
        """Of mixes that differ from the base in one layer; each mix is scored once."""
        ledger, keys = self.c.ledger, {mix: key_of("conversion_accuracy", **self._score_tags(mix)) for mix in mixes}
        new = [mix for mix, key in keys.items() if ledger.done(key) is None]
        if new:
            done = len(ledger.find("conversion_accuracy", split="search"))
            total = evaluations(len(self.exact), len(self.kinds))
            self.c.progress(done, max(total, done + 1), f"search: {self.name(base)}")
            found = self.blocks("search").scores(base, new)
            ledger.append([self._score_record(mix, score) for mix, score in zip(new, found, strict=True)])
        records = [ledger.done(keys[mix]) for mix in mixes]
        return [MixScore(-float(r.tags["loss"] or 0), float(r.value or 0)) for r in records if r is not None]

    def _score_tags(self, mix: Mix) -> dict[str, Tag]:
        return {"model": self.name(mix), "mix": mix_tag(mix), "split": "search", **sizes(self.c.config)}

    def _score_record(self, mix: Mix, score: MixScore) -> Record:
        tags = self._score_tags(mix) | {"replaced": self.replaced(mix), "loss": -score.likelihood}
        return self.c.record("conversion_accuracy", score.accuracy, len(self.c.images.search), **tags)

    @property
    def slack(self) -> float:
        """Standard error of the difference of two accuracies on the search's images."""
        return math.sqrt(DISCORDANT / len(self.c.images.search))

    def within(self, slack: float = 0.0) -> list[Mix]:
        """The candidates that lose at most the allowed share on the search's images; the fastest is the last."""
        least = (1 - self.share) * self.teacher_accuracy - slack
        return [mix for mix, score in self.candidates.values() if score.accuracy >= least]

    @cached_property
    def first(self) -> Mix:
        """The mix that is trained further: the fastest within the allowed share, or the best one if there is none."""
        within = self.within()
        return within[-1] if within else max(self.candidates.values(), key=lambda pair: pair[1])[0]

    @cached_property
    def decided(self) -> list[Mix]:
        """The mixes to decide on, the best on the search's images first: all of them; or, with max_decided, the first
        mix and that many of those that may be within the drop, spread evenly over the savings of time."""
        scores = dict(self.candidates.values())
        mixes = list(scores)
        if self.max_decided is not None:
            mixes = self.within(self.slack)
            if len(mixes) > self.max_decided:
                mixes = [mixes[i] for i in np.linspace(len(mixes) - 1, 0, self.max_decided).round().astype(int)]
            mixes = list(dict.fromkeys([*mixes, self.first]))
        return sorted((mix for mix in mixes if mix != self.exact), key=lambda mix: scores[mix], reverse=True)

    def result(self, name: str, mix: Mix) -> StageResult:
        """The mix as a model in a folder of its own."""
        return self.c.result(name, self.c.store(name, lambda: self.mixed(mix)))

    def mixed(self, mix: Mix) -> VisionTransformer:
        """A model with these blocks; the rest is the teacher's."""
        model = make_student(self.c.teacher, self.name(mix), "all", self.c.conversion.seed)
        states = [one.state_dict() for one in self.models]
        for key, value in model.state_dict().items():
            if key.startswith("blocks."):
                state = states[mix[int(key.split(".")[1])]]
                shared = [name for name in state if name.split(".")[2:] == key.split(".")[2:]]
                value.copy_(state[key if key in state else shared[0]])  # what layers share may be in another layer
        return model

    def decide(self, results: Sequence[StageResult]) -> StageResult | None:
        """The fastest of the mixes and of `results`, which are the first mix and the stages trained from it, that is
        shown to stay within max_drop; of several, the most accurate on validation images. None if none is."""
        passed = passing(self.order(results), self.share, self._drop)
        most = max((one.saved for one in passed), default=0.0)
        best = [one for one in passed if one.saved == most]
        if stored := [one.result for one in best if one.result]:
            return max(stored, key=lambda result: (result.accuracy, result.agreement))
        return self.result(OTHER_MIX, best[0].mix) if best else None

    def order(self, results: Sequence[StageResult]) -> list[Choice]:
        """By score on the search's images, the best first. The stages trained from the first mix come before it, the
        last one first, since they should be better."""
        found = []
        for mix in self.decided:
            if mix == self.first:
                trained = reversed(results[1:])
                found += [Choice(f"{one.name}: {one.attention}", mix, self.saved(mix), one) for one in trained]
            stored = results[0] if mix == self.first else None
            found.append(Choice(self.name(mix), mix, self.saved(mix), stored))
        return found

    def _drop(self, candidate: Choice, risk: float) -> Drop:
        """On the images that decide, once."""
        tags = {"model": candidate.name, "mix": mix_tag(candidate.mix)}

        def measured() -> list[Record]:
            drop = Drop.between(self.correct[self.exact], self._correct(candidate))
            counts = {"of": drop.accuracy, "lost": drop.lost, "won": drop.won}
            decided = {"bound": drop.bound(risk), "risk": risk, "passed": drop.within(self.share, risk)}
            return [self.c.record("conversion_drop", drop.value, drop.n, **tags, **decided, **counts)]

        record = self.c.ledger.once(key_of("conversion_drop", **tags), measured)
        accuracy, lost, won = (record.tags[name] or 0 for name in ("of", "lost", "won"))
        return Drop(record.n, float(accuracy), int(lost), int(won))

    @cached_property
    def correct(self) -> dict[Mix, np.ndarray]:
        """The teacher and every mix to decide on → whether it is right, for each image that decides. One pass over the
        images computes all of them."""
        mixes = [self.exact, *self.decided]
        found: list[list[np.ndarray]] = [[] for _ in mixes]
        blocks = self.blocks("decide")
        for i, (labels, outputs) in enumerate(blocks.logits(self.exact, mixes)):
            self.c.progress(i * blocks.batch, len(blocks.split), f"deciding between {len(mixes)} mixes")
            for right, logits in zip(found, outputs, strict=True):
                right.append((logits.argmax(-1) == labels).cpu().numpy())
        return {mix: np.concatenate(right) for mix, right in zip(mixes, found, strict=True)}

    def _correct(self, candidate: Choice) -> np.ndarray:
        result = candidate.result
        if result is None or result.name == FIRST_MIX:
            return self.correct[candidate.mix]
        return self.c.evaluate(result.folder, "decide").predictions == self.c.images.decide.labels
