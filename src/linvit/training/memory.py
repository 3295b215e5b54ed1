"""Peak memory of one training step with the recipe's own optimizer, in a fresh process."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from linvit.devices import amp_dtype
from linvit.measure.memory import extra_memory, in_fresh_process
from linvit.measure.models import model_calls
from linvit.measure.provenance import provenance
from linvit.models import ModelConfig
from linvit.records import Record
from linvit.schemas.recipe import Recipe
from linvit.training.optimizers import make_optimizer


def peak_memory(
    config: ModelConfig, recipe: Recipe, device: torch.device, batch: int, timeout: float | None = None
) -> Record:
    """Bytes that a model, its optimizer and one step take: on CUDA as allocated, else in a CPU process. A ValueError if
    it takes more than `timeout` seconds."""
    place = device if device.type == "cuda" else torch.device("cpu")
    common = provenance(place, amp_dtype(recipe.amp, place))
    told = {"config": config.model_dump(mode="json"), "recipe": recipe.model_dump(mode="json")}
    told |= {"device": str(place), "batch": batch, "threads": common["threads"]}
    taken = in_fresh_process("linvit.training.memory", told, timeout)
    return Record("peak_memory", taken, "bytes", **common, tags={"batch": batch})


def _peak_here(config: dict[str, Any], recipe: dict[str, Any], device: str, batch: int, threads: int) -> int:
    torch.set_num_threads(threads)
    model, settings, place = ModelConfig(**config), Recipe(**recipe), torch.device(device)

    def step(images: int) -> None:
        dtype = amp_dtype(settings.amp, place)
        model_calls(model, place, images, lambda net: make_optimizer(settings, net), dtype=dtype)["train_step"]()

    step(1)  # libraries take their own memory here
    return extra_memory(lambda: step(batch), place)


if __name__ == "__main__":
    print(json.dumps(_peak_here(**json.loads(sys.argv[1]))))
