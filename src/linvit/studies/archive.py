"""Published records: what a study's page is made from, and what lets an interrupted study resume on another machine.

DIR/records/NAME/SCALE/COLUMN.tar.xz holds a column of a study, DIR/records/NAME/SCALE.tar.xz a measured figure: its
documents and records, and of every finished run its learning curve, its confusion matrix and which test images were
right. Weights are left out, except those from which a row is still to be started, and so are paths of the machine. The
same content gives the same bytes.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from linvit.files import below, write_atomically
from linvit.ledger import Ledger
from linvit.locks import difference
from linvit.records import Record
from linvit.schemas.experiment import BACKBONES
from linvit.schemas.study import Study
from linvit.training.run import FINISHED

FOLDER = "records"  # below the folder that is published into
SUFFIX = ".tar.xz"
MAX_BYTES, MAX_FILES = 2**28, 20_000  # of an archive that is opened
OF_RUN = ("experiment.json", "records.jsonl", "log.jsonl", "confusion.json", "predictions.npz", "image_bits.npz")
CONFIG, WEIGHTS = "best/config.json", "best/model.safetensors"
LEFT_OUT = ("examples", "illustration", "samples")  # artefacts with images of the data set
PRIVATE = ("out", "data_root")  # options of a request that name places of this machine


def archive_path(into: Path, study: str, scale: str, column: str = "") -> Path:
    return into / FOLDER / study / f"{scale}/{column}{SUFFIX}" if column else into / FOLDER / study / f"{scale}{SUFFIX}"


def pack_study(folder: Path, file: Path, started: Collection[str] = ()) -> bool:
    """Add the finished runs of a study's folder to those of the archive; whether the archive has changed.

    started: the rows that start from the softmax models. Runs that only the archive has stay. A ValueError if it holds
    another definition of the study."""
    with TemporaryDirectory() as place:
        merged, published = Path(place) / "merged", Path(place) / "published"
        copy_runs(folder, merged)
        if file.exists():
            unpack(file, published)
            if copy_runs(published, merged) is None:
                other = f"{file} holds runs of another definition of this study than {folder}"
                raise ValueError(f"{other}: delete the file to replace it")
        return _pack(merged, file, started)


def restore_study(file: Path, folder: Path) -> int:
    """Add the archive's finished runs to a study's folder; how many these are. A ValueError if the folder or the
    archive holds another study."""
    with TemporaryDirectory() as place:
        unpack(file, Path(place) / "published")
        added = copy_runs(Path(place) / "published", folder)
    if added is None:
        raise ValueError(f"{file} holds runs of another definition of this study than {folder}: choose another --out")
    return added


def copy_runs(source: Path, target: Path) -> int | None:
    """Add to one folder of a study the finished runs that another has, and their records; the number of these runs.
    None, and nothing is added, if they are folders of different studies. What both have stays as it is in `target`."""
    mine, theirs = (Study.path(folder) for folder in (target, source))
    given = study = Study.read(theirs)
    if mine.exists():
        study = Study.read(mine)
        if difference(study.settings(), given.settings()):
            return None
        study, given = (given, study) if (given.finished or 0) > (study.finished or 0) else (study, given)
        try:
            study = study.extended(given)
        except ValueError:  # a row has changed
            return None
    runs = [run for run in _finished(source) if not _ended(target / run)]
    known = {_experiment(target / run) for run in _finished(target)}
    for run in runs:
        for name in (*OF_RUN[:1], *OF_RUN[2:], CONFIG, WEIGHTS, OF_RUN[1]):  # the records last: they make it finished
            if (source / run / name).exists():
                write_atomically(target / run / name, (source / run / name).read_bytes())
        _rewrite(target / run / OF_RUN[0], target)
    for file in source.glob("*.json"):
        if file != theirs and not (target / file.name).exists():
            write_atomically(target / file.name, file.read_bytes())
    _merge_records(source, target, known)
    study.save(target)
    _rewrite(mine, target)
    return len(runs)


def _merge_records(source: Path, target: Path, known: set[str]) -> None:
    """Those of runs that the target does not have, and measurements of the whole; the oldest first."""
    ledger = Ledger(target / "records.jsonl")
    lines = {record.line(): record for record in ledger}
    for record in Ledger(source / "records.jsonl"):
        if not record.experiment or record.experiment not in known:
            lines.setdefault(record.line(), record)
    if len(lines) > len(ledger):
        ledger.replace(sorted(lines.values(), key=lambda record: record.time))


def pack_figure(folder: Path, file: Path) -> bool:
    """Store a measured figure in place of what the archive holds; whether the archive has changed."""
    files = {"records.jsonl": (folder / "records.jsonl").read_bytes()}
    for record in Ledger(folder / "records.jsonl"):
        if record.artefact and "/" not in record.artefact and (folder / record.artefact).exists():
            files[record.artefact] = (folder / record.artefact).read_bytes()
    return _write(file, files)


def _pack(folder: Path, file: Path, started: Collection[str]) -> bool:
    records = [record for record in Ledger(folder / "records.jsonl") if record.metric not in LEFT_OUT]
    files = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    files["study.json"] = _document(folder / "study.json", None)
    files["records.jsonl"] = "".join(record.line() + "\n" for record in records).encode()
    needed = _starts(folder, records, started)
    for run in _finished(folder):
        for name in (*OF_RUN, CONFIG, *([WEIGHTS] if run in needed else [])):
            path = folder / run / name
            if path.exists() and not ("-half-seed" in run and path.suffix == ".npz"):  # only its result matters
                files[f"{run}/{name}"] = _content(path)
    return _write(file, files)


def _content(path: Path) -> bytes:
    if path.name == "experiment.json":
        return _document(path, None)
    if path.name == "predictions.npz":
        return _packed_predictions(path)
    return path.read_bytes()


def _packed_predictions(path: Path) -> bytes:
    """Which test images were right, a bit each. Folds are scored together later, for which the classes are needed."""
    with np.load(path) as arrays:
        found = dict(arrays)
    source = json.loads((path.parent / OF_RUN[0]).read_text(encoding="utf-8"))["source"] or {}
    if "predicted" in found and source.get("fold") is None:
        found["right"] = np.packbits(found.pop("predicted") == found["labels"])
    content = io.BytesIO()
    np.savez(content, **{name: found[name] for name in sorted(found)})  # the archive compresses all of them together
    return content.getvalue()


def _starts(folder: Path, records: list[Record], started: Collection[str]) -> set[str]:
    """The softmax runs from which one of the rows `started` is still to be trained."""
    ended = {(r.tags.get("variant"), r.tags.get("seed")) for r in records if r.metric in FINISHED}
    baselines = [v.id for v in Study.read(folder / "study.json").variants if v.role == "baseline"]
    needed = {
        record.experiment
        for record in records
        if record.metric == FINISHED[0] and record.tags.get("variant") in baselines
        if any((row, record.tags.get("seed")) not in ended for row in started)
    }
    return {run for run in _finished(folder) if _experiment(folder / run) in needed}


def _finished(folder: Path) -> list[str]:
    return [path.parent.name for path in sorted(folder.glob("*/experiment.json")) if _ended(path.parent)]


def _ended(run: Path) -> bool:
    return (run / "experiment.json").exists() and Ledger(run / "records.jsonl").has(*FINISHED)


def _experiment(run: Path) -> str:
    return json.loads((run / "experiment.json").read_text(encoding="utf-8"))["id"]


def _rewrite(path: Path, folder: Path) -> None:
    """A document with its starts in this folder."""
    write_atomically(path, _document(path, folder))


def _document(path: Path, folder: Path | None) -> bytes:
    """A study or an experiment as stored, with starts as they are found below `folder`, or among linvit's backbones;
    without a folder, as RUN/best or backbones/NAME, and without places of this machine."""

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(each) for each in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"folder", "sha256"}:
            inside = PurePosixPath(*PurePosixPath(value["folder"]).parts[-2:])
            home = BACKBONES.parent if inside.parent.name == BACKBONES.name else folder and folder.resolve()
            return value | {"folder": str(home / inside) if folder and home else str(inside)}
        if folder is None:
            value = {key: each for key, each in value.items() if not (key in PRIVATE and "verb" in value)}
            value = value | ({"root": None} if {"data", "root"} <= set(value) else {})
        return {key: placed(each) for key, each in value.items()}

    content = placed(json.loads(path.read_text(encoding="utf-8")))
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _write(file: Path, files: dict[str, bytes]) -> bool:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files, key=lambda name: (PurePosixPath(name).name, name)):  # alike files follow each other
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    packed = lzma.compress(content.getvalue(), preset=6 | lzma.PRESET_EXTREME)
    if file.exists() and file.read_bytes() == packed:
        return False
    write_atomically(file, packed)
    return True


def unpack(file: Path, folder: Path) -> None:
    """Write the files of an archive into a folder; a ValueError if it is not one of ours."""
    try:
        with lzma.open(file) as packed:
            raw = packed.read(MAX_BYTES + 1)  # headers count too: tarfile reads them whole
        if len(raw) > MAX_BYTES:
            raise ValueError(f"{file} holds more than {MAX_BYTES >> 20} MiB")
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            files = dict(_members(file, archive, folder))
        for path in sorted(files, key=lambda path: path.name == "records.jsonl"):  # last: they make a figure finished
            write_atomically(path, files[path])
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{file} cannot be read ({error}): it is damaged, or not an archive of records") from None


def _members(file: Path, archive: tarfile.TarFile, folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Regular files, with their paths in the folder, of bounded number. Sparse ones would grow when read."""
    for count, member in enumerate(archive, 1):
        path = below(folder, member.name)
        if path in (None, folder) or not member.isfile() or member.issparse() or member.name.count("/") > 2:
            raise ValueError(f"{file} holds {member.name!r}, which is not a file of a study")
        if count > MAX_FILES:
            raise ValueError(f"{file} holds more than {MAX_FILES:,} files")
        content = archive.extractfile(member)
        assert content is not None
        yield path, content.read()
