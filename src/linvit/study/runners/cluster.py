"""Jobs on a Ray cluster that is there already: one task each, with the processors that it needs.

The study stays where its command was given: there its folder lies, and there events and records come in. Images are put
into the cluster's object store once, and each node fetches them from there once. A node that sees the study's folder
works in it; any other works in a folder of its own, and what changes there, checkpoints among it, comes back with the
events. So a job whose process or node is lost goes on elsewhere from its last checkpoint, either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from pydantic import ValidationError

from linvit.data import Dataset
from linvit.errors import clear
from linvit.files import write_atomically
from linvit.measure.provenance import machine
from linvit.records import Record, Records
from linvit.study.design import Study
from linvit.study.jobs import Hear, Job, Shelf
from linvit.study.measuring import Measuring
from linvit.study.runners import RUNNERS, Runner
from linvit.train import Experiment
from linvit.train.events import Event, Noted, Stepped, from_json, to_json
from linvit.train.loop import Rate
from linvit.train.trackers import TRACKERS

OFTEN = 1.0  # seconds between two events of one job that only say how far it is
TRIES = 3  # of a job whose process or node is lost
ANSWER, SAVING = 5.0, 60.0  # seconds: for a cluster to answer, and for its tasks to save what they are at
SHIPPED = 4 * 2**30  # bytes: a larger set is opened by every node, at the path where the study has it
PORT = 10001  # of a cluster for those outside it, if none is named
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SCHEDULER_EVENTS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
SPLITS = ("train", "validation", "test")
Files = Mapping[str, bytes | None]  # by their names below the study's folder; None: no longer there


class Post(NamedTuple):
    """What a task says while it works."""

    number: int  # of its job
    attempt: int
    row: dict[str, Any]
    files: Files


def _mailbox(ray: Any) -> Any:
    """Where tasks post what happens: an actor on the cluster's first node. A class in a function travels by value, and
    posts are plain tuples there, so that its process needs nothing of linvit."""

    class Mailbox:
        def __init__(self) -> None:
            self.posts: list[tuple[Any, ...]] = []
            self.there = asyncio.Event()

        async def put(self, *post: Any) -> None:
            self.posts.append(post)
            self.there.set()

        async def take(self) -> list[tuple[Any, ...]]:
            """All that has come, as soon as something has."""
            await self.there.wait()
            return await self.rest()

        async def rest(self) -> list[tuple[Any, ...]]:
            self.there.clear()
            posts, self.posts = self.posts, []
            return posts

    return ray.remote(Mailbox).options(num_cpus=0, resources={"node:__internal_head__": 0.001}).remote()


class Told(NamedTuple):
    """What a task is told of its place. Lists hold a reference, which is followed only if it is needed."""

    box: Any  # the mailbox
    number: int
    attempt: int
    root: str  # the study's folder
    mark: str  # a file in it, by which a node knows that it sees the same folder
    files: list[Any]  # what lies there already
    start: list[Any]  # the files of the trained model that is started from
    plugins: str

    def post(self, row: dict[str, Any], files: Files) -> Any:
        return self.box.put.remote(self.number, self.attempt, row, dict(files))


class Mirror:
    """A folder of a node's own, whose changes are told. What trackers keep is of the study's end alone."""

    def __init__(self, root: Path):
        self.root, self.seen = root, dict[str, tuple[int, int]]()
        self.seen = self._stats()

    def _stats(self) -> dict[str, tuple[int, int]]:
        found = [path for path in self.root.rglob("*") if path.is_file() and not path.name.startswith(".")]
        names = {path: path.relative_to(self.root) for path in found}
        return {
            str(name): (path.stat().st_mtime_ns, path.stat().st_size)
            for path, name in names.items() if name.parts[0] not in TRACKERS
        }  # fmt: skip

    def changes(self) -> Files:
        now = self._stats()
        new = {name: (self.root / name).read_bytes() for name, stat in now.items() if self.seen.get(name) != stat}
        gone = dict.fromkeys(name for name in self.seen if name not in now)
        self.seen = now
        return new | gone

    def everything(self) -> Files:
        return {name: (self.root / name).read_bytes() for name in self._stats()}


def _write(root: Path, files: Files) -> None:
    """What a folder is comes first, and last what says that something is done: a kill between two leaves sense."""
    for name in sorted(files, key=lambda name: (not name.endswith("experiment.json"), name.endswith("records.jsonl"))):
        if (content := files[name]) is None:
            (root / name).unlink(missing_ok=True)
        else:
            write_atomically(root / name, content)


@contextlib.contextmanager
def _placed(told: Told) -> Iterator[tuple[Path, Mirror | None]]:
    """In a task: the study's folder as this node has it, and, where that is one of its own, its mirror."""
    import ray

    own = os.environ.get("LINVIT_PLUGINS", "")
    if told.plugins and told.plugins not in own:
        os.environ["LINVIT_PLUGINS"] = os.pathsep.join(filter(None, [told.plugins, own]))
    root = Path(told.root)
    if (root / told.mark).exists():
        yield root, None
        return
    with tempfile.TemporaryDirectory(prefix="linvit-") as place:
        for ref in told.files:
            _write(Path(place), ray.get(ref))
        yield Path(place), Mirror(Path(place))


def _rebuilt(told: Told, text: str, root: Path, place: str) -> Job:
    """The job, its folder below `root`; a start that this node does not have is put into `place`."""
    import ray

    try:
        job = Job.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"a node cannot do this job: {clear(error)}") from None
    job = job.model_copy(update={"folder": str(root / Path(job.folder).name)})
    start = job.experiment.start
    if start is None or Path(start.folder).exists():
        return job
    for ref in told.start:
        _write(Path(place), ray.get(ref))
    moved = job.experiment.model_copy(update={"start": start.model_copy(update={"folder": place})})
    return job.model_copy(update={"experiment": moved})


SHELF = Shelf()  # of this process, for sets that are not shipped


def _whole(experiment: Experiment, bare: Dataset | None, stores: Sequence[np.ndarray]) -> Dataset:
    """The images, as they came from the object store; or opened here."""
    if bare is None:
        return SHELF.find(experiment)
    return replace(
        bare, **{part: replace(getattr(bare, part), store=s) for part, s in zip(SPLITS, stores, strict=True)}
    )


def _work(told: Told, text: str, seconds: float | None, bare: Dataset | None, *stores: np.ndarray) -> dict[str, Any]:
    """A task: the job; or, if seconds are given, how fast it gets on for so long."""
    try:
        with _placed(told) as (root, mirror), tempfile.TemporaryDirectory(prefix="linvit-start-") as place:
            job = _rebuilt(told, text, root, place)
            data = _whole(job.experiment, bare, stores)
            if seconds is not None:
                return {"rate": list(job.rate(data, seconds)) if seconds else [0.0, 0.0]}
            return _done(told, job, data, mirror)
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    except (RuntimeError, MemoryError) as error:  # out of memory, as a rule
        return {"failed": str(error).strip().partition("\n")[0] or type(error).__name__}


def _done(told: Told, job: Job, dataset: Dataset, mirror: Mirror | None) -> dict[str, Any]:
    import ray

    last, posts = 0.0, 0

    def hear(event: Event) -> None:
        nonlocal last, posts
        now = time.monotonic()
        if type(event) is not Stepped or now - last > OFTEN:
            last, posts = now, posts + 1
            told.post(to_json(event), mirror.changes() if mirror else {})

    try:
        records = job.do(dataset, [hear])
    except KeyboardInterrupt:  # the study wants to end: what was saved must arrive
        ray.get(told.post({}, mirror.changes() if mirror else {}))
        raise
    rows = [json.loads(record.line()) for record in records]
    return {"records": rows, "files": mirror.everything() if mirror else {}, "posts": posts}


class Measured(NamedTuple):
    """What a study is measured by, but for its images."""

    study: Study
    jobs: list[Job]
    base: Experiment
    device: str
    left: float | None  # seconds
    threads: int


def _measure(told: Told, what: Measured, bare: Dataset | None, *stores: np.ndarray) -> dict[str, Any]:
    """A task: all that is measured beside accuracy, on a node that nothing else runs on."""
    torch.set_num_threads(what.threads)

    def progress(done: int, total: int, name: str) -> None:
        told.post({"progress": [done, total, name]}, {})

    with _placed(told) as (root, mirror):
        jobs = [job.model_copy(update={"folder": str(root / Path(job.folder).name)}) for job in what.jobs]
        data, records = _whole(what.base, bare, stores), Records(root / "records.jsonl")
        deadline = None if what.left is None else time.monotonic() + what.left
        device = torch.device(what.device)
        failed = Measuring(root, records, data, what.study, jobs, what.base, device, progress, deadline).all()
        return {"failed": failed, "machine": machine(), "files": mirror.changes() if mirror else {}}


ours = False  # whether this process was connected here, and not by whoever calls


def connect(where: str) -> Any:
    """The ray module, connected; a ValueError within seconds if there is no cluster. One that this process is connected
    to already is taken."""
    global ours
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray.exceptions
    except ImportError:
        raise ValueError("a Ray cluster needs the package ray: pip install 'linvit[cluster]'") from None
    if ray.is_initialized():
        return ray
    address = where if "://" in where else os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto":
        address = _nearest()
    try:
        there = urlsplit(address if "://" in address else f"//{address}")
        if there.port is None and "://" in address:
            address, there = f"ray://{there.hostname}:{PORT}", there._replace(netloc=f"{there.hostname}:{PORT}")
        socket.create_connection(
            (there.hostname or "", there.port or 0), ANSWER
        ).close()  # Ray itself tries for minutes
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"no Ray cluster can be used at {address} ({why}): check the address, or start one") from None
    ours = True
    return ray


def _nearest() -> str:
    """The address of the cluster that runs on this machine."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        raise ValueError(
            "no Ray cluster runs here: start one (ray start --head), or name one as ray://HOST:PORT or in RAY_ADDRESS"
        ) from None


class Sent(NamedTuple):
    job: Job
    attempt: int
    ref: Any  # to its answer


@RUNNERS.register("ray")
class Cluster(Runner):
    opens = False

    def __init__(self, jobs: int | None, datasets: Mapping[str, Dataset], where: str = "ray"):
        super().__init__(jobs, datasets, where)
        self.limit = jobs
        self.ray = ray = connect(where)
        self.lost = tuple(
            getattr(ray.exceptions, name)
            for name in ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError",
                         "ObjectLostError", "TaskUnschedulableError")
        )  # fmt: skip
        self.work, self.measuring = ray.remote(_work), ray.remote(_measure)
        self.heard: dict[tuple[int, int], int] = {}  # job and attempt → posts that were read
        self.sent: dict[int, Sent] = {}  # jobs that are not answered yet, by number
        self.pending: dict[Any, int] = {}  # reference → the number of the job that it will be the answer to
        self.stores: dict[int, Any] = {}  # arrays of pixels that have been put
        self.bare: dict[str, Any] = {}  # data sets without them, by identity
        self.starts: dict[str, Any] = {}  # by their weights
        self.marks: dict[Path, str] = {}  # by study folder
        plugins = filter(None, os.environ.get("LINVIT_PLUGINS", "").split(os.pathsep))
        self.plugins = os.pathsep.join(str(Path(part).resolve()) for part in plugins)
        self.box = _mailbox(ray)
        self.mail = self.box.take.remote()

    @classmethod
    def reach(cls, where: str, device: str, threads: int | None) -> tuple[torch.device, int]:
        nodes = _alive(connect(where))
        gpu = device.startswith("cuda") or (device == "auto" and any(node["Resources"].get("GPU") for node in nodes))
        place = torch.device("cuda" if gpu else "cpu")
        return place, _room(nodes, threads or 1, place)

    def room(self, threads: int, device: torch.device) -> int:
        return self.limit or _room(_alive(self.ray), threads, device)

    def run(self, jobs: Sequence[Job], hear: Hear) -> Iterator[tuple[Job, list[Record]]]:
        waiting, done = deque(jobs), {}
        for job in jobs:
            while job.number not in done:
                while waiting and (self.limit is None or len(self.pending) < self.limit):
                    self.send(waiting.popleft())
                done |= {one.number: records for one, records in self.answers(hear)}
            yield job, done.pop(job.number)

    def send(self, job: Job, attempt: int = 1) -> None:
        """Have it done; no other that is not answered yet may have its number."""
        folder = Path(job.folder).resolve()
        files = {f"{folder.name}/{name}": content for name, content in Mirror(folder).everything().items()}
        told = self._told(job.number, attempt, folder.parent, files)._replace(start=self._start(job))
        self.heard[job.number, attempt] = 0
        ref = self._task(job, told)
        self.pending[ref], self.sent[job.number] = job.number, Sent(job, attempt, ref)

    def cancel(self, job: Job) -> None:
        """End one that was sent, and wait for that; what it says from now on is not heard."""
        ref = self.sent.pop(job.number).ref
        del self.pending[ref]
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.cancel(ref)
            self.ray.wait([ref], timeout=SAVING)

    def _task(self, job: Job, told: Told, seconds: float | None = None) -> Any:
        gpu = job.device.startswith("cuda")
        text = job.model_copy(update={"device": "cuda"} if gpu else {}).model_dump_json()  # it sees no other
        task = self.work.options(num_cpus=job.threads, num_gpus=int(gpu), max_retries=0)
        return task.remote(told, text, seconds, *self._images(job.experiment))

    def _told(self, number: int, attempt: int, root: Path, files: Files) -> Told:
        if root not in self.marks:
            self.marks[root] = f".ray-{uuid.uuid4().hex}"
            write_atomically(root / self.marks[root], "the nodes of a cluster look for this\n")
        there = [self.ray.put(files)] if files else []
        return Told(self.box, number, attempt, str(root), self.marks[root], there, [], self.plugins)

    def _start(self, job: Job) -> list[Any]:
        if (start := job.experiment.start) is None:
            return []
        if start.sha256 not in self.starts:
            found = [path for path in Path(start.folder).iterdir() if path.suffix in (".json", ".safetensors")]
            self.starts[start.sha256] = self.ray.put({path.name: path.read_bytes() for path in found})
        return [self.starts[start.sha256]]

    def _images(self, experiment: Experiment) -> list[Any]:
        """Its data set without pixels, and those of its splits, which folds share; put once."""
        identity = experiment.data.identity
        data = self.datasets[identity]
        splits = [getattr(data, part) for part in SPLITS]
        if experiment.source and sum({id(s.store): s.store.nbytes for s in splits}.values()) > SHIPPED:
            return [None]
        for split in splits:
            if id(split.store) not in self.stores:
                self.stores[id(split.store)] = self.ray.put(np.asarray(split.store))
        if identity not in self.bare:
            nothing = np.zeros(0, np.uint8)
            bare = {part: replace(split, store=nothing) for part, split in zip(SPLITS, splits, strict=True)}
            self.bare[identity] = self.ray.put(replace(data, **bare))
        return [self.bare[identity], *(self.stores[id(split.store)] for split in splits)]

    def answers(self, hear: Hear, patience: float = SAVING) -> list[tuple[Job, list[Record]]]:
        """Wait for something to happen, at most for so many seconds: the jobs that are done then, with their records.
        Who hears may cancel the job of which it hears."""
        refs = [self.mail, *self.pending]
        self.ray.wait(refs, num_returns=1, timeout=patience)
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        if self.mail in ready:
            self._read(self._taken(), hear)
        done = [self.sent[self.pending[ref]] for ref in ready if ref in self.pending]
        found = [(sent.job, self._answer(sent, hear)) for sent in done]
        return [(job, records) for job, records in found if records is not None]

    def _awaits(self, sent: Sent) -> bool:
        return self.sent.get(sent.job.number) is sent

    def _has_mail(self, seconds: float) -> bool:
        return bool(self.ray.wait([self.mail], timeout=seconds)[0])

    def _taken(self) -> list[Post]:
        try:
            posts = [Post(*post) for post in self.ray.get(self.mail)]
        except self.ray.exceptions.RayError as error:
            what = f"the cluster is lost ({_why(error)}); what was trained is not: give the same command again"
            raise ValueError(what) from None
        self.mail = self.box.take.remote()
        return posts

    def _read(self, posts: Sequence[Post], hear: Hear) -> None:
        """What jobs have posted, but for attempts that are over."""
        for number, attempt, row, files in posts:
            if number in self.sent and self.sent[number].attempt == attempt:
                self.heard[number, attempt] += 1
                job = self.sent[number].job
                _write(Path(job.folder).resolve().parent, files)
                if row:
                    hear(job, from_json(row))

    def _answer(self, sent: Sent, hear: Hear) -> list[Record] | None:
        """The records of its job, when all that it posted is read; None if that is tried again, or was cancelled."""
        job, attempt, ref = sent
        try:
            answer = self.ray.get(ref) if self._awaits(sent) else {}
            while self._awaits(sent) and self.heard[job.number, attempt] < answer.get("posts", 0):
                if not self._has_mail(ANSWER):
                    break
                self._read(self._taken(), hear)
            if not self._awaits(sent):  # who hears of it may have cancelled it
                return None
        except self.lost as error:
            if attempt < TRIES:
                self.send(job, attempt + 1)
                hear(job, Noted("its process or node was lost: it goes on elsewhere, from its last checkpoint"))
                return None
            return job.failed(f"lost {TRIES} times: {_why(error)}")
        except self.ray.exceptions.RayError as error:
            return job.failed(_why(error))
        finally:
            self.pending.pop(ref, None)
            if self._awaits(sent):
                del self.sent[job.number]
        if "error" in answer:
            raise ValueError(answer["error"])
        if "failed" in answer:
            return job.failed(answer["failed"])
        if answer["files"]:
            folder = Path(job.folder).resolve()
            old = dict.fromkeys(f"{folder.name}/{name}" for name in Mirror(folder).seen)
            _write(folder.parent, old | answer["files"])
            job.experiment.claim(folder)  # a node may have had its start elsewhere
        return [Record.of(row) for row in answer["records"]]

    def rate(self, job: Job, seconds: float) -> Rate:
        """All that run at a time at once; each begins when about all are there."""
        told, answers = Told(self.box, 0, 0, "", "", [], self._start(job), self.plugins), []
        for duration in (0.0, seconds):
            try:
                answers = self.ray.get([self._task(job, told, duration) for _ in range(self.jobs)])
            except self.ray.exceptions.RayError as error:
                raise ValueError(f"the cluster could not be timed: {_why(error)}") from None
            if wrong := [answer for answer in answers if "rate" not in answer]:
                raise ValueError(next(iter(wrong[0].values())))
        return min(Rate(*answer["rate"]) for answer in answers)

    def measure(self, what: Measuring, threads: int | None) -> tuple[list[str], dict[str, Any]]:
        """On one node, which is named and has nothing else to do then: the first by name that can."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        root, kind = what.folder.resolve(), "GPU" if what.device.type == "cuda" else "CPU"
        why = f"no node with a {kind} is left"
        for attempt in range(TRIES):
            able = [node for node in _alive(self.ray) if node["Resources"].get(kind, 0) >= 1]
            if not able:
                break
            node, cores = able[0], int(able[0]["Resources"].get("CPU", 0))
            name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
            what.progress(0, 1, f"waiting for {name}, to measure speeds on it alone")
            left = None if what.deadline is None else what.deadline - time.monotonic()
            pieces = Measured(what.study, what.every, what.base, what.device.type, left, threads or max(1, cores))
            kept = [*root.glob("records.jsonl"), *root.glob("*/best/*")]
            files = {str(path.relative_to(root)): path.read_bytes() for path in kept}
            task = self.measuring.options(
                num_cpus=cores, num_gpus=int(kind == "GPU"), max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )  # fmt: skip
            ref = task.remote(self._told(-1, attempt, root, files), pieces, *self._images(what.base))
            try:
                answer = self._heard_out(ref, what)
            except self.lost as error:
                why = _why(error)
                continue
            except self.ray.exceptions.RayTaskError as error:
                why = _why(error)
                break
            except KeyboardInterrupt:
                self.ray.cancel(ref)
                raise
            _write(root, answer["files"])
            return answer["failed"], answer["machine"] | {"node": name}
        return [f"Speed and memory could not be measured: {why}."], {}

    def _heard_out(self, ref: Any, what: Measuring) -> dict[str, Any]:
        """The answer; how far it is, meanwhile."""
        while True:
            ready, _ = self.ray.wait([self.mail, ref], num_returns=1)
            if ref in ready:
                return self.ray.get(ref)
            for post in self._taken():
                if "progress" in post.row:
                    what.progress(*post.row["progress"])

    def close(self) -> None:
        """Tasks save what they are at, and what they saved is fetched."""
        if not self.ray.is_initialized():
            return
        with contextlib.suppress(self.ray.exceptions.RayError, OSError):
            for ref in self.pending:
                self.ray.cancel(ref)
            if self.pending:
                self.ray.wait(list(self.pending), num_returns=len(self.pending), timeout=SAVING)
                posts = self.ray.get(self.box.rest.remote(), timeout=SAVING)
                arrived, _ = self.ray.wait([self.mail], timeout=0)
                every = [*(self.ray.get(self.mail) if arrived else []), *posts]
                self._read([Post(*post) for post in every], lambda job, event: None)
            self.ray.kill(self.box)
        for root, mark in self.marks.items():
            (root / mark).unlink(missing_ok=True)
        self.sent, self.pending, self.marks = {}, {}, {}
        if ours:
            _disconnect(self.ray)


def _disconnect(ray: Any) -> None:
    global ours
    ray.shutdown()
    ours = False


def _alive(ray: Any) -> list[dict[str, Any]]:
    """The nodes, in the order of their names."""
    found = [node for node in ray.nodes() if node["Alive"]]
    return sorted(found, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))


def _room(nodes: Sequence[Mapping[str, Any]], threads: int, device: torch.device) -> int:
    """How many jobs run at a time."""
    gpu = device.type == "cuda"
    each = [int(node["Resources"].get("GPU" if gpu else "CPU", 0)) // (1 if gpu else threads) for node in nodes]
    if not sum(each):
        wanted = "GPU" if gpu else f"{threads} CPUs"
        raise ValueError(f"no node of the cluster has {'a ' if gpu else ''}{wanted}: ask for less, or add a node")
    return sum(each)


def _why(error: Any) -> str:
    """What went wrong in a task, in one line."""
    if "No module named 'linvit'" in str(error):
        return "a node has no linvit: install the same version on every node"
    error = getattr(error, "cause", None) or error
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
