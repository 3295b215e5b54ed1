"""Checkpoints of a running training, and finished models: folders of plain JSON and safetensors, never pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from linvit.data import Dataset
from linvit.errors import clear
from linvit.files import parse_json, write_atomically
from linvit.models import ModelConfig, VisionTransformer, model_config
from linvit.models.foreign import download, is_foreign, read_foreign
from linvit.models.resize import resized
from linvit.schemas.experiment import TrainedOn
from linvit.schemas.pixels import ImageSize
from linvit.training.files import load_tensors, save_tensors

FORMAT = 1  # of config.json
KEPT = 2  # checkpoints of a running training
FACTS = ("name", "classes", "mean", "std")  # of the data, for whoever uses the model; and resize


def save_checkpoint(
    folder: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, facts: dict[str, Any]
) -> None:
    """Everything a run needs to go on from facts["step"], in one file; the two newest are kept, and none from after
    that step: those were damaged, or the run would have gone on from them."""
    step = facts["step"]
    tensors = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": v for key, v in state.items() if isinstance(v, Tensor)}
    save_tensors(folder / f"step-{step:09d}.safetensors", tensors, **facts)
    others = sorted(folder.glob("step-*.safetensors"), reverse=True)
    here = next(i for i, path in enumerate(others) if path.name == f"step-{step:09d}.safetensors")
    for path in others[:here] + others[here + KEPT :]:
        path.unlink()


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
        try:
            for name, module in modules.items():
                module.load_state_dict(_below(name, tensors))
        except RuntimeError as error:
            why = str(error).splitlines()[-1].strip()
            raise ValueError(f"{path} does not fit its experiment ({why}): delete {folder} to start again") from None
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in _below("optimizer", tensors).items():
            index, _, field = key.partition(".")
            state.setdefault(int(index), {})[field] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return facts, complaints
    if complaints:
        raise ValueError(f"no checkpoint is whole: {complaints[0]}; delete {folder} to start again")
    return None


def _below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


def save_model(folder: Path, model: VisionTransformer, **facts: Any) -> None:
    """model.safetensors by one rename, so that the folder always holds a whole model."""
    save_tensors(folder / "model.safetensors", model.state_dict(), **facts)


def save_config(folder: Path, config: ModelConfig, dataset: Dataset) -> None:
    save_about(folder, config, {fact: getattr(dataset, fact) for fact in (*FACTS, "resize")})


def save_about(folder: Path, config: ModelConfig, data: Mapping[str, Any]) -> None:
    """config.json; data: FACTS, and resize."""
    about = {"format": FORMAT, "model": config.model_dump(mode="json"), "data": dict(data)}
    write_atomically(folder / "config.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a linvit model at or below `path` (a run's folder means its best model) and its config.json."""
    folder, about = _opened(Path(path))
    try:
        if about["format"] != FORMAT or not isinstance(about["model"], dict):
            raise KeyError("format")
        about["data"] = TrainedOn.model_validate(about["data"]).model_dump(exclude_none=True)
    except (KeyError, TypeError, ValidationError) as error:
        why = clear(error, "data") if isinstance(error, ValidationError) else repr(error)
        raise ValueError(f"{folder / 'config.json'} is not a linvit model's configuration ({why})") from None
    return folder, about


def _opened(folder: Path) -> tuple[Path, Any]:
    """A model's folder and its config.json, whoever wrote it."""
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: give the folder of a run or of a model (…/best)")
    if folder.is_file():
        if folder.name not in ("model.safetensors", "model.safetensors.index.json", "config.json"):
            raise ValueError(f"{folder} is a file: give the folder that holds config.json and model.safetensors")
        folder = folder.parent
    if not (folder / "config.json").exists() and (folder / "best" / "config.json").exists():
        folder = folder / "best"
    try:
        return folder, parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no model: config.json is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read ({error!r})") from None


@dataclass(frozen=True)
class Stored:
    """A trained model as it lies in a folder: what rebuilds it, what it was trained on, and its weights, which are read
    when they are asked for."""

    folder: Path
    config: ModelConfig
    about: dict[str, Any]  # FACTS
    read: Callable[[], dict[str, Tensor]]
    foreign: bool = False  # from elsewhere: what it was trained on is not known
    antialias: bool = True  # how its positions are interpolated

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return self.read()

    def tensors_at(self, image_size: ImageSize, patch_size: int | None = None) -> dict[str, Tensor]:
        """The weights for images or patches of another size."""
        return resized(self.tensors, self.config, image_size, patch_size, self.antialias)


def on_hub(path: str | Path) -> bool:
    """Whether this names a model of the Hugging Face hub, `org/name`, and nothing here."""
    there = Path(path).exists() or Path(path).parent.exists()
    return not there and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) is not None


def read_model(path: str | Path, weights: bool = True) -> Stored:
    """The model of a folder, not built yet: linvit's own, or one of Hugging Face's, timm's or torchvision's layout. A
    model of the hub is named by its id, `org/name`. weights: whether they must be there, to be read later."""
    name = str(path) if on_hub(path) else ""
    folder, about = _opened(download(name) if name else Path(path))
    if is_foreign(about):
        config, known, read, antialias = read_foreign(folder, about, name or folder.resolve().name)
        return Stored(folder, config, known, read, foreign=True, antialias=antialias)
    folder, about = read_config(folder)
    if weights and not (folder / "model.safetensors").exists():
        raise ValueError(f"{folder} holds no model yet: its training has not finished an epoch")
    try:
        config = model_config(**about["model"])
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    for what in ("mean", "std"):
        if len(values := about["data"][what]) != config.channels:
            raise ValueError(
                f"{folder / 'config.json'}: {what} has {len(values)} values for {config.channels} channels"
            )
    return Stored(folder, config, about["data"], lambda: load_tensors(folder / "model.safetensors")[0])


def load(path: str | Path, image_size: int | str | tuple[int, int] | None = None) -> VisionTransformer:
    """The trained model of a folder, in evaluation mode. `model.about` has its classes, and `mean` and `std`, by
    which its images are normalised (`linvit.data.normalise`).

    The folder is linvit's, or config.json and safetensors of a ViT of transformers, timm or torchvision; or it is a
    model's id on the Hugging Face hub. image_size: another one, e.g. 224 or (224, 320), to which positions are
    interpolated."""
    stored = read_model(path)
    if image_size is None:
        return built(stored)
    changed: dict[str, Any] = stored.config.model_dump() | {"image_size": image_size}
    config = model_config(**changed)
    return built(replace(stored, config=config), stored.tensors_at(config.image_size))


def built(
    stored: Stored, tensors: Mapping[str, Tensor] | None = None, model: VisionTransformer | None = None
) -> VisionTransformer:
    """The model, with its own weights or with others; or one of the same shape, filled with them."""
    return _filled(model or VisionTransformer(stored.config), stored, tensors)


def load_into(model: VisionTransformer, path: str | Path) -> VisionTransformer:
    """`load` without building: a model of the same shape takes the weights, whatever it held before."""
    stored = read_model(path)
    model.reseed(stored.config.seed)
    return _filled(model, stored)


def _filled(model: VisionTransformer, stored: Stored, tensors: Mapping[str, Tensor] | None = None) -> VisionTransformer:
    try:
        model.load_state_dict(stored.tensors if tensors is None else tensors)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise ValueError(f"{stored.folder / 'model.safetensors'} does not fit its config.json: {first}") from None
    model.about = stored.about
    return model.eval()
