"""`advise`: which attention for these images, this model or this many tokens, before anything is trained.

It states what was measured on this machine: from how many tokens on each attention is faster than softmax, attention's
share of a model's time, how many features a target error needs, and what earlier studies showed. It makes no claim
about accuracy that only training can support: its recommendation comes with the command that would prove it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from linvit.attention import BASELINE, build_attention, caution, role_of, with_size
from linvit.data import normalise
from linvit.devices import pick_device
from linvit.measure import features
from linvit.measure.advice import (
    TASKS,
    Model,
    cached,
    forecast,
    kind_of,
    measure_model,
    step_bytes,
    suitable_batch,
    workloads,
)
from linvit.measure.features import Enough
from linvit.measure.memory import free_memory
from linvit.metrics import percent
from linvit.metrics import size as in_bytes
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record
from linvit.registry import parse_layers
from linvit.report.recommendation import TIE
from linvit.requests import AdviseRequest
from linvit.schemas.pixels import ImageSize
from linvit.study.earlier import EarlierStudy, earlier_studies, known_attentions
from linvit.study.questions import IMAGES, Question, ask, describe, some_images
from linvit.training.checkpoint import read_model
from linvit.training.defaults import ATTENTIONS
from linvit.training.files import checksum

ERROR_SECONDS = 5.0
OTHER_FEATURES = 32  # of kinds that were not asked about, whose layers are timed as well
WORDS = {"latency": "single-image inference", "inference": "batched inference", "training": "training"}


@dataclass(frozen=True)
class Advice:
    question: Question
    model: Model
    specs: tuple[str, ...]  # that softmax is compared with
    task: str  # that decides
    target: float  # error
    enough: tuple[Enough, ...]
    uniform: float  # its error
    origin: str  # of q and k
    studies: tuple[EarlierStudy, ...]
    choice: str
    reason: str
    command: str
    records: tuple[Record, ...]

    def summary(self) -> dict[str, Any]:
        """All of it as plain data."""
        model = self.model

        def by_task(value: Callable[[str], Any]) -> dict[str, Any]:
            return {task: value(task) for task in TASKS}

        attentions = []
        for spec in self.specs:
            evens = by_task(partial(model.break_even, spec))
            shortest = model.lengths(spec)[0]
            attentions.append(
                {
                    "attention": spec,
                    "speed": by_task(partial(model.speed, spec)),
                    "layer": by_task(partial(model.ratio, spec)),
                    "break_even_tokens": evens,
                    "break_even_is_at_most": {task: tokens == shortest for task, tokens in evens.items()},
                }
            )
        return {
            "about": self.question.text,
            "tokens": self.question.tokens,
            "batch": model.batch,
            "task": self.task,
            "recommendation": self.choice,
            "reason": self.reason,
            "command": self.command,
            "share": by_task(model.share),
            "limit": by_task(partial(model.speed, "identity")),
            "attentions": attentions,
            "layers_measured": bool(model.measured),
            "measured_tokens": list(model.known.lengths),
            "forecast_error": model.known.error,
            "features": [self._features(one) for one in self.enough],
            "target_error": self.target,
            "uniform_error": self.uniform,
            "q_and_k": self.origin,
            "studies": [_study(study) for study in self.studies],
        }

    def _features(self, one: Enough) -> dict[str, Any]:
        speed = None if one.spec is None else self.model.speed(one.spec, self.task)
        names = {"attention": one.kind, "m": one.count, "features": one.features}
        return names | {"error": one.error, "tried": one.tried, "speed": speed}


def _study(study: EarlierStudy) -> dict[str, Any]:
    findings = [{**vars(finding), "speeds": dict(finding.speeds)} for finding in study.findings]
    facts = {"folder": str(study.folder), "data": study.data, "tokens": study.tokens}
    return facts | {"machine": study.machine or "this one", "attentions": findings}


def advise(
    about: str | int | Path, *, progress: Progress = ignore, cache: str | Path | None = None, **keywords: Any
) -> Advice:
    """about: a number of tokens, a data set's name or path, or the folder of a trained model (linvit's or a Hugging
    Face or timm ViT's). keywords: the fields of `linvit.requests.AdviseRequest`. cache: where measurements are kept."""
    return run(AdviseRequest.of(about=str(about), **keywords), progress=progress, cache=cache)


def run(request: AdviseRequest, *, progress: Progress = ignore, cache: str | Path | None = None) -> Advice:
    if request.hardware is not None:
        raise ValueError(f"hardware={request.hardware} is not measured: linvit.study.forecasting makes forecasts")
    check_runs(request)
    question, task = ask(request), request.task
    device, specs = pick_device(request.device), candidates(request.attentions, question)
    batch = request.batch or suitable_batch(question.config)
    needed, free = step_bytes(question.config, batch), free_memory(device)
    if needed > free:
        raise ValueError(
            f"batch={batch}: a training step needs about {in_bytes(needed)}, but {in_bytes(free)} are free"
        )
    kinds, kept = features.estimators(specs), {"device": device, "fresh": request.fresh, "cache": cache}
    errors, origin = _errors(question, kinds, request, partial(cached, **kept), progress)
    known = forecast([*specs, *kinds], **kept, progress=progress)
    others = [with_size(kind, OTHER_FEATURES, question.tokens) for kind in kinds if kind not in map(kind_of, specs)]
    model = measure_model(question.config, [*specs, *others], known, batch=batch, **kept, progress=progress)
    studies = earlier_studies(request.runs or Path("runs"), question)
    speeds, known_as = {spec: model.speed(spec, task) for spec in specs}, partial(known_attentions, studies, question)
    choice = choose(speeds, known_as("shown"), known_as("bad"))
    how = "layers timed on this machine" if model.measured else "forecast from timings on this machine"
    grounds = Grounds(model, specs, task, question, studies, how, known.lengths[1])
    why, mentioned, pixels = reason(choice, grounds)
    evens = [_break_even(model, spec, name) for spec in specs for name in TASKS]
    return Advice(
        question=question,
        model=model,
        specs=tuple(specs),
        task=task,
        target=request.target,
        enough=tuple(features.enough(errors, kinds, request.target)),
        uniform=features.control(errors),
        origin=origin,
        studies=tuple(studies),
        choice=choice,
        reason=why,
        command=question.comparison(mentioned, pixels).command(),
        records=(*known.records, *model.records, *errors, *evens),
    )


def check_runs(request: AdviseRequest) -> None:
    if request.runs is not None and not request.runs.is_dir():
        raise ValueError(f"runs={request.runs} is not a folder: name the one with earlier studies")


def candidates(attentions: Sequence[str], question: Question) -> list[str]:
    """The attentions asked about and the model's own, without baselines and controls, as far as the model can have
    them."""
    own = map(str, parse_layers(question.config.attention, question.config.depth))
    site, found = workloads(question.config, 1)["latency"].site, []
    for spec in dict.fromkeys([*own, *(attentions or ATTENTIONS)]):
        if role_of(spec) != "candidate":
            continue
        try:
            build_attention(spec, site)
        except ValueError as error:
            if spec in attentions:
                raise
            warnings.warn(f"{spec} is left out: {error}", UserWarning, stacklevel=2)
            continue
        found.append(spec)
    if not found:
        raise ValueError("no attention to compare with softmax: give one, e.g. -a performer-relu:m=32")
    return found


def _errors(
    question: Question,
    kinds: Sequence[str],
    request: AdviseRequest,
    keep: Callable[..., list[Record]],
    progress: Progress,
) -> tuple[list[Record], str]:
    """The errors by number of features, and whose q and k they are of."""
    config, sigma = question.config, request.sigma
    if question.trained is None:
        site, most = config.site, features.MAX_TOKENS
        key = ["drawn", kinds, sigma, site.tokens, site.heads, site.head_dim]
        found = keep(key, make=lambda: features.errors_at_random(kinds, site, sigma, progress))
        capped = f", {most:,} tokens" if site.tokens > most else ""
        return found, f"are random, from N(0, σ²) with σ = {sigma:g}{capped}"
    stored = read_model(question.trained)
    if question.data is None:
        size = IMAGES, *config.image_shape
        x, what = torch.randn(size, generator=generator("advice", *size)), "noise; --data takes images"
    else:
        pixels = some_images(question, request.data_root)
        x = normalise(torch.from_numpy(pixels), stored.about["mean"], stored.about["std"])
        what = f"{count_of(len(pixels), 'image')} of {question.name}"

    def make() -> list[Record]:
        model = VisionTransformer(config.model_copy(update={"classes": stored.config.classes}))
        model.load_state_dict(stored.tensors_at(config.image_size, config.patch_size))
        return features.errors_in_model(model, x, kinds, ERROR_SECONDS, progress)

    key = ["seen", kinds, checksum(stored.tensors), config.image_size, config.patch_size, x.double().sum().item()]
    return keep(key, make=make), f"of {describe(stored)} for {what}"


def choose(
    speeds: Mapping[str, float],
    proven: Iterable[str] = (),
    bad: Iterable[str] = (),
    warned: Callable[[str], object] = caution,
) -> str:
    """The fastest of those that were proven, else of those that tests of linvit found nothing against, else of all that
    were not shown to be bad; softmax if none is faster by more than a tie."""
    faster = [spec for spec, speed in speeds.items() if speed > TIE and spec not in {*bad} - {*proven}]
    proven_faster = [spec for spec in faster if spec in set(proven)]
    sound = [spec for spec in faster if not warned(spec)]
    return max(proven_faster or sound or faster or [BASELINE], key=lambda spec: speeds.get(spec, 1.0))


class Speeds(Protocol):
    """A model with any attention in its layers, relative to softmax: measured here, or forecast for a device."""

    def speed(self, spec: str, task: str) -> float: ...

    def share(self, task: str) -> float: ...

    def pays_from(self, spec: str, task: str, gain: float) -> float | None: ...


@dataclass(frozen=True)
class Grounds:
    """What a recommendation rests on."""

    model: Speeds
    specs: Sequence[str]
    task: str
    question: Question
    studies: Sequence[EarlierStudy]
    how: str  # speeds are known
    longest: int  # tokens that they are known for


def reason(choice: str, on: Grounds) -> tuple[str, str, ImageSize | None]:
    """One sentence about speeds; the attention that it mentions, and the image size if it is another."""
    model, task, question, studies = on.model, on.task, on.question, on.studies
    here, words = count_of(question.tokens, "token"), WORDS[task]
    if choice != BASELINE:
        accuracy = "accuracy must be measured by training"
        if study := known_attentions(studies, question, "shown").get(choice):
            margin, data = count_of(100 * study.margin, "point"), f"{study.data} ({count_of(study.tokens, 'token')})"
            accuracy = f"{study.folder} showed that it loses less than {margin} on {data}"
        elif warning := caution(choice):
            accuracy = f"but {warning}: {accuracy}"
        faster = f"{model.speed(choice, task):.2f} times as fast as softmax for {words} with {here}"
        return f"it makes the whole model {faster} ({on.how}); {accuracy}.{_faster_but(choice, on)}", choice, None
    best = max(on.specs, key=lambda spec: model.speed(spec, task))
    faster_by = model.speed(best, task)
    if faster_by > TIE and (study := known_attentions(studies, question, "bad").get(best)):
        lost = f"it lost more than {count_of(100 * study.margin, 'point')} on {study.data}, or diverged"
        said = f"{best} would be {faster_by:.2f} times as fast for {words} with {here}, but in {study.folder} {lost}."
        return said, best, None
    lead = (
        f"with {here}, none of these attentions makes {words} more than {TIE - 1:.0%} faster "
        f"({best}: {faster_by:.2f}×), and attention takes {percent(model.share(task))} of the time"
    )
    pays = {spec: found for spec in on.specs if (found := model.pays_from(spec, task, TIE)) is not None}
    if not pays:
        return f"{lead}; up to {count_of(on.longest, 'token')} that does not change.", best, None
    first = min(pays, key=pays.__getitem__)
    pixels = question.pixels(pays[first])
    return f"{lead}; from about {pays[first]:,.0f} tokens ({pixels} px) on, {first} would.", first, pixels


def _faster_but(choice: str, on: Grounds) -> str:
    """Why the fastest is not the choice, where tests of linvit decided that."""
    best = max(on.specs, key=lambda spec: on.model.speed(spec, on.task))
    speed, warning = on.model.speed(best, on.task), caution(best)
    return f" {best} would be {speed:.2f} times as fast, but {warning}." if best != choice and warning else ""


def count_of(count: float, word: str) -> str:
    return f"{count:,g} {word}{'s' * (count != 1)}"


def _break_even(model: Model, spec: str, task: str) -> Record:
    load, base, lengths = model.loads[task], model.known.records[0], model.lengths(spec)
    site, names = load.site, ("heads", "head_dim", "prefix")
    tags = {"attention": spec, "mode": load.mode, "batch": load.batch, "from": lengths[0], "to": lengths[-1]}
    return replace(
        base,
        metric="break_even_tokens",
        value=model.break_even(spec, task),
        unit="tokens",
        n=len(model.known.records),
        tags=tags | {name: getattr(site, name) for name in names},
    )
