"""Merit: what the variants of a study are compared by, and how it is worded.

A higher score is better, so bits count as negative. Margins, gains and differences are those of scores: 0.01 is
a point of accuracy, or a hundredth of a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from linvit.metrics import METRICS


@dataclass(frozen=True)
class Merit:
    metric: str  # of the test images
    half: str  # the same after half of the steps
    title: str
    best: str  # the verdict of the best variant
    more: str  # what one that is better is
    unit: str  # of differences
    scale: float  # how many of these units a score of one is
    digits: int
    says: str  # a variant's number, with what it is
    form: str  # of numbers on axes
    curve: tuple[str, str, str, str]  # the learning curve: key of the log, title, axis, form

    @property
    def noun(self) -> str:
        return self.title.removeprefix("Test ").lower()

    @property
    def sign(self) -> int:
        """By which a number becomes a score, and a score a number."""
        return METRICS[self.metric].better

    def show(self, value: float | None) -> str:
        return METRICS[self.metric].show(value)

    def amount(self, difference: float) -> str:
        """`1 point`, `0.01 bits`."""
        value = self.scale * difference
        return f"1 {self.unit.removesuffix('s')}" if round(value, 9) == 1 else f"{value:.3g} {self.unit}"

    def within(self, margin: float) -> str:
        return f"within {self.amount(margin)}"

    def plain(self, difference: float) -> str:
        """Without its unit."""
        return f"{self.scale * difference:.{self.digits}f}".replace("-", "−")

    def signed(self, difference: float) -> str:
        return f"{self.scale * difference:+.{self.digits}f}".replace("-", "−")


ACCURACY = Merit(
    metric="test_accuracy",
    half="half_accuracy",
    title="Test accuracy",
    best="most accurate",
    more="more accurate",
    unit="points",
    scale=100,
    digits=1,
    says="test accuracy {}",
    form="~%",
    curve=("validation_accuracy", "Validation accuracy", "Images right", "~%"),
)
PRECISION = Merit(
    metric="mean_average_precision",
    half="half_mean_average_precision",
    title="Mean average precision",
    best="most precise",
    more="more precise",
    unit="points",
    scale=100,
    digits=1,
    says="mean average precision {}",
    form="~%",
    curve=("validation_mean_average_precision", "Validation mean average precision", "Mean average precision", "~%"),
)
BITS = Merit(
    metric="bits_per_dim",
    half="half_bits_per_dim",
    title="Bits per dimension",
    best="fewest bits",
    more="better",
    unit="bits",
    scale=1,
    digits=3,
    says="{} per dimension of the test images",
    form="~r",
    curve=("validation_bits_per_dim", "Validation bits per dimension", "Bits per dimension", "~r"),
)
