"""The command line as a user meets it: help, errors in one line, exit codes, a verb in one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from linvit import __version__, cli

VERBS = cli.Verbs().list_commands(None)


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    return code, *capsys.readouterr()


@pytest.fixture
def verb(tmp_path, monkeypatch):
    """Write `cli/<name>.py` somewhere else, and let the command line find it."""

    def write(name: str, body: str) -> str:
        (tmp_path / f"{name}.py").write_text(body)
        monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
        monkeypatch.delitem(sys.modules, f"linvit.cli.{name}", raising=False)
        return name.replace("_", "-")

    return write


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], *([verb, "--help"] for verb in VERBS)], ids=str)
def test_help_imports_no_torch(words):
    code = (
        f"import sys; from linvit.cli import main; assert main({words!r} or ['--help']) == 0;"
        "print({'torch', 'altair', 'numpy', 'sklearn', 'rich'} & set(sys.modules) or 'light', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "light\n"), done.stderr
    assert done.stdout


def test_help_names_every_verb_and_keeps_examples(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"\n  {verb} " in out for verb in VERBS)
    assert "\n      linvit list attentions\n" in out


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_examples(capsys, name):
    assert f"      linvit {name} " in run(capsys, name, "--help")[1]


def test_no_words_is_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["linvit"])
    assert cli.main() == 0
    assert "Usage: linvit" in capsys.readouterr().out


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"linvit {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lits"], "unknown verb 'lits'; did you mean 'list'?"),
        (["list"], "Missing argument"),
        (["list", "--nonsense", "kernels"], "No such option"),
        (["list", "nonsense"], "nothing to list under 'nonsense'; choose from: attentions, kernels"),
        (["bench"], "Missing command"),
        (["bench", "nonsense"], "nonsense"),
        (["bench", "error", "--tokens", "0"], "--tokens"),
        (["bench", "error", "--sigma", "-1"], "sigma=-1.0 must be a positive number"),
        (["bench", "error", "-a", "performer-xep"], "did you mean 'performer-exp'?"),
        (["bench", "speed", "-a", "performer-exp:m=0"], "m=0"),
        (["bench", "speed", "--device", "nonsense"], "device 'nonsense' cannot be used here"),
        (["bench", "speed", "--dtype", "int8"], "int8"),
    ],
    ids=" ".join,
)
def test_user_errors_are_one_line_and_2(capsys, words, says):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("linvit: error: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_verb_is_one_file(capsys, verb):
    name = verb("say_it", "def run(word: str = 'hello') -> None:\n    '''Say it.'''\n    print(word)\n")
    assert run(capsys, name, "--word", "bye") == (0, "bye\n", "")
    assert "say-it Say it." in " ".join(run(capsys, "--help")[1].split())


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("raise ValueError('m=0 must be\\nat least 1')", "linvit: error: m=0 must be at least 1\n"),
        ("open('no/such/file')", "linvit: error: no/such/file: No such file or directory\n"),
        ("raise PermissionError(13, 'Permission denied', 'here')", "linvit: error: here: Permission denied\n"),
        ("raise OSError(28, 'No space left on device', 'there')", "linvit: error: there: No space left on device\n"),
    ],
)
def test_errors_of_a_verb(capsys, verb, monkeypatch, statement, line):
    name = verb("fails", f"def run() -> None:\n    {statement}\n")
    assert run(capsys, name) == (2, "", line)
    monkeypatch.setenv("LINVIT_TRACEBACK", "1")
    with pytest.raises((ValueError, OSError)):
        cli.main([name])


@pytest.mark.parametrize("statement", ["raise OSError('broken')", "raise KeyError('a bug')", "1 / 0"])
def test_bugs_keep_their_traceback(verb, statement):
    name = verb("fails", f"def run() -> None:\n    {statement}\n")
    with pytest.raises((OSError, KeyError, ZeroDivisionError)):
        cli.main([name])


@pytest.mark.parametrize(
    ("message", "line"), [("", "linvit: interrupted\n"), ("'saved'", "linvit: interrupted: saved\n")]
)
def test_interrupted(capsys, verb, message, line):
    name = verb("stops", f"def run() -> None:\n    raise KeyboardInterrupt({message})\n")
    assert run(capsys, name) == (130, "", line)


def test_interrupted_while_a_package_is_imported(tmp_path):
    """Where an exception would come out as another, or not at all."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    # what was started in the background ignores SIGINT, and so would this process
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeds}; from linvit.cli import main; raise SystemExit(main(['list', 'kernels']))"
    env = {**os.environ, "LINVIT_PLUGINS": str(tmp_path / "slow.py")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "linvit: interrupted\n")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_told_to_leave_by_a_scheduler(capsys, verb, number, wrapped):
    """Exit code 75 means: start the same command again."""
    stop = f"os.kill(os.getpid(), signal.{number})"
    body = f"    {stop}\n"
    if wrapped:  # as verbs do that say how to go on
        again = "    except KeyboardInterrupt as stop:\n        raise KeyboardInterrupt('later') from stop\n"
        body = f"    try:\n        {stop}\n{again}"
    name = verb("leaves", f"import os, signal\ndef run() -> None:\n{body}")
    before = signal.getsignal(getattr(signal, number))
    assert run(capsys, name) == (75, "", "linvit: interrupted: later\n" if wrapped else "linvit: interrupted\n")
    assert signal.getsignal(getattr(signal, number)) is before


def test_exit_code_of_a_verb(capsys, verb):
    name = verb("leaves", "import typer\ndef run() -> None:\n    raise typer.Exit(3)\n")
    assert run(capsys, name)[0] == 3


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m linvit list kernels --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (len(done.stdout), done.stderr) == (10, "")
