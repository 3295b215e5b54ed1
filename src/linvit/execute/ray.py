"""Work on a Ray cluster that is already running: one task each, with the CPUs or the GPU that it needs.

Nodes read and write the result folder themselves, so that it must be on storage that all of them share; that is checked
before anything is started. Images are opened by each node from their source. Events come back through a queue. A task
whose process or node is lost is started again elsewhere and resumes from its last checkpoint.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from linvit.data import Dataset
from linvit.execute.base import EXECUTORS, Executor, forward_progress
from linvit.execute.work import DatasetCache, OnEvent, Work, WorkerDied, first_line, outcome, perform, thinned
from linvit.files import write_atomically
from linvit.measure.provenance import machine
from linvit.progress import Progress
from linvit.training.events import Event, Noted, from_json, to_json

EVENT_SECONDS = 1.0  # between two events of one task that only say how far it is
MAX_ATTEMPTS = 3  # of work whose process or node is lost
CONNECT_SECONDS, CHECK_SECONDS, SAVE_SECONDS = 5.0, 60.0, 60.0
CLIENT_PORT = 10001  # of a cluster for connections from outside, if none is named
LOCAL_CLUSTER = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # where Ray notes its address
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SCHEDULER_EVENTS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
LOST = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "ObjectLostError", "TaskUnschedulableError")
Node = dict[str, Any]  # as `ray.nodes()` describes it

opened = DatasetCache()  # in a node's process: its images
connected_here = False  # whether `connect` made the connection, and not this process's user


def connect(address: str) -> Any:
    """The ray module, connected; a ValueError within seconds if no cluster answers. An existing connection is used."""
    global connected_here
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray.exceptions
    except ImportError:
        raise ValueError("a Ray cluster needs the package ray: pip install 'linvit[cluster]'") from None
    if ray.is_initialized():
        return ray
    target = address if "://" in address else os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if target == "auto" and LOCAL_CLUSTER.exists():
            target = LOCAL_CLUSTER.read_text(encoding="utf-8").strip()
        if target != "auto":
            where = urlsplit(target if "://" in target else f"//{target}")
            if where.port is None and "://" in target:
                target = f"ray://{where.hostname}:{CLIENT_PORT}"
            place = (where.hostname or "", where.port or CLIENT_PORT)
            socket.create_connection(place, CONNECT_SECONDS).close()  # Ray itself tries for minutes
        ray.init(target, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        hint = "start one (ray start --head), or name one as ray://HOST:PORT or in RAY_ADDRESS"
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = "none runs on this machine" if target == "auto" else lines[-1]
        raise ValueError(f"no Ray cluster can be used at {target} ({why}): {hint}") from None
    connected_here = True
    return ray


def alive_nodes(ray: Any) -> list[Node]:
    """In the order of their names."""
    found = [node for node in ray.nodes() if node["Alive"]]
    return sorted(found, key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))


def node_name(node: Node) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"


def only_on(node: str) -> dict[str, Any]:
    """The option of a task or an actor that places it there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def reason(error: Any) -> str:
    """What went wrong in a task."""
    return first_line(getattr(error, "cause", None) or error).rstrip(".")


def check_nodes(ray: Any, marker: Path | None = None) -> None:
    """A ValueError unless linvit is installed on every node and every node sees the marker, if there is one."""

    def check(path: str) -> str:  # inside a function, it is sent as code: it runs where linvit is missing, too
        import importlib.util
        import os
        import time

        if importlib.util.find_spec("linvit") is None:
            return "has no linvit: install the same version on every node"
        for _ in range(10):  # a network file system may show a new file late
            if not path or os.path.exists(path):
                return ""
            time.sleep(0.5)
        return f"does not see {os.path.dirname(path)}: --out must be on storage that all nodes of the cluster share"

    task, path = ray.remote(num_cpus=0, max_retries=0)(check), str(marker or "")
    for node, answer in [(node, task.options(**only_on(node["NodeID"])).remote(path)) for node in alive_nodes(ray)]:
        try:
            why = ray.get(answer, timeout=CHECK_SECONDS)
        except ray.exceptions.RayError as error:
            why = f"cannot be used ({reason(error)})"
        if why:
            raise ValueError(f"node {node_name(node)} {why}")


def run_task(text: str, number: int, events: Any, images: Dataset | None, plugins: str) -> dict[str, Any]:
    """On a node: do the work."""
    import ray.exceptions

    own, sent = os.environ.get("LINVIT_PLUGINS", ""), []
    if plugins not in own:
        os.environ["LINVIT_PLUGINS"] = os.pathsep.join(filter(None, [plugins, own]))
    if images is not None:
        opened.add(images)

    def send(event: Event) -> None:  # without waiting: a task that waits gives up its CPUs meanwhile
        sent[:] = [events.actor.put_nowait.remote((number, to_json(event)))]

    answer = perform(text, opened, thinned(send, EVENT_SECONDS))
    with suppress(ray.exceptions.RayError):  # pyright: ignore[reportAttributeAccessIssue] (the result counts)
        ray.get(sent)
    if "error" in answer:
        answer["error"] = f"node {socket.gethostname()}: {answer['error']}"
    return answer | {"machine": machine()}


@dataclass
class Task:
    on_event: OnEvent
    reference: Any = None  # Ray's
    failure: Exception | None = None  # raised by on_event
    all_read: threading.Event = field(default_factory=threading.Event)  # set after its last event


@EXECUTORS.register("ray")
class Ray(Executor):
    def __init__(self, slots: int, threads: int, datasets: DatasetCache, address: str = "ray"):
        super().__init__(slots, threads, datasets, address)
        self.ray = connect(address)
        self.lost = tuple(getattr(self.ray.exceptions, name) for name in LOST)
        plugins = filter(None, os.environ.get("LINVIT_PLUGINS", "").split(os.pathsep))
        self.plugins = os.pathsep.join(str(Path(part).resolve()) for part in plugins)
        self.images: dict[str, Any] = {}  # references to those that were sent, by identity
        self.shared: set[Path] = set()  # folders that all nodes see
        self.numbers, self.running = itertools.count(), dict[int, Task]()
        self.lock, self.closing, self.pool = threading.RLock(), False, ThreadPoolExecutor(slots)
        self.queue: Any = None
        self.reader = threading.Thread(target=self._read, daemon=True)

    @classmethod
    def locate(cls, address: str, device: str, threads: int | None) -> tuple[torch.device, int]:
        ray = connect(address)
        nodes = alive_nodes(ray)
        gpu = device.startswith("cuda") or (device == "auto" and any(node["Resources"].get("GPU") for node in nodes))
        kind, each = ("GPU", 1) if gpu else ("CPU", threads or 1)
        slots = sum(int(node["Resources"].get(kind, 0)) // each for node in nodes)
        if not slots:
            raise ValueError(f"no node of the cluster has {each} {kind}{'s' * (each > 1)}: request less, or add a node")
        check_nodes(ray)
        return torch.device("cuda" if gpu else "cpu"), slots

    def submit(self, work: Work, on_event: OnEvent = lambda event: None) -> Future[Any]:
        self._prepare(work)
        return self.pool.submit(self._run, work, on_event)

    def _prepare(self, work: Work) -> None:
        """Before the first task: storage that all nodes see, and a queue for events near this process."""
        from ray.util.queue import Queue

        if work.storage is not None and (folder := work.storage.absolute()) not in self.shared:
            marker = folder / f".ray-{uuid.uuid4().hex}"
            write_atomically(marker, "nodes of a cluster look for this file\n")
            try:
                check_nodes(self.ray, marker)
            finally:
                marker.unlink(missing_ok=True)
            self.shared.add(folder)
        if self.queue is None:
            home = self.ray.get_runtime_context().get_node_id()
            self.queue = Queue(actor_options={"num_cpus": 0} | only_on(home))
            self.reader.start()

    def _read(self) -> None:
        """In a thread: pass events on."""
        with suppress(self.ray.exceptions.RayError):  # the cluster is lost: tasks say so
            while (item := self.queue.get()) is not None:
                number, row = item
                with self.lock:
                    if (task := self.running.get(number)) is None or task.failure is not None:
                        continue
                    if row is None:
                        task.all_read.set()
                        continue
                    try:
                        task.on_event(from_json(row))
                    except Exception as error:  # StopWork, as a rule
                        task.failure = error
                        task.all_read.set()
                        self.ray.cancel(task.reference)

    def _run(self, work: Work, on_event: OnEvent) -> Any:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return outcome(work, self._attempt(work, on_event))
            except self.lost as error:
                if attempt == MAX_ATTEMPTS:
                    raise WorkerDied(f"lost {MAX_ATTEMPTS} times: {reason(error)}") from None
                with self.lock:
                    on_event(Noted("its process or node was lost: it resumes elsewhere from its last checkpoint"))
            except self.ray.exceptions.RayError as error:
                raise WorkerDied(reason(error)) from None

    def _attempt(self, work: Work, on_event: OnEvent, **options: Any) -> dict[str, Any]:
        gpu, number, task = work.device.startswith("cuda"), next(self.numbers), Task(on_event)
        text = work.absolute().model_copy(update={"device": "cuda"} if gpu else {}).to_json()  # a task sees one GPU
        options = {"num_cpus": work.threads or 1, "num_gpus": int(gpu), "max_retries": 0} | options
        with self.lock:
            if self.closing:
                raise WorkerDied("the command was ended")
            images, self.running[number] = self._images(work), task
            remote = self.ray.remote(run_task).options(**options)
            task.reference = remote.remote(text, number, self.queue, images, self.plugins)
        try:
            answer = self.ray.get(task.reference)
            if self.reader.is_alive() and task.failure is None:
                self.queue.put((number, None))
                task.all_read.wait(SAVE_SECONDS)
        except self.ray.exceptions.TaskCancelledError:
            answer = {"failed": "it was cancelled"}
        finally:
            with self.lock:
                del self.running[number]
        if task.failure is not None:
            raise task.failure
        return answer

    def _images(self, work: Work) -> Any:
        """Those that exist only in this process, sent once; None: nodes open them."""
        identity = work.experiment.data.identity
        if work.experiment.source is None and identity not in self.images:
            self.images[identity] = self.ray.put(self.datasets.find(work.experiment))
        return self.images.get(identity)

    def measure(self, work: Work, progress: Progress) -> tuple[Any, dict[str, Any]]:
        """On the first node by name that can, while nothing else runs there; on the next if that is lost."""
        self._prepare(work)
        kind = "GPU" if work.device.startswith("cuda") else "CPU"
        why = f"no node with a {kind} is left"
        for node in [node for node in alive_nodes(self.ray) if node["Resources"].get(kind, 0) >= 1]:
            name, cpus = node_name(node), max(1, int(node["Resources"].get("CPU", 0)))
            progress(0, 1, f"waiting for node {name}, to measure on it alone")
            mine, options = work.model_copy(update={"threads": work.threads or cpus}), only_on(node["NodeID"])
            run = self.pool.submit(self._attempt, mine, forward_progress(progress), num_cpus=cpus, **options)
            try:
                answer = run.result()
                return outcome(mine, answer), answer["machine"] | {"node": name}
            except self.lost as error:
                why = reason(error)
            except self.ray.exceptions.RayError as error:
                raise WorkerDied(reason(error)) from None
        raise WorkerDied(why)

    def shutdown(self) -> None:
        global connected_here
        if not self.ray.is_initialized():
            return
        with self.lock:
            self.closing, references = True, [task.reference for task in self.running.values()]
        self.pool.shutdown(wait=False, cancel_futures=True)
        with suppress(self.ray.exceptions.RayError):
            for force in (False, True):  # first they may save what they are doing
                for reference in references:
                    self.ray.cancel(reference, force=force)
                self.ray.wait(references, num_returns=len(references), timeout=SAVE_SECONDS) if references else None
            self.pool.shutdown()
            if self.queue is not None:
                self.queue.put(None)
                self.reader.join(SAVE_SECONDS)
                self.queue.shutdown(force=True)
        if connected_here:
            self.ray.shutdown()
            connected_here = False
