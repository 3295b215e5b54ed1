"""Studies: several variants under one protocol."""

from linvit.schemas.study import Study, Variant
from linvit.study.compare import Comparison, compare
from linvit.study.jobs import StudyJob

__all__ = ["Comparison", "Study", "StudyJob", "Variant", "compare"]
