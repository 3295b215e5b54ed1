"""`convert`: a trained vision transformer → the same with linear attention, stage by stage, each with its evidence.

A stage is an ordinary training in a folder of its own below the conversion's, so all that holds for trainings holds
here: killed at any moment, the same call goes on and ends with the same weights.

    DIR/convert.json  records.jsonl  report.html  report.md  results.csv
    DIR/teacher  DIR/zero-shot                       the model as it is for these images; with the new attention
    DIR/stage-1  DIR/stage-2                         trainings: attention by attention, then all blocks
    DIR/mix  DIR/stage-2-mix                         with max_drop: what the search found, and stage 2 again
    DIR/stage-3                                      a training on the labels
    DIR/mix-decided                                  with max_drop: another mix, if that was taken
    DIR/best/{config.json, model.safetensors, README.md}
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from linvit.convert import plan
from linvit.convert.plan import OURS, Conversion
from linvit.convert.search import images_needed
from linvit.convert.student import Inherit, fitted, images_for, student_of
from linvit.convert.work import Converted, Work
from linvit.data import Dataset, folded, folder_of
from linvit.errors import clear
from linvit.files import remove_parts, slug
from linvit.locks import apart, claimed, locked
from linvit.measure.provenance import pick_device
from linvit.progress import Progress, ignore, seconds
from linvit.registry import parse_layers
from linvit.train import Start, open_data
from linvit.train import experiment as experiments
from linvit.train.checkpoint import read_model
from linvit.train.events import Listener, Noted, tell
from linvit.train.files import checksum
from linvit.train.recipe import check_amp


def convert(
    model: str | Path,
    *,
    to: str,
    data: str | Path | Dataset,
    out: str | Path | None = None,
    stages: Sequence[int] = (1, 2, 3),
    inherit: Inherit = "all",
    max_drop: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    budget: str | None = None,
    seed: int = 0,
    device: str = "auto",
    data_root: str | Path | None = None,
    image_size: int | None = None,
    patch_size: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    listeners: Sequence[Listener] = (),
    progress: Progress = ignore,
    checkpoint_seconds: float = 30.0,
    command: str = "",
    report: bool = True,
    **options: Any,
) -> Converted:
    """Turn a trained model into the same one with the attention `to`; the same call again goes on where it stopped.

    stages: 1, each attention matches the teacher's outputs; 2, all blocks match its features and classes; 3, labels.
    max_drop: share of the teacher's accuracy that may be lost, e.g. 0.01: as many layers are linear as that allows.
    epochs, steps or budget ("10m"): of all stages together. image_size, patch_size: other than the teacher's, positions
    are interpolated and the filters of patches resized. options: any of Recipe's. The test images are read once, at the
    end.
    """
    place, stored = pick_device(device), read_model(model)
    if out is not None and Path(out).resolve() == stored.folder.resolve():
        raise ValueError(f"--out {out} is the folder of the model: choose another --out")
    wanted = plan.known_stages(stages)
    if sum(length is not None for length in (epochs, steps, budget)) > 1:
        raise ValueError("give one of epochs, steps and budget")
    if patch_size is not None and patch_size < 1:
        raise ValueError(f"patch_size={patch_size} must be at least 1")
    dataset, source = open_data(
        data, progress, root=data_root, image_size=image_size or stored.config.image_size, limit=limit,
        channels=stored.config.channels, skip_bad=skip_bad,
    )  # fmt: skip
    seen = plan.trained_on(stored, dataset)
    if seen and (fold := plan.fold_of(stored)):
        dataset, source = folded(dataset, fold), source and source.folded(fold)
    elif seen and dataset.name != stored.about["name"]:
        other = stored.about["name"]
        tell(listeners, Noted(f"the teacher was trained on {other}: images of {dataset.name} may be among those"))
    elif stored.foreign:
        tell(listeners, Noted(f"whether the teacher was trained on images of {dataset.name} is not known: if so, "
                              "neither its accuracy nor what is lost of it is that of new images"))  # fmt: skip
    check_amp(options.get("amp", "off"), place)
    if max_drop is not None and any(spec.name == "softmax" for spec in parse_layers(to, stored.config.depth)):
        raise ValueError(
            f"max_drop={max_drop:g} finds which layers stay softmax: name linear attentions alone, not {to}"
        )
    images = images_for(dataset, stored.about, max_drop is not None, seen, seed)
    for name in ("train", "validation", "test"):
        if not len(images.part(name)):
            raise ValueError(f"{dataset.name} has no {name} images, and a conversion needs some")
    fewest = 0 if max_drop is None else images_needed(max_drop, stored.config.depth + 2)
    if (left := len(images.decide)) < fewest:
        part = "validation images, as the teacher was trained on the others," if seen else "training images"
        raise ValueError(
            f"max_drop={max_drop:g}: so small a drop can be shown on no fewer than {fewest:,} images, but "
            f"{dataset.name} leaves {left:,} of its {part} to decide by"
        )
    teacher = fitted(stored, dataset, patch_size=patch_size)
    student_of(teacher, to, inherit, seed)  # what cannot be built is an error before anything is written
    recipe = plan.common_recipe(stored, images.data, teacher.tokens, options)
    known = {key: options[key] for key in sorted(options)}
    try:
        asked = Conversion(
            data=experiments.Images(name=dataset.name, identity=dataset.identity), source=source,
            teacher=Start(folder=str(stored.folder.resolve()), sha256=checksum(stored.tensors)), to=to, stages=wanted,
            inherit=inherit, max_drop=max_drop, image_size=dataset.image_size, patch_size=patch_size, seed=seed,
            budget=budget,
            steps={} if budget else plan.lengths(recipe, images.data, wanted, max_drop is not None, epochs, steps),
            options=known, command=command, started=time.time(),
            trained_on="" if stored.foreign else stored.about["name"],
            decided_on="" if max_drop is None else "validation" if seen else "training",
        )  # fmt: skip
    except ValidationError as error:
        raise clear(error) from None
    if budget:
        seconds(budget)
    folder = Path(out) if out is not None else Path("runs") / f"{slug(dataset.name)}-convert-{asked.id}"
    apart(folder, folder_of(data))
    with locked(folder):
        there = claimed(folder / "convert.json", asked, OURS)
        if there is not None:  # what no setting says, an older one may lack
            there = there.model_copy(update={"trained_on": asked.trained_on, "decided_on": asked.decided_on})
        (there or asked).save(folder)
        remove_parts(folder, *(path for path in folder.iterdir() if path.is_dir()))
        work = Work(there or asked, stored, images, teacher, folder, place, listeners, progress, checkpoint_seconds)
        found = work.all()
        if report:
            from linvit.report.conversion import build  # altair takes a second to import

            build(folder)
        return found
