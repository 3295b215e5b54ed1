"""Models on the Hugging Face hub: published from a folder, and as a class with `from_pretrained` and `push_to_hub`.

    from linvit.training.hub import HubModel
    model = HubModel.from_pretrained("org/name")     # of the hub, or a folder; weights are safetensors, never pickle
    model.push_to_hub("org/other")

It needs `pip install 'linvit[hf]'`. The hub's address and token are huggingface_hub's: HF_ENDPOINT, `hf auth login`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linvit.ledger import Ledger
from linvit.models import VisionTransformer
from linvit.registry import parse_layers
from linvit.schemas.model import ModelConfig
from linvit.training.card import card
from linvit.training.checkpoint import Stored, built, read_config, read_model, save_about, save_model

try:
    from huggingface_hub import (
        CommitOperationAdd,
        EvalResult,
        HfApi,
        ModelCard,
        ModelCardData,
        PyTorchModelHubMixin,
        snapshot_download,
    )
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
    )
except ImportError:
    raise ValueError("the hub needs huggingface_hub: pip install 'linvit[hf]'") from None

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FILES = ("config.json", "model.safetensors")
TESTED = {  # metric → tags of the one that counts, and the hub's name of its kind
    "test_accuracy": ({"selection": "best"}, "accuracy"),
    "balanced_accuracy": ({"selection": "best"}, "balanced_accuracy"),
    "mean_average_precision": ({"selection": "best"}, "mean_average_precision"),
    "bits_per_dim": ({"selection": "best"}, "bits_per_dim"),
    "conversion_accuracy": ({"model": "student", "split": "test"}, "accuracy"),
}


class HubModel(VisionTransformer, PyTorchModelHubMixin, library_name="linvit", tags=["linear-attention"]):
    """A linvit model with the hub's methods: `from_pretrained`, `save_pretrained`, `push_to_hub`."""

    source: Path | None = None  # the folder it was read from, whose records tell how good it is

    def __init__(self, config: ModelConfig):
        super().__init__(config)

    @classmethod
    def of(cls, stored: Stored) -> HubModel:
        """The model of a folder, or of the hub, as `read_model` finds it."""
        model = cls(stored.config)
        built(stored, model=model)
        model.source = stored.folder
        return model

    @classmethod
    def _from_pretrained(cls, *, model_id: str, local_files_only: bool = False, **options: Any) -> HubModel:
        """Weights and configuration are read as `linvit.load` reads them; `pytorch_model.bin` is never looked for."""
        folder = Path(model_id)
        if not folder.is_dir():
            known = {name: options.get(name) for name in ("revision", "cache_dir", "force_download", "token")}
            folder = Path(
                snapshot_download(model_id, local_files_only=local_files_only, allow_patterns=[*FILES], **known)  # type: ignore[arg-type]
            )
        return cls.of(read_model(folder))

    def _save_pretrained(self, save_directory: Path) -> None:
        save_model(save_directory, self)
        save_about(save_directory, self.config, self.about)

    def generate_model_card(self, **details: Any) -> ModelCard:
        """details: `license`, and `name` on the hub."""
        title = f"{self.about.get('name', 'linvit')}: vision transformer with {self.config.attention}"
        shape = " × ".join(map(str, self.config.image_shape))
        text = card(title, {"parameters": self.parameter_count()}, f"Input: {shape}.")
        return _card(text, self.config, self.about, self.source, **details)


def results(folder: Path, data: str, stem: str) -> list[EvalResult]:
    """What the records next to a model say of its test images."""
    home = folder.parent if folder.name in ("best", "last") else folder
    ledger, found = Ledger(home / "records.jsonl"), []
    for metric, (tags, kind) in TESTED.items() if folder.name != "last" else ():
        record = ledger.last(metric, **tags)  # type: ignore[arg-type]
        if record is not None and record.value is not None and math.isfinite(record.value):
            found.append(
                EvalResult(
                    task_type=_pipeline(stem),
                    dataset_type=re.sub(r"[^\w.-]+", "-", data).strip("-") or "images",
                    dataset_name=data,
                    dataset_split="test",
                    metric_type=kind,
                    metric_name=f"{metric.removeprefix('conversion_').replace('_', ' ')}, {record.n:,} images",
                    metric_value=record.value,
                )
            )
    return found


def _pipeline(stem: str) -> str:
    kinds = {"next-pixel": "unconditional-image-generation", "masked-pixel": "image-to-image"}
    return kinds.get(stem, "image-classification")


def _card(
    text: str,
    config: ModelConfig,
    about: dict[str, Any],
    folder: Path | None,
    license: str | None = None,
    name: str = "org/name",
) -> ModelCard:
    """The text under the metadata that the hub searches by: library, task, and results as its model-index."""
    data = str(about.get("name", "images"))
    tested = results(folder, data, config.stem) if folder is not None else []
    attentions = {str(layer).partition(":")[0] for layer in parse_layers(config.attention, config.depth)}
    metadata = ModelCardData(
        library_name="linvit",
        pipeline_tag=_pipeline(config.stem),
        tags=["linear-attention", "vision-transformer", *sorted(attentions)],
        license=license,
        model_name=f"{data}: {config.attention}" if tested else None,
        eval_results=tested or None,
        metrics=sorted({result.metric_type for result in tested}) or None,
    )
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text.replace('path/to/this/folder', name)}")


def contents(folder: str | Path, name: str, license: str | None = None, page: bool = False) -> dict[str, Path | bytes]:
    """What publishing a folder's model uploads: path on the hub → file or content."""
    if not NAME.fullmatch(name):
        raise ValueError(f"'{name}' is not a name on the hub: give org/name")
    home, about = read_config(folder)
    stored = read_model(home)
    readme = home / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else card(stored.about["name"], {}, "")
    files: dict[str, Path | bytes] = {file: home / file for file in FILES}
    whole = _card(text, stored.config, about["data"], home, license=license, name=name)
    files["README.md"] = str(whole).encode()
    if page:
        if (report := page_of(home)) is None:
            raise ValueError(f"{home}: neither the run nor its study has a report.html: publish without --page")
        files["report.html"] = report
    return files


def page_of(folder: Path) -> Path | None:
    """The page of the run, or of the study that it belongs to."""
    home = folder.parent if folder.name in ("best", "last") else folder
    for place in (home, *list(home.parents)[:3]):
        if (place / "report.html").exists() and (place == home or (place / "study.json").exists()):
            return place / "report.html"
    return None


def publish(
    folder: str | Path,
    name: str,
    *,
    private: bool = False,
    license: str | None = None,
    page: bool = False,
    log: Callable[[str], None] = print,
) -> str:
    """Upload a folder's model and card, and with `page` its report.html, in one commit; the commit's address."""
    files = contents(folder, name, license, page)
    with one_line(name):
        api = HfApi(library_name="linvit")
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        for path in files:
            log(f"{repository}/{path}")
        parts = [CommitOperationAdd(path, content) for path, content in files.items()]
        return str(api.create_commit(repository, parts, commit_message="linvit publish").commit_url)


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """What the hub or the network has against it."""
    try:
        yield
    except LocalTokenNotFoundError:
        raise ValueError(f"{name}: the hub requires a token: run `hf auth login`, or set HF_TOKEN") from None
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name}: the hub rejected the upload ({why})") from None
