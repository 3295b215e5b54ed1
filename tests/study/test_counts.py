"""How often a study reads, lists and builds: each thing once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from studying import Trained

from linvit.data import folder as data_folder
from linvit.ledger import open_ledger
from linvit.models import VisionTransformer
from linvit.records import Records
from linvit.schemas.experiment import BACKBONES
from linvit.schemas.study import Study
from linvit.study import compare
from linvit.training import backbones, checkpoint
from linvit.training import start as starts

ATTENTIONS = ["softmax", "performer-exp:m=32", "performer-relu:m=32", "performer-theta:m=32"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for kind in range(2):
        (tmp_path / "photos" / f"kind {kind}").mkdir(parents=True)
        for i in range(24):
            pixels = rng.integers(0, 120, (32, 32, 3), dtype=np.uint8) + np.uint8(120 * kind)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"kind {kind}" / f"{i}.png")
    return tmp_path / "photos"


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was read, listed, parsed and built, with the file where there is one."""
    found: Counter[str] = Counter()
    starts._recent.clear()  # as in a new process
    backbones._start_of.cache_clear()

    def count(owner: object, name: str, key) -> None:
        original = getattr(owner, name)

        def counted(*args, **options):
            found[key(*args)] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(VisionTransformer, "__init__", lambda model, config: "models")
    count(Records, "__iter__", lambda records: f"parsed {records.path}")
    count(checkpoint, "load_tensors", lambda path: f"read {path}")
    count(data_folder, "from_files", lambda *_: "listed")
    return found


@pytest.mark.usefixtures("no_page")
def test_everything_is_read_listed_and_parsed_once_and_few_models_are_built(
    photos: Path, tmp_path: Path, counts: Counter[str]
) -> None:
    trained = Trained()
    options = {
        "controls": False,
        "start": "backbones",
        "image_size": 16,
        "steps": 2,
        "batch_size": 8,
        "optimizer": "adamw",
    }
    folder = compare(
        photos, attentions=ATTENTIONS, seeds=2, jobs=1, threads=1, out=tmp_path / "x", on_event=trained, **options
    )
    assert len(trained) == 8
    starts = {name: count for name, count in counts.items() if str(BACKBONES) in name}
    assert len(starts) >= len(ATTENTIONS)
    assert set(starts.values()) == {1}
    assert counts["listed"] == 1
    assert {name: count for name, count in counts.items() if name.startswith("parsed") and count > 1} == {}
    assert all(map(open_ledger(folder).has, ("attention_error", "examples", "train_step_vs_softmax")))
    warnings = Study.read(Study.path(folder)).warnings
    assert any(text.startswith("Each variant started from a backbone with its own attention") for text in warnings)
    trainings = 8 + len(ATTENTIONS)  # and each variant once for half of the steps
    assert counts["models"] <= trainings + len({*ATTENTIONS, "identity"})
