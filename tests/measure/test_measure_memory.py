from __future__ import annotations

import sys

import pytest
import torch

from linvit.measure.memory import extra_memory
from linvit.models import model_config
from linvit.train.memory import peak_memory
from linvit.train.recipe import create_recipe

MB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is the process's own, from its start")
@pytest.mark.parametrize("freed", [0, 200])
def test_memory_that_was_used_before_counts_again(freed):
    """In pieces, which an allocator keeps when they are freed."""
    for _ in range(2):
        pieces = [torch.ones(16 * 1024) for _ in range(freed * 16)]
        del pieces
    found = extra_memory(lambda: [torch.ones(16 * 1024) for _ in range(100 * 16)])
    assert 95 * MB < found < 125 * MB


def test_a_training_step_is_measured_in_a_process_of_its_own():
    shape = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2, "dim": 64, "depth": 2, "heads": 2}
    few, many = (peak_memory(model_config(**shape), create_recipe(), torch.device("cpu"), n) for n in (64, 512))
    assert 4 * MB < few.value < many.value
    assert many.tags == {"batch": 512}


def test_a_process_that_fails_says_why():
    shape = {"image_size": 8, "channels": 1, "classes": 3, "patch_size": 2}
    with pytest.raises(ValueError, match="negative dimension"):
        peak_memory(model_config(**shape), create_recipe(), torch.device("cpu"), -3)
