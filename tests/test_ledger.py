"""Ledger: records are found by what was measured, parsed once, and never lost or half seen."""

from __future__ import annotations

import os

import pytest

from linvit import ledger as ledger_module
from linvit.ledger import Ledger, key_of, open_ledger
from linvit.records import Record, Records


def accuracy(value: float, **tags) -> Record:
    return Record("test_accuracy", value, "fraction", tags={"attention": "softmax", "seed": 0} | tags)


def steps(value: int, model: str) -> Record:
    return Record("conversion_steps", value, "count", tags={"model": model, "seed": 3, "kept": value > 5})


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "new" / "records.jsonl")


@pytest.fixture
def parsed(monkeypatch) -> list[int]:
    """Grows with every time that a file is parsed."""
    times: list[int] = []
    real = Records.__iter__

    def counted(self):
        times.append(1)
        return real(self)

    monkeypatch.setattr(Records, "__iter__", counted)
    return times


def test_a_missing_file_is_empty_and_not_made(ledger):
    assert (list(ledger), len(ledger), ledger.last("macs"), ledger.done(key_of("macs"))) == ([], 0, None, None)
    assert not ledger.has("macs", "diverged")
    ledger.append([])
    assert not ledger.path.exists()


def test_records_are_found_by_measurement_metric_and_tags(ledger):
    first, second, third = steps(3, "stage 1"), steps(4, "stage 2"), steps(9, "stage 1")
    ledger.append([first, second, accuracy(0.5)])
    ledger.append([third])
    assert len(ledger) == 4
    assert ledger.find("conversion_steps") == [first, second, third]
    assert ledger.find("conversion_steps", model="stage 1") == [first, third]
    assert ledger.find("conversion_steps", model="stage 1", kept=False) == [first]
    assert ledger.last("conversion_steps", model="stage 1") == third
    assert ledger.last("conversion_steps", model="stage 3") is None
    assert ledger.done(key_of("conversion_steps", model="stage 1", seed=99)) == third  # seed is not part of its key
    assert ledger.done(key_of("conversion_steps", model="stage 3")) is None
    assert ledger.has("macs", "test_accuracy")
    assert not ledger.has("macs")


def test_once_makes_what_is_missing_and_nothing_twice(ledger):
    key, calls = key_of("conversion_steps", model="stage 1"), []

    def make():
        calls.append(1)
        return [steps(1, "stage 0"), steps(7, "stage 1")]

    assert ledger.once(key, make).value == 7
    assert ledger.once(key, make).value == 7
    assert Ledger(ledger.path).once(key, make).value == 7
    assert calls == [1]
    assert [r.value for r in ledger] == [1, 7]  # everything that was made is written
    with pytest.raises(AssertionError, match="stage 2"):
        ledger.once(key_of("conversion_steps", model="stage 2"), lambda: [steps(1, "stage 0")])


def test_append_new_writes_measurements_that_are_not_recorded(ledger):
    ledger.append([steps(1, "a")])
    ledger.append_new([steps(2, "a"), steps(3, "b")])
    assert [(r.value, r.tags["model"]) for r in ledger] == [(1, "a"), (3, "b")]
    ledger.append_new([steps(2, "a")], key=lambda record: (record.value,))
    assert [r.value for r in ledger] == [1, 3, 2]


def test_own_appends_are_not_parsed(ledger, parsed):
    for number in range(5):
        ledger.append([steps(number, "a"), accuracy(number / 7, θ="größe")])
        assert len(ledger) == 2 * (number + 1)
    ledger.replace(list(ledger)[:3])
    ledger.append([steps(8, "b")])
    found = list(ledger)
    assert parsed == []
    assert found == list(Ledger(ledger.path))


def test_a_file_is_parsed_once_and_again_when_another_process_has_written(ledger, parsed):
    Records(ledger.path).append([steps(1, "a")])
    for _ in range(3):
        assert (len(ledger), ledger.last("conversion_steps").value, ledger.has("macs")) == (1, 1, False)
    assert len(parsed) == 1
    Records(ledger.path).append([steps(2, "a")])  # as another process would
    assert [r.value for r in ledger] == [1, 2]
    assert ledger.done(key_of("conversion_steps", model="a")).value == 2
    assert len(parsed) == 2


def test_another_process_writes_during_an_append(ledger, monkeypatch):
    ledger.append([steps(1, "a")])
    real = Records.append

    def with_company(self, records):
        real(self, [steps(2, "b")])
        real(self, records)

    monkeypatch.setattr(Records, "append", with_company)
    ledger.append([steps(3, "c")])
    assert [r.value for r in ledger] == [1, 2, 3]


def test_a_file_of_the_same_length_that_was_replaced_is_read_again(ledger):
    first, second = Record("macs", 1, "MAC", time=1.0), Record("macs", 2, "MAC", time=1.0)
    ledger.append([first])
    stamp = ledger.path.stat()
    Ledger(ledger.path).replace([second])
    os.utime(ledger.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert ledger.path.stat().st_size == stamp.st_size
    assert list(ledger) == [second]
    ledger.path.unlink()
    assert list(ledger) == []


def test_replace_is_complete_or_has_not_happened(ledger, monkeypatch):
    before, after = [steps(1, "a"), steps(2, "b")], [steps(2, "b"), steps(3, "c"), accuracy(0.5)]
    ledger.append(before)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            ledger.replace(after)
    assert list(ledger) == list(Records(ledger.path)) == before
    ledger.replace(after)
    assert list(ledger) == list(Records(ledger.path)) == after
    assert ledger.done(key_of("conversion_steps", model="a")) is None
    assert [path.name for path in ledger.path.parent.iterdir() if path.suffix == ".part"] == []


def test_a_torn_last_line_is_ignored_and_removed_by_the_next_append(ledger):
    ledger.append([steps(1, "a")])
    with open(ledger.path, "ab") as file:
        file.write(b'{"metric": "conv')
    assert [r.value for r in ledger] == [1]
    ledger.append([steps(2, "b")])
    assert [r.value for r in ledger] == [1, 2]
    assert list(ledger) == list(Ledger(ledger.path))


def test_a_damaged_line_is_named(ledger):
    ledger.append([steps(1, "a")])
    ledger.path.write_text("junk\n" + ledger.path.read_text())
    with pytest.raises(ValueError, match=r"records\.jsonl:1: damaged"):
        len(ledger)


def test_what_is_not_finite_is_read_back_as_none(ledger):
    ledger.append([Record("test_loss", float("nan"), "nat")])
    assert ledger.last("test_loss").value is None


def test_one_ledger_per_folder_and_process(tmp_path, monkeypatch):
    ledger_module._shared.cache_clear()
    monkeypatch.chdir(tmp_path)
    one = open_ledger("run")
    assert one.path == tmp_path / "run" / "records.jsonl"
    assert open_ledger(tmp_path / "run") is one
    assert open_ledger(tmp_path / "other") is not one
