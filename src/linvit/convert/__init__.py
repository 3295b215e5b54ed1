"""Trained models with another attention: swapped inside their own modules, or offered to other libraries."""

from __future__ import annotations

from linvit.convert.linearize import Linearized, linearize
from linvit.convert.registries import register_transformers, timm_attention

__all__ = ["Linearized", "linearize", "register_transformers", "timm_attention"]
