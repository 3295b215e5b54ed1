"""The documents are of this code: the API page, the examples of CONTRIBUTING, and links."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from linvit import data, study
from linvit.attention import ATTENTIONS, create_attention
from linvit.data import DATASETS
from linvit.study import Job
from linvit.study.design import named
from linvit.study.runners import RUNNERS
from linvit.train import design, run
from linvit.train.tasks import TASKS
from linvit.train.trackers import TRACKERS

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S)
SMALL = {"stem": "patch", "patch_size": 4, "dim": 14, "depth": 1, "heads": 2, "mlp_dim": 22, "epochs": 1}


def test_the_api_page_is_what_the_docstrings_say():
    spec = importlib.util.spec_from_file_location("api", ROOT / "docs/api.py")
    assert spec is not None
    assert spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    assert (ROOT / "docs/api.md").read_text(encoding="utf-8") == api.text(), "docs/api.md is old: make docs"


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """The examples that register something, as files that a user would have."""
    for registry in (ATTENTIONS, DATASETS, TASKS, RUNNERS, TRACKERS):
        registry.discover()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for number, text in enumerate(text for text in EXAMPLES if "register(" in text):
        (tmp_path / f"example_{number}.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("LINVIT_PLUGINS", str(tmp_path))
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))


def test_examples_of_contributing_run(plugins, tmp_path, monkeypatch):
    q, k, v = torch.randn(3, 2, 3, 5, 7)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    out = create_attention("half", heads=3, head_dim=7, tokens=5)(q, k, v, mask)
    torch.testing.assert_close(out[1, :, :2], (v[1, :, :2] + v[1, :, :2].mean(1, keepdim=True)) / 2)
    dataset = data.load_data("brightness:images=90")
    experiment = design(dataset, "half", **SMALL).model_copy(update={"task": "margin"})
    place = tmp_path / "run"
    lines = TRACKERS["lines"](experiment, place, place)
    records = run(experiment, dataset, place, device=torch.device("cpu"), listeners=[lines])
    assert len((place / "lines.txt").read_text().splitlines()) == 2  # one epoch, and the test
    assert any(record.metric == "test_accuracy" for record in records)
    monkeypatch.setattr("os.nice", lambda much: much)  # the other tests are in this process too
    job = Job(number=0, jobs=1, variant="half", experiment=experiment, folder=str(tmp_path / "job"))
    ((done, _),) = RUNNERS["nice"](1, {dataset.identity: dataset}).run([job], lambda job, event: None)
    assert done is job


def test_the_study_of_contributing_has_variants_that_differ(monkeypatch):
    asked: dict = {}
    monkeypatch.setattr(study, "compare", lambda *args, **options: asked.update(options))
    exec(next(text for text in EXAMPLES if "compare(" in text), {"__name__": "__main__"})
    assert [variant.label for variant in named(asked["variants"])] == [
        "optimizer muon",
        "optimizer adamw",
        "optimizer sgd",
    ]


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert "://" in target or (page.parent / target).exists(), target
