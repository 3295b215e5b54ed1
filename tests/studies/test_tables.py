"""A study of a published table, end to end on made-up images: columns, the row from a checkpoint, kills, its state."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linvit import cli
from linvit.data import download, load_data
from linvit.records import Records
from linvit.studies import COLUMNS, STUDIES, Figure, NotHere, Table, Where, reproduce, runnable, study
from linvit.studies.page import _gave_way
from linvit.studies.results import Results
from linvit.study import Study
from linvit.train import Experiment

TINY = """
from linvit.studies import STUDIES, Row, Scale, Table

@STUDIES.register("tiny")
class Tiny(Table):
    '''A table of three lines. linvit reproduce tiny'''

    report, title, data = "000", "Three lines", "synthetic:classes=3,images=96,size=8,channels=1"
    mistakes = ("M7",)
    takes = {"cpu": "seconds", "smoke": "seconds"}
    rows = [
        Row("transformer", "softmax"),
        Row("wide", "performer-relu:m=4", options={"mlp_dim": 13}),
        Row("from checkpoint", "performer-exp:m=4", "performer-exp:m=4,stabilizer=reference", checkpoint=True),
        Row("more", "linformer:k=2", columns=("fair",)),
        Row("longer", "performer-exp:m=4", times=2, columns=("fair",)),
    ]
    literal = {"stem": "patch", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 11, "epochs": 9,
               "batch_size": 16, "pad_crop": 0}
    fair = literal
    scales = {"cpu": {
        "literal": Scale(seeds=1, options={"epochs": 1}, measured=False, text="1 epoch of 9"),
        "fair": Scale(seeds=2, options={"epochs": 1}, measured=False, text="1 epoch"),
    }}

@STUDIES.register("diverging")
class Diverging(Tiny):
    rows = [
        Row("transformer", "softmax", columns=("literal",)),
        Row("from checkpoint", "performer-exp:m=4", checkpoint=True, columns=("literal",)),
    ]
    literal = Tiny.literal | {"optimizer": "sgd", "lr": 1e30, "clip_norm": 0.0}
"""
RUN = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from linvit.studies import Where, reproduce
seen = 0
def hear(job, event):
    global seen
    seen += 1
    begun = job.variant == "from checkpoint" and job.experiment.seed == 1
    if seen == int(sys.argv[2]) or (begun and sys.argv[2] == "-1"):
        os.kill(os.getpid(), signal.SIGKILL)
reproduce("tiny", "cpu", sys.argv[1], Where(hear=hear, jobs=1))
"""


@pytest.fixture(autouse=True, scope="module")
def plugin(tmp_path_factory):
    """The study, found as anybody's would be."""
    file = tmp_path_factory.mktemp("plugins") / "tiny.py"
    file.write_text(TINY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINVIT_PLUGINS", str(file))
        assert "tiny" in STUDIES.names()
        yield
    del STUDIES._entries["tiny"], STUDIES._entries["diverging"]


@pytest.fixture(scope="module")
def done(plugin, tmp_path_factory) -> Path:
    return reproduce("tiny", "cpu", tmp_path_factory.mktemp("home"), Where(jobs=1))


def results(folder: Path) -> dict:
    found = Records(folder / "records.jsonl")
    return {(r.tags["variant"], r.tags["seed"], r.tags["selection"]): r.value for r in found
            if r.metric == "test_accuracy"}  # fmt: skip


def test_both_columns_have_their_rows(done):
    literal, fair = (Study.read(done / column / "study.json") for column in COLUMNS)
    assert [v.id for v in literal.variants] == ["transformer", "wide", "from checkpoint"]
    assert {v.id for v in fair.variants} == {"transformer", "wide", "from checkpoint", "more", "longer", "uniform"}
    assert {v.column for v in literal.variants} == {"literal"}
    assert literal.seeds == {v.id: [0] for v in literal.variants}
    assert all(seeds == [0, 1] for seeds in fair.seeds.values())
    assert literal.epochs == 1
    by_name = {v.id: v for v in literal.variants}
    assert by_name["from checkpoint"].attention == "performer-exp:m=4,stabilizer=reference"
    assert {v.id for v in fair.variants if v.beside} == {"from checkpoint", "longer"}  # twice the steps of the others
    assert by_name["wide"].options == {"mlp_dim": 13}
    assert study("tiny").state(done) == "done"
    assert (done / "fair" / "report.html").exists()


def test_each_seed_from_a_checkpoint_begins_with_the_softmax_model_of_that_seed(done):
    for column, seeds in (("literal", [0]), ("fair", [0, 1])):
        every = {v.id: v for v in Study.read(done / column / "study.json").variants}
        assert list(every["from checkpoint"].starts) == seeds
        assert every["wide"].start is None
        runs = [Experiment.read(file) for file in (done / column).glob("from-checkpoint-seed*/experiment.json")]
        began = {run.seed: run.start for run in runs if run.start}
        assert sorted(began) == seeds
        for seed, start in began.items():
            assert Path(start.folder).parent.name.startswith(f"transformer-seed{seed}-")
            assert Path(start.folder).parents[1] == (done / column).resolve()
        assert len({start.sha256 for start in began.values()}) == len(seeds)
        found = Records(done / column / "records.jsonl")
        before = [r for r in found if r.metric == "start_accuracy"]
        assert {r.tags["variant"] for r in before} == {"from checkpoint"}


def test_twice_the_steps_are_those_of_a_row_from_a_checkpoint_and_its_start(done):
    tiny = study("tiny")
    assert isinstance(tiny, Table)
    images = len(load_data(tiny.data).train)
    whole = [file for file in (done / "fair").glob("*-seed0-*/experiment.json") if "-half-" not in file.parent.name]
    runs = {file.parent.name.partition("-seed")[0]: Experiment.read(file).length(images).total for file in whole}
    assert runs["longer"] == runs["from-checkpoint"] + runs["transformer"]
    assert runs["more"] == runs["transformer"]
    said = Study.read(done / "fair" / "study.json").warnings
    assert f"longer had {runs['longer']} steps, the others {runs['more']}: a difference is not the" in " ".join(said)
    assert " had " not in " ".join(Study.read(done / "literal" / "study.json").warnings)


def test_a_seed_whose_softmax_model_diverged_has_no_row_from_it(done, tmp_path):
    """Even if it had come far enough to leave weights behind."""
    tiny, folder = study("tiny"), shutil.copytree(done / "fair", tmp_path / "fair")
    assert isinstance(tiny, Table)
    records = folder / "records.jsonl"
    lines = [line for line in records.read_text().splitlines(keepends=True)
             if not ('"test_accuracy"' in line and '"transformer"' in line and '"seed": 0' in line)]  # fmt: skip
    records.write_text("".join(lines))
    (row,) = tiny.variants("fair", "cpu", tiny.trained(folder))
    assert (row.id, list(row.starts)) == ("from checkpoint", [1])
    assert row.start == row.starts[1]


@pytest.mark.kills
def test_killed_and_resumed_it_ends_the_same(done, tmp_path):
    """Killed in the first column, in the second, in the second seed from a checkpoint, and left alone."""
    state = []
    for turn in (9, 20, -1, 10**9):
        call = [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path), str(turn)]
        ended = subprocess.run(call, capture_output=True, text=True)
        assert ended.returncode == (0 if turn == 10**9 else -signal.SIGKILL), ended.stderr
        state.append(study("tiny").state(tmp_path / "tiny" / "cpu"))
    assert state == ["begun", "begun", "begun", "done"]
    for column in COLUMNS:
        again = tmp_path / "tiny" / "cpu" / column
        assert results(again) == results(done / column)
        models = [{file.parents[1].name: file.read_bytes() for file in folder.glob("*/best/model.safetensors")}
                  for folder in (again, done / column)]  # fmt: skip
        assert models[0] == models[1]


def test_the_same_call_again_trains_nothing(done):
    heard = []
    reproduce("tiny", "cpu", done.parents[1], Where(jobs=1, hear=lambda job, event: heard.append(job)))
    assert heard == []


def test_what_a_scale_changes():
    tiny = study("tiny")
    assert isinstance(tiny, Table)
    assert tiny.gives_way("cpu") == "literal: 1 epoch of 9; fair: 1 epoch"
    assert tiny.gives_way("smoke").startswith("one step")
    smoke = tiny.options("fair", "smoke")
    assert (smoke["steps"], smoke["dim"], "epochs" in smoke) == (1, 32, False)
    assert tiny.options("literal", "cpu")["epochs"] == 1
    assert tiny.options("literal", "smoke", tiny.rows[1]) == {"mlp_dim": 13}  # a row's own stay
    assert tiny.options("fair", "smoke", tiny.rows[-1]) == {"steps": 2}
    assert tiny.options("fair", "cpu", tiny.rows[-1]) == {"epochs": 2}


def test_a_diverged_softmax_leaves_the_rows_from_it_out(tmp_path):
    folder = reproduce("diverging", "cpu", tmp_path, Where(jobs=1))
    assert study("diverging").state(folder) == "done"
    assert [v.id for v in Study.read(folder / "literal" / "study.json").variants] == ["transformer"]
    assert not (folder / "fair").exists()


def test_the_list(capsys, tmp_path, done):
    assert cli.main(["reproduce", "--out", str(done.parents[1])]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "done" in lines["tiny"]
    assert "20 min" in lines["000-mnist"]
    assert cli.main(["reproduce", "--json", "--out", str(tmp_path)]) == 0
    rows = {row["study"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(STUDIES.names())
    assert rows["tiny"]["cpu"] == "seconds"
    assert rows["paper-fig9"]["cpu"] == "–"
    assert not list(tmp_path.iterdir())


def test_more_seeds_are_added_and_the_columns_are_shown(capsys, tmp_path, done):
    home = tmp_path / "home"
    shutil.copytree(done, home / "tiny" / "cpu")
    assert cli.main(["reproduce", "tiny", "--seeds", "3", "--jobs", "1", "--out", str(home)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split() == ["row", "literal", "fair"]  # nothing was published of it
    assert shown.out.count("from checkpoint") == 1
    assert "literal: the report's recipe, 3 rows" in shown.err
    for column in COLUMNS:
        study_of = Study.read(home / "tiny" / "cpu" / column / "study.json")
        assert all(seeds == [0, 1, 2] for seeds in study_of.seeds.values())
        for key, value in results(done / column).items():
            assert results(home / "tiny" / "cpu" / column)[key] == value


@pytest.mark.parametrize(("words", "said"), [
    (["000-mnst"], "unknown study '000-mnst'; did you mean '000-mnist'?"),
    (["tiny", "paper-fig9"], "paper-fig9 cannot be run at scale 'cpu': TrEMBL"),
    (["tiny", "--scale", "full"], "tiny cannot be run at scale 'full'"),
    (["tiny", "--scale", "huge"], "huge"),
    (["--jobs", "3"], "--jobs has no effect without the name of a study"),
    (["paper-fig1", "--jobs", "3"], "--jobs=3 has no effect on paper-fig1, which is measured, not trained"),
    (["tiny", "paper-fig3", "--seeds", "3"], "--seeds=3 has no effect on paper-fig3"),
])  # fmt: skip
def test_what_cannot_be_run_is_said_before_anything_is(words, said, capsys, tmp_path):
    assert cli.main(["reproduce", *words, "--out", str(tmp_path / "x")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_missing_images_are_named_and_the_others_run(capsys, tmp_path, monkeypatch):
    def nowhere(*words, **named):
        raise OSError("no network")

    monkeypatch.setattr(download.urllib.request, "urlopen", nowhere)
    monkeypatch.setenv("LINVIT_DATA", str(tmp_path / "nothing"))
    (tmp_path / "nothing").mkdir()
    words = ["000-cifar100", "tiny", "002-cifar100", "--scale", "smoke", "--out", str(tmp_path / "x"), "-q"]
    assert cli.main(["reproduce", *words]) == 2
    told = capsys.readouterr()
    assert "tiny: " in told.out
    assert told.err.count("\n") == 1
    assert "000-cifar100, 002-cifar100 not run: cifar100: its files are not in" in told.err
    assert "put there cifar-100-binary.tar.gz" in told.err
    assert study("tiny").state(tmp_path / "x" / "tiny" / "smoke") == "done"
    assert study("000-cifar100").state(tmp_path / "x" / "000-cifar100" / "smoke") == ""


@pytest.mark.parametrize("name", ["paper-fig1", "paper-fig8", "paper-fig14"])
def test_a_figure_is_measured_once(name, tmp_path):
    folder = reproduce(name, "smoke", tmp_path)
    assert (folder / "figure.png").stat().st_size > 5_000
    assert (folder / "figure.html").exists()
    before = (folder / "records.jsonl").read_bytes()
    (folder / "figure.png").unlink()
    reproduce(name, "smoke", tmp_path)
    assert (folder / "records.jsonl").read_bytes() == before
    assert (folder / "figure.png").exists()  # drawn again
    assert isinstance(study(name), Figure)


def test_the_page_says_what_was_run_where_a_scale_has_changed(done, monkeypatch):
    found, ran = study("tiny"), Results(done.parents[1]).column("tiny", "fair")
    assert isinstance(found, Table)
    assert ran
    assert _gave_way(found, "fair", ran) == found.size("cpu", "fair").text
    larger = {column: replace(size, limit=10**6) for column, size in found.scales["cpu"].items()}
    monkeypatch.setattr(type(found), "scales", {"cpu": larger})
    assert _gave_way(found, "fair", ran).endswith(" training images, 1 epochs, as this scale once was")


def test_a_figure_is_measured_with_the_threads_asked_for(tmp_path):
    before = torch.get_num_threads()
    folder = reproduce("paper-fig3", "smoke", tmp_path, Where(threads=before + 1))
    assert {record.threads for record in Records(folder / "records.jsonl")} == {before + 1}
    assert torch.get_num_threads() == before


def test_one_that_is_not_here_says_why():
    found = study("paper-fig13")
    assert isinstance(found, NotHere)
    with pytest.raises(ValueError, match="paper-fig13 cannot be run at scale 'full': it needs a model trained on prot"):
        runnable("paper-fig13", "full")
    with pytest.raises(ValueError, match="unknown scale 'half': full, cpu or smoke"):
        runnable("paper-fig1", "half")
