"""Peak memory of one training step with the recipe's own optimizer, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from linvit.measure.memory import extra_memory
from linvit.measure.models import model_calls
from linvit.measure.provenance import provenance
from linvit.models import ModelConfig
from linvit.records import Record
from linvit.train.optimizers import make_optimizer
from linvit.train.recipe import Recipe


def peak_memory(config: ModelConfig, recipe: Recipe, device: torch.device, batch: int) -> Record:
    """Bytes that a model, its optimizer and one step take: on CUDA as allocated, else in a CPU process."""
    place = device if device.type == "cuda" else torch.device("cpu")
    common = provenance(place, torch.float32)
    call = [sys.executable, "-P", "-m", "linvit.train.memory", config.model_dump_json(), recipe.model_dump_json(),
            str(place), str(batch), str(common["threads"])]  # fmt: skip
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}  # what can be imported here can be there
    try:
        done = subprocess.run(call, env=os.environ | paths, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(str(error)) from None
    if done.returncode:
        why = (done.stderr.strip() or f"its process ended with {done.returncode}").splitlines()[-1]
        raise ValueError(why)
    return Record("peak_memory", int(done.stdout), "bytes", **common, tags={"batch": batch})


def _print_peak(config: ModelConfig, recipe: Recipe, device: torch.device, batch: int) -> None:
    def step(images: int) -> None:
        model_calls(config, device, images, lambda model: make_optimizer(recipe, model))["train_step"]()

    step(1)  # libraries take their own memory here
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step(batch)
        print(torch.cuda.max_memory_allocated(device) - before)
    else:
        print(extra_memory(lambda: step(batch)))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[5]))
    _print_peak(
        ModelConfig.model_validate_json(sys.argv[1]), Recipe.model_validate_json(sys.argv[2]),
        torch.device(sys.argv[3]), int(sys.argv[4]),
    )  # fmt: skip
