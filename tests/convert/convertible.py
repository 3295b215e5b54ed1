"""A conversion in a process that can be killed. A fork server imports this once."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
from traces import die_at

from linvit.attention import attention_names
from linvit.data import DATASETS, FORMATS
from linvit.pipeline.convert import convert as convert_model
from linvit.records import commit

torch.set_num_threads(1)
DATASETS.names(), FORMATS.names(), attention_names(), commit()


def convert(teacher: str, out: str, kill_at: int | None, options: dict[str, Any]) -> None:
    """kill_at: the number of the durable change (a write, rename or removal) at which the process dies."""
    die_at(kill_at)
    convert_model(teacher, out=out, device="cpu", checkpoint_seconds=0.0, **options)
