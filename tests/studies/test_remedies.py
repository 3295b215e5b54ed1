"""What would decide a claim: the studies that were not run, more seeds, longer training, quiet cores."""

from __future__ import annotations

import pytest
from results_of import made, noisy, sizes

from linvit.studies import page
from linvit.studies.hypotheses import FAILS, HOLDS, OPEN, Claim, at_least, better, judge
from linvit.studies.races import lighter, quicker
from linvit.studies.remedies import next_runs, remedies
from linvit.studies.results import Ref, Results

A, B = Ref("000-mnist", "RF16 softmax"), Ref("000-mnist", "transformer")
FAR = Ref("000-cifar10", "transformer"), Ref("000-cifar10", "RF16 softmax")


def told(home, *tests, word: str | None = None) -> list[tuple[str, str, str]]:
    results = Results(home)
    (verdict,) = judge([Claim("000.0", "", "", tests)], results)
    assert word in (None, verdict.word)
    return [(one.command, one.duration, one.why) for one in remedies(verdict, results)]


def test_what_was_not_run_is_to_be_run(tmp_path):
    mnist, cifar = (
        ("linvit reproduce 000-mnist", "75 core-minutes", ""),
        (
            "linvit reproduce 000-cifar10",
            "3.6 core-hours",
            "",
        ),
    )
    assert told(tmp_path, better(A, B), better(*FAR)) == [mnist, cifar]
    made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": noisy(0.95)})
    assert told(tmp_path, better(A, B), better(*FAR), word=OPEN) == [cifar]
    assert told(tmp_path, better(A, B), word=HOLDS) == told(tmp_path, better(B, A), word=FAILS) == []


def test_a_row_without_a_result_asks_for_its_study(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9)})
    assert told(tmp_path, better(A, B)) == [("linvit reproduce 000-mnist", "75 core-minutes", "a row has no result")]


def test_noise_asks_for_more_seeds_and_their_time(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9, 5, 0.01), "RF16 softmax": [0.905, 0.895, 0.91, 0.9, 0.893]})
    ((command, duration, why),) = told(tmp_path, better(A, B), word=OPEN)
    start, _, seeds = command.rpartition(" ")
    assert (start, why) == ("linvit reproduce 000-mnist --seeds", "more seeds")
    assert int(seeds) > 8  # as many as the study has
    assert duration == f"{75 * int(seeds) / 8 / 60:.1f} core-hours"


def test_differences_that_no_number_of_seeds_decides(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9, 5, 0.1), "RF16 softmax": [0.95, 0.8, 1.0, 0.9, 0.7]})
    ((command, _, why),) = told(tmp_path, at_least(A, B), word=OPEN)
    assert (command, why) == ("", "no number of seeds decides it on these test images")


def test_barely_trained_models_ask_for_the_full_scale(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9, 5), "RF16 softmax": noisy(0.9, 5)}, half=0.06)
    ((command, _, why),) = told(tmp_path, at_least(A, B), word=OPEN)
    assert (command, why) == ("linvit reproduce 000-mnist --scale full", "the models are barely trained")


@pytest.mark.parametrize("busy", [True, False])
def test_a_busy_core_asks_for_quiet_ones(tmp_path, busy):
    sizes(tmp_path, "000", {f"000-mnist: {row}": (1.0, 1.0) for row in ("transformer", "RF16 softmax")}, busy=busy)
    test = quicker("000-mnist", "RF16 softmax", "transformer")
    ((command, _, why),) = told(tmp_path, test, word=OPEN)
    expected = (
        "linvit reproduce 000-sizes",
        "measured on a busy core: delete its folder, and measure it on quiet cores",
    )
    assert (command, why) == (expected if busy else ("", "they are equally fast on this machine"))
    ((_, _, why),) = told(tmp_path, lighter("000-mnist", "RF16 softmax", "transformer"), word=OPEN)
    assert why == "their memory is the same"


def test_diverged_rows_cannot_be_compared(tmp_path):
    made(tmp_path, {"transformer": noisy(0.9), "RF16 softmax": [0.9, None, 0.9]})
    ((command, _, why),) = told(tmp_path, better(A, B), word=OPEN)
    assert command == ""
    assert "RF16 softmax: seed 1 diverged" in why


def test_a_claim_that_only_the_correction_leaves_open_asks_for_more_seeds(tmp_path):
    made(tmp_path, {"transformer": [0.90, 0.901, 0.899], "RF16 softmax": [0.906, 0.9025, 0.9045]})
    results = Results(tmp_path)
    verdicts = judge([Claim(f"000.{i}", "", "", [better(A, B)]) for i in range(10)], results)
    assert verdicts[0].word == OPEN
    (one,) = remedies(verdicts[0], results)
    assert one.command == "linvit reproduce 000-mnist --seeds 24"


def test_next_runs_come_in_the_order_of_the_agenda_with_their_claims(tmp_path):
    results = Results(tmp_path)
    claims = [Claim("000.0", "", "", [better(A, B)]), Claim("000.1", "", "", [better(*FAR), better(A, B)])]
    assert next_runs(judge(claims, results), results) == [
        ("000-cifar10", "3.6 core-hours", ["000.1"]),
        ("000-mnist", "75 core-minutes", ["000.0", "000.1"]),
    ]


def test_the_page_says_what_would_decide_every_open_claim(tmp_path):
    made(tmp_path, {"transformer": noisy(0.99, 5), "RF16 softmax": noisy(0.992, 5)})
    book = page.gather(tmp_path)
    assert all(book.remedies[v.claim.id] for v in book.verdicts if v.word not in (HOLDS, FAILS))
    assert not any(book.remedies[v.claim.id] for v in book.verdicts if v.word in (HOLDS, FAILS))
    text = page.write(tmp_path).read_text()
    assert "<code>linvit reproduce 001-V</code> (3.5 core-hours)" in text
    assert "first <code>linvit reproduce 002-non-finite</code>" in text.partition('id="claims"')[0]
