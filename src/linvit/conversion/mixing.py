"""max_drop: mixes of the teacher's and the student's blocks, the search among them, and the decision.

Two sets of images are used, on neither of which anything was trained. The images of the search find the best mix for
each number of linear layers, and the one of them that is trained further. The images of the decision are read once, at
the end, for these mixes and for the stages trained from one of them, in an order that does not depend on them. So all
candidates share one risk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from linvit.conversion.context import Context, StageResult, sizes
from linvit.conversion.search import Blocks, Drop, Mix, MixScore, evaluations, greedy, passing
from linvit.conversion.student import linear_layers, make_student
from linvit.ledger import key_of
from linvit.models import VisionTransformer
from linvit.records import Record, Tag
from linvit.registry import Spec, join_layers, parse_layers
from linvit.training.checkpoint import load

LOCAL = Spec("window", {"size": 7})  # local softmax: a linear kind that the search tries as well
KEPT_OPTIONS = ("dwc", "qk_norm", "rope", "gate", "cpe")  # of the teacher's attention, which has weights for them
MAX_LOCAL_COST = 0.98  # of the teacher's multiply–accumulates; above, local softmax is not worth trying
DISCORDANT = 0.1  # fraction of the images, roughly, on which teacher and a mix may differ by chance
FIRST_MIX, OTHER_MIX = "mix", "mix, decided"  # the mix that is trained further, and another one that was chosen


@dataclass(frozen=True)
class Candidate:
    """What the decision may choose."""

    name: str
    mix: Mix
    linear: int  # layers
    result: StageResult | None = None  # None: a mix that is not stored as a model yet


def mix_tag(mix: Mix) -> str:
    """A mix in a record: its spec alone is ambiguous where the teacher has the student's attention in some layers."""
    return "".join(map(str, mix))


class LayerSearch:
    """The search of one conversion, and its decision."""

    def __init__(self, c: Context, layers: str, student: Path):
        self.c, self.layers, self.student = c, layers, student
        self.exact: Mix = (0,) * c.config.depth
        self.share = c.conversion.max_drop or 0.0

    @cached_property
    def local(self) -> VisionTransformer | None:
        """The teacher with local softmax, if that fits the grid and is cheaper."""
        c = self.c
        if any(spec.name == LOCAL.name for spec in parse_layers(c.conversion.to, c.config.depth)):
            return None
        try:
            model = make_student(c.teacher, join_layers(self.local_specs), "all", c.conversion.seed).to(c.device)
        except ValueError:
            return None
        return model if model.macs() < c.teacher.macs() * MAX_LOCAL_COST else None

    @property
    def local_specs(self) -> list[Spec]:
        old = [spec.options for spec in self.c.specs(self.c.config.attention)]
        kept = [{name: options[name] for name in KEPT_OPTIONS if name in options} for options in old]
        return [Spec(LOCAL.name, {**LOCAL.options, **options}) for options in kept]

    @cached_property
    def specs(self) -> list[list[Spec]]:
        """Of each kind, the spec of every layer; the teacher is the first kind."""
        found = [self.c.specs(self.c.config.attention), self.c.specs(self.layers)]
        return found if self.local is None else [*found, self.local_specs]

    @cached_property
    def models(self) -> list[VisionTransformer]:
        found = [self.c.teacher, load(self.student).to(self.c.device)]
        return found if self.local is None else [*found, self.local]

    def name(self, mix: Mix) -> str:
        return join_layers([self.specs[kind][i] for i, kind in enumerate(mix)])

    def linear(self, mix: Mix) -> int:
        return linear_layers([self.specs[kind][i] for i, kind in enumerate(mix)])

    def blocks(self, split: str) -> Blocks:
        data = self.c.images.dataset
        return Blocks(self.models, self.c.images.split(split), data.mean, data.std)

    @cached_property
    def candidates(self) -> dict[int, tuple[Mix, MixScore]]:
        """The number of linear layers → the best mix that the search found, and its score."""
        best = self.scores(self.exact, [self.exact])[0].accuracy
        slack = 2 * math.sqrt(DISCORDANT / len(self.c.images.search))
        return greedy(*self._shape, self.scores, enough=best, useless=best * (1 - self.share) - slack)

    def scores(self, base: Mix, mixes: Sequence[Mix]) -> list[MixScore]:
        """Of mixes that differ from the base in one layer; each mix is scored once."""
        ledger, keys = self.c.ledger, {mix: key_of("conversion_accuracy", **self._score_tags(mix)) for mix in mixes}
        new = [mix for mix, key in keys.items() if ledger.done(key) is None]
        if new:
            done, total = len(ledger.find("conversion_accuracy", split="search")), evaluations(*self._shape)
            self.c.progress(done, max(total, done + 1), f"search: {self.name(base)}")
            found = self.blocks("search").scores(base, new)
            ledger.append([self._score_record(mix, score) for mix, score in zip(new, found, strict=True)])
        records = [ledger.done(keys[mix]) for mix in mixes]
        return [MixScore(-float(r.tags["loss"] or 0), float(r.value or 0)) for r in records if r is not None]

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.exact), len(self.specs) - 1  # layers, linear kinds

    def _score_tags(self, mix: Mix) -> dict[str, Tag]:
        return {"model": self.name(mix), "mix": mix_tag(mix), "split": "search", **sizes(self.c.config)}

    def _score_record(self, mix: Mix, score: MixScore) -> Record:
        tags = self._score_tags(mix) | {"linear": self.linear(mix), "loss": -score.likelihood}
        return self.c.record("conversion_accuracy", score.accuracy, len(self.c.images.search), **tags)

    @cached_property
    def first(self) -> Mix:
        """The most linear mix that loses at most the allowed share on the search's images; it is trained further."""
        least = (1 - self.share) * self.candidates[0][1].accuracy  # without a linear layer it is the teacher
        return [mix for mix, score in self.candidates.values() if score.accuracy >= least][-1]

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

    def decide(self, results: Sequence[StageResult]) -> StageResult:
        """Of the mixes and of `results`, the first mix and the stages trained from it: the most linear one that is
        proved to stay within max_drop; of several, the most accurate on validation images. The teacher if none is."""
        passed = passing(self.order(results), self.share, self._drop)
        most = max((one.linear for one in passed), default=0)
        best = [one for one in passed if one.linear == most]
        if stored := [one.result for one in best if one.result]:
            return max(stored, key=lambda result: (result.accuracy, result.agreement))
        mix = best[0].mix if best else self.exact
        return results[0] if mix == self.first else self.result(OTHER_MIX, mix)

    def order(self, results: Sequence[StageResult]) -> list[Candidate]:
        """By score on the search's images, the best first. Stages trained from the first mix, the last one first, come
        before that mix, since they should be better."""
        found = []
        for mix, _ in sorted(self.candidates.values(), key=lambda pair: pair[1], reverse=True):
            if mix == self.exact:
                continue
            if mix == self.first:
                trained = reversed(results[1:])
                found += [Candidate(f"{one.name}: {one.attention}", mix, one.linear, one) for one in trained]
            stored = results[0] if mix == self.first else None
            found.append(Candidate(self.name(mix), mix, self.linear(mix), stored))
        return found

    def _drop(self, candidate: Candidate, risk: float) -> Drop:
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
        """The teacher and every mix that the search found → whether it is right, for each image that decides. One pass
        over the images computes all of them."""
        mixes = list(dict.fromkeys([self.exact, *(mix for mix, _ in self.candidates.values())]))
        found: list[list[np.ndarray]] = [[] for _ in mixes]
        blocks = self.blocks("decide")
        for i, (labels, outputs) in enumerate(blocks.logits(self.exact, mixes)):
            self.c.progress(i * blocks.batch, len(blocks.split), f"deciding between {len(mixes)} mixes")
            for right, logits in zip(found, outputs, strict=True):
                right.append((logits.argmax(-1) == labels).cpu().numpy())
        return {mix: np.concatenate(right) for mix, right in zip(mixes, found, strict=True)}

    def _correct(self, candidate: Candidate) -> np.ndarray:
        result = candidate.result
        if result is None or result.name == FIRST_MIX:
            return self.correct[candidate.mix]
        return self.c.evaluate(result.folder, "decide").predictions == self.c.images.decide.labels
