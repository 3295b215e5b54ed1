"""`linvit advise --for DEVICE` as a user meets it: a forecast, and never anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from linvit import cli
from linvit.cli import parse
from linvit.measure import advice, features
from linvit.requests import AdviseRequest, read_request
from linvit.study import advising, forecasting

TINY = ["17", "--size", "nano", "--patch", "4", "-a", "performer-exp:m=8", "-a", "linformer:k=4"]
WARNING = "Forecast for NVIDIA H100 SXM from a model of its data-sheet figures: nothing was run on it."


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LINVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for module, name in ((advice, "race"), (advice, "cached"), (features, "errors_at_random")):
        monkeypatch.setattr(module, name, lambda *given, **options: pytest.fail("measured"))


def test_text_and_files_say_that_it_is_a_forecast(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main(["advise", *TINY, "--for", "h100", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"{WARNING}\na model of size nano with 4 × 4 patches and CLS: 17 tokens, 4 layers, 4 heads of 16\n"
    )
    for words in ("launch-bound", "\nperformer-exp:m=8 ", "\nlinformer:k=4 ", "published times", "\n  linvit compare "):
        assert words in printed
    assert "measured here" not in printed
    assert {path.name for path in out.glob("[!.]*")} == {"forecast.json", "forecast.html", "forecast.png"}
    assert json.loads((out / "forecast.json").read_text())["warning"] == WARNING
    page = (out / "forecast.html").read_text()
    assert WARNING in page
    assert "Forecast for NVIDIA H100 SXM: number of tokens" in page
    assert "launch-bound" in page
    assert not (tmp_path / "cache").exists()


def test_json_has_times_of_host_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "1024", "-a", "performer-relu:m=32", "--for", "l4", "--for", "training", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forecast"] is True
    assert found["device"] == "NVIDIA L4"
    assert found["task"] == "training"
    (row,) = found["attentions"]
    for times in (row, found["softmax"]):
        for task in ("latency", "inference", "training"):
            host, device = times["host_seconds"][task], times["device_seconds"][task]
            assert times["seconds"][task] == max(host, device)
            assert times["launch_bound"][task] is (host > device)
    assert found["softmax"]["launch_bound"]["training"] is False  # 32 images of 1,024 tokens
    assert row["speed"]["training"] == found["softmax"]["seconds"]["training"] / row["seconds"]["training"]


def test_quiet_is_the_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *TINY, "--for", "t4", "--quiet"]) == 0
    assert capsys.readouterr() == ("softmax\n", "")  # so few tokens are launch-bound


def test_more_tokens_than_are_measured_and_images() -> None:
    long = forecasting.forecast(9216, "a100", attentions=["linformer:k=16"])
    assert long.question.tokens == 9216
    assert long.choice == "linformer:k=16"
    assert "forecast for NVIDIA A100 80GB, not measured" in long.reason
    digits = forecasting.forecast("digits", "m3", attentions=["performer-relu:m=8"], task="latency")
    assert digits.question.name == "digits"
    assert "linvit compare digits" in digits.command


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["64", "--for", "h200"],
            "did you mean 'h100'? choose from: latency, inference, training, a100, h100, l4, t4,",
        ),
        (["64", "--for", "a800"], "choose from: latency, inference, training, a100"),
        (["64", "--for", "h100", "--for", "l4"], "--for h100 and --for l4: give one of them"),
        (["64", "--for", "h100", "--device", "cpu"], "--device cpu has no effect with --for h100: nothing is measured"),
        (["64", "--for", "h100", "--error", "0.1"], "--error 0.1 has no effect with --for h100"),
        (["64", "--for", "h100", "--fresh"], "--fresh has no effect with --for h100"),
        (["64", "--for", "t4", "--batch", "1000000000"], "but NVIDIA T4 has 14.9 GiB"),
        (["20000", "--for", "t4"], "N=20,000 tokens are too many: forecasts end at 16,385"),
        (["64", "--for", "t4", "-a", "performer-nothing"], "unknown attention 'performer-nothing'"),
        (["64", "--for", "t4", "--runs", "nowhere"], "runs=nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(capsys, tmp_path: Path, words: list[str], why: str) -> None:
    assert cli.main(["advise", *words, "--out", "results"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert why in printed.err
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "given", [{"hardware": "h100"}, {"task": "training", "hardware": "4090"}, {"task": "latency"}, {}]
)
def test_tasks_and_devices_are_one_option(given: dict[str, str]) -> None:
    request = AdviseRequest.of(about="64", **given)
    words = request.command().split()[1:]
    assert words.count("--for") == len(given)
    assert parse(words)[0] == request == read_request(request.stored())
    assert (request.task, request.hardware) == (given.get("task", "inference"), given.get("hardware"))


def test_a_measured_answer_is_not_given_for_a_device_that_is_not_here() -> None:
    with pytest.raises(ValueError, match=r"hardware=h100 is not measured: linvit\.study\.forecasting"):
        advising.advise(64, hardware="h100")
    with pytest.raises(ValueError, match="hardware is missing"):
        forecasting.run(AdviseRequest.of(about="64"))
