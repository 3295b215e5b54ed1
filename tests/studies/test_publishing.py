"""Published records: the page is rebuilt from them, and an interrupted study resumes from them elsewhere."""

from __future__ import annotations

import io
import json
import lzma
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from results_of import made

from linvit.cli import main
from linvit.files import write_atomically
from linvit.ledger import Ledger
from linvit.records import Record
from linvit.report import read_study
from linvit.schemas.experiment import BACKBONES
from linvit.schemas.study import Study
from linvit.studies import STUDIES, page, reproduce
from linvit.studies.archive import archive_path, copy_runs, pack_figure, pack_study, restore_study, unpack
from linvit.studies.declaration import COLUMNS
from linvit.studies.publishing import collect_records, publish
from linvit.studies.run import state

pytestmark = pytest.mark.usefixtures("plugin")
FAIR = "000-mnist/cpu/fair"  # where `made` places its results


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(file: Path) -> list[str]:
    with tarfile.open(file, "r:xz") as archive:
        return archive.getnames()


def values(folder: Path) -> set[tuple]:
    """What was found, however often it was recorded."""
    return {
        (r.metric, r.value, str(r.tags)) for r in Ledger(folder / "records.jsonl") if not r.metric.endswith("seconds")
    }


def resumed(published: Path, out: Path, **options) -> list[str]:
    """Resume from what was published; the names of the runs that were trained."""
    trained = []
    reproduce("tiny", out=out, jobs=1, restore=published, on_event=lambda job, e: trained.append(job.name), **options)
    return list(dict.fromkeys(trained))


@pytest.fixture(scope="module")
def published(done, tmp_path_factory) -> Path:
    """Archives, without a page."""
    into = tmp_path_factory.mktemp("published")
    collect(done.parents[1], into)
    return into


def collect(home: Path, into: Path) -> set[Path]:
    return collect_records(STUDIES["tiny"], "cpu", home, into)


@pytest.fixture
def brief(monkeypatch):
    """Without what the page shows of every study and computes: claims, mistakes, other studies."""
    monkeypatch.setattr("linvit.studies.page.CLAIMS", ())
    monkeypatch.setattr("linvit.studies.page.MISTAKES", page.MISTAKES[1:2])
    monkeypatch.setattr("linvit.studies.page.studies_in_order", lambda: [STUDIES["tiny"], STUDIES["paper-fig8"]])


def interrupted(done: Path, home: Path, *runs: str) -> Path:
    """A copy of the study without these runs of its fair column."""
    folder = shutil.copytree(done, home / "tiny" / "cpu") / "fair"
    lost = [path for run in runs for path in folder.glob(f"{run}-*")]
    assert len(lost) == len(runs)
    ids = [json.loads((path / "experiment.json").read_text())["id"] for path in lost]
    for path in lost:
        shutil.rmtree(path)
    records = Ledger(folder / "records.jsonl")
    records.replace([record for record in records if record.experiment not in ids])
    return home


@pytest.mark.usefixtures("brief")
def test_the_page_is_rebuilt_from_records_alone_bit_for_bit(done, tmp_path):
    home, first, again = tmp_path / "home", tmp_path / "first", tmp_path / "again"
    shutil.copytree(done, home / "tiny/cpu")
    reproduce("paper-fig8", scale="cpu", out=home)
    publish(home, first)
    shutil.copytree(first / "records", again / "records")
    publish(tmp_path / "nothing", again)
    assert files(again) == files(first)
    assert {"reports.html", *(f"reports/tiny/cpu/{column}/report.md" for column in COLUMNS)} <= set(files(again))
    assert not [name for name in files(again) if "confusion" in name]
    assert "confusion" not in (again / "reports/tiny/cpu/fair/report.md").read_text()
    assert "data:image/png" in (again / "reports.html").read_text()


def test_publishing_twice_changes_nothing(done, published, tmp_path):
    again = shutil.copytree(published, tmp_path / "again")
    assert collect(done.parents[1], again) == set()
    assert files(again) == files(published)


def test_verdicts_are_those_of_the_results_that_were_published(done, published, tmp_path):
    unpack(archive_path(published, "tiny", "cpu", "fair"), tmp_path / "fair")
    there, here = read_study(tmp_path / "fair"), read_study(done / "fair")
    assert there.right.keys() == here.right.keys()
    assert all(
        np.array_equal(there.right[row][seed], right) for row in here.right for seed, right in here.right[row].items()
    )
    assert len(here.right["transformer"]) == 2
    assert values(tmp_path / "fair") == values(done / "fair")


def test_archives_are_small_and_hold_neither_weights_nor_places_of_the_machine(done, published):
    for column in COLUMNS:
        file = archive_path(published, "tiny", "cpu", column)
        assert file.stat().st_size < 40_000
        assert not [name for name in names(file) if name.endswith(("safetensors", ".html", ".png", ".svg"))]
        assert str(done.parents[1]).encode() not in lzma.decompress(file.read_bytes())


def test_only_missing_runs_are_trained_and_start_from_published_weights(done, tmp_path):
    home = interrupted(done, tmp_path / "home", "wide-seed1", "longer-seed0", "from-checkpoint-seed1")
    collect(home, tmp_path / "published")
    file = archive_path(tmp_path / "published", "tiny", "cpu", "fair")
    kept = [name for name in names(file) if name.endswith("safetensors")]
    assert len(kept) == 1
    assert kept[0].startswith("transformer-seed1-")
    elsewhere = tmp_path / "elsewhere"
    missing = {"longer, seed 0", "wide, seed 1", "from checkpoint, seed 1"}
    assert set(resumed(tmp_path / "published", elsewhere)) == missing
    assert values(elsewhere / "tiny/cpu/fair") == values(done / "fair")
    assert state(STUDIES["tiny"], elsewhere / "tiny/cpu") == "done"
    collect(elsewhere, tmp_path / "published")
    assert not [name for name in names(file) if name.endswith("safetensors")]


def test_a_finished_study_is_restored_and_gets_more_seeds(done, published, tmp_path):
    restored = tmp_path / "restored"
    for column in COLUMNS:
        assert restore_study(archive_path(published, "tiny", "cpu", column), restored / "tiny/cpu" / column) > 3
    collect(restored, tmp_path / "again")
    assert files(tmp_path / "again") == files(published)
    trained = resumed(published, tmp_path / "home", seeds=3)
    assert {name.partition(", ")[2] for name in trained} == {"seed 1", "seed 2"}  # literal has one seed, fair two
    assert "from checkpoint, seed 2" in trained
    assert "from checkpoint, seed 0" not in trained
    assert values(done / "fair") <= values(tmp_path / "home/tiny/cpu/fair")


def test_runs_that_only_the_archive_has_stay(done, published, tmp_path):
    home = interrupted(done, tmp_path / "home", "wide-seed1", "longer-seed0")
    into = shutil.copytree(published, tmp_path / "published")
    collect(home, into)
    fair = archive_path(Path(), "tiny", "cpu", "fair").as_posix()
    assert set(names(into / fair)) == set(names(published / fair))


def test_a_restored_run_does_not_replace_one_that_is_there(done, published, tmp_path):
    shutil.copytree(done / "fair", tmp_path / "fair")
    before = files(tmp_path / "fair")
    assert restore_study(archive_path(published, "tiny", "cpu", "fair"), tmp_path / "fair") == 0
    changed = {name for name, content in files(tmp_path / "fair").items() if before.get(name) != content}
    assert {Path(name).name for name in changed} <= {"study.json", ".records.jsonl.lock"}


def test_another_definition_is_refused(done, published, tmp_path, capsys):
    home = tmp_path / "home"
    shutil.copytree(done, home / "tiny/cpu")
    for file in (home / "tiny/cpu").glob("*/study.json"):
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"recipe": content["recipe"] | {"lr": 0.5}}))
    assert copy_runs(done / "fair", home / "tiny/cpu/fair") is None
    assert main(["reproduce", "tiny", "--restore", str(published), "--out", str(home)]) == 2
    assert "holds runs of another definition of this study than" in capsys.readouterr().err.splitlines()[-1]


def test_runs_of_another_definition_do_not_replace_an_archive(tmp_path):
    file = tmp_path / "fair.tar.xz"
    assert pack_study(made(tmp_path / "first", {"wide": [0.9]}) / FAIR, file)
    with pytest.raises(ValueError, match="delete the file to replace it"):
        pack_study(made(tmp_path / "other", {"wide": [0.8]}, identity="others") / FAIR, file)


def test_a_shipped_backbone_stays_one(tmp_path):
    folder = made(tmp_path / "home", {"wide": [0.9]}) / FAIR
    content = json.loads((folder / "study.json").read_text())
    content["variants"][0]["start"] = {"folder": str(BACKBONES / "softmax"), "sha256": "ab" * 32}
    (folder / "study.json").write_text(json.dumps(content))
    pack_study(folder, tmp_path / "fair.tar.xz")
    unpack(tmp_path / "fair.tar.xz", tmp_path / "published")
    restore_study(tmp_path / "fair.tar.xz", tmp_path / "restored")
    published, restored = (
        Study.read(tmp_path / name / "study.json").variants[0].start for name in ("published", "restored")
    )
    assert published is not None
    assert published.shipped
    assert published.folder == "backbones/softmax"
    assert restored is not None
    assert restored.folder == str(BACKBONES / "softmax")


def test_nothing_published_is_said(tmp_path, capsys):
    assert (
        main(["reproduce", "paper-fig8", "--scale", "smoke", "--restore", str(tmp_path), "--out", str(tmp_path)]) == 0
    )
    assert main(["reproduce", "--restore", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "--restore has no effect without the name of a study" in capsys.readouterr().err


def test_a_measured_figure_is_restored(tmp_path):
    folder = reproduce("paper-fig8", scale="cpu", out=tmp_path / "home")
    collect_records(STUDIES["paper-fig8"], "cpu", tmp_path / "home", tmp_path / "published")
    restored = reproduce("paper-fig8", scale="cpu", out=tmp_path / "elsewhere", restore=tmp_path / "published")
    assert list(Ledger(restored / "records.jsonl")) == list(Ledger(folder / "records.jsonl"))
    assert (restored / "prefix-sums.npz").exists()
    assert (restored / "figure.png").exists()


def test_a_figure_whose_restoration_was_interrupted_is_restored_again(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    Ledger(tmp_path / "home/records.jsonl").append([Record("error", 1.0, artefact="sums.npz")])
    (tmp_path / "home/sums.npz").write_bytes(b"sums")
    pack_figure(tmp_path / "home", tmp_path / "cpu.tar.xz")
    monkeypatch.setattr("linvit.studies.archive.write_atomically", interrupted_after(1))
    with pytest.raises(KeyboardInterrupt):
        unpack(tmp_path / "cpu.tar.xz", tmp_path / "out")
    assert list(files(tmp_path / "out")) == ["sums.npz"]


def interrupted_after(count: int):
    """`write_atomically`, stopped after this number of files."""
    left = iter(range(count))

    def write(path: Path, content: bytes) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write_atomically(path, content)

    return write


def test_images_of_the_data_are_never_published(tmp_path):
    study, home = STUDIES["002-fig5-8"], tmp_path / "home"
    folder = reproduce("002-fig5-8", scale="smoke", out=home)
    shutil.copytree(folder, home / "002-fig5-8/cpu")
    assert (folder / "images.npz").exists()
    assert collect_records(study, "cpu", home, tmp_path / "published") == set()
    assert not (tmp_path / "published").exists()


def hostile(file: Path, name: str, kind: bytes = tarfile.REGTYPE, size: int = 3) -> Path:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = size, kind, "/etc/passwd"
    with tarfile.open(file, "w:xz") as archive:
        archive.addfile(member, io.BytesIO(bytes(size)))
    return file


@pytest.mark.parametrize(
    ("name", "kind"), [("../x", tarfile.REGTYPE), ("/tmp/x", tarfile.REGTYPE), ("a/b/c/d", tarfile.REGTYPE),
                       ("a", tarfile.SYMTYPE), (r"C:\x", tarfile.REGTYPE), (r"..\..\x", tarfile.REGTYPE),
                       ("C:x", tarfile.REGTYPE)]
)  # fmt: skip
def test_a_file_that_is_not_of_a_study_is_refused(name, kind, tmp_path):
    with pytest.raises(ValueError, match="which is not a file of a study"):
        unpack(hostile(tmp_path / "x.tar.xz", name, kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_archive_that_is_too_large_or_damaged_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.studies.archive.MAX_BYTES", 2**20)
    with pytest.raises(ValueError, match="holds more than 1 MiB"):
        unpack(hostile(tmp_path / "x.tar.xz", "records.jsonl", size=2**20 + 1), tmp_path / "out")
    (tmp_path / "y.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is damaged"):
        unpack(tmp_path / "y.tar.xz", tmp_path / "out")
    content = hostile(tmp_path / "z.tar.xz", "records.jsonl", size=10**6).read_bytes()
    (tmp_path / "z.tar.xz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        unpack(tmp_path / "z.tar.xz", tmp_path / "out")


def test_headers_count_towards_the_size_of_an_archive(tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.studies.archive.MAX_BYTES", 2**20)
    header = {"comment": "x" * 2**20}
    with tarfile.open(tmp_path / "x.tar.xz", "w:xz", format=tarfile.PAX_FORMAT, pax_headers=header) as archive:
        archive.addfile(tarfile.TarInfo("records.jsonl"))
    with pytest.raises(ValueError, match="holds more than 1 MiB"):
        unpack(tmp_path / "x.tar.xz", tmp_path / "out")


@pytest.mark.usefixtures("brief")
def test_the_command_publishes(done, tmp_path, capsys):
    made(tmp_path / "home", {"wide": [0.9, 0.8, 0.85]}, study="tiny")
    into = tmp_path / "docs"
    assert main(["reproduce", "--publish", str(into), "--out", str(tmp_path / "home"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(into / "reports.html")}
    assert 'href="reports/tiny/cpu/fair/report.md"' in (into / "reports.html").read_text()
