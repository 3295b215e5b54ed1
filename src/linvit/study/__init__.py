"""Studies: several experiments under one protocol."""

from linvit.study.compare import ATTENTIONS, StudyEvent, compare

__all__ = ["ATTENTIONS", "StudyEvent", "compare"]
