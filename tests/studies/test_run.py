"""A published study end to end on synthetic images: columns, the row from a checkpoint, kills, its state; figures."""

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
from linvit.schemas.experiment import Experiment
from linvit.schemas.study import Study
from linvit.studies import STUDIES, Published, reproduce
from linvit.studies.curves import log_curves
from linvit.studies.declaration import COLUMNS
from linvit.studies.details import by_class, details
from linvit.studies.results import Results
from linvit.studies.run import runnable, softmax_models, state, variants
from linvit.studies.sheets import reduced

pytestmark = pytest.mark.usefixtures("plugin")
KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from linvit.studies import reproduce
seen = 0
def on_event(job, event):
    global seen
    seen += 1
    started = job.variant == "from checkpoint" and job.experiment.seed == 1
    if seen == int(sys.argv[2]) or (started and sys.argv[2] == "-1"):
        os.kill(os.getpid(), signal.SIGKILL)
reproduce("tiny", out=sys.argv[1], jobs=1, on_event=on_event)
"""


def results(folder: Path) -> dict:
    found = Records(folder / "records.jsonl")
    return {
        (r.tags["variant"], r.tags["seed"], r.tags["selection"]): r.value for r in found if r.metric == "test_accuracy"
    }


def stored(folder: Path) -> Study:
    return Study.read(Study.path(folder))


def test_both_columns_have_their_rows(done):
    literal, fair = (stored(done / column) for column in COLUMNS)
    assert [v.id for v in literal.variants] == ["transformer", "wide", "from checkpoint"]
    assert {v.id for v in fair.variants} == {"transformer", "wide", "from checkpoint", "longer", "uniform"}
    assert {v.column for v in literal.variants} == {"literal"}
    assert literal.seeds == {v.id: [0] for v in literal.variants}
    assert all(seeds == [0, 1] for seeds in fair.seeds.values())
    assert literal.epochs == 1
    by_name = {v.id: v for v in literal.variants}
    assert by_name["from checkpoint"].attention == "performer-exp:m=4,stabilizer=reference"
    assert by_name["wide"].options == {"mlp_dim": 13}
    assert {v.id for v in fair.variants if v.beside} == {"from checkpoint", "longer"}  # twice the steps of the others
    assert state(STUDIES["tiny"], done) == "done"
    assert (done / "fair" / "report.html").exists()


def test_each_seed_from_a_checkpoint_starts_from_the_softmax_model_of_that_seed(done):
    for column, seeds in (("literal", [0]), ("fair", [0, 1])):
        every = {v.id: v for v in stored(done / column).variants}
        assert list(every["from checkpoint"].starts) == seeds
        assert every["wide"].start is None
        runs = [Experiment.read(file) for file in (done / column).glob("from-checkpoint-seed*/experiment.json")]
        starts = {run.seed: run.start for run in runs if run.start}
        assert sorted(starts) == seeds
        for seed, start in starts.items():
            assert Path(start.folder).parent.name.startswith(f"transformer-seed{seed}-")
            assert Path(start.folder).parents[1] == (done / column).resolve()
        assert len({start.sha256 for start in starts.values()}) == len(seeds)
        before = [r for r in Records(done / column / "records.jsonl") if r.metric == "start_accuracy"]
        assert {r.tags["variant"] for r in before} == {"from checkpoint"}


def test_twice_the_steps_are_those_of_a_row_from_a_checkpoint_and_its_start(done):
    images = len(load_data(STUDIES["tiny"].data).train)
    whole = [file for file in (done / "fair").glob("*-seed0-*/experiment.json") if "-half-" not in file.parent.name]
    runs = {file.parent.name.partition("-seed")[0]: Experiment.read(file).length(images).total for file in whole}
    assert runs["longer"] == runs["from-checkpoint"] + runs["transformer"]
    assert runs["wide"] == runs["transformer"]
    assert f"longer had {runs['longer']} steps, the others {runs['wide']}: " in " ".join(stored(done / "fair").warnings)
    assert " had " not in " ".join(stored(done / "literal").warnings)


def test_losses_and_scores_by_class_stand_next_to_the_printed(done):
    ran = Results(done.parents[1]).column("tiny", "fair")
    found = details(ran, "wide")
    lowest = [
        min(json.loads(line)["validation_loss"] for line in file.read_text().splitlines())
        for file in (done / "fair").glob("wide-seed*/log.jsonl")
    ]
    assert len(lowest) == 2
    assert found.loss == pytest.approx(sum(lowest) / 2)
    assert found.alpha is None
    names = list(found.classes)
    assert len(names) == 3
    printed = Published({"per_class": {name: {"precision": 88, "recall": 89, "f1": 88} for name in names}})
    table = by_class("wide", printed, {"fair": found})
    assert [row["Published"] for row in table.texts] == ["88 / 89 / 88"] * 3
    assert table.texts[0]["Fair"] == " / ".join(f"{100 * score:.0f}" for score in found.classes[names[0]])
    assert by_class("wide", Published({}), {"fair": found}) is None


def test_learning_curves_on_logarithmic_axes(done):
    """Of the first seed of each row; nothing below zero can be drawn."""
    columns = {column: Results(done.parents[1]).column("tiny", column) for column in COLUMNS}
    charts = log_curves("tiny", columns)
    assert [chart.name for chart in charts] == ["log-literal-tiny", "log-fair-tiny"]
    rows = charts[1].layers[0].data.values
    assert {row["variant"] for row in rows} == set(columns["fair"].rows)
    assert all(row["step"] > 0 and row["value"] > 0 for row in rows)
    scale = charts[0].page()["layer"][0]["encoding"]
    assert (scale["x"]["scale"]["type"], scale["y"]["scale"]["type"]) == ("log", "log")


def test_a_seed_whose_softmax_model_diverged_has_no_row_from_it(done, tmp_path):
    """Even if it left weights."""
    tiny, folder = STUDIES["tiny"], shutil.copytree(done / "fair", tmp_path / "fair")
    records = folder / "records.jsonl"
    lines = [
        line
        for line in records.read_text().splitlines(keepends=True)
        if not ('"test_accuracy"' in line and '"transformer"' in line and '"seed": 0' in line)
    ]
    records.write_text("".join(lines))
    (row,) = variants(tiny, "fair", "cpu", softmax_models(tiny, folder))
    assert (row.id, list(row.starts)) == ("from checkpoint", [1])
    assert row.start == row.starts[1]


@pytest.mark.kills
def test_killed_and_resumed_it_ends_the_same(done, tmp_path):
    """Killed in the first column, in the second, in the second seed from a checkpoint, and left alone."""
    states = []
    for turn in (9, 20, -1, 10**9):
        call = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), str(turn)]
        ended = subprocess.run(call, capture_output=True, text=True)
        assert ended.returncode == (0 if turn == 10**9 else -signal.SIGKILL), ended.stderr
        states.append(state(STUDIES["tiny"], tmp_path / "tiny" / "cpu"))
    assert states == ["started", "started", "started", "done"]
    for column in COLUMNS:
        again = tmp_path / "tiny" / "cpu" / column
        assert results(again) == results(done / column)
        models = [
            {file.parents[1].name: file.read_bytes() for file in folder.glob("*/best/model.safetensors")}
            for folder in (again, done / column)
        ]
        assert models[0] == models[1]


def test_a_diverged_softmax_leaves_the_rows_from_it_out(tmp_path):
    folder = reproduce("diverging", out=tmp_path, jobs=1)
    assert state(STUDIES["diverging"], folder) == "done"
    assert [v.id for v in stored(folder / "literal").variants] == ["transformer"]
    assert not (folder / "fair").exists()


def test_the_list(capsys, tmp_path, done):
    assert cli.main(["reproduce", "--out", str(done.parents[1])]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "done" in lines["tiny"]
    assert "75 core-minutes" in lines["000-mnist"]
    assert cli.main(["reproduce", "--json", "--out", str(tmp_path)]) == 0
    rows = {row["study"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(STUDIES.names())
    assert rows["tiny"]["cpu"] == "seconds"
    assert rows["paper-fig6-proteins"]["cpu"] == "–"
    assert (rows["002-vit"]["claims"], rows["paper-fig9"]["claims"]) == ("1", "")
    figures = [name for name in rows if "fig" in name]
    assert figures.index("paper-fig4") < figures.index("paper-fig5") < figures.index("paper-fig14")
    assert not list(tmp_path.iterdir())


def test_more_seeds_are_added_and_nothing_is_trained_again(capsys, tmp_path, done):
    home = tmp_path / "home"
    shutil.copytree(done, home / "tiny" / "cpu")
    jobs = []
    reproduce("tiny", out=home, jobs=1, on_event=lambda job, event: jobs.append(job))
    assert jobs == []
    assert cli.main(["reproduce", "tiny", "--seeds", "3", "--jobs", "1", "--out", str(home)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split() == ["row", "published", "literal", "fair"]
    assert shown.out.count("from checkpoint") == 1
    assert "literal: the report's recipe, 3 rows" in shown.err
    assert "Per row: 3 seeds (literal), 3 seeds (fair). Mistakes of the report that matter here: M7." in shown.err
    for column in COLUMNS:
        study = stored(home / "tiny" / "cpu" / column)
        assert all(seeds == [0, 1, 2] for seeds in study.seeds.values())
        assert study.requests[-1]["verb"] == "reproduce"
        for key, value in results(done / column).items():
            assert results(home / "tiny" / "cpu" / column)[key] == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["000-mnst"], "unknown study '000-mnst'; did you mean '000-mnist'?"),
        (["tiny", "paper-fig6-proteins"], "paper-fig6-proteins cannot be run at scale 'cpu': 36 layers of"),
        (["tiny", "--scale", "full"], "tiny cannot be run at scale 'full': it has cpu, smoke"),
        (["tiny", "--scale", "huge"], "huge"),
        (["--jobs", "3"], "--jobs has no effect without the name of a study"),
        (["paper-fig1", "--jobs", "3"], "--jobs=3 has no effect on paper-fig1, which is measured, not trained"),
        (["tiny", "paper-fig3", "--on", "here"], "--on=here has no effect on paper-fig3"),
    ],
)
def test_what_cannot_be_run_is_an_error_before_anything_is_written(words, said, capsys, tmp_path):
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
    shown = capsys.readouterr()
    assert "tiny: " in shown.out
    assert shown.err.count("\n") == 1
    assert "000-cifar100, 002-cifar100 not run: cifar100: its files are not in" in shown.err
    assert "put cifar-100-binary.tar.gz" in shown.err
    assert state(STUDIES["tiny"], tmp_path / "x" / "tiny" / "smoke") == "done"
    assert state(STUDIES["000-cifar100"], tmp_path / "x" / "000-cifar100" / "smoke") == ""


def test_a_figure_is_measured_once_with_the_threads_asked_for(tmp_path):
    before = torch.get_num_threads()
    folder = reproduce("paper-fig8", scale="smoke", out=tmp_path, threads=before + 1)
    assert torch.get_num_threads() == before
    (record,) = Records(folder / "records.jsonl")
    assert record.threads == before + 1
    assert record.value < 1e-12
    assert (folder / "figure.html").exists()
    (folder / "figure.png").unlink()
    reproduce("paper-fig8", scale="smoke", out=tmp_path)
    assert list(Records(folder / "records.jsonl")) == [record]
    assert (folder / "figure.png").stat().st_size > 5_000  # drawn again


def test_the_page_says_what_was_run_if_the_scale_has_changed(done):
    tiny, column = STUDIES["tiny"], Results(done.parents[1]).column("tiny", "fair")
    assert reduced(tiny, "fair", column) == tiny.reduced("fair", "cpu")
    larger = replace(tiny, fair=replace(tiny.fair, cpu=replace(tiny.fair.cpu, limit=10**6)))
    assert reduced(larger, "fair", column).endswith(" training images, 1 epochs, an earlier definition of this scale")


def test_one_that_cannot_be_reproduced_says_why():
    with pytest.raises(ValueError, match="paper-fig6-proteins cannot be run at scale 'full': 36 layers of width"):
        runnable("paper-fig6-proteins", "full")
    with pytest.raises(ValueError, match="scale"):
        reproduce("paper-fig1", scale="half")
