"""Studies: several variants under one protocol."""

from linvit.study.compare import ATTENTIONS, compare
from linvit.study.design import Study, Variant
from linvit.study.jobs import Job

__all__ = ["ATTENTIONS", "Job", "Study", "Variant", "compare"]
