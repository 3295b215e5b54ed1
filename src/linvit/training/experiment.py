"""Experiments in their folders: which files are theirs, and the record that all their records are made from."""

from __future__ import annotations

from pathlib import Path

import torch

from linvit import ranks
from linvit.devices import amp_dtype
from linvit.locks import claim_folder
from linvit.measure.provenance import provenance
from linvit.records import Record
from linvit.schemas.experiment import Experiment

OURS = ("log.jsonl", "records.jsonl", "confusion.json", "best", "last")  # what a run writes into its folder


def claim(experiment: Experiment, folder: Path) -> None:
    """Write experiment.json, or make sure that the folder holds this experiment."""
    stored = claim_folder(experiment.path(folder), experiment, OURS)
    wanted = experiment
    if stored is not None and experiment.source is None:
        wanted = experiment.model_copy(update={"source": stored.source})
    if wanted != stored:
        wanted.save(folder)


def record_of(experiment: Experiment, device: torch.device) -> Record:
    """A record without a value, which says where and of what others are."""
    tags = {"attention": experiment.model.attention, "dataset": experiment.data.name, "seed": experiment.seed}
    found = provenance(device, amp_dtype(experiment.recipe.amp, device))
    found["threads"] *= ranks.count()  # of all processes that train it
    return Record("", None, experiment=experiment.id, **found, tags=tags)
