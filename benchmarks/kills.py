"""1,000 times `kill -9` at a random moment of train, compare, convert and tune.

    python benchmarks/kills.py --out runs/kills                  # about 40 minutes on one core; the same call resumes
    python benchmarks/kills.py --out runs/kills --verb tune --kills 10

Each verb runs once undisturbed. Then the same command is started in a new folder, killed with all of its processes
after a random time (in start-up, decoding, training, measuring, or while it writes the page), and started again, until
it has ended by itself. Checked are, after every kill: each file that is there is whole under its name; at the end:
weights, predictions and logs are those of the undisturbed run to the bit, records are but for times, memory and
timestamps, and every line that was on disk when its number was reported is still there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from reliability import forked, leftovers
from reliability.corpus import make_photos

SHAPE = ["stem=patch", "patch_size=4", "dim=16", "depth=2", "heads=2", "mlp_dim=16", "batch_size=16"]
SETS = [word for pair in SHAPE for word in ("--set", pair)]
HERE = ["--device", "cpu", "--threads", "1", "-q", "--out", "out"]
SYNTHETIC = "synthetic:classes=3,images=96,size=8,channels=1"
SPACE = '[options]\nlr = { low = 1e-3, high = 1e-1, log = true }\noptimizer = ["muon", "adamw"]\n'
DRAWN = [
    "--set",
    "dropout=0.1",
    "--set",
    "drop_path=0.1",
    "--set",
    "ema=0.9",
    "--set",
    "redraw=5",
    "--set",
    "mixup=0.2",
]
COMMANDS = {
    "train": ["train", "INPUTS/photos", "-a", "performer-exp:m=8", "--from", "scratch", "--image-size", "8", *SETS]
    + [*DRAWN, "--epochs", "4", "--save-every", "0", *HERE],
    "compare": ["compare", SYNTHETIC, "-a", "softmax", "-a", "performer-relu:m=8", "--no-controls", *SETS]
    + ["--epochs", "2", "--seeds", "2", "--jobs", "1", *HERE],
    "convert": ["convert", "INPUTS/teacher/out", "--to", "performer-exp", "--data", "digits", "--limit", "200"]
    + ["--set", "steps=8", "--max-drop", "20%", "--save-every", "0", *HERE],
    "tune": ["tune", SYNTHETIC, "-a", "softmax", "-a", "performer-relu:m=4", "--space", "INPUTS/space.toml", *SETS]
    + ["--epochs", "4", "--trials", "3", "--jobs", "1", *HERE],
}
TEACHER = ["train", "digits", "-a", "softmax", *SETS, "--epochs", "4", *HERE]
LIMITS = forked.Limits(seconds=900.0)
KILLS_OF_A_RUN = 3  # on average: most must survive the start-up, or nothing would be resumed
LONGEST = 60  # kills of one run, after which it is left alone


@dataclass(frozen=True)
class Undisturbed:
    words: list[str]
    folder: Path
    seconds: float
    lines: int  # that it has stored


@dataclass(frozen=True)
class Disturbed:
    """One run that was killed several times."""

    verb: str
    run: int
    kills: int
    moments: dict[str, int]  # kills before the first line was stored, while lines were stored, and after the last
    seconds: float
    problems: list[str]


def prepare(reports: Path) -> None:
    """In the process that will be killed: every step is saved, and what is stored is listed."""
    from linvit.study import jobs
    from linvit.tuning import search

    for module, name in ((search, "Job"), (jobs, "StudyJob")):
        setattr(module, name, _saving_every_step(getattr(module, name)))
    forked.measure_quickly()
    leftovers.report_to(reports)


def _saving_every_step(kind: Any) -> Any:
    kind.model_fields["checkpoint_seconds"].default = 0.0
    kind.model_rebuild(force=True)
    return kind


def begin(words: Sequence[str], home: Path) -> int:
    environment = {"LINVIT_CACHE": str(home / "cache"), "LINVIT_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    return forked.start(words, home, LIMITS, environment, functools.partial(prepare, home / "reports"))


def undisturbed(verb: str, inputs: Path, home: Path) -> Undisturbed:
    """Two runs without a kill, which must end the same; a third of their time is what varies between them."""
    words = [word.replace("INPUTS", str(inputs)) for word in COMMANDS[verb]]
    seconds = 0.0
    for name in ("whole", "again"):
        shutil.rmtree(home / name, ignore_errors=True)
        begun = time.monotonic()
        found = forked.ended(begin(words, home / name), LIMITS.seconds)
        seconds = time.monotonic() - begun
        if found is None or found[0]:
            raise RuntimeError(f"{verb} ended with {found}: {(home / name / 'stderr').read_text()}")
    if problems := leftovers.differences(home / "whole" / "out", home / "again" / "out"):
        raise RuntimeError(f"{verb} is not deterministic: {problems[0]}")
    return Undisturbed(words, home / "whole" / "out", seconds, leftovers.stored_lines(home / "whole" / "out"))


def disturbed(verb: str, number: int, whole: Undisturbed, home: Path, kills: int) -> Disturbed:
    """Run, kill and run again until the command has ended; at most so many kills."""
    dice, moments, problems = Random(f"{verb} {number}"), Counter[str](), list[str]()
    shutil.rmtree(home, ignore_errors=True)
    begun = time.monotonic()
    while not problems:
        alone = sum(moments.values()) >= min(kills, LONGEST)
        delay = LIMITS.seconds if alone else dice.expovariate(KILLS_OF_A_RUN / whole.seconds)
        pid = begin(whole.words, home)
        if (found := forked.ended(pid, delay)) is not None:
            if found[0]:
                problems = [f"exit code {found[0]}: {(home / 'stderr').read_text()[-2000:]}"]
            break
        forked.kill(pid)
        forked.ended(pid, forked.GRACE_SECONDS)
        count = leftovers.stored_lines(home / "out")
        moments["before the first" if not count else "after the last" if count >= whole.lines else "between"] += 1
        problems = leftovers.torn(home / "out")
    problems += leftovers.differences(whole.folder, home / "out") + leftovers.lost(leftovers.reported(home / "reports"))
    seconds = round(time.monotonic() - begun, 2)
    return Disturbed(verb, number, sum(moments.values()), dict(moments), seconds, problems)


def make_inputs(home: Path) -> None:
    if (home / "whole").exists():
        return
    shutil.rmtree(home, ignore_errors=True)
    make_photos(home / "photos", images=40, side=24)
    (home / "space.toml").write_text(SPACE)
    if found := forked.run(TEACHER, home / "teacher", LIMITS, {"LINVIT_CACHE": str(home / "cache")}).code:
        raise RuntimeError(f"the teacher's training ended with {found}: {(home / 'teacher/stderr').read_text()}")
    (home / "whole").touch()


def run_verb(verb: str, out: Path, kills: int, log: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Go on from the runs that are listed in the folder, until there have been as many kills."""
    make_inputs(out / "inputs")
    file = out / f"{verb}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if (left := kills - sum(row["kills"] for row in rows)) <= 0:
        return rows
    whole = undisturbed(verb, out / "inputs", out / verb)
    log(f"{verb}: {whole.seconds:.1f} s undisturbed, {whole.lines} lines stored")
    while left > 0:
        home = out / verb / f"run-{len(rows)}"
        found = disturbed(verb, len(rows), whole, home, left)
        rows.append(asdict(found))
        left -= found.kills
        with open(file, "a") as lines:
            lines.write(json.dumps(asdict(found)) + "\n")
        if found.problems:
            log(f"{verb}, run {found.run}, {found.kills} kills: {found.problems[0]}")
        else:
            shutil.rmtree(home)
    return rows


def summarise(rows: list[dict[str, Any]]) -> None:
    print("\n| verb | kills | runs | before the first line | between | after the last | failures |")
    print("|---|---|---|---|---|---|---|")
    for verb in (*COMMANDS, "all"):
        mine = [row for row in rows if verb in ("all", row["verb"])]
        moments = sum((Counter(row["moments"]) for row in mine), Counter[str]())
        kills, failures = sum(row["kills"] for row in mine), sum(bool(row["problems"]) for row in mine)
        parts = " | ".join(str(moments[name]) for name in ("before the first", "between", "after the last"))
        print(f"| {verb} | {kills} | {len(mine)} | {parts} | {failures} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--kills", type=int, default=250, help="of each verb")
    parser.add_argument("--verb", choices=list(COMMANDS), action="append", help="repeatable; all of them without it")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    forked.preload()
    rows = [row for verb in asked.verb or COMMANDS for row in run_verb(verb, asked.out.resolve(), asked.kills)]
    summarise(rows)
    raise SystemExit(any(row["problems"] for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
