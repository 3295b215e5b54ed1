"""Requests: checked once, and everything that is shown of an option derives from its field."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import linvit
from linvit.cli import parse
from linvit.requests import (
    BY_VERB,
    CompareRequest,
    ConvertRequest,
    ReproduceRequest,
    TrainRequest,
    TuneRequest,
    read_request,
)

EXAMPLES = [
    TrainRequest.of(data="photos/", attention="softmax@2+uniform@2", epochs=3, compile=True, track=["mlflow"]),
    CompareRequest.of(
        attentions=["softmax", "performer-relu:m=32"],
        epochs="3",
        margin="1%",
        match=False,
        betas=(0.9, 0.95),
        runner="ray://head:10001",
        with_redrawn=50,
    ),
    CompareRequest.of(data="-odd", budget="15m", checkpoint=None),
    TuneRequest.of(data="mnist", trials=5, folds=3, dropout=0.1),
    ConvertRequest.of(model="runs/a", to="performer-hyp", data="cifar10", stages="none", max_drop="1%", lr=1e-3),
    ConvertRequest.of(model="runs/a", to="linformer:k=8", data="cifar10", stages=[2, 1]),
    ReproduceRequest.of(names=["001-I", "001-V"], seeds=5),
]


@pytest.mark.parametrize("request_", EXAMPLES, ids=lambda request: request.verb)
def test_a_command_and_a_stored_request_make_the_request_again(request_):
    assert read_request(request_.stored()) == request_
    words = shlex.split(request_.command())
    assert words[0] == "linvit"
    assert parse(words[1:])[0] == request_


def test_what_only_concerns_display_is_not_part_of_the_command():
    assert CompareRequest.of(quiet=True, as_json=True, dry_run=True).command() == "linvit compare digits"


def test_passwords_are_neither_stored_nor_shown():
    for url in (
        "postgresql://me:secret@host/db?password=secret",
        "postgresql://me@host/db?password=se@secret",
        "postgresql:///db?sslmode=require&password=secret@x",
    ):
        request = TuneRequest.of(storage=url)
        assert "secret" not in request.command() + str(request.stored())
    assert "me@host" in TuneRequest.of(storage="postgresql://me@host/db").command()


def test_a_changed_request_is_checked_again():
    request = CompareRequest.of(epochs=3)
    assert request.replaced(seeds=30, epochs=4).command() == "linvit compare digits --epochs 4 --seeds 30"
    with pytest.raises(ValueError, match="seeds=0 must be at least 1"):
        request.replaced(seeds=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare --seeds 0", "--seeds 0 must be at least 1"),
        ("compare --folds 1", "--folds 1 must be at least 2"),
        ("compare --seeds many", "--seeds many must be an integer"),
        ("compare --epochs none", "--epochs none must be a number"),
        ("compare --set lrr=3", "unknown option 'lrr'; did you mean 'lr'?"),
        ("compare --set image_size=3", "--set image_size: use --image-size"),
        ("compare --set classes=3", "classes comes from the data"),
        ("compare --set attention=softmax", "--set attention: use --attention"),
        ("compare --set on=ray", "unknown option 'on'"),
        ("compare --set epochs", "--set epochs: write KEY=VALUE"),
        ("compare --epochs 1 --set epochs=2", "epochs is given twice"),
        ("compare --set lr=1 --set lr=2", "lr is given twice"),
        ("compare --epochs 1 --set steps=2", "give epochs or steps, not both"),
        ("compare --epochs 1 --budget 3m", "give epochs or budget, not both"),
        ("compare --budget 3x", "budget '3x' is not a duration"),
        ("compare --margin 40%", "--margin 40% must be at most 0.2"),
        ("compare --size huge", "unknown size 'huge'"),
        ("compare --bugdet 3m", "no such option --bugdet; did you mean '--budget'?"),
        ("train -a softmax -a uniform", "--attention is given twice"),
        ("compare a b", "unexpected argument 'b'"),
        ("train --schedule fast", "--schedule fast must be one of constant, cosine"),
        ("train --set betas=0.9", "betas"),
        ("tune --trials 3 --budget 3m", "give trials or a budget, not both"),
        ("tune --pruner some", "--pruner some must be one of median, hyperband or none"),
        ("tune --set steps=3", "give epochs, not steps"),
        ("convert m --to x", "--data is missing"),
        ("convert m --to x --data d --stages 1,5", "must be one of 1, 2 or 3"),
        ("convert m --to x --data d --epochs 1 --steps 2", "give epochs or steps, not both"),
        ("convert m --to x --data d --set dim=3", "unknown option 'dim'"),
        ("predict --model m", "IMAGE is missing"),
        ("compair", "unknown verb 'compair'; did you mean 'compare'?"),
        ("bench sped", "unknown verb 'bench sped'; did you mean 'speed'?"),
    ],
)
def test_bad_words_get_one_line(words, message):
    with pytest.raises(ValueError) as error:
        parse(words.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("verb", BY_VERB)
def test_help_shows_every_option_with_an_example(verb, capsys):
    with pytest.raises(SystemExit):
        parse([*verb.split(), "--help"])
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"linvit {verb}" in text


def test_a_new_option_is_one_line_in_one_file(tmp_path):
    """By the real route: a copy of the package in which one field was added."""
    copy = tmp_path / "linvit"
    shutil.copytree(Path(linvit.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "requests" / "training.py"
    before = '    verb = "compare"\n'
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, before + '    colour: str = option("red", "A colour for the test.")\n'))
    program = """
import sys
from linvit.cli import main, parse
from linvit.requests import read_request
main(["compare", "--help"])
main(["compare", "digits", "--colour", "blue", "--epochs", "1", "--print-config", "--out", sys.argv[1]])
request, _ = parse(["compare", "--colour", "blue"])
print(read_request(request.stored()).command())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "A colour for the test. [default: red]" in done.stdout
    assert 'colour = "blue"' in done.stdout
    assert "linvit compare digits --colour blue" in done.stdout
