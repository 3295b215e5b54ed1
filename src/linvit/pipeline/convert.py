"""`convert`: a trained vision transformer becomes the same model with another attention, from a request to a result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit.attention import role_of
from linvit.conversion.budget import MAX_DECIDED
from linvit.conversion.candidates import SAME, TABLE, disguised
from linvit.conversion.context import Context
from linvit.conversion.images import ConversionImages, divide_images
from linvit.conversion.run import Converted
from linvit.conversion.run import run as run_steps
from linvit.conversion.search import images_needed
from linvit.conversion.stages import find_seconds, stage_shares, stage_steps, training_seconds
from linvit.conversion.student import make_student
from linvit.conversion.teacher import fit_model, held_out_fold, stage_recipe, trained_on
from linvit.data import Dataset, folded
from linvit.devices import amp_dtype, pick_device
from linvit.durations import duration
from linvit.files import remove_parts
from linvit.ledger import key_of
from linvit.locks import claim_folder, locked
from linvit.measure.threads import use_threads
from linvit.pipeline.prepare import check_given, result_folder
from linvit.progress import Progress, ignore
from linvit.registry import parse_layers
from linvit.requests import ConvertRequest
from linvit.schemas.conversion import AUTO, MAX_DROP, Conversion
from linvit.schemas.experiment import DatasetRef, Source
from linvit.schemas.recipe import Recipe
from linvit.toml import to_toml
from linvit.training.checkpoint import Stored
from linvit.training.events import Listener, Noted
from linvit.training.source import open_data
from linvit.training.start import start_from, stored_of
from linvit.training.trackers import tracking

if TYPE_CHECKING:
    from linvit import report

DECIDING = ("to", "stages", "inherit", "patch_size", "seed", "budget")  # fields that a conversion stores
OWN_FILES = ("experiment.json", "study.json", "records.jsonl", "report.html", "best")

Log = Callable[[str], None]


def convert(
    model: str | Path,
    *,
    data: str | Path | Dataset,
    to: str | Sequence[str] = AUTO,
    on_event: Listener = lambda event: None,
    progress: Progress = ignore,
    **keywords: Any,
) -> Converted:
    """Replace the attention of a trained model by `to`; the same call resumes an interrupted conversion.

    to: a spec, several to be mixed with max_drop, or "auto": whatever is faster on this machine within max_drop.
    keywords: the fields of `linvit.requests.ConvertRequest` (max_drop, stages, inherit, budget, image_size, out, seed,
    …) and any option of Recipe, e.g. epochs=2 or steps=600 of all stages together, lr=1e-4.
    stages: 1, each attention matches the teacher's outputs; 2, all blocks match its features and classes; 3, labels.
    max_drop: maximum loss relative to the teacher's accuracy, e.g. 0.01; the fastest mix of layers within it is chosen.
    on_event: called with every event of the stages. progress: called for everything else.
    """
    dataset = data if isinstance(data, Dataset) else None
    request = ConvertRequest.of(model=model, to=to, data=dataset.name if dataset else data, **keywords)
    if request.dry_run or request.print_config:
        raise ValueError("dry_run and print_config print a plan: use them on the command line")
    conversion = ConversionRun(request, dataset, on_event, progress=progress)
    conversion.run()
    assert conversion.converted is not None
    return conversion.converted


@dataclass
class ConversionRun:
    """The run of one request: check → claim the folder → convert → report."""

    request: ConvertRequest
    dataset: Dataset | None = None
    on_event: Listener = lambda event: None
    log: Log = lambda text: None
    progress: Progress = ignore
    converted: Converted | None = None

    def run(self) -> report.Result | None:
        """The report's result; None if the request was for a plan, or without a report."""
        with use_threads(self.request.threads):
            context = self.prepare()
            if self.request.print_config:
                return self.log(to_toml(context.conversion.settings()).rstrip())
            if self.request.dry_run:
                return self.log(outlook(context))
            with locked(context.folder):
                claim(context)
                self.converted = run_steps(context)
                return self.report(context.folder)

    def report(self, folder: Path) -> report.Result | None:
        if not self.request.report:
            return None
        from linvit import report  # altair takes a second to import

        return report.build(folder)

    def prepare(self) -> Context:
        """Read the teacher and the images once, and check everything; nothing is written."""
        request = self.request
        trackers, device = tracking(request.track), pick_device(request.device)
        amp_dtype(request.options.get("amp", "auto"), device)
        start = start_from(request.model)
        stored = stored_of(start)
        if request.out is not None and request.out.resolve() == stored.folder.resolve():
            raise ValueError(f"--out {request.out} is the folder of the model: choose another --out")
        auto, depth = request.to == (AUTO,), stored.config.depth
        max_drop = MAX_DROP if auto and request.max_drop is None else request.max_drop
        check_target(request.to, stored, max_drop)
        dataset, source, seen = self.open_images(stored)
        images = divide_images(dataset, stored.about, max_drop is not None, seen, request.seed)
        teacher = fit_model(stored, dataset, patch_size=request.patch_size)
        for spec in () if auto else request.to:  # what cannot be built is an error here
            if same := disguised(make_student(teacher, spec, request.inherit, request.seed)):
                raise ValueError(f"{same} {SAME}: choose other options, another attention or larger images")
        check_counts(images, max_drop, MAX_DECIDED + 2 if auto else depth + 2, seen)
        options = {name: value for name, value in sorted(request.options.items()) if name not in ("epochs", "steps")}
        recipe = stage_recipe(stored, images.dataset, teacher.tokens, options)
        conversion = Conversion(
            data=DatasetRef(name=dataset.name, identity=dataset.identity),
            source=source,
            teacher=start,
            image_size=dataset.image_size,
            **{name: getattr(request, name) for name in DECIDING},
            max_drop=max_drop,
            steps=planned_steps(request, recipe, images.dataset),
            options=options,
            trained_on="" if stored.foreign else stored.about["name"],
            decided_on="" if max_drop is None else "validation" if seen else "training",
            request=request.stored(),
            started=time.time(),
        )
        folder = result_folder(request, f"{dataset.name}-convert-{conversion.id}", self.dataset)
        every, callbacks = request.checkpoint_seconds, (self.on_event, self.progress)
        return Context(conversion, stored, teacher, recipe, images, folder, device, *callbacks, trackers, every)

    def open_images(self, stored: Stored) -> tuple[Dataset, Source | None, bool]:
        """The data set, how to find it again, and whether the teacher was trained on it."""
        request, config = self.request, stored.config
        if self.dataset is not None:
            check_given(request)
        dataset, source = open_data(
            request.data if self.dataset is None else self.dataset,
            self.progress,
            root=request.data_root,
            image_size=request.image_size or config.image_size,
            limit=request.limit,
            channels=config.channels,
            resize=request.resize or stored.about["resize"],
            skip_bad=request.skip_bad,
            cached=False,  # a search reads few of them
        )
        seen, name = trained_on(stored, dataset), dataset.name
        if seen and (fold := held_out_fold(stored)):
            return folded(dataset, fold), source and source.folded(fold), seen
        if seen and name != stored.about["name"]:
            taught = stored.about["name"]
            self.on_event(Noted(f"the teacher was trained on {taught}, which may include images of {name}"))
        elif stored.foreign:
            text = f"the teacher may have been trained on images of {name}: if so, its accuracy and the student's loss"
            self.on_event(Noted(f"{text} differ on new images"))
        return dataset, source, seen


def check_target(to: Sequence[str], stored: Stored, max_drop: float | None) -> None:
    depth, attention = stored.config.depth, stored.config.attention
    if to == (AUTO,):
        if not any(role_of(spec) == "baseline" for spec in parse_layers(attention, depth)):
            raise ValueError(f"{stored.folder} has {attention} and no softmax to replace: name an attention with --to")
        return
    for one in to:
        if max_drop is not None and any(role_of(spec) == "baseline" for spec in parse_layers(one, depth)):
            raise ValueError(
                f"max_drop={max_drop:g} chooses the layers that stay softmax: give it other attentions than {one}"
            )


def check_counts(images: ConversionImages, max_drop: float | None, candidates: int, seen: bool) -> None:
    """Every split needs images, and those that decide between the candidates must be enough to show the drop."""
    name = images.dataset.name
    for split in ("train", "validation", "test"):
        if not len(images.split(split)):
            raise ValueError(f"{name} has no {split} images, and a conversion needs some")
    needed = 0 if max_drop is None else images_needed(max_drop, candidates)
    if len(images.decide) < needed:
        part = "validation images (the teacher was trained on the others)" if seen else "training images"
        raise ValueError(
            f"max_drop={max_drop:g} cannot be shown with fewer than {needed:,} images, and {name} has "
            f"{len(images.decide):,} of its {part} for that: add images or allow a larger drop"
        )


def planned_steps(request: ConvertRequest, recipe: Recipe, dataset: Dataset) -> dict[str, int]:
    """Of each training; none with a budget, or where nothing is trained."""
    auto, options = request.to == (AUTO,), request.options
    shares = stage_shares(request.stages, request.max_drop is not None, auto)
    if request.budget or not shares or (auto and not {"epochs", "steps"} & set(options)):
        return {}
    per_epoch = max(1, len(dataset.train) // recipe.batch_size)
    return stage_steps(shares, per_epoch, request.options.get("epochs"), request.options.get("steps"))


def claim(context: Context) -> None:
    """Make the folder this conversion's, or continue the one it holds."""
    folder, asked = context.folder, context.conversion
    stored = claim_folder(asked.path(folder), asked, OWN_FILES)
    if stored is not None:  # with the steps that a budget was turned into
        context.conversion = stored.model_copy(update={"trained_on": asked.trained_on, "decided_on": asked.decided_on})
    context.conversion.save(folder)
    remove_parts(folder, *(path for path in folder.iterdir() if path.is_dir()))


def outlook(context: Context) -> str:
    """What would be trained, and what is finished."""
    c, steps = context.conversion, context.conversion.steps
    shares = stage_shares(c.stages, c.max_drop is not None, c.auto)
    to = "the fastest within the drop" if c.auto else " and ".join(c.to)
    lines = [f"{context.folder}: {context.config.attention} to {to}, {context.config.depth} layers"]
    if c.auto:
        lines.append(
            f"candidates: {', '.join(TABLE)}; finding the target takes about {duration(find_seconds(c.budget))}"
        )
        shares = shares if steps or training_seconds(c.budget) else {}
    for name in shares:
        done = context.ledger.done(key_of("conversion_seconds", model=name)) is not None
        length = f"{steps[name]:,} steps" if name in steps else f"{shares[name]:.0%} of {c.budget}"
        lines.append(f"{name}: {length}, {'finished' if done else 'not finished'}")
    return "\n".join(lines)
