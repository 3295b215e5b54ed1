"""Tensors in files that carry their own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from linvit.files import parse_json, write_atomically


def save_tensors(path: Path, tensors: Mapping[str, Tensor], **facts: Any) -> None:
    """One safetensors file that carries its own checksum and facts, in its only metadata entry (more would be written
    in random order, and equal weights should be equal bytes)."""
    tensors = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    seals = {"sha256": checksum(tensors), "facts_sha256": _checksum_of(facts)}
    write_atomically(path, save(tensors, {"linvit": json.dumps(facts | seals, sort_keys=True)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts; a ValueError that names the file if it is not whole."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
            facts = parse_json((file.metadata() or {}).get("linvit", "{}"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    sums = facts.pop("sha256", None), facts.pop("facts_sha256", None)
    found = checksum(tensors), _checksum_of(facts)
    if any(wanted not in (None, have) for wanted, have in zip(sums, found, strict=True)):
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    return tensors, facts


def _checksum_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and values."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
