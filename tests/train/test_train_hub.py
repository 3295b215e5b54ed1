"""Models on the hub, with a stand-in server. huggingface_hub reads its address when it is imported: so in a process of
its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hubserver import TOKEN, serving

import linvit
from linvit import cli

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

USED = """
import sys, torch, linvit
from linvit import cli
from linvit.training.hub import HubModel

run, home = sys.argv[1:]
assert cli.main(["publish", run, "me/digits", "--license", "mit", "--private"]) == 0
first = linvit.load(run)
again = linvit.load("me/digits")                       # safetensors from the hub, as any model of it
model = HubModel.from_pretrained("me/digits")
x = torch.randn(2, 1, 8, 8)
assert torch.equal(first(x), again(x)) and torch.equal(first(x), model(x))
assert isinstance(model, torch.nn.Module) and model.about == first.about and not model.training
model.save_pretrained(home + "/saved")
assert torch.equal(linvit.load(home + "/saved")(x), first(x))
with torch.no_grad():
    model.head.weight.mul_(2)
model.push_to_hub("me/other")
assert not torch.equal(HubModel.from_pretrained("me/other")(x), first(x))
assert cli.main(["publish", run, "me/digits", "--license", "mit", "--page", "--quiet"]) == 0   # again: one more commit
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "run"
    linvit.train("digits", attention="performer-relu:m=8", dim=12, depth=1, heads=2, steps=2, limit=60, out=folder)
    (folder / "report.html").write_text("<!doctype html><title>the page</title>")
    return folder


def python(code, *words, **environment):
    environment = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    call = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(call, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_model_is_published_found_and_loaded_again(run, tmp_path):
    with serving() as (hub, address):
        done = python(USED, run, tmp_path, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "hf"))
        assert done.returncode == 0, f"{done.stderr}\n{hub.unknown}"
    assert not [request for request in hub.unknown if "agent-harnesses" not in request]  # huggingface_hub's own
    files = hub.repositories["me/digits"]
    assert sorted(files) == ["README.md", "config.json", "model.safetensors", "report.html"]
    assert files["model.safetensors"] == (run / "best/model.safetensors").read_bytes()
    assert files["report.html"] == (run / "report.html").read_bytes()
    assert hub.private == {"me/digits"}
    assert [paths for repo, _, paths in hub.commits if repo == "me/digits"] == [sorted(files)[:3], sorted(files)]
    assert done.stdout.count("/commit/") == 2

    import yaml

    front, text = files["README.md"].decode().removeprefix("---\n").split("\n---\n", 1)
    about = yaml.safe_load(front)
    assert about["library_name"] == "linvit"
    assert about["pipeline_tag"] == "image-classification"
    assert about["license"] == "mit"
    assert "performer-relu" in about["tags"]
    assert 'linvit.load("me/digits")' in text
    measured = about["model-index"][0]["results"][0]
    assert measured["dataset"]["name"] == "digits"
    rows = map(json.loads, (run / "records.jsonl").read_text().splitlines())
    accuracy = next(r["value"] for r in rows if r["metric"] == "test_accuracy" and r["selection"] == "best")
    assert accuracy in [metric["value"] for metric in measured["metrics"] if metric["type"] == "accuracy"]


def test_a_refusal_is_one_line(run, tmp_path):
    code = "import sys\nfrom linvit import cli\nsys.exit(cli.main(['publish', sys.argv[1], 'me/digits', '-q']))"
    with serving() as (_, address):
        done = python(code, run, HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_TOKEN="hf_wrong")
    assert (done.returncode, done.stdout) == (2, "")
    assert "me/digits: the hub rejected the upload (" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_sent_in_a_dry_run(run, capsys):
    assert cli.main(["publish", str(run), "me/digits", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "me/digits/model.safetensors: " in out
    assert "library_name: linvit" in out


def test_the_page_is_uploaded_only_on_request(run, capsys):
    assert cli.main(["publish", str(run), "me/digits", "--dry-run", "--quiet"]) == 0
    assert "report.html" not in capsys.readouterr().out
    assert cli.main(["publish", str(run), "me/digits", "--dry-run", "--quiet", "--page"]) == 0
    assert "me/digits/report.html: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{run}", "digits"], "'digits' is not a name on the hub: give org/name"),
        (["{run}", "a/b/c"], "'a/b/c' is not a name on the hub: give org/name"),
        (["{run}/nothing", "me/digits"], "nothing does not exist"),
    ],
)
def test_bad_input(run, capsys, words, says):
    assert cli.main(["publish", *(word.format(run=run) for word in words)]) == 2
    assert says in capsys.readouterr().err
