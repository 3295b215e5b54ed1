"""The command line as a user meets it: help, errors in one line, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

from linvit import __version__, cli
from linvit.cli import list as list_verb
from linvit.cli._output import warnings_in_one_line
from linvit.requests import BY_VERB


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    return code, *capsys.readouterr()


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[str]]:
    """The words of a command that calls the function."""

    def replace(work: Callable[[], object]) -> list[str]:
        monkeypatch.setattr(list_verb, "run", lambda request: work())
        return ["list", "kernels"]

    return replace


def test_help_imports_no_torch():
    """Nor does that of any verb: it would take seconds."""
    verbs = [verb.split() for verb in BY_VERB]
    code = f"""
import contextlib, io, sys
from linvit.cli import main
for words in [["--help"], ["--version"], [], *([*verb, "--help"] for verb in {verbs!r})]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0, words
    assert out.getvalue(), words
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_verb_and_keeps_examples(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"\n    {verb} " in out for verb in cli.verbs())
    assert "\n    linvit list attentions\n" in out


@pytest.mark.parametrize("name", BY_VERB)
def test_every_verb_has_examples(capsys, name):
    assert f"    linvit {name}" in run(capsys, *name.split(), "--help")[1]


def test_every_verb_is_a_file_and_a_request():
    assert {name.partition(" ")[0] for name in BY_VERB} == set(cli.verbs())


def test_no_words_is_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["linvit"])
    assert cli.main() == 0
    assert capsys.readouterr().out.startswith("usage: linvit VERB")


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"linvit {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lits"], "unknown verb 'lits'; did you mean 'list'?"),
        (["list"], "WHAT is missing (see linvit list --help)"),
        (["list", "--nonsense", "kernels"], "no such option --nonsense"),
        (["list", "kernels", "more"], "unexpected argument 'more'"),
        (["list", "nonsense"], "nothing to list under 'nonsense'; choose from: attentions, kernels"),
        (["train", "--epochs"], "--epochs: expected one argument"),
        (["train", "--epoch", "1"], "no such option --epoch; did you mean '--epochs'?"),
        (["compare", "--seeds", "none"], "--seeds none must be an integer"),
        (["compare", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["bench", "nonsense"], "unknown verb 'bench nonsense'"),
    ],
    ids=" ".join,
)
def test_user_errors_are_one_line_and_2(capsys, words, says):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("linvit: error: ")
    assert says in err
    assert err.count("\n") == 1


def test_words_after_two_dashes_are_no_options(capsys):
    assert "'--json'" in run(capsys, "list", "--", "--json")[2]


def fail(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("m=0 must be\nat least 1"), "m=0 must be at least 1"),
        (FileNotFoundError(2, "No such file or directory", "no/such/file"), "no/such/file: No such file or directory"),
        (PermissionError(13, "Permission denied", "here"), "here: Permission denied"),
    ],
)
def test_errors_of_a_verb(capsys, verb, monkeypatch, error, line):
    words = verb(fail(error))
    assert run(capsys, *words) == (2, "", f"linvit: error: {line}\n")
    monkeypatch.setenv("LINVIT_TRACEBACK", "1")
    with pytest.raises(type(error)):
        cli.main(words)


@pytest.mark.parametrize("error", [OSError("broken"), KeyError("a bug"), ZeroDivisionError()])
def test_bugs_keep_their_traceback(verb, error):
    with pytest.raises(type(error)):
        cli.main(verb(fail(error)))


@pytest.mark.parametrize(
    ("saved", "line"), [((), "interrupted"), (("saved",), "interrupted: saved; resume with: linvit list kernels")]
)
def test_interrupted(capsys, verb, saved, line):
    assert run(capsys, *verb(fail(KeyboardInterrupt(*saved)))) == (130, "", f"linvit: {line}\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_evicted_by_a_scheduler(capsys, verb, number):
    """Exit code 75 means: start the same command again."""

    def stop() -> None:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt as error:  # as verbs do that say how to resume
            error.args = ("saved",)
            raise

    before = signal.getsignal(number)
    code, out, err = run(capsys, *verb(stop))
    assert (code, out, err) == (75, "", "linvit: interrupted: saved; resume with: linvit list kernels\n")
    assert signal.getsignal(number) is before


def test_the_exit_code_is_the_verbs(capsys, verb):
    assert run(capsys, *verb(lambda: 3))[0] == 3
    assert run(capsys, *verb(lambda: None))[0] == 0


def test_a_reader_that_leaves_early_is_no_error(capfd, verb, monkeypatch):
    redirected: list[int] = []
    monkeypatch.setattr(cli.os, "dup2", lambda source, target: redirected.append(target))
    assert cli.main(verb(fail(BrokenPipeError()))) == 141
    assert redirected == [sys.stdout.fileno()]
    assert capfd.readouterr().err == ""


def test_an_error_cannot_control_the_terminal(capsys, verb):
    code, _, err = run(capsys, *verb(fail(ValueError("no\x1b[2J such\nfile \udcff"))))
    assert (code, err) == (2, "linvit: error: no\\x1b[2J such file \\udcff\n")


def test_warnings_are_one_line_and_not_about_metadata_of_images(capsys):
    with warnings_in_one_line():
        for module in ("PIL.TiffImagePlugin", "linvit.data"):
            warnings.warn_explicit("odd\ntag", UserWarning, "file.py", 1, module=module)
    assert capsys.readouterr().err == "linvit: warning: odd tag\n"


@pytest.mark.kills
def test_interrupted_while_a_package_is_imported(tmp_path):
    """Where an exception would become another, or be lost."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    # a process that was started in the background ignores SIGINT, and so would this one
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from linvit.cli import main; raise SystemExit(main(['list', 'kernels']))"
    env = {**os.environ, "LINVIT_PLUGINS": str(tmp_path / "slow.py")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "linvit: interrupted\n")
