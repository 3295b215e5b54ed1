"""Checkpoints of a running training, and finished models: folders of plain JSON and safetensors, never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.data import Dataset
from linvit.models import ModelConfig, VisionTransformer, model_config
from linvit.train.files import load_tensors, save_tensors, write_atomically

KEPT = 2  # checkpoints of a running training


def save_checkpoint(
    folder: Path, step: int, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, facts: dict[str, Any]
) -> None:
    """Everything a run needs to go on from `step`, in one file; the two newest are kept."""
    tensors = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": v for key, v in state.items() if isinstance(v, Tensor)}
    save_tensors(folder / f"step-{step:09d}.safetensors", tensors, step=step, **facts)
    for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT]:
        old.unlink()


def load_checkpoint(
    folder: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[str]] | None:
    """The facts of the newest whole checkpoint, its weights put in place, and complaints about damaged ones."""
    complaints: list[str] = []
    for path in sorted(folder.glob("step-*.safetensors"), reverse=True):
        try:
            tensors, facts = load_tensors(path)
        except ValueError as error:
            complaints.append(str(error))
            continue
        for name, module in modules.items():
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            module.load_state_dict(own)
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, index, field = key.split(".")
                state.setdefault(int(index), {})[field] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return facts, complaints
    if complaints:
        raise ValueError(f"no checkpoint is whole: {complaints[0]}; delete {folder} to start again")
    return None


def save_model(folder: Path, model: VisionTransformer, **facts: Any) -> None:
    """model.safetensors by one rename, so that the folder always holds a whole model."""
    save_tensors(folder / "model.safetensors", model.state_dict(), **facts)


def save_config(folder: Path, config: ModelConfig, dataset: Dataset) -> None:
    about = {
        "format": 1,
        "model": config.model_dump(mode="json"),
        "data": {
            "name": dataset.name,
            "classes": dataset.classes,
            "mean": list(dataset.mean),
            "std": list(dataset.std),
        },
    }
    write_atomically(folder / "config.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The model folder at or below `path` (a run's folder means its best model) and its config.json."""
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: give the folder of a run or of a model (…/best)")
    if not (folder / "config.json").exists() and (folder / "best" / "config.json").exists():
        folder = folder / "best"
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if about["format"] != 1 or not isinstance(about["model"], dict) or not isinstance(about["data"], dict):
            raise KeyError("format")
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no model: config.json is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a linvit model's configuration ({error!r})") from None
    return folder, about


def load(path: str | Path) -> VisionTransformer:
    """The trained model of a folder, in evaluation mode; its classes and statistics are in `model.about`."""
    folder, about = read_config(path)
    model = VisionTransformer(model_config(**about["model"]))
    tensors, _ = load_tensors(folder / "model.safetensors")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise ValueError(f"{folder / 'model.safetensors'} does not fit its config.json: {first}") from None
    model.about = about["data"]
    return model.eval()
