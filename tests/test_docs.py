"""Examples, tutorials and commands in the documentation run with this code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
import torch

from linvit import data, study
from linvit.attention import ATTENTIONS, create_attention
from linvit.cli import parse, verbs
from linvit.data import DATASETS
from linvit.execute import EXECUTORS, DatasetCache, Job
from linvit.kernels import KERNELS
from linvit.pipeline.design import Designer
from linvit.schemas.study import Variant, name_variants
from linvit.training.run import run
from linvit.training.tasks import TASKS
from linvit.training.trackers import TRACKERS

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs/tutorials"


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


EXAMPLES = [*blocks(ROOT / "CONTRIBUTING.md"), *blocks(TUTORIALS / "attention.md")]
SMALL = {"stem": "patch", "patch_size": 4, "dim": 14, "depth": 1, "heads": 2, "mlp_dim": 22, "epochs": 1}


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """The examples that register something, as files that a user would have."""
    for registry in (ATTENTIONS, KERNELS, DATASETS, TASKS, EXECUTORS, TRACKERS):
        registry.discover()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for number, text in enumerate(text for text in EXAMPLES if "register(" in text):
        (tmp_path / f"example_{number}.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("LINVIT_PLUGINS", str(tmp_path))
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))


def test_examples_that_register_something_run(plugins, tmp_path, monkeypatch):
    q, k, v = torch.randn(3, 2, 3, 5, 7)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    for spec in ("cosine:a=0.5", "performer-softplus:m=11"):
        attention = create_attention(spec, heads=3, head_dim=7, tokens=5)
        out, matrix = attention(q, k, v, mask), attention.attention_matrix(q, k, mask)
        torch.testing.assert_close(out[1:, :, :2], attention(*(x[1:, :, :2] for x in (q, k, v))))
        torch.testing.assert_close(out, matrix @ v, atol=1e-5, rtol=1e-4)
        assert not matrix[1, :, :, 2:].any()
    with pytest.raises(ValueError, match=r"a=1\.5 must be between 0 and 1"):
        create_attention("cosine:a=1.5", heads=3, head_dim=7, tokens=5)
    dataset = data.load_data("brightness:images=90")
    experiment = Designer(dataset, None, 0, SMALL, match=False).experiment(Variant(attention="cosine", task="margin"))
    place = tmp_path / "run"
    lines = TRACKERS["lines"](experiment, place, place)
    records = run(experiment, dataset, place, device=torch.device("cpu"), listeners=[lines])
    assert len((place / "lines.txt").read_text().splitlines()) == 2  # one epoch, and the test
    assert any(record.metric == "test_accuracy" for record in records)
    monkeypatch.setattr("os.nice", lambda much: much)  # the other tests are in this process too
    images, job = DatasetCache(), Job(experiment=experiment, folder=str(tmp_path / "job"))
    images.add(dataset)
    ((done, found),) = EXECUTORS["nice"](1, 1, images).run_jobs([job], lambda job, event: None)
    assert done is job
    assert any(record.metric == "test_accuracy" for record in found)


def test_the_study_of_contributing_has_variants_that_differ(monkeypatch):
    asked: dict = {}
    monkeypatch.setattr(study, "compare", lambda *args, **options: asked.update(options))
    exec(next(text for text in EXAMPLES if "compare(" in text), {"__name__": "__main__"})
    assert [variant.label for variant in name_variants(asked["variants"])] == [
        "optimizer muon",
        "optimizer adamw",
        "optimizer sgd",
    ]


def commands(text: str) -> Iterator[str]:
    """What follows `linvit` in a page: in lines of code blocks, fenced or indented, and in code within sentences."""
    text = text.replace("\\\n", " ")
    fenced, indented = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S), re.compile(r"^(?: {4}|\t).+$", re.M)
    blocks = [body for language, body in fenced.findall(text) if language not in ("python", "toml")]
    text = fenced.sub("", text)
    lines = [*"\n".join(blocks).splitlines(), *indented.findall(text)]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", indented.sub("", text))]
    for line in [*lines, *spans]:
        if found := re.match(r"\s*(?:\$ |srun |torchrun .*-m )?linvit ([a-z].*)", line):
            yield found[1]


@pytest.mark.parametrize("page", pages.WRITTEN, ids=lambda page: page.name)
def test_every_command_can_be_parsed(page):
    for command in commands(page.read_text(encoding="utf-8")):
        words = shlex.split(re.sub(r"…|\$S\b", "", command), comments=True)
        words = [re.sub(r"^[A-Z]$", "3", word).partition("|")[0] for word in words]  # K and N are numbers
        if len(words) == 1:  # a verb that a sentence mentions
            assert words[0] in verbs()
            continue
        try:
            parse(words)
        except (ValueError, SystemExit) as error:
            pytest.fail(f"linvit {command}: {error}")


def test_commands_of_a_page_are_found():
    page = "`linvit\ntune`.\n\n    linvit job a 1\n\n```sh\nlinvit list \\\nsizes\n```\n```python\nlinvit x\n```\n"
    assert [*commands(page)] == ["list  sizes", "job a 1", "tune"]
