"""Every study runs at scale smoke, on real data; those whose images are missing are skipped."""

from __future__ import annotations

import time

import pytest

from linvit.data import Missing, survey
from linvit.metrics import problems
from linvit.records import Records
from linvit.studies import STUDIES, PublishedStudy, reproduce
from linvit.studies.run import state

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.durations])
def test_smoke(name, tmp_path):
    study = STUDIES[name]
    if isinstance(study, PublishedStudy):
        try:
            survey(study.data)
        except Missing as missing:
            pytest.skip(str(missing))
    started = time.process_time()
    folder = reproduce(name, scale="smoke", out=tmp_path)
    assert time.process_time() - started < 60
    assert state(study, folder) == "done"
    records = [record for file in folder.rglob("records.jsonl") for record in Records(file)]
    assert records
    assert [problem for record in records for problem in problems(record)] == []
