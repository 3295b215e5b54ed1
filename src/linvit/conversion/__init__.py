"""Conversion: an engine that makes the attention of a trained model linear; `linvit.convert(…)` is in the pipeline."""
