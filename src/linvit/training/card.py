"""Model cards: the README next to every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linvit.data import Dataset
from linvit.schemas.experiment import Experiment


def model_card(experiment: Experiment, dataset: Dataset, facts: dict[str, Any]) -> str:
    """Of a training, with what is stored next to its weights and, if it was tested, how that went."""
    config, recipe, tested = experiment.model, experiment.recipe, "test_loss" in facts
    shown = dataset.classes[:20]
    more = f" and {len(dataset.classes) - 20} more" if len(dataset.classes) > 20 else ""
    length = f"{recipe.epochs:g} epochs" if recipe.steps is None else f"{recipe.steps} steps"
    table = {key.replace("_", " "): value for key, value in facts.items() if key not in ("best", "best_row")}
    table |= {"test images": len(dataset.test)} if tested else {}
    chosen = "Chosen on validation data" if "validation_loss" in facts else "After the last step"
    kind = f"{config.stem} model" if config.pixels else "vision transformer"
    return card(
        f"{dataset.name}: {kind} with {config.attention}",
        table | {"seeds": f"1 (seed {experiment.seed})"},
        f"Input: {' × '.join(map(str, config.image_shape))}. Classes: {', '.join(shown)}{more}.\n"
        f"Trained for {length} with {recipe.optimizer}, lr {recipe.lr}, batch {recipe.batch_size}.\n"
        f"{chosen}; test data {'were used once' if tested else 'have not been used'}.",
    )


def card(title: str, table: Mapping[str, Any], text: str) -> str:
    rows = "\n".join(f"| {name} | {_number(value)} |" for name, value in table.items())
    return f"""# {title}

| | |
|---|---|
{rows}

{text}

```python
import linvit
model = linvit.load("path/to/this/folder")
```
"""


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
