"""max_drop: mixes of the teacher's and the student's blocks, the search among them, and the decision.

Two sets of images, on neither of which anything was trained. Those of the search find the best mix for each number of
linear layers, and say which of them is trained further. Those that decide are looked at once, at the end: by these
mixes and by what training made of the one, in an order that nothing they say can change, so that all that may be taken
shares one risk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linvit.attention import ATTENTIONS
from linvit.convert.measuring import sizes
from linvit.convert.search import Blocks, Drop, Mix, Score, evaluations, greedy, passing
from linvit.convert.student import linear_layers, student_of
from linvit.models import VisionTransformer
from linvit.records import Record
from linvit.registry import Spec, join_layers
from linvit.train import load

if TYPE_CHECKING:
    from linvit.convert.work import Row, Work

LOCAL = Spec("window", {"size": 7})  # a linear kind that the search tries too, where it is registered
BESIDE = ("dwc", "qk_norm")  # of the teacher's attention, which has weights for them
CHEAPER = 0.98  # of the whole model's work, from which on local softmax is of use
DISCORDANT = 0.1  # share of the images, roughly, of which teacher and a mix may say different things by chance
FIRST, OTHER = "mix", "mix, decided"  # the mix that is trained further, and another that was taken


@dataclass(frozen=True)
class Candidate:
    """What may be taken."""

    name: str
    mix: Mix
    linear: int  # layers
    row: Row | None = None  # None: a mix that has not been made a model yet


def digits(mix: Mix) -> str:
    """A mix in a record: two of one name may differ, where a student keeps softmax in some layers."""
    return "".join(map(str, mix))


class Mixing:
    """The search of one conversion, and its decision."""

    def __init__(self, work: Work, layers: str, student: Path):
        self.work, self.layers, self.student = work, layers, student
        self.exact: Mix = (0,) * work.config.depth
        self.share = work.plan.max_drop or 0.0

    @cached_property
    def local(self) -> VisionTransformer | None:
        """The teacher with local softmax, where there is one, it fits the grid and takes less than all of softmax."""
        work = self.work
        if LOCAL.name not in ATTENTIONS or LOCAL.name in work.plan.to:
            return None
        try:
            found = student_of(work.teacher, join_layers(self.local_specs), "all", work.plan.seed).to(work.device)
        except ValueError:
            return None
        return found if found.macs() < work.teacher.macs() * CHEAPER else None

    @property
    def local_specs(self) -> list[Spec]:
        beside = [{key: old.options[key] for key in BESIDE if key in old.options}
                  for old in self.work.specs(self.work.config.attention)]  # fmt: skip
        return [Spec(LOCAL.name, {**LOCAL.options, **options}) for options in beside]

    @cached_property
    def specs(self) -> list[list[Spec]]:
        """Of each kind, the spec of every layer; the first kind is the teacher's."""
        found = [self.work.specs(self.work.config.attention), self.work.specs(self.layers)]
        return found if self.local is None else [*found, self.local_specs]

    @cached_property
    def models(self) -> list[VisionTransformer]:
        found = [self.work.teacher, load(self.student).to(self.work.device)]
        return found if self.local is None else [*found, self.local]

    def layers_of(self, mix: Mix) -> list[Spec]:
        return [self.specs[kind][i] for i, kind in enumerate(mix)]

    def name(self, mix: Mix) -> str:
        return join_layers(self.layers_of(mix))

    def linear(self, mix: Mix) -> int:
        return linear_layers(self.layers_of(mix))

    def blocks(self, part: str) -> Blocks:
        data = self.work.images.data
        return Blocks(self.models, self.work.images.part(part), data.mean, data.std)

    @cached_property
    def candidates(self) -> dict[int, tuple[Mix, Score]]:
        """The number of linear layers → the best mix that the search found, and its score."""
        work, depth, kinds = self.work, len(self.exact), len(self.specs) - 1
        total, count = evaluations(depth, kinds), len(work.images.search)
        known: dict[str, Score] = {
            str(r.tags["mix"]): Score(-float(r.tags["loss"] or 0), float(r.value or 0))
            for r in work.of("conversion_accuracy", split="search")
        }

        def scores(base: Mix, mixes: Sequence[Mix]) -> list[Score]:
            fresh = [mix for mix in dict.fromkeys(mixes) if digits(mix) not in known]
            if fresh:
                work.progress(len(known), max(total, len(known) + 1), f"search: {self.name(base)}")
                found = self.blocks("search").scores(base, fresh)
                work.keep([self._scored(mix, score) for mix, score in zip(fresh, found, strict=True)])
                known.update({digits(mix): score for mix, score in zip(fresh, found, strict=True)})
            return [known[digits(mix)] for mix in mixes]

        best = scores(self.exact, [self.exact])[0].accuracy
        slack = 2 * math.sqrt(DISCORDANT / count)
        return greedy(depth, kinds, scores, enough=best, useless=best * (1 - self.share) - slack)

    def _scored(self, mix: Mix, score: Score) -> Record:
        work, linear = self.work, self.linear(mix)
        row = replace(work.base, metric="conversion_accuracy", unit="fraction", n=len(work.images.search))
        tags = {"model": self.name(mix), "mix": digits(mix), "split": "search", "linear": linear}
        return replace(row, value=score.accuracy).tagged(**tags, loss=-score.likelihood, **sizes(work.config))

    @cached_property
    def first(self) -> Mix:
        """The most linear that loses no more than is allowed on the images of the search: it is trained further."""
        least = (1 - self.share) * self.candidates[0][1].accuracy  # without a linear layer it is the teacher
        return [mix for mix, score in self.candidates.values() if score.accuracy >= least][-1]

    def row(self, name: str, mix: Mix) -> Row:
        """The mix as a model in a folder of its own, and its line."""
        return self.work.row(name, self.work.write(name, lambda: self.mixed(mix)))

    def mixed(self, mix: Mix) -> VisionTransformer:
        """One model with these blocks; the rest is the teacher's."""
        work = self.work
        model = student_of(work.teacher, self.name(mix), "all", work.plan.seed)
        states = [one.state_dict() for one in self.models]
        for key, value in model.state_dict().items():
            if key.startswith("blocks."):
                there = states[mix[int(key.split(".")[1])]]
                owners = [name for name in there if name.split(".")[2:] == key.split(".")[2:]]
                value.copy_(there[key if key in there else owners[0]])  # what layers share may get another owner
        return model

    def decide(self, rows: Sequence[Row]) -> Row:
        """Of the mixes and of `rows`, the first mix and what training made of it, the most linear that is shown to stay
        within max_drop; of several, the most accurate on validation images. The teacher if none is."""
        passed = passing(self.order(rows), self.share, self._look)
        most = max((one.linear for one in passed), default=0)
        best = [one for one in passed if one.linear == most]
        if made := [one.row for one in best if one.row]:
            return max(made, key=lambda row: (row.accuracy, row.agreement))
        mix = best[0].mix if best else self.exact
        return rows[0] if mix == self.first else self.row(OTHER, mix)

    def order(self, rows: Sequence[Row]) -> list[Candidate]:
        """From the best score on the images of the search; what was trained further, the last stage first, comes before
        the mix that it was made of, which it should be better than."""
        found = []
        for mix, _ in sorted(self.candidates.values(), key=lambda pair: pair[1], reverse=True):
            if mix == self.exact:
                continue
            if mix == self.first:
                found += [Candidate(f"{row.name}: {row.attention}", mix, row.linear, row) for row in reversed(rows[1:])]
            found.append(Candidate(self.name(mix), mix, self.linear(mix), rows[0] if mix == self.first else None))
        return found

    def _look(self, candidate: Candidate, risk: float) -> Drop:
        """On the images that decide, unless it was looked at before."""
        work = self.work
        if found := work.of("conversion_drop", model=candidate.name, mix=digits(candidate.mix)):
            tags = found[-1].tags
            return Drop(found[-1].n, float(tags["of"] or 0), int(tags["lost"] or 0), int(tags["won"] or 0))
        drop = Drop.of(self.rights[self.exact], self._right(candidate))
        row = replace(work.base, metric="conversion_drop", value=drop.value, unit="fraction", n=drop.n)
        work.keep([row.tagged(
            model=candidate.name, mix=digits(candidate.mix), bound=drop.bound(risk), risk=risk, of=drop.accuracy,
            lost=drop.lost, won=drop.won, passed=drop.within(self.share, risk),
        )])  # fmt: skip
        return drop

    @cached_property
    def rights(self) -> dict[Mix, np.ndarray]:
        """The teacher and every mix that the search found → on which images that decide it is right. One pass over the
        images for all: of a mix, only what comes after the teacher's first layers is computed again."""
        mixes = list(dict.fromkeys([self.exact, *(mix for mix, _ in self.candidates.values())]))
        found: list[list[np.ndarray]] = [[] for _ in mixes]
        blocks = self.blocks("decide")
        for i, (labels, every) in enumerate(blocks.logits(self.exact, mixes)):
            self.work.progress(i * blocks.batch, len(blocks.split), f"deciding between {len(mixes)} mixes")
            for right, said in zip(found, every, strict=True):
                right.append((said.argmax(-1) == labels).cpu().numpy())
        return {mix: np.concatenate(right) for mix, right in zip(mixes, found, strict=True)}

    def _right(self, candidate: Candidate) -> np.ndarray:
        row = candidate.row
        if row is None or row.name == FIRST:
            return self.rights[candidate.mix]
        said = self.work.evaluated(self.work.model_folder(row), "decide").predictions
        return said == self.work.images.decide.labels
