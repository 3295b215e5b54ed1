"""In which order studies are worth running at scale cpu, how long each takes, and how noisy it is.

`linvit reproduce --all` runs them in this order: what decides most claims in the shortest time comes first. Minutes are
of one core of an AMD EPYC, as `benchmarks/study_costs.py` estimated them on a busy core, times 0.75, by which its
estimate was too large for a study that had been run. A deviation is that of the difference between two rows over seeds,
in points of accuracy; `studies.power` says what a study can detect with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Planned(NamedTuple):
    minutes: float  # of one core
    deviation: float | None = None  # None: not known, or no accuracies are compared
    source: str = ""  # where it was seen

    @property
    def duration(self) -> str:
        if self.minutes < 100:
            return f"{max(1, round(self.minutes))} core-minute{'s' * (round(self.minutes) > 1)}"
        return f"{self.minutes / 60:.1f} core-hours"


CIFAR = (0.6, "in 000-cifar10, all images, 4 epochs")
SHORT = (1.3, "in 001-I, 10,000 images, 3 epochs")
FACTORIAL = (1.5, "in 002-factorial, 8,000 images, 2 epochs")
DIGITS = (0.13, "in 000-mnist, 10,000 images, 3 epochs")
LONG = (0.34, "in paper-long-1024, 6,000 images, 3 epochs")
PATCHES = (0.73, "in attentions-2026-bare, 15,000 images, 4 epochs")

AGENDA: Mapping[str, Planned] = {
    # computed and measured, on busy cores too
    "002-non-finite": Planned(0.6),
    "paper-fig2": Planned(1),
    "paper-fig4": Planned(10),
    "paper-fig14": Planned(6),
    # speed and memory, on quiet cores
    "001-sizes": Planned(40),
    "000-sizes": Planned(30),
    "002-sizes": Planned(10),
    "paper-fig20-21": Planned(15),
    # accuracy, several claims each
    "000-cifar10": Planned(215, *CIFAR),
    "000-mnist": Planned(75, *DIGITS),
    "002-vit": Planned(42, *CIFAR),
    "000-hybrid": Planned(40, *CIFAR),
    "paper-fig15": Planned(39, *CIFAR),
    "002-exp": Planned(37, *FACTORIAL),
    "002-theta-mixture": Planned(22, *FACTORIAL),
    "001-I": Planned(67, *SHORT),
    "001-II": Planned(97, *SHORT),
    "002-relu": Planned(37, *FACTORIAL),
    "002-cifar100": Planned(23, *FACTORIAL),
    "002-gelu-4": Planned(21, *FACTORIAL),
    "002-gelu-1": Planned(21, *FACTORIAL),
    "002-gelu-2": Planned(21, *FACTORIAL),
    "002-gelu-3": Planned(21, *FACTORIAL),
    "002-factorial": Planned(120, *FACTORIAL),
    "002-elu-4": Planned(80, *FACTORIAL),
    "002-pretraining": Planned(65),
    "paper-fig18": Planned(39),
    "paper-fig6-7": Planned(23),
    "paper-fig6-7-bidirectional": Planned(19),
    "001-V": Planned(207),
    # the attentions made for vision
    "attentions-2026-extras": Planned(300, *PATCHES),
    # printed numbers and figures that no claim needs
    "paper-fig1": Planned(0.2),
    "paper-fig8": Planned(0.2),
    "paper-fig9": Planned(0.2),
    "002-fig5-8": Planned(0.2),
    "paper-fig10-11": Planned(1),
    "paper-fig13": Planned(4),
    "000-fig2": Planned(10),
    "paper-fig3": Planned(20),
    "paper-fig3-models": Planned(15),
    "paper-fig18-bidirectional": Planned(38),
    "paper-fig16-17": Planned(53, *DIGITS),
    "paper-fig5": Planned(43, *CIFAR),
    "002-elu-1": Planned(17, *FACTORIAL),
    "002-elu-2": Planned(17, *FACTORIAL),
    "002-elu-3": Planned(20, *FACTORIAL),
    "002-theta-mlp": Planned(21, *FACTORIAL),
    "002-precision": Planned(24, *FACTORIAL),
    "001-VIII": Planned(22),
    "001-IX": Planned(23),
    "001-III": Planned(53, *SHORT),
    "001-IV": Planned(61, *SHORT),
    "001-VI": Planned(65),
    "001-VII": Planned(77),
    "000-cifar100": Planned(90, *CIFAR),
    "attentions-2026-bare": Planned(215, *PATCHES),
    "paper-long-256": Planned(8, *LONG),
    "paper-long-1024": Planned(48, *LONG),
    "paper-long": Planned(27),
    "paper-fig19": Planned(56),
    "attentions-2026-256": Planned(160, *PATCHES),
    "attentions-2026-tiny": Planned(220),
}
