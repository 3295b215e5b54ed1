"""The model card beside every model."""

from __future__ import annotations

from typing import Any

from linvit.data import Dataset
from linvit.train.experiment import Experiment


def model_card(experiment: Experiment, dataset: Dataset, facts: dict[str, Any]) -> str:
    config, recipe = experiment.model, experiment.recipe
    shown = dataset.classes[:20]
    more = f" and {len(dataset.classes) - 20} more" if len(dataset.classes) > 20 else ""
    length = f"{recipe.epochs:g} epochs" if recipe.steps is None else f"{recipe.steps} steps"
    numbers = "\n".join(
        f"| {key.replace('_', ' ')} | {_number(value)} |"
        for key, value in facts.items()
        if key not in ("best", "best_row")
    )
    chosen = "Chosen on validation data" if "validation_loss" in facts else "As it was after the last step"
    tested = f"| test images | {len(dataset.test)} |\n" if "test_loss" in facts else ""
    seen = "were seen once" if "test_loss" in facts else "have not been seen"
    kind = "next-pixel model" if config.causal else "vision transformer"
    return f"""# {dataset.name}: {kind} with {config.attention}

| | |
|---|---|
{numbers}
{tested}| seeds | 1 (seed {experiment.seed}) |

Input: {config.channels} × {config.image_size} × {config.image_size}. Classes: {", ".join(shown)}{more}.
Trained for {length} with {recipe.optimizer}, lr {recipe.lr}, batch {recipe.batch_size}.
{chosen}; test data {seen}.

```python
import linvit
model = linvit.load("path/to/this/folder")
```
"""


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
