"""Every study runs at scale smoke; on real data, so that those whose images are not there are skipped."""

from __future__ import annotations

import time

import pytest

from linvit.data import Missing, survey
from linvit.metrics import problems
from linvit.records import Records
from linvit.studies import STUDIES, NotHere, Table, Where, reproduce, study

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", STUDIES.names())
def test_smoke(name, tmp_path):
    found = study(name)
    if isinstance(found, NotHere):
        pytest.skip(found.why)
    if isinstance(found, Table):
        try:
            survey(found.data)
        except Missing as missing:
            pytest.skip(str(missing))
    begun = time.process_time()
    folder = reproduce(name, "smoke", tmp_path, Where())
    assert time.process_time() - begun < 60
    assert found.state(folder) == "done"
    every = [record for file in folder.rglob("records.jsonl") for record in Records(file)]
    assert every
    assert [problem for record in every for problem in problems(record)] == []
