"""The order in which studies are run, and what is said of them before."""

from __future__ import annotations

import pytest
from results_of import made, noisy

from linvit.cli import main
from linvit.requests import ReproduceRequest
from linvit.studies import STUDIES, PublishedStudy
from linvit.studies.agenda import AGENDA, Planned
from linvit.studies.claims import CLAIMS
from linvit.studies.power import claims_of, detectable, promise
from linvit.studies.results import Ref, Results

HOURS = 40  # of one core, for all studies of the reports


def test_every_study_has_its_place_and_all_fit():
    shipped = {name for name, study in STUDIES.items() if study.durations and name not in ("tiny", "diverging")}
    assert set(AGENDA) == shipped
    assert sum(planned.minutes for name, planned in AGENDA.items() if STUDIES[name].report != "2026") <= 60 * HOURS
    for name, planned in AGENDA.items():
        assert STUDIES[name].durations["cpu"] == planned.duration
        assert bool(planned.deviation) == bool(planned.source)
        assert planned.deviation is None or isinstance(STUDIES[name], PublishedStudy)


def test_what_decides_a_claim_comes_before_what_decides_none():
    deciding = [bool(claims_of(name)) for name in AGENDA]
    assert deciding == sorted(deciding, reverse=True)
    named = {claim for name in AGENDA for claim in claims_of(name)}
    computed = {"003.2"}  # needs no study
    assert named == {claim.id for claim in CLAIMS} - computed


@pytest.mark.parametrize(
    ("minutes", "text"), [(0.2, "1 core-minute"), (59.6, "60 core-minutes"), (150, "2.5 core-hours")]
)
def test_durations(minutes, text):
    assert Planned(minutes).duration == text


def test_what_a_study_detects_is_what_its_tests_then_detect(tmp_path, monkeypatch):
    """But for the level: a single test has 5 %."""
    study, rows = STUDIES["000-cifar10"], [row.name for row in STUDIES["000-cifar10"].rows_of("fair")]
    sd = 0.004
    scores = {name: [v if v is None else v + sd * ((i * 7 + j * 3) % 5 - 2) for j, v in enumerate(noisy(0.7, 5, 0))]
              for i, name in enumerate(rows)}  # fmt: skip
    results = Results(made(tmp_path, scores, study="000-cifar10"))
    pair = results.pair(Ref(study.name, rows[0]), Ref(study.name, rows[1]))
    deviation = 100 * float(pair.comparison.noise[pair.i, pair.j]) ** 0.5
    monkeypatch.setitem(AGENDA, study.name, Planned(1, deviation, "here"))
    monkeypatch.setattr("linvit.studies.power.CLAIMS", [])  # no correction
    assert detectable(study, "fair") == pytest.approx(float(pair.detects.removesuffix(" points")), rel=0.06)


def test_more_seeds_detect_less_and_two_nothing():
    study = STUDIES["000-cifar10"]
    assert detectable(study, "fair", 10) < detectable(study, "fair", 5)
    assert detectable(study, "fair", 2) is None
    assert "Detects differences of" in promise(study)
    assert promise(study, 2) == promise(STUDIES["paper-fig4"]) == promise(STUDIES["001-V"]) == ""


def test_all_is_every_study_in_this_order(monkeypatch, tmp_path, capsys):
    from linvit.studies.run import Reproduction

    ran = []

    def run(self, study):
        ran.append(study.name)
        if study.name == "002-precision":
            raise ValueError("this CPU has no native bfloat16")
        return tmp_path

    monkeypatch.setattr(Reproduction, "run", run)
    assert main(["reproduce", "--all", "--scale", "smoke", "--out", str(tmp_path)]) == 2  # and says so at the end
    assert ran == list(AGENDA)
    assert "002-precision not run: this CPU has no native bfloat16" in capsys.readouterr().err
    assert main(["reproduce", "001-I", "--all", "--out", str(tmp_path)]) == 2
    assert "--all runs every study: leave 001-I out, or --all" in capsys.readouterr().err


def test_each_study_remembers_its_own_command():
    request = ReproduceRequest(all=True)
    assert request.replaced(names=("001-I",), all=False).all is False
