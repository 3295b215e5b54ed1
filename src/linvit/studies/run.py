"""Running a declared study: its comparisons or its measurement, resumed where an earlier run stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from linvit.files import slug
from linvit.ledger import open_ledger
from linvit.locks import locked
from linvit.measure.threads import use_threads
from linvit.progress import Progress, ignore
from linvit.report.benchmarks import save
from linvit.requests import ReproduceRequest
from linvit.schemas.experiment import BACKBONES, Start
from linvit.schemas.study import Study, Variant
from linvit.studies.archive import archive_path, restore_study, unpack
from linvit.studies.declaration import STUDIES, Column, Declaration, Figure, PublishedStudy
from linvit.study.compare import compare
from linvit.study.jobs import OnJobEvent
from linvit.training.start import start_from

TESTED = ("test_accuracy", "bits_per_dim")  # metrics of a run that was trained to the end
ENDS = (*TESTED, "diverged", "failed")  # metrics of a run that ended
DESCRIPTION = {"literal": "the report's recipe", "fair": "one protocol for all rows"}
WHERE = ("device", "runner", "jobs", "threads", "data_root")  # of a request, as `compare` takes them


def reproduce(
    name: str,
    *,
    on_event: OnJobEvent = lambda job, event: None,
    log: Callable[[str], None] = lambda text: None,
    progress: Progress = ignore,
    **keywords: Any,
) -> Path:
    """Run a study and return the folder of its results, OUT/NAME/SCALE. The same call resumes.

    keywords: the fields of `linvit.requests.ReproduceRequest`: scale, out, seeds, device, jobs, …
    """
    request = ReproduceRequest.of(names=(name,), **keywords)
    return Reproduction(request, on_event, log, progress).run(runnable(name, request.scale))


def runnable(name: str, scale: str) -> Declaration:
    """The study of this name; a ValueError if it cannot be run at this scale."""
    study = STUDIES[name]
    if scale not in study.durations:
        reason = f"it has {', '.join(study.durations)}" if study.durations else study.about
        raise ValueError(f"{name} cannot be run at scale '{scale}': {reason}")
    return study


@dataclass(frozen=True)
class Reproduction:
    """A request being carried out."""

    request: ReproduceRequest
    on_event: OnJobEvent = lambda job, event: None
    log: Callable[[str], None] = lambda text: None
    progress: Progress = ignore

    def run(self, study: Declaration) -> Path:
        folder = self.request.out / study.name / self.request.scale
        if isinstance(study, PublishedStudy):
            for column in study.columns:
                self._train(study, column, folder / column)
        elif isinstance(study, Figure):
            self._measure(study, folder)
        return folder

    def _train(self, study: PublishedStudy, column: Column, folder: Path) -> None:
        """Train one column: first the rows from scratch, then those that start from their softmax models."""
        rows = study.rows_of(column)
        self._restore(study, column, folder)
        self.log(f"{column}: {DESCRIPTION[column]}, {len(rows)} rows")
        two_stages = any(row.checkpoint for row in rows)
        self._compare(study, column, folder, variants(study, column, self.request.scale), last=not two_stages)
        if two_stages and (models := softmax_models(study, folder)):
            self._compare(study, column, folder, variants(study, column, self.request.scale, models), last=True)

    def _restore(self, study: PublishedStudy, column: Column, folder: Path) -> None:
        """Take over the finished runs that were published."""
        if self.request.restore is None:
            return
        file = archive_path(self.request.restore, study.name, self.request.scale, column)
        if not file.exists():
            return self.log(f"{column}: {file} does not exist, so nothing is restored")
        with locked(folder):
            self.log(f"{column}: {restore_study(file, folder)} finished runs restored from {file}")

    def _compare(self, study: PublishedStudy, column: Column, folder: Path, rows: list[Variant], last: bool) -> None:
        size, fair = study.size(column, self.request.scale), column == "fair"
        where = {name: getattr(self.request, name) for name in WHERE}
        if not (size.measured or self.request.runner or self.request.jobs):
            where["jobs"] = 1  # seconds of training do not justify a second process
        compare(
            study.data,
            variants=rows,
            origin=self.request.replaced(names=(study.name,), all=False, report=None, publish=None, restore=None),
            on_event=self.on_event,
            progress=self.progress,
            task=study.task,
            start="scratch",
            controls=fair and study.length(column) == 1,  # controls are trained once, from scratch
            seeds=self.request.seeds or size.seeds,
            image_size=study.image_size(column, self.request.scale),
            limit=size.limit,
            folds=size.folds,
            match=fair,
            measured=size.measured and last,
            out=folder,
            **where,
            **study.options(column, self.request.scale),
        )

    def _measure(self, figure: Figure, folder: Path) -> None:
        ledger, published = open_ledger(folder), None
        if self.request.restore is not None and not len(ledger):
            published = archive_path(self.request.restore, figure.name, self.request.scale)
        if published is not None and published.exists():
            unpack(published, folder)
            self.log(f"records restored from {published}")
        if not len(ledger):
            folder.mkdir(parents=True, exist_ok=True)
            with use_threads(self.request.threads):
                ledger.append(list(figure.measure(figure.scales[self.request.scale], folder, self)))
        save(figure.draw(list(ledger), folder), folder / "figure")


def variants(
    study: PublishedStudy, column: Column, scale: str, models: Mapping[int, Path] | None = None
) -> list[Variant]:
    """The rows of a column that are trained from scratch; with `models` (seed → model), those that start from one."""
    starts = {seed: _start(model) for seed, model in (models or {}).items()}
    return [
        Variant(
            id=row.name,
            label=row.name,
            attention=(row.literal if column == "literal" else None) or row.attention,
            options=study.row_options(column, scale, row),
            data=dict(row.literal_data) if column == "literal" else {},
            start=start_from(BACKBONES / row.pretrained) if row.pretrained else next(iter(starts.values()), None),
            starts=starts,
            task=study.task,
            column=column,
            beside=row.length != study.length(column),
        )
        for row in study.rows_of(column)
        if row.checkpoint == bool(starts)
    ]


def _start(model: Path) -> Start:
    """Of a restored study, whose weights are gone once all that starts from them is trained, as it is stored there."""
    if (model / "model.safetensors").exists():
        return start_from(model)
    rows = Study.read(Study.path(model.parents[1])).variants
    every = (start for row in rows for start in row.starts.values() if Path(start.folder) == model.resolve())
    if (found := next(every, None)) is None:
        raise ValueError(f"{model} holds no weights, and rows start from them: train the study in another --out")
    return found


def softmax_models(study: PublishedStudy, folder: Path) -> dict[int, Path]:
    """seed → its trained softmax model, without those that diverged or failed."""
    name = next(row.name for row in study.rows if row.attention == "softmax")
    tested = [record for metric in TESTED for record in open_ledger(folder).find(metric, variant=name)]
    runs = {int(record.tags["seed"] or 0): record.experiment for record in tested}
    return {seed: folder / f"{slug(name)}-seed{seed}-{run[:6]}" / "best" for seed, run in sorted(runs.items())}


def state(study: Declaration, folder: Path) -> Literal["done", "started", ""]:
    """How much of a study is in the folder of one of its scales."""
    if not isinstance(study, PublishedStudy):
        return "done" if len(open_ledger(folder)) else ""
    if all(_done(study, column, folder / column) for column in study.columns):
        return "done"
    return "started" if any((folder / column).exists() for column in study.columns) else ""


def _done(study: PublishedStudy, column: Column, folder: Path) -> bool:
    """Whether all runs of a column ended, diverged ones included, and its page was written."""
    if not (folder / "report.html").exists():
        return False
    try:
        stored = Study.read(Study.path(folder))
    except ValueError:  # written by another version: running the study again explains what to do
        return False
    ended = {(r.tags.get("variant"), r.tags.get("seed")) for end in ENDS for r in open_ledger(folder).find(end)}
    runs = {(name, seed) for name, seeds in stored.seeds.items() for seed in seeds}
    rows = study.rows_of(column)
    if any(row.checkpoint for row in rows) and not softmax_models(study, folder):
        rows = [row for row in rows if not row.checkpoint]
    return stored.finished is not None and {row.name for row in rows} <= set(stored.seeds) and runs <= ended
