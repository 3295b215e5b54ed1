"""Records: nothing that was reported is lost, whatever happens to the writer."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linvit
from linvit.records import Record, Records, commit, versions


def some(number: int) -> Record:
    return Record(
        "accuracy", number / 7, "fraction", n=5, experiment="e", tags={"attention": "softmax", "seed": number}
    )


def test_round_trip(tmp_path):
    records = Records(tmp_path / "new" / "records.jsonl")
    assert list(records) == []
    written = [
        some(1),
        some(2).tagged(split="test", θ="größe\n\u2028"),
        Record("time", 3, "s", device="cpu", threads=2),
    ]
    records.append(written[:1])
    records.append(written[1:])
    records.append([])
    assert list(records) == written
    lines = records.path.read_text().split("\n")
    assert len(lines) == 4
    row = json.loads(lines[0])
    assert row["attention"] == "softmax"  # flat: tags are columns
    assert row["value"] == 1 / 7
    assert row["commit"] == commit()
    assert row["versions"] == versions()
    assert "linvit" in row["versions"]


json_values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
own = set(Record.__dataclass_fields__)


@settings(deadline=None, derandomize=True)
@given(
    metric=st.text(),
    value=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
    tags=st.dictionaries(st.text().filter(lambda key: key not in own), json_values),
)
def test_any_record_survives_its_line(metric, value, tags):
    record = Record(metric, value, tags=tags)
    line = record.line()
    assert "\n" not in line
    assert Record.of(json.loads(line)) == record


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_runs_are_recorded_without_a_number(value):
    record = Record("loss", value)
    assert json.loads(record.line())["value"] is None
    assert Record.of(json.loads(record.line())).value is None


@pytest.mark.parametrize("name", sorted(own))
def test_tags_may_not_hide_fields(name):
    with pytest.raises(ValueError, match=name):
        Record("m", 1, tags={name: 1}).line()


def test_a_bad_record_leaves_the_file_alone(tmp_path):
    records = Records(tmp_path / "records.jsonl")
    first = some(1)
    records.append([first])
    with pytest.raises(ValueError, match="metric"):
        records.append([some(2), Record("m", 1, tags={"metric": 1})])
    assert list(records) == [first]


def test_every_torn_last_line_is_ignored_and_then_removed(tmp_path):
    """A power cut may stop a line at any byte, in the middle of a letter too."""
    records = Records(tmp_path / "records.jsonl")
    first, second, third = (some(i).tagged(name="θ→größe") for i in (1, 2, 3))
    records.append([first])
    kept = records.path.read_bytes()
    whole = (second.line() + "\n").encode()
    for length in range(len(whole)):
        records.path.write_bytes(kept + whole[:length])
        assert list(records) == [first]
    for length in (0, 1, 40, whole.index("θ".encode()) + 1, len(whole) - 1):
        records.path.write_bytes(kept + whole[:length])
        records.append([third])
        assert list(records) == [first, third]


def test_a_torn_line_longer_than_a_block_and_a_file_of_nothing_else(tmp_path):
    records = Records(tmp_path / "records.jsonl")
    records.path.write_bytes(b"x" * 20011)
    assert list(records) == []
    first = some(1)
    records.append([first])
    assert list(records) == [first]


@pytest.mark.parametrize(
    "line",
    [
        *(
            "",
            "{",
            "5",
            "null",
            "[]",
            '"metric"',
            "{}",
            '{"metric": "a"}',
            '{"metric":"a","value":1,"tags":{}}',
            "\xff",
        ),
        *("[" * 100_000, '{"metric":["a"],"value":1}', '{"metric":"a","value":"1"}', '{"metric":"a","value":NaN}'),
        *(
            '{"metric":"a","value":1,"seed":[0]}',
            '{"metric":"a","value":1,"seed":NaN}',
            '{"metric":"a","value":1,"n":0.5}',
        ),
    ],
)
def test_a_bad_line_inside_is_named(tmp_path, line):
    records = Records(tmp_path / "records.jsonl")
    records.append([some(1)])
    with open(records.path, "ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    records.append([some(2)])
    reader = iter(records)
    next(reader)
    with pytest.raises(ValueError, match=r"records\.jsonl:2: damaged"):
        next(reader)


WRITES = 30


def _append(path: str, writer: int) -> None:
    for number in range(WRITES):
        Records(path).append(
            [
                Record("m", number, tags={"writer": writer, "pad": "x" * 5003}),
                Record("n", number, tags={"writer": writer}),
            ]
        )


def test_several_processes_write_one_file(tmp_path):
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append, args=(str(path), writer)) for writer in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    found = list(Records(path))
    assert len(found) == 2 * WRITES * 2
    for writer in range(2):
        own_lines = [(r.metric, r.value) for r in found if r.tags["writer"] == writer]
        assert own_lines == [(metric, number) for number in range(WRITES) for metric in "mn"]
    # what one append wrote is together
    assert all(a.tags["writer"] == b.tags["writer"] for a, b in zip(found[::2], found[1::2], strict=True))


def test_a_killed_writer_loses_nothing_that_it_reported(tmp_path):
    path = tmp_path / "records.jsonl"
    code = f"""
from linvit.records import Record, Records
for number in range(10**6):
    Records({str(path)!r}).append([Record("m", number, versions="", commit="", tags={{"pad": "x" * 997}})])
    print(number, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reported = -1
    for line in process.stdout:
        reported = int(line)
        if reported == 23:
            process.kill()
    process.wait()
    assert reported >= 23
    assert [r.value for r in Records(path)][: reported + 1] == list(range(reported + 1))
    Records(path).append([some(1)])
    assert list(Records(path))[-1].tags == some(1).tags


def test_commit_is_of_the_package():
    home = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=Path(linvit.__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert commit().rstrip("+") == home.stdout.strip()


def test_commit_is_not_that_of_a_repository_the_package_is_installed_in(tmp_path):
    package = tmp_path / ".venv" / "lib" / "linvit"
    package.mkdir(parents=True)
    for name in ("__init__.py", "records.py", "files.py", "locks.py"):
        shutil.copy(Path(linvit.__file__).parent / name, package)
    for words in (
        ["init", "-q"],
        ["add", "-f", "."],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    code = "from linvit.records import commit; print(repr(commit()))"
    paths = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"
