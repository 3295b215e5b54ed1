"""Conversion: an engine that replaces the attention of a trained model; `linvit.convert(…)` is in the pipeline."""
