"""Tuning: `tune("digits", attentions=["softmax", "performer-relu:m=32"])`, the same search for every variant."""

from linvit.tuning.search import Tuning, tune

__all__ = ["Tuning", "tune"]
