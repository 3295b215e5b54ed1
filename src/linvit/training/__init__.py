"""Training: an engine that knows experiments; `linvit.train(…)` is in the pipeline."""
