"""How cost grows with a study: records, jobs, images, processes.

    python benchmarks/scale.py --out docs/benchmarks           # about fifteen minutes on two cores, 3 GB of disk
    python benchmarks/scale.py --only records jobs             # some of it

records: a study of that many records, with its runs' files, becomes a page. jobs: jobs that do nothing, through the
local runners and a Ray cluster of two nodes on this machine. run: what one training leaves on disk. images: a folder of
small JPEGs is decoded, in a process of its own, with its memory. network: how fast two processes of this machine add
vectors. ranks: one training by one process with all threads, and by as many processes with one thread each, in turn.
Writes scale.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

import linvit
from linvit import report
from linvit.execute import EXECUTORS, DatasetCache, Job
from linvit.measure.provenance import cpu_name
from linvit.pipeline.design import Designer
from linvit.records import Record, Records, commit
from linvit.schemas.model import ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.schemas.study import DatasetFacts, Study, Variant
from linvit.training.source import open_source, source_of

CLASSES, TESTED, VARIANTS = 10, 1000, 20
GOALS = {"page": "≤ 10 s", "job": "≤ 20 ms", "ray": "≤ 50 ms", "images": "≥ 1,000 per core", "ranks": "≥ 0.9"}
Rows = list[tuple[str, str, str]]  # what, measured, goal
T = TypeVar("T")


def records(wanted: int, home: Path) -> Rows:
    """A study as `compare` leaves it, with random accuracies, and its page."""
    folder, dice = home / "study", random.Random(0)
    names = [f"performer-relu:m={8 * (i + 1)}" for i in range(VARIANTS - 1)]
    names.insert(0, "softmax")
    found: list[Record] = []
    labels = np.arange(TESTED, dtype=np.int32) % CLASSES
    seed = 0
    while len(found) < wanted:
        for name in names:
            found += _run(folder, name, seed, labels, dice)
        seed += 1
    classes, counts = [f"class {i}" for i in range(CLASSES)], {"train": 9000, "validation": 1000, "test": TESTED}
    study = Study(  # pyright: ignore[reportCallIssue]
        started=time.time(),
        steps=100,
        epochs=10,
        dataset=DatasetFacts(name="some", identity="0", classes=classes, channels=3, image_size=32, **counts),
        variants=[Variant(id=name, label=name, attention=name) for name in names],
        seeds={name: list(range(seed)) for name in names},
        model=ModelConfig(),  # pyright: ignore[reportCallIssue]
        recipe=Recipe(),  # pyright: ignore[reportCallIssue]
    )
    study.save(folder)
    Records(folder / "records.jsonl").append(found)
    size = (folder / "records.jsonl").stat().st_size
    rows: Rows = []
    for what, figures in (("a page", False), ("a page with figure files", True)):
        (seconds, cpu), result = timed(lambda figures=figures: report.build(folder, figures=figures))
        rows.append(
            (
                f"{len(found):,} records of {seed * VARIANTS:,} runs of {VARIANTS} variants rendered as {what}",
                f"{seconds:.1f} s ({cpu:.1f} s of CPU)",
                "" if figures else GOALS["page"],
            )
        )
    return [
        *rows,
        ("one record", f"{size / len(found):.0f} bytes", ""),
        ("that page", f"{result.page.stat().st_size / 1e6:.1f} MB", ""),
    ]


def timed(work: Callable[[], T]) -> tuple[tuple[float, float], T]:
    """Wall and CPU time, of processes that ended meanwhile too: on a busy machine only the second means much."""
    before, start = os.times(), time.perf_counter()
    found = work()
    after = os.times()
    return (time.perf_counter() - start, sum(after[:4]) - sum(before[:4])), found


def _run(folder: Path, name: str, seed: int, labels: np.ndarray, dice: random.Random) -> list[Record]:
    place = folder / f"{name.replace(':', '-')}-{seed}"
    place.mkdir(parents=True)
    right = dice.gauss(0.8, 0.01)
    said = np.where(np.random.default_rng(seed).random(TESTED) < right, labels, (labels + 1) % CLASSES).astype(np.int32)
    np.savez_compressed(place / "predictions.npz", predicted=said, labels=labels)
    matrix = np.bincount(labels * CLASSES + said, minlength=CLASSES**2).reshape(CLASSES, CLASSES)
    (place / "confusion.json").write_text(json.dumps({"matrix": matrix.tolist()}))
    rows = [
        {
            "epoch": e,
            "step": 10 * e,
            "train_loss": 2 / e,
            "train_accuracy": 0.5,
            "validation_loss": 1.0,
            "validation_accuracy": right - 1 / (e + 1),
            "learning_rate": 1e-3,
            "seconds": e,
        }
        for e in range(1, 11)
    ]
    (place / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = Record(
        "",
        None,
        experiment=f"{hash((name, seed)) % 2**48:012x}",
        device="cpu",
        threads=1,
        dtype="float32",
        tags={"attention": name, "dataset": "some", "seed": seed, "variant": name},
    )

    def one(metric: str, value: float | None, unit: str = "", artefact: str = "", **tags: Any) -> Record:
        place_of = f"{place.name}/{artefact}" if artefact else ""
        return replace(base, metric=metric, value=value, unit=unit, artefact=place_of).tagged(**tags)

    found = [
        one("parameters", 100_000, "count"),
        one("macs", 10**7, "MAC"),
        one("train_seconds", 60.0, "s"),
        one("learning_curve", None, artefact="log.jsonl"),
        one("validation_accuracy", right, "fraction"),
        one("confusion", None, artefact="confusion.json", selection="best"),
        one("predictions", None, artefact="predictions.npz", selection="best"),
        one("balanced_accuracy", right, "fraction", selection="best"),
    ]
    for selection in ("best", "final"):
        value = float(np.mean(said == labels))
        found.append(one("test_accuracy", value, "fraction", selection=selection))
        found.append(one("test_loss", 1.0, "nat", selection=selection))
    for metric in ("precision", "recall", "f1"):
        found += [one(metric, right, "fraction", selection="best", **{"class": f"class {i}"}) for i in range(CLASSES)]
    return found


def jobs(wanted: int, home: Path) -> Rows:
    """It is too late for all of them: they are sent, looked at and answered, and that is all."""
    source = source_of("digits")
    dataset, opened = open_source(source), DatasetCache()
    opened.add(dataset)
    experiment = Designer(dataset, source, 0, {}).base
    every = [Job(experiment=experiment, folder=str(home / f"job-{i}"), begin_by=0.0) for i in range(wanted)]
    rows: Rows = []
    with cluster():
        for name, at_a_time in (("here", 1), ("processes", 2), ("ray", 2)):
            with EXECUTORS[name](at_a_time, 1, opened, name) as executor:
                list(executor.run_jobs(every[:at_a_time], lambda job, event: None))  # workers start
                (seconds, _), done = timed(lambda it=executor: len(list(it.run_jobs(every, lambda job, event: None))))
            assert done == wanted
            rows.append(
                (
                    f"an empty queued job, of {wanted:,}, by the executor `{name}`",
                    f"{1000 * seconds / wanted:.2f} ms",
                    GOALS["ray" if name == "ray" else "job"],
                )
            )
    size = len(every[0].model_dump_json())
    return [*rows, ("a job as JSON", f"{size:,} bytes", "")]


@contextmanager
def cluster() -> Iterator[None]:
    """Two nodes with a processor each, both on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "include_dashboard": False}
    there = Cluster(initialize_head=True, head_node_args=node)
    there.add_node(**node)
    os.environ["RAY_ADDRESS"] = str(there.address)
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]
        ray.shutdown()
        there.shutdown()


def run(steps: int, home: Path) -> Rows:
    """What a training leaves; how accurate it is is of no interest here."""
    place = home / "run"
    trained = linvit.train("synthetic:images=512,size=32", out=place, steps=steps, size="tiny", checkpoint_seconds=0)
    sizes = {path.relative_to(place): path.stat().st_size for path in place.rglob("*") if path.is_file()}
    parameters = int(trained.value("parameters") or 0)
    checkpoints = [size for path, size in sizes.items() if path.name.startswith("step-")]
    lines = (place / "records.jsonl").read_text().splitlines()
    each = max(checkpoints) / 4 / parameters
    return [
        (
            f"a run's folder, {parameters:,} parameters (`--size tiny`), {len(sizes)} files",
            f"{sum(sizes.values()) / 1e6:.1f} MB",
            "",
        ),
        (f"of these, {len(checkpoints)} checkpoints, each", f"{each:.2f} × the parameters' bytes", ""),
        (
            f"its records, of {len(trained.data.classes)} classes",
            f"{len(lines)} with {sizes[Path('records.jsonl')] / 1e3:.1f} kB",
            "",
        ),
    ]


NETWORK = """
import json, sys, time
import torch
from linvit import ranks

torch.set_num_threads(1)
ranks.join(torch.device("cpu"))
for count in map(int, sys.argv[1:]):
    values, times = torch.ones(count), []
    for _ in range(30):
        start = time.perf_counter()
        ranks.summed(values)
        times.append(time.perf_counter() - start)
        values.fill_(1.0)
    if ranks.number() == 0:
        print(json.dumps([count, sorted(times)[len(times) // 2]]), file=sys.stderr)
"""


def network(most: int, home: Path) -> Rows:
    sizes = [1, most // 100, most // 10, most]
    said = _together([sys.executable, "-c", NETWORK, *map(str, sizes)], 2, 1)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    return [
        (
            f"{count:,} float32 numbers summed over two processes of one machine",
            f"{1000 * seconds:.2f} ms" + (f" ({4e-9 * count / seconds:.2f} GB/s)" if count > 1 else ""),
            "",
        )
        for count, seconds in found
    ]


def images(wanted: int, home: Path) -> Rows:
    """Decoded by processes of their own, of which the peak memory is known: a fifth of the images, and all of them."""
    rows: Rows = []
    cores = len(os.sched_getaffinity(0))
    peaks: dict[int, int] = {}
    for many in (wanted // 5, wanted):
        folder = home / f"images-{many}"
        _photos(folder, many, (64, 64))
        found = _decoded(folder, home / "cache")
        peaks[many] = found["anonymous"]
        if many == wanted:
            rows.append(
                (
                    f"{many:,} JPEG files of 64 × 64 decoded on {cores} cores, including all of `load_data`",
                    _rate(many, found, cores),
                    GOALS["images"],
                )
            )
            again = _decoded(folder, home / "cache")
            rows.append(("the same again, from the cache", f"{again['seconds']:.1f} s", ""))
    few, many = sorted(peaks)
    grown = (peaks[many] - peaks[few]) / (many - few)
    rows.append(
        (
            f"its peak memory beyond mapped files, {few:,} and {many:,} images",
            f"{peaks[few] / 2**20:.0f} and {peaks[many] / 2**20:.0f} MiB ({grown:.0f} bytes per additional image)",
            "does not grow with the pixels",
        )
    )
    _photos(home / "large", wanted // 50, (500, 375))
    found = _decoded(home / "large", home / "cache", image_size=224)
    rows.append(("JPEG files of 500 × 375 decoded to 224 px", _rate(wanted // 50, found, cores), ""))
    return rows


def _rate(count: int, found: dict[str, Any], cores: int) -> str:
    each = f"{count / found['seconds'] / cores:,.0f} images/s per core"
    return f"{each}, {count / found['cpu']:,.0f} per second of CPU"


def _photos(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Smooth noise, which takes about as many bytes as a photo does; a hundred different ones."""
    source, kinds = np.random.default_rng(0), []
    for _ in range(100):
        coarse = Image.fromarray(source.integers(0, 256, (max(2, size[1] // 8), max(2, size[0] // 8), 3), np.uint8))
        text = io.BytesIO()
        coarse.resize(size, Image.Resampling.BICUBIC).save(text, "JPEG", quality=90)
        kinds.append(text.getvalue())
    for label in range(CLASSES):
        (folder / f"class-{label}").mkdir(parents=True)
    for i in range(count):
        (folder / f"class-{i % CLASSES}" / f"{i:07d}.jpg").write_bytes(kinds[i % len(kinds)])


DECODE = """
import json, sys, threading, time
from pathlib import Path
from linvit import data

def anonymous():
    return sum(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines()
               if line.startswith("RssAnon"))

peak, over, before = [0], threading.Event(), anonymous()
def watch():
    while not over.wait(0.05):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
start, cpu = time.perf_counter(), time.process_time()
found = data.load_data(sys.argv[1], cache=sys.argv[2], image_size=int(sys.argv[3]) or None)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
over.set()
thread.join()
print(json.dumps({"seconds": seconds, "cpu": cpu, "anonymous": peak[0] - before}))
"""


def _decoded(folder: Path, cache: Path, image_size: int = 0) -> dict[str, Any]:
    call = [sys.executable, "-c", DECODE, str(folder), str(cache), str(image_size)]
    return json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)


def ranks(rounds: int, home: Path) -> Rows:
    """Steps of a training by one process with all threads, and by as many processes with one each, in turn."""
    threads, rows = len(os.sched_getaffinity(0)), []
    for name, options in {
        "mnist": {"data": "mnist"},
        "cifar10": {"data": "cifar10"},
        "cifar10, pure patches": {"data": "cifar10", "size": "tiny"},
    }.items():
        ratios, speeds = [], {"one": [], "all": []}
        for i in range(rounds):
            for how in ("one", "all") if i % 2 else ("all", "one"):
                many = 1 if how == "one" else threads
                speeds[how].append(_speed(options, many, threads // many, home / f"{name}-{how}-{i}"))
            ratios.append(speeds["all"][-1] / speeds["one"][-1])
        one, all_ = (statistics.median(speeds[how]) for how in ("one", "all"))
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        what = f"{name}: {threads} processes with one thread, relative to one process with {threads}"
        speed = f"{all_:,.0f} and {one:,.0f} images/s"
        rows.append((what, f"{statistics.median(ratios):.2f} × ({spread}; {speed})", GOALS["ranks"]))
        print(" | ".join(rows[-1]), flush=True)
    return rows


STEPS = """
import json, sys, time
import torch
import linvit
from linvit import ranks
from linvit.training.events import Stepped

torch.set_num_threads(int(sys.argv[1]))
seen, options = [], json.loads(sys.argv[2])
hear = lambda event: seen.append(time.perf_counter()) if type(event) is Stepped else None
linvit.train(options.pop("data"), limit=8000, steps=40, test=False, on_event=hear, checkpoint_seconds=1e9, **options)
if ranks.number() == 0:
    print(json.dumps(seen), file=sys.stderr)
"""


def _speed(options: dict[str, Any], processes: int, threads: int, out: Path) -> float:
    """Images per second: the median step, after ten that warm up."""
    call = [sys.executable, "-c", STEPS, str(threads), json.dumps(options | {"out": str(out)})]
    seen = json.loads(_together(call, processes, threads).splitlines()[-1])[10:]
    batch = json.loads((out / "experiment.json").read_text())["recipe"]["batch_size"]
    return batch / statistics.median(np.diff(seen))


def _together(call: list[str], processes: int, threads: int) -> str:
    """What the first of them says on stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": str(threads),
    }
    started = [
        subprocess.Popen(call, env=os.environ | common | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    said = [process.communicate()[1] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("\n".join(said))
    return said[0]


PARTS: dict[str, tuple[Callable[[int, Path], Rows], int]] = {
    "records": (records, 100_000),
    "jobs": (jobs, 1000),
    "run": (run, 30),
    "images": (images, 100_000),
    "network": (network, 10_000_000),
    "ranks": (ranks, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    for name, (_, usual) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    rows: Rows = []
    for name in args.only:
        with tempfile.TemporaryDirectory() as home:
            found = PARTS[name][0](getattr(args, name), Path(home))
        for row in found:
            print(" | ".join(row), flush=True)
        rows += found
    asked = " ".join(f"--{name} {getattr(args, name)}" for name in args.only)
    text = f"""# How cost grows with a study

Measured on {cpu_name()}, {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]},
torch {torch.__version__}, commit {commit()}, by `python benchmarks/scale.py --only {" ".join(args.only)} {asked}`.

| what | measured | goal |
|---|---|---|
"""
    args.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    (args.out / "scale.md").write_text(text + lines, encoding="utf-8")


if __name__ == "__main__":
    main()
