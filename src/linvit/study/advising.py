"""`advise`: which attention for these images, this model or so many tokens, before anything is trained.

It says what was measured on this machine: from how many tokens on each attention is faster than softmax, how much of a
model's time attention takes, how many features a target error needs, and what earlier studies showed. What only
training can tell, accuracy, it does not claim: its recommendation comes with the command that would prove it.
"""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linvit import report
from linvit.data import Arrays, normalise, read_image, survey
from linvit.data.cache import LARGEST, cache_root
from linvit.data.dataset import read_source
from linvit.data.decode import resize
from linvit.measure import features
from linvit.measure.advice import (
    TASKS,
    Model,
    cached,
    forecast,
    kind_of,
    measure_model,
    points,
    shapes_of,
    sized,
    step_bytes,
    suitable_batch,
)
from linvit.measure.features import Enough
from linvit.measure.memory import LONGEST, free_memory
from linvit.measure.provenance import machine, pick_device
from linvit.metrics import CONTROLS, percent
from linvit.metrics import size as in_bytes
from linvit.models import ModelConfig, VisionTransformer, model_config
from linvit.models.cost import grid
from linvit.models.resize import resized
from linvit.progress import Progress, ignore
from linvit.randomness import generator
from linvit.records import Record
from linvit.registry import parse, parse_layers
from linvit.report.recommendation import TIE
from linvit.report.statistics import WORSE
from linvit.study.compare import ATTENTIONS
from linvit.train import backbones
from linvit.train.checkpoint import Stored, on_hub, read_model
from linvit.train.experiment import resolve
from linvit.train.files import checksum

SIZE, PATCH = "small", 16  # of the model that a number of tokens alone is asked about
IMAGES = 2  # whose q and k are looked at
AMONG = 512  # the first so many of a set that they are taken from
ERROR_SECONDS = 5.0
DEEPEST = 4  # folders below --runs in which a study is looked for, as reproductions lie
SHOWN = 3  # studies, at most
OTHERS = 32  # features of kinds that nobody asked about, where their layers are timed
ALIKE = 2.0  # times as many tokens are still similar
WORDS = {"latency": "inference of one image", "inference": "inference in batches", "training": "training"}


@dataclass(frozen=True)
class Question:
    """The model that is asked about, and where its weights and images are, if there are any."""

    text: str
    config: ModelConfig
    data: str | None = None
    name: str | None = None  # of the data
    trained: Path | None = None  # whose weights it has
    options: tuple[str, ...] = ()  # of `linvit compare`, for the same model
    side: int | None = None  # its --image-size, if that has to be given

    @property
    def tokens(self) -> int:
        return shapes_of(self.config, 1)["latency"].tokens

    def pixels(self, tokens: float) -> int:
        """The side of an image with at least so many tokens."""
        rows, columns = grid(self.config)
        side = math.ceil(math.sqrt(max(1.0, tokens - self.config.prefix_tokens) * columns / rows) - 1e-9)
        return side * (self.config.image_size // columns)


@dataclass(frozen=True)
class Trial:
    """What a study found of one attention."""

    attention: str
    accuracy: float
    verdict: str
    shown: bool  # to lose less than the margin
    bad: bool  # shown to lose more, or it diverged
    speeds: Mapping[str, float]  # task → times softmax's, as far as measured


@dataclass(frozen=True)
class Earlier:
    """A study that was done before."""

    folder: Path
    data: str
    tokens: int
    machine: str  # empty: this one
    margin: float
    trials: tuple[Trial, ...]


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
    studies: tuple[Earlier, ...]
    choice: str
    reason: str
    command: str
    records: tuple[Record, ...]

    def summary(self) -> dict[str, Any]:
        """All of it as plain data."""
        model, lengths = self.model, self.model.known.lengths
        return {
            "about": self.question.text, "tokens": self.question.tokens, "batch": model.batch, "task": self.task,
            "recommendation": self.choice, "reason": self.reason, "command": self.command,
            "share": {task: model.share(task) for task in TASKS},
            "limit": {task: model.speed("identity", task) for task in TASKS},
            "attentions": [
                {"attention": spec, "speed": {task: model.speed(spec, task) for task in TASKS},
                 "layer": {task: model.ratio(spec, task) for task in TASKS},
                 "break_even_tokens": {task: model.break_even(spec, task) for task in TASKS},
                 "break_even_is_at_most": {task: model.break_even(spec, task) == model.lengths(spec)[0]
                                           for task in TASKS}}
                for spec in self.specs
            ],
            "layers_measured": bool(model.measured), "measured_tokens": list(lengths),
            "forecast_error": model.known.error,
            "features": [
                {"attention": e.kind, "m": e.count, "features": e.features, "error": e.error, "tried": e.tried,
                 "speed": None if e.spec is None else model.speed(e.spec, self.task)} for e in self.enough
            ],
            "target_error": self.target, "uniform_error": self.uniform, "q_and_k": self.origin,
            "studies": [
                {"folder": str(s.folder), "data": s.data, "tokens": s.tokens, "machine": s.machine or "this one",
                 "attentions": [{**vars(trial), "speeds": dict(trial.speeds)} for trial in s.trials]}
                for s in self.studies
            ],
        }  # fmt: skip


def advise(
    about: str | int | Path, *, attentions: Sequence[str] | None = None, data: str | Path | None = None,
    image_size: int | None = None, patch: int | None = None, size: str | None = None, task: str = "inference",
    batch: int | None = None, target: float = 0.2, sigma: float = 1.0, runs: str | Path | None = None,
    fresh: bool = False, cache: str | Path | None = None, device: str = "cpu", data_root: str | Path | None = None,
    progress: Progress = ignore,
) -> Advice:  # fmt: skip
    """about: a number of tokens, a data set's name or path, or the folder of a trained model (linvit's or a Hugging
    Face or timm ViT's); with a model, `data` are the images whose q and k it is looked at with.

    task decides: "latency" (one image at a time), "inference" (a batch) or "training". target: the total variation to
    softmax for which features are counted; sigma: the deviation of q and k where they have to be drawn. runs: where
    earlier studies lie, by default runs/ if there is one. fresh: measure again what this machine was measured for;
    cache: where that is kept.
    """
    if task not in TASKS:
        raise ValueError(f"task={task} is not one of {', '.join(TASKS)}")
    for name, value, right in (("batch", batch, batch is None or batch >= 1), ("error", target, 0 < target < 1),
                               ("sigma", sigma, math.isfinite(sigma) and sigma > 0)):  # fmt: skip
        if not right:
            wanted = "at least 1" if name == "batch" else "between 0 and 1" if name == "error" else "a positive number"
            raise ValueError(f"{name}={value} must be {wanted}")
    if runs is not None and not Path(runs).is_dir():
        raise ValueError(f"runs={runs} is not a folder: name the one in which studies lie")
    question = ask(about, data, image_size, patch, size, data_root)
    _not_too_many(question.tokens)
    place, specs = pick_device(device), _candidates(attentions, question)
    images = batch or suitable_batch(question.config)
    taken, free = step_bytes(question.config, images), free_memory(place)
    if taken > free:
        raise ValueError(
            f"batch={images}: a training step would take about {in_bytes(taken)}, of {in_bytes(free)} free"
        )
    kinds, kept = features.estimators(specs), {"device": place, "fresh": fresh, "cache": cache}
    errors, origin = _errors(question, kinds, sigma, data_root, partial(cached, **kept), progress)
    known = forecast([*specs, *kinds], **kept, progress=progress)
    others = [sized(kind, OTHERS, question.tokens) for kind in kinds if kind not in map(kind_of, specs)]
    model = measure_model(question.config, [*specs, *others], known, batch=images, **kept, progress=progress)
    earlier = studies(Path(runs or "runs"), question)
    speeds = {spec: model.speed(spec, task) for spec in specs}
    choice = choose(speeds, _proven(earlier, question), _proven(earlier, question, bad=True))
    why, shown, pixels = reason(model, specs, choice, task, question, earlier)
    evens = [_break_even(model, spec, name) for spec in specs for name in TASKS]
    return Advice(
        question=question,
        model=model,
        specs=tuple(specs),
        task=task,
        target=target,
        enough=tuple(features.enough(errors, kinds, target)),
        uniform=features.control(errors),
        origin=origin,
        studies=tuple(earlier),
        choice=choice,
        reason=why,
        command=command(question, shown, pixels),
        records=(*known.records, *model.records, *errors, *evens),
    )


def ask(
    about: str | int | Path, data: str | Path | None = None, image_size: int | None = None, patch: int | None = None,
    size: str | None = None, data_root: str | Path | None = None,
) -> Question:  # fmt: skip
    """What is asked about, as a model; whatever cannot be is an error of one line."""
    for name, value in (("image_size", image_size), ("patch", patch)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    text = str(about)
    if text.lstrip("+-").isdecimal():
        found = _of_tokens(int(text), image_size, patch, size)
    elif on_hub(text) or any((Path(text) / part / "config.json").is_file() for part in (".", "best")):
        found = _of_model(text, image_size, patch, size)
    else:
        found = _of_data(text, image_size, patch, size, data_root)
    if data is not None:
        if found.data is not None:
            raise ValueError(f"data={data}: {text} are images already; data goes with a model or a number of tokens")
        found = replace(found, data=str(data), name=survey(data, data_root).name)
    if not found.config.depth:
        raise ValueError(f"{text} has no attention layers: depth=0")
    return found


def _not_too_many(tokens: int) -> None:
    """Only what is timed here can be spoken of."""
    most = max(shape.tokens for shape, _ in points())
    if tokens > most:
        layers = f"; `linvit bench speed --tokens {tokens}` times single layers" if tokens <= LONGEST else ""
        raise ValueError(f"N={tokens:,} tokens are too many: forecasts here end at {most:,}{layers}")


def _of_tokens(tokens: int, image_size: int | None, patch: int | None, size: str | None) -> Question:
    """A square grid of patches, with a CLS token or without: as many tokens, or the nearest number that makes one."""
    if tokens < 1:
        raise ValueError(f"N={tokens} must be at least 1 token")
    if image_size is not None:
        raise ValueError(f"image_size={image_size} has no effect: {tokens} tokens are asked about; give one of them")
    _not_too_many(tokens)
    root, patch = math.isqrt(tokens), patch or PATCH
    side, cls = min(product((root, root + 1), (0, 1)), key=lambda made: abs(made[0] ** 2 + made[1] - tokens))
    config = model_config(size or SIZE, image_size=side * patch, patch_size=patch, pool="cls" if cls else "mean")
    options = ("--size", size or SIZE, "--set", f"patch_size={patch}", *(("--set", "pool=cls") if cls else ()))
    found = side**2 + cls
    grid_of = f"{side} × {side} patches" + " and CLS" * cls
    near = "" if found == tokens else f", the square nearest to {tokens:,}"
    text = f"a model of size {size or SIZE} with {grid_of}{near}"
    return Question(text, config, options=options, side=side * patch)


def _of_model(folder: str, image_size: int | None, patch: int | None, size: str | None) -> Question:
    if size is not None:
        raise ValueError(f"size={size} has no effect: {folder} is a model and has its own; leave it out")
    stored = read_model(folder)
    config = stored.config
    if patch is not None and config.stem != "patch":
        raise ValueError(f"patch={patch} has no effect: stem={config.stem} has no patches: leave it out")
    changes = {"image_size": image_size or config.image_size, "patch_size": patch or config.patch_size}
    config = model_config(**config.model_dump() | changes)
    options = () if patch is None else ("--set", f"patch_size={patch}")
    known = "" if stored.foreign else f", trained on {stored.about['name']}"
    text = f"{_called(stored)} ({config.attention}{known}) at {config.image_size} px"
    return Question(text, config, trained=stored.folder, options=("--from", folder, *options), side=image_size)


def _called(stored: Stored) -> str:
    """That it ships, or its folder's name, or that of a model from elsewhere, which may lie in any folder."""
    home = stored.folder.resolve()
    if home in (folder.resolve() for folder in backbones.shipped().values()):
        return f"the shipped {stored.config.attention} backbone"
    folder = home.parent.name if home.name in ("best", "last") else home.name
    return f"model {stored.about['name'] if stored.foreign else folder}"


def _of_data(
    data: str, image_size: int | None, patch: int | None, size: str | None, data_root: str | Path | None
) -> Question:
    """The model that `linvit compare` would train on these images."""
    images = survey(data, data_root)
    given: dict[str, Any] = {"size": size}
    if patch is not None:
        given |= {"stem": "patch", "patch_size": patch}
    like = trained = None
    if backbones.suit(images, image_size or images.side, given):
        trained = backbones.shipped()["softmax"]
        like = read_model(trained).config
    side = image_size or (like.image_size if like else min(images.side, LARGEST))
    facts = {"image_size": side, "channels": images.channels, "classes": images.classes}
    config, _ = resolve(images.name, facts, "softmax", 0, given, like, trained=trained is not None)
    options = tuple(f"{key}={value}" for key, value in given.items() if value is not None and key != "size")
    words = ("--size", size) if size else ()
    text = f"{images.name} at {side} px"
    return Question(text, config, data, images.name, trained,
                    (*words, *(word for option in options for word in ("--set", option))), image_size)  # fmt: skip


def _candidates(attentions: Sequence[str] | None, question: Question) -> list[str]:
    """Attentions that are asked about and the model's own, but for softmax and the controls, each of which it can
    have."""
    own = map(str, parse_layers(question.config.attention, question.config.depth))
    every = dict.fromkeys([*own, *(attentions or ATTENTIONS)])
    wanted = [spec for spec in every if parse(spec).name not in ("softmax", *CONTROLS)]
    shape, found = shapes_of(question.config, 1)["latency"], []
    for spec in wanted:
        try:
            shape.attention(spec)
        except ValueError as error:
            if spec in (attentions or ()):
                raise
            warnings.warn(f"{spec} is left out: {error}", UserWarning, stacklevel=2)
            continue
        found.append(spec)
    if not found:
        raise ValueError("no attention to compare with softmax: give one, e.g. -a performer-relu:m=32")
    return found


def _errors(
    question: Question, kinds: Sequence[str], sigma: float, data_root: str | Path | None,
    keep: Callable[..., list[Record]], progress: Progress,
) -> tuple[list[Record], str]:  # fmt: skip
    """The errors over numbers of features, and of which q and k they are."""
    shape, config = shapes_of(question.config, 1)["latency"], question.config
    if question.trained is None:
        where = {"sigma": sigma, "tokens": shape.tokens, "heads": shape.heads, "head_dim": shape.head_dim}
        found = keep(["drawn", kinds, where], make=lambda: features.drawn(kinds, **where, progress=progress))
        capped = f", {features.LONGEST:,} tokens" if shape.tokens > features.LONGEST else ""
        return found, f"modelled: drawn from N(0, σ²) with σ = {sigma:g}{capped}"
    stored = read_model(question.trained)
    if question.data is None:
        size = IMAGES, config.channels, config.image_size, config.image_size
        x, what = torch.randn(size, generator=generator("advice", *size)), "noise; --data takes images"
    else:
        pixels = some_images(question.data, config, data_root)
        x = normalise(torch.from_numpy(pixels), stored.about["mean"], stored.about["std"])
        what = f"{many(len(pixels), 'image')} of {question.name}"

    def make() -> list[Record]:
        model = VisionTransformer(config.model_copy(update={"classes": stored.config.classes}))
        model.load_state_dict(resized(stored.tensors, stored.config, config.image_size, config.patch_size))
        return features.seen(model, x, kinds, ERROR_SECONDS, progress)

    key = ["seen", kinds, checksum(stored.tensors), config.image_size, config.patch_size, x.double().sum().item()]
    return keep(key, make=make), f"of {_called(stored)} for {what}"


def some_images(data: str, config: ModelConfig, data_root: str | Path | None) -> np.ndarray:
    """A few images as the model takes them, uint8 (n, C, H, W), without decoding the rest."""
    _, found = read_source(data, data_root, cache_root(None))
    step = max(1, min(AMONG, len(found.labels)) // IMAGES)
    if isinstance(found, Arrays):
        return resize(found.images[: step * IMAGES : step][:IMAGES], config.image_size, config.channels)
    chosen = islice(found.read(), 0, step * IMAGES, step)
    return np.stack([read_image(where, config.image_size, config.channels, name) for name, where in chosen])


def studies(runs: Path, question: Question) -> list[Earlier]:
    """The studies below `runs`, the most similar first: of the same data, then of a similar number of tokens. A
    reproduction's smoke teaches nothing, and its literal part is not fair."""
    found = []
    for depth in range(DEEPEST + 1):
        for path in sorted(runs.glob("*/" * depth + "study.json")):
            if path.parent.name == "literal" or path.parent.parent.name == "smoke":
                continue
            try:
                earlier = _earlier(path.parent)
            except (ValueError, KeyError, OSError) as error:
                warnings.warn(f"{path.parent} is left out: {' '.join(str(error).split())}", UserWarning, stacklevel=2)
                continue
            if earlier.trials:
                found.append(earlier)

    def distance(study: Earlier) -> tuple[bool, float]:
        return study.data != question.name, abs(math.log(study.tokens / question.tokens))

    return sorted(found, key=distance)[:SHOWN]


def _earlier(folder: Path) -> Earlier:
    summary = report.summarise(report.read(folder))
    info = summary.study.info
    there, here = info.get("machine") or {}, machine()
    same = all(there.get(key) == here[key] for key in ("cpu", "cores", "device"))
    name = "" if same else f"{there.get('cpu', 'unknown')}, {there.get('cores', '?')} cores, {there.get('device', '?')}"
    metrics = {
        "latency": "latency_vs_softmax",
        "inference": "inference_vs_softmax",
        "training": "train_step_vs_softmax",
    }
    trials = [
        Trial(v.attention, v.best.mean, v.verdict, v.standing.shown and not v.diverged,
              v.verdict == WORSE or bool(v.diverged),
              {task: v.numbers[metric] for task, metric in metrics.items() if metric in v.numbers})
        for v in summary.variants if v.best and v.judged
    ]  # fmt: skip
    tokens = shapes_of(model_config(**info["model"]), 1)["latency"].tokens
    return Earlier(folder, str(summary.study.dataset.get("name")), tokens, name, summary.margin, tuple(trials))


def _proven(earlier: Iterable[Earlier], question: Question, bad: bool = False) -> dict[str, Earlier]:
    """The attentions that a similar study showed to lose less than its margin, or to be bad, and the study."""
    found: dict[str, Earlier] = {}
    for study in earlier:
        alike = study.data == question.name if question.name else 1 / ALIKE <= study.tokens / question.tokens <= ALIKE
        for trial in study.trials if alike else ():
            if trial.bad if bad else trial.shown:
                found.setdefault(trial.attention, study)
    return found


def choose(speeds: Mapping[str, float], proven: Iterable[str] = (), bad: Iterable[str] = ()) -> str:
    """The fastest of those that were proven, else of all that were not shown to be bad; softmax where none is faster by
    more than a tie."""
    faster = {spec: speed for spec, speed in speeds.items() if speed > TIE and spec not in {*bad} - {*proven}}
    shown = {spec: speed for spec, speed in faster.items() if spec in set(proven)}
    return max(shown or faster or {"softmax": 1.0}, key=lambda spec: speeds.get(spec, 1.0))


def reason(
    model: Model, specs: Sequence[str], choice: str, task: str, question: Question, earlier: Iterable[Earlier]
) -> tuple[str, str, int | None]:
    """One sentence, of what was measured; the attention that it speaks of, and at which image size if another."""
    here, words = many(question.tokens, "token"), WORDS[task]
    if choice != "softmax":
        how = "its layers measured here" if model.measured else "by this machine's forecast"
        study = _proven(earlier, question).get(choice)
        known = "whether it is as accurate on your images only training tells"
        if study:
            known = (f"it was shown in {study.folder} to lose less than {many(100 * study.margin, 'point')} on "
                     f"{study.data} ({many(study.tokens, 'token')})")  # fmt: skip
        return (f"it makes the whole model {model.speed(choice, task):.2f} times as fast as softmax in {words} at "
                f"{here} ({how}); {known}."), choice, None  # fmt: skip
    best = _next(model, specs, task)
    faster = model.speed(best, task)
    if faster > TIE and (study := _proven(earlier, question, bad=True).get(best)):
        lost = f"it lost more than {many(100 * study.margin, 'point')} on {study.data}, or diverged"
        said = f"{best} would be {faster:.2f} times as fast in {words} at {here}, but in {study.folder} {lost}."
        return said, best, None
    lead = (f"at {here} no attention asked about makes {words} more than {TIE - 1:.0%} faster ({best} is at "
            f"{faster:.2f}×), and attention takes {percent(model.share(task))} of the time")  # fmt: skip
    pays = {spec: found for spec in specs if (found := model.pays_from(spec, task, TIE)) is not None}
    if not pays:
        return f"{lead}; up to {many(model.known.lengths[1], 'token')} that does not change.", best, None
    first = min(pays, key=pays.__getitem__)
    pixels = question.pixels(pays[first])
    return f"{lead}; from about {pays[first]:,.0f} tokens ({pixels} px) {first} would be.", first, pixels


def _next(model: Model, specs: Sequence[str], task: str) -> str:
    """The fastest of what softmax is compared with."""
    return max(specs, key=lambda spec: model.speed(spec, task))


def many(count: float, word: str) -> str:
    return f"{count:,g} {word}{'s' * (count != 1)}"


def command(question: Question, spec: str, pixels: int | None = None) -> str:
    """What would prove it: accuracy and speed of both, on the images, of this size if it is another."""
    data, side = question.data or "path/to/images", pixels or question.side
    size = ("--image-size", str(side)) if side else ()
    return shlex.join(["linvit", "compare", data, *question.options, *size, "-a", "softmax", "-a", spec])


def _break_even(model: Model, spec: str, task: str) -> Record:
    shape, base, lengths = model.shapes[task], model.known.records[0], model.lengths(spec)
    tags = {"attention": spec, "mode": shape.mode, "heads": shape.heads, "head_dim": shape.head_dim,
            "prefix": shape.prefix, "batch": shape.batch, "from": lengths[0], "to": lengths[-1]}  # fmt: skip
    return replace(base, metric="break_even_tokens", value=model.break_even(spec, task), unit="tokens",
                   n=len(model.known.records), tags=tags)  # fmt: skip
