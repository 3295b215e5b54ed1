"""Three sentences that say what a reader should believe now, counted from the tests of all claims."""

from __future__ import annotations

from collections.abc import Sequence

from linvit.report.comparison import LEVEL
from linvit.report.statistics import holm
from linvit.studies.declaration import all_published
from linvit.studies.hypotheses import Part, Verdict
from linvit.studies.mistakes import flagged


def beliefs(verdicts: Sequence[Verdict]) -> list[str]:
    """Of accuracy, of cost, and of the reports' own words."""
    parts = {part.what: part for verdict in verdicts for part in verdict.parts}.values()  # some claims share tests
    accuracy, cost = _accuracy([p for p in parts if p.topic == "accuracy"]), _cost(list(parts))
    denied = sum(bool(verdict.claim.contradicted) for verdict in verdicts)
    said = (
        f"Reports: {denied} of {len(verdicts)} claims are contradicted by what the same report prints, and "
        f"{flagged('sequence length 1')} of the {sum(map(len, all_published().values()))} published numbers are of "
        "models with one token, whose attention returns v: they say nothing about kernels."
    )
    return [accuracy, cost, said]


def _counts(parts: Sequence[Part]) -> tuple[int, int, int]:
    """Tests that were run, and those that show the statement or its contrary, corrected for their number."""
    ran = [part for part in parts if part.ran]
    holds, fails = ([p <= LEVEL for p in holm([getattr(part, side) for part in ran])] for side in ("holds", "fails"))
    return len(ran), sum(holds), sum(fails)


def _accuracy(parts: Sequence[Part]) -> str:
    ran, near, behind = _counts(parts)
    if not ran:
        return f"Accuracy: none of {len(parts)} comparisons of a Performer with a Transformer has been run yet."
    belief = {
        (False, False): "whether Performers are as accurate as Transformers is undecided",
        (True, False): "wherever it is decided, a Performer loses less than the margin to the Transformer",
        (False, True): "wherever it is decided, a Performer loses more than the margin to the Transformer",
        (True, True): "some Performers lose less than the margin to the Transformer, others more",
    }[near > 0, behind > 0]
    rest = ran - near - behind
    return (
        f"Accuracy: {belief} ({near} of {ran} comparisons show a loss below the margin, {behind} a larger one, {rest} "
        f"neither; {len(parts)} are planned)."
    )


def _cost(parts: Sequence[Part]) -> str:
    said = []
    for topic, more, less in (
        ("training", "trains faster than softmax", "more slowly"),
        ("inference", "infers faster", "more slowly"),
        ("memory", "takes less memory", "more"),
    ):
        ran, better, worse = _counts([part for part in parts if part.topic == topic])
        if ran:
            said.append(f"{more} in {better} of {ran} comparisons and {less} in {worse}")
    if not said:
        return "Cost: nothing has been measured at the reports' own sizes yet."
    return f"Cost: at the reports' own sizes a Performer {', '.join(said)}."
