"""Trainings in float64, as one of several processes or alone: rounding is then far below what a wrong share, order or
statistic would change."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from linvit import ranks
from linvit.measure import accuracy
from linvit.pipeline import train as training
from linvit.signals import Evicted
from linvit.training import loop
from linvit.training.sharing import share_norms
from linvit.training.tasks import TASKS
from linvit.training.tasks.classification import Classification

DATA = "synthetic:images=72,size=8"
TINY: dict[str, Any] = {
    "stem": "patch",
    "patch_size": 4,
    "dim": 14,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 19,
    "batch_size": 17,
    "epochs": 3,
    "device": "cpu",
    "task": "double",
    "checkpoint_seconds": 0.0,
}


@TASKS.register("double")
class Double(Classification):
    def loss(self, model, images, labels, indices, epoch):
        x, targets = self.augment(images, labels, indices, epoch, self.experiment.seed)
        logits = model(x.double())
        targets = targets.double() if targets.is_floating_point() else targets
        loss = F.cross_entropy(logits, targets, label_smoothing=self.experiment.recipe.label_smoothing)
        return loss, (logits.detach().argmax(-1) == labels).sum()


@TASKS.register("whole-batch")
class WholeBatch(Double):
    mean_over_images = False


def in_double() -> None:
    """From here on this process trains in float64."""
    started, normalise = loop.started, accuracy.normalise

    def doubled(experiment, dataset):
        model, headless = started(experiment, dataset)
        return model.double(), headless

    loop.started = doubled  # type: ignore[attr-defined]
    accuracy.normalise = lambda *args: normalise(*args).double()  # type: ignore[attr-defined]


def signalled(number: int, rank: int, step: int) -> None:
    """One rank gets a signal in the middle of a step."""
    real = loop.Training._step

    def deadly(self, batch):
        if batch.step == step and ranks.number() == rank:
            os.kill(os.getpid(), number)
        return real(self, batch)

    loop.Training._step = deadly  # type: ignore[method-assign]


def train(out: Path | str, **options: Any) -> Any:
    return training.train(DATA, out=out, **TINY | options)


def norms(sizes: tuple[int, ...]) -> str:
    """Batch norm whose batch the ranks have parts of, against PyTorch's on all of it."""
    source = torch.Generator().manual_seed(7)
    x, gradient = torch.randn(2, *sizes, generator=source, dtype=torch.float64)
    x = 3 * x + torch.arange(sizes[1]).view(-1, 1, 1)  # channels with means of their own
    alone = nn.BatchNorm2d(sizes[1]).double()
    with torch.no_grad():
        alone.weight.copy_(torch.randn(sizes[1], generator=source))
        alone.bias.copy_(torch.randn(sizes[1], generator=source))
    together = nn.BatchNorm2d(sizes[1]).double()
    together.load_state_dict(alone.state_dict())
    holder = nn.Sequential(together)
    share_norms(holder)
    assert type(together) is not nn.BatchNorm2d
    mine = ranks.part(sizes[0])
    for _ in range(2):  # running statistics add up
        whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        alone.zero_grad(), together.zero_grad()
        expected, found = alone(whole), together(part)
        torch.testing.assert_close(found, expected[mine], rtol=1e-11, atol=1e-12)
        expected.backward(gradient)
        found.backward(gradient[mine])
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, whole.grad[mine], rtol=1e-10, atol=1e-11)
        for name in ("weight", "bias"):  # which are summed with all other gradients
            summed = ranks.summed(getattr(together, name).grad.clone())
            torch.testing.assert_close(summed, getattr(alone, name).grad, rtol=1e-10, atol=1e-11)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(together.get_buffer(name), buffer, rtol=1e-11, atol=1e-12)
    alone.eval(), together.eval()
    torch.testing.assert_close(together(x), alone(x), rtol=1e-11, atol=1e-12)
    return "right"


def launch(count: int, cases: Mapping[str, Any], folder: Path) -> list[tuple[int, str]]:
    """Processes that run the cases together, from a server that has imported all of this; the exit code and the last
    line of standard error of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranked"])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["LINVIT_CACHE"] = os.environ["LINVIT_CACHE"]
    each = [common | {"RANK": str(rank)} for rank in range(count)]
    started = [context.Process(target=child, args=(folder / "cases.json", variables)) for variables in each]
    folders = (Path(__file__).parent, Path(__file__).parents[1], os.environ.get("PYTHONPATH", ""))
    here = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    with mock.patch.dict(os.environ, here):
        for process in started:
            process.start()
    for process in started:
        process.join(100)
        process.kill()
    said = [folder / f"stderr.{rank}" for rank in range(count)]
    last = [(path.read_text().strip().splitlines() or [""])[-1] if path.exists() else "" for path in said]
    return [(process.exitcode or 0, text) for process, text in zip(started, last, strict=True)]


def child(cases: Path, variables: dict[str, str]) -> None:
    os.environ |= variables
    with open(cases.parent / f"stderr.{variables['RANK']}", "w") as file, redirect_stderr(file):
        try:
            main(cases)
        except Evicted as notice:
            print(notice, file=sys.stderr)
            sys.exit(75)


def main(path: Path) -> None:
    torch.set_num_threads(1)
    in_double()
    ranks.join(torch.device("cpu"))
    for name, case in json.loads(path.read_text()).items():
        if "signal" in case:
            signalled(*case.pop("signal"))
        if "differ" in case:
            case["seed"] = ranks.number()
            del case["differ"]
        try:
            result = norms(tuple(case["norm"])) if "norm" in case else str(train(path.parent / name, **case).diverged)
        except ValueError as error:
            result = f"error: {error}"
        (path.parent / f"{name}.{ranks.number()}.txt").write_text(result)
