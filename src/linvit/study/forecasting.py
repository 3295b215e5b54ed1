"""`advise --for DEVICE`: the same question about a device that is not here, answered from its data sheet.

Nothing is run on the device, and nothing is measured here or kept: times come from `linvit.measure.hardware`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from linvit.measure.advice import TASKS
from linvit.measure.hardware import HARDWARE, Hardware, ModelForecast, check_memory, forecast_model, suitable_batch
from linvit.progress import Progress, ignore
from linvit.requests import AdviseRequest
from linvit.study.advising import Grounds, candidates, check_runs, choose, reason
from linvit.study.earlier import earlier_studies, known_attentions
from linvit.study.questions import Question, ask

ACCURACY = (
    "The model's constants were set to published times of single attentions on an A800, which it meets within a factor "
    "of 1.5; no other device and no whole model was checked."
)


@dataclass(frozen=True)
class HardwareAdvice:
    question: Question
    model: ModelForecast
    specs: tuple[str, ...]  # that softmax is compared with
    task: str  # that decides
    choice: str
    reason: str
    command: str

    @property
    def device(self) -> Hardware:
        return self.model.on

    @property
    def warning(self) -> str:
        return f"Forecast for {self.device.name} from a model of its data-sheet figures: nothing was run on it."

    @property
    def assumptions(self) -> str:
        """What the forecast takes for granted."""
        dtype = str(self.device.dtype).removeprefix("torch.")
        how = "all operations as eager PyTorch runs them, softmax too"
        if self.device.fuses:
            how = (
                "fused softmax; Performers compiled, as linvit does there (operations between two products are one "
                "kernel); all else as eager PyTorch runs it"
            )
        return f"Models in {dtype}; {how}."

    def summary(self) -> dict[str, Any]:
        """All of it as plain data."""
        model = self.model

        def by_task(value: Callable[[str], Any]) -> dict[str, Any]:
            return {task: value(task) for task in TASKS}

        def times(spec: str) -> dict[str, Any]:
            found = {task: model.model(spec, task) for task in TASKS}
            return {
                "seconds": {task: one.total for task, one in found.items()},
                "device_seconds": {task: one.device for task, one in found.items()},
                "host_seconds": {task: one.host for task, one in found.items()},
                "launch_bound": {task: one.launch_bound for task, one in found.items()},
            }

        attentions = []
        for spec in self.specs:
            evens, shortest = by_task(partial(model.break_even, spec)), model.lengths(spec)[0]
            about = {
                "attention": spec,
                "speed": by_task(partial(model.speed, spec)),
                "layer": by_task(partial(model.ratio, spec)),
                "break_even_tokens": evens,
                "break_even_is_at_most": {task: tokens == shortest for task, tokens in evens.items()},
            }
            attentions.append(about | times(spec))
        return {
            "forecast": True,
            "device": self.device.name,
            "warning": self.warning,
            "assumptions": self.assumptions,
            "accuracy": ACCURACY,
            "about": self.question.text,
            "tokens": self.question.tokens,
            "batch": model.batch,
            "task": self.task,
            "recommendation": self.choice,
            "reason": self.reason,
            "command": self.command,
            "share": by_task(model.share),
            "limit": by_task(partial(model.speed, "identity")),
            "softmax": times("softmax"),
            "attentions": attentions,
            "forecast_tokens": [min(model.lengths("softmax")), model.longest],
        }


def forecast(about: str | int | Path, hardware: str, *, progress: Progress = ignore, **keywords: Any) -> HardwareAdvice:
    """about: as `linvit.study.advising.advise` takes it. hardware: a100, h100, l4, t4, 4090 or m3. keywords: the other
    fields of `linvit.requests.AdviseRequest`."""
    return run(AdviseRequest.of(about=str(about), hardware=hardware, **keywords), progress=progress)


def run(request: AdviseRequest, *, progress: Progress = ignore) -> HardwareAdvice:
    if request.hardware is None:
        raise ValueError("hardware is missing: name the device that the forecast is for, e.g. h100")
    check_runs(request)
    question, task, on = ask(request), request.task, HARDWARE[request.hardware]
    specs = candidates(request.attentions, question)
    batch = request.batch or suitable_batch(question.config)
    check_memory(question.config, batch, on)
    model = forecast_model(question.config, specs, on, batch=batch, progress=progress)
    studies = earlier_studies(request.runs or Path("runs"), question)
    speeds, known_as = {spec: model.speed(spec, task) for spec in specs}, partial(known_attentions, studies, question)
    choice = choose(speeds, known_as("shown"), known_as("bad"))
    how = f"forecast for {on.name}, not measured"
    why, mentioned, pixels = reason(choice, Grounds(model, specs, task, question, studies, how, model.longest))
    command = question.comparison(mentioned, pixels).command()
    return HardwareAdvice(question, model, tuple(specs), task, choice, why, command)


def launch_bound(advice: HardwareAdvice, specs: Sequence[str]) -> dict[str, list[str]]:
    """Tasks in which the device waits for launches at the model's size, with the attentions of which that is so."""
    found = {task: [s for s in specs if advice.model.model(s, task).launch_bound] for task in TASKS}
    return {task: bound for task, bound in found.items() if bound}
