"""1,000 spoilt inputs: each works, or ends with one line and exit code 2.

    python benchmarks/inputs.py --out runs/inputs                # about 10 minutes on one core; the same call resumes
    python benchmarks/inputs.py --out runs/inputs --case 417     # one of them again, with its output

Specs, options, images, archives, tables, configurations, weights and result folders are changed at random: bits,
headers, fields, words. Each case is one command in a process of its own with limits for time, memory and file sizes and
without a network. It is a failure if a traceback is shown, if the error is not a single line, if a limit is reached, if
a pickle is loaded (those that are offered make a folder when they are), if an input is changed by a command that ended
with an error, or if text from an input reaches a page as markup.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from reliability import forked
from reliability.cases import KINDS, Case
from reliability.corpus import make_corpus
from reliability.mutations import MARKUP

LIMITS = forked.Limits(seconds=200.0, cpu=40.0)
ASKED_FOR = ("specs", "settings", "options")  # kinds of input whose author may have asked for much work


def prepare() -> None:
    """In the process of a case, which is as on a machine without a network."""
    forked.measure_quickly()

    def refuse(*words: Any) -> NoReturn:
        raise OSError(101, "Network is unreachable")

    socket.socket.connect = refuse  # type: ignore[method-assign]
    socket.getaddrinfo = refuse


@dataclass(frozen=True)
class Verdict:
    case: int
    kind: str
    words: list[str]
    code: int
    cpu: float  # seconds
    memory: int
    problem: str = ""  # empty: as it should be


def run_case(number: int, corpus: Path, folder: Path, seed: int = 0) -> Verdict:
    """Make the inputs of a case, run its command, and judge how that ended. The folder is new."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dice = Random(f"{seed}-{number}")
    name = dice.choice(sorted(KINDS))
    words = KINDS[name](Case(dice, corpus.resolve(), folder.resolve()))
    before = _contents(folder)
    environment = {"LINVIT_CACHE": str(folder.resolve() / "cache"), "HF_HUB_OFFLINE": "1", "LINVIT_PLUGINS": ""}
    done = forked.run(words, folder, LIMITS, environment, prepare)
    problem = _problem(name, done, folder, before)
    return Verdict(number, name, words, done.code, round(done.cpu, 2), done.memory, problem)


def _contents(folder: Path) -> dict[Path, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _problem(name: str, done: forked.Outcome, folder: Path, before: dict[Path, str]) -> str:
    """What is wrong with how a command ended; empty if nothing is."""
    told = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
    lines = [line for line in told.splitlines() if line.strip()]
    if (folder / "canary").exists():
        return "a pickle was loaded"
    if "Traceback (most recent call last)" in told:
        return f"traceback: {lines[-1]}"
    if (done.late and (name not in ASKED_FOR or done.code != 75)) or done.code == -signal.SIGXCPU:
        return "it took too long"
    if done.code not in (0, 1, 2, 75) or (done.code == 1 and "diverged" not in (folder / "stdout").read_text() + told):
        return f"exit code {done.code}"
    if done.code == 2:
        if len([line for line in lines if line.startswith("linvit: ")]) != 1 or not lines[-1].startswith(
            "linvit: error: "
        ):
            return f"not one line: {told!r}"
        if any(not character.isprintable() for character in lines[-1]):
            return f"a control character in the error: {lines[-1]!r}"
        after = _contents(folder)
        if changed := [path.name for path, sha in before.items() if after.get(path) != sha]:
            return f"an error, but {changed[0]} was changed"
    pages = (path for path in folder.rglob("*.html") if path not in before)
    if found := [path.name for path in pages if MARKUP in path.read_text(errors="replace")]:
        return f"markup from an input in {found[0]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/inputs"))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one again, and show its output")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    forked.preload()
    make_corpus((asked.out / "corpus").resolve())
    if asked.case is not None:
        folder = asked.out / f"case-{asked.case}"
        print(run_case(asked.case, asked.out / "corpus", folder, asked.seed))
        print((folder / "stdout").read_text() + (folder / "stderr").read_text())
        return
    file = asked.out / f"seed-{asked.seed}.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for number in range(len(done), asked.cases):
        folder = asked.out / f"case-{number}"
        verdict = run_case(number, asked.out / "corpus", folder, asked.seed)
        with open(file, "a") as lines:
            lines.write(json.dumps(asdict(verdict)) + "\n")
        done.append(asdict(verdict))
        if verdict.problem:
            print(f"case {number}, {verdict.kind}: {verdict.problem}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    summarise(done)
    raise SystemExit(any(row["problem"] for row in done))


def summarise(verdicts: list[dict[str, Any]]) -> None:
    print("\n| kind | inputs | worked | refused | failures | longest | most memory |\n|---|---|---|---|---|---|---|")
    for name in [*sorted(KINDS), ""]:
        rows = [row for row in verdicts if name in ("", row["kind"])]
        if rows:
            codes = Counter(row["code"] for row in rows)
            failures = sum(bool(row["problem"]) for row in rows)
            longest, memory = max(row["cpu"] for row in rows), max(row["memory"] for row in rows)
            print(
                f"| {name or 'all'} | {len(rows)} | {len(rows) - codes[2] - failures} | {codes[2]} | {failures} | "
                f"{longest:.1f} s | {memory / forked.GIB:.2f} GiB |"
            )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
