"""`compare`: variants × seeds under one protocol, measured on this machine, reported on one page.

All variants have the same data order, splits and steps, and as many parameters as softmax, matched by the width of the
MLP. Nothing that is finished runs again: the same call resumes, and a new variant or seed runs only what is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linvit import metrics, report
from linvit.attention import has_random_features, role_of
from linvit.data import Dataset
from linvit.execute import WorkerDied
from linvit.files import remove_parts
from linvit.ledger import open_ledger
from linvit.locks import claim_folder, locked
from linvit.measure.provenance import machine
from linvit.measure.threads import use_threads
from linvit.pipeline import plan as planning
from linvit.pipeline.configure import configured_comparison
from linvit.pipeline.outlook import plan_lines
from linvit.pipeline.prepare import Prepared, prepare, result_folder, with_limit
from linvit.pipeline.steps import measuring_seconds
from linvit.progress import Progress, ignore, repeated
from linvit.records import Record, Tag
from linvit.requests import CompareRequest, Request
from linvit.schemas.experiment import Start
from linvit.schemas.study import DEFAULT_MARGIN, Plan, Study, Variant
from linvit.study.jobs import OnJobEvent, StudyJob, study_jobs, write_jobs
from linvit.study.limitations import unfinished, warnings
from linvit.study.measuring import MeasureStudy
from linvit.study.placement import JobPlacement
from linvit.study.runs import Runs
from linvit.toml import to_toml
from linvit.training import backbones
from linvit.training.defaults import ATTENTIONS, CAUSAL_ATTENTIONS, CONTROL, START_ATTENTIONS
from linvit.training.loop import Rate
from linvit.training.run import status
from linvit.training.tasks import TASKS
from linvit.training.trackers import tracking

OWN_FILES = ("experiment.json", "records.jsonl", "report.html", "results.csv")
DEFAULT_SEEDS = 3
FIGURES = 3.0  # times as long as the first page takes the last, with figures as files
LATE = 0.03  # of the budget, by which it may be exceeded for figures

Log = Callable[[str], None]


def compare(
    data: str | Path | Dataset = "digits",
    *,
    variants: Sequence[Variant] = (),
    origin: Request | None = None,
    on_event: OnJobEvent = lambda job, event: None,
    log: Log = lambda text: None,
    progress: Progress = ignore,
    **keywords: Any,
) -> Path:
    """Train and measure every variant with every seed, and write the report; returns the study's folder.

    keywords: the fields of `linvit.requests.CompareRequest` (attentions, start, seeds, folds, budget, out, jobs, …) and
    any option of ModelConfig and Recipe for all variants, e.g. epochs=10. variants: rows that differ in more than their
    attention. origin: the request that this study is part of, if any.
    on_event(job, event): called with every event of every training. log: called with lines of text, such as the
    plan. progress(done, total, what): called for everything else.
    """
    dataset = data if isinstance(data, Dataset) else None
    request = CompareRequest.of(data=dataset.name if dataset else data, **keywords)
    comparison = Comparison(request, dataset, tuple(variants), origin, on_event, log, progress)
    comparison.run()
    return comparison.folder


@dataclass
class Comparison:
    """One request being carried out: prepare → plan → train → measure → report."""

    request: CompareRequest
    dataset: Dataset | None = None
    extra: Sequence[Variant] = ()
    origin: Request | None = None
    on_event: OnJobEvent = lambda job, event: None
    log: Log = lambda text: None
    progress: Progress = ignore
    clock: Callable[[], float] = time.perf_counter
    begun: float | None = None  # by the clock, when a budget begins; None: now
    folder: Path = Path()
    page_seconds: float = 0.0  # for which the first page was written
    rates: dict[str, Rate] = field(default_factory=dict)  # of each variant, where its jobs run

    def __post_init__(self) -> None:
        self.started = self.clock() if self.begun is None else self.begun

    def run(self) -> report.Result | None:
        """The report's result; None if the request was only for a plan."""
        self.asked = self.request  # before a configuration file is applied
        self.request, configured = configured_comparison(self.request)
        request, variants = self.request, wanted_variants(self.request, [*configured, *self.extra])
        tracking(request.track)  # a missing package is an error before any image is read
        with use_threads(request.threads):
            self.prepare(variants)
            self.placement = JobPlacement(request, self.prepared, self.study)
            try:
                self.plan()
                if request.print_config:
                    settings = {"request": self.asked.stored()} | configuration(self.study, self.prepared)
                    return self.log(to_toml(settings).rstrip())
                if request.dry_run:
                    for job in self.jobs():
                        self.log(job_line(job))
                    return None
                with locked(self.folder):
                    self.claim()  # again: another process may have come first
                    self.placement.study = self.study
                    if request.jobs_file:
                        return self.write_jobs()
                    self.train()
                    self.first_page()
                    self.measure()
                    return self.report()
            finally:
                self.placement.close()

    def prepare(self, variants: list[Variant]) -> None:
        request = self.request
        self.folder = result_folder(request, f"compare-{_name(request, self.dataset)}", self.dataset)
        path = Study.path(self.folder)
        earlier = Study.read(path) if path.exists() else None
        if request.jobs_file and self.dataset is not None:
            raise ValueError("jobs_file needs images that other processes can open: give a name or a path")
        prepared = prepare(request, variants, dataset=self.dataset, earlier=earlier, progress=self.progress)
        self.prepared, designer, plan = prepared, prepared.designer, prepared.plan
        count = request.seeds or (plan.seeds if plan else 1 if request.folds else DEFAULT_SEEDS)
        seeds = range(request.seed, request.seed + count)
        trained = [v for v in prepared.variants if not v.published]
        for variant in trained:
            designer.experiment(variant)  # a bad option is an error before anything is written
        in_python = bool(self.extra) or self.dataset is not None  # no command makes such variants or images
        stored = self.origin or (None if in_python else self.asked)
        self.study = Study(
            requests=[stored.stored()] if stored else [],
            started=time.time(),
            dataset=designer.facts(designer.dataset),
            source=prepared.source,
            folds=request.folds,
            variants=prepared.variants,
            seeds={v.id: variant_seeds(v, seeds) for v in trained},
            margin=request.margin or DEFAULT_MARGIN,
            plan=plan,
            model=designer.base.model,
            recipe=designer.base.recipe,
            start=prepared.start,
            match=request.match,
            budget=planning.budget_of(request, prepared.survey, prepared.variants),
            machine=machine(),
        )
        self.claim()

    def claim(self) -> None:
        """The folder's own study with these variants and seeds added, or this one."""
        stored = claim_folder(Study.path(self.folder), self.study, OWN_FILES)
        if stored is not None:
            margin = self.request.margin or stored.margin
            self.study = stored.extended(self.study).model_copy(update={"margin": margin})

    def plan(self) -> None:
        """The number of steps; with a budget, from the speed of each variant where its jobs will run."""
        prepared, study, base = self.prepared, self.study, self.prepared.designer.base
        length = base.length(len(prepared.designer.dataset.train))
        study.steps = length.total if study.steps is None else study.steps
        study.epochs = round(study.steps / length.per_epoch, 3)
        if prepared.planner is not None and study.plan is not None:
            self.rates = self.placement.rates(planning.timing_seconds(study.plan.seconds) / 2, self.progress)
            jobs = self.placement.decide(self.progress).jobs
            spent = self.clock() - self.started
            new = prepared.planner.settle(study.plan, self.rates, self.per_epoch, jobs, spent)
            if new.limit != study.plan.limit and new.limit is not None:
                self.use_fewer(new.limit)
            self.settle(new)
        if study.plan and self.placement.placement and not self.request.print_config:
            jobs, start = self.placement.placement.jobs, describe_start(prepared.starts)
            for line in plan_lines(
                study.plan, prepared.survey, base.model, len(study.seeds), study.epochs, jobs, start
            ):
                self.log(line)

    @property
    def per_epoch(self) -> int:
        designer = self.prepared.designer
        return designer.base.length(len(designer.dataset.train)).per_epoch

    def settle(self, plan: Plan) -> None:
        """Steps and seeds are those of this plan from now on."""
        study = self.study
        study.plan, study.steps = plan, plan.steps
        study.epochs = round(plan.steps / self.per_epoch, 3)
        study.seeds = {name: seeds[: plan.seeds] for name, seeds in study.seeds.items()}

    def use_fewer(self, limit: int) -> None:
        """At most this many images of each split: variants turned out to be slower than planned."""
        self.prepared = with_limit(self.prepared, limit)
        designer = self.placement.designer = self.prepared.designer
        self.study.dataset, self.study.source = designer.facts(designer.dataset), self.prepared.source

    def jobs(self) -> list[StudyJob]:
        return study_jobs(self.study, self.prepared.designer, self.folder, self.prepared.device)

    def write_jobs(self) -> None:
        self.study.save(self.folder)
        jobs = [job.model_copy(update={"threads": self.request.threads or 1}) for job in self.jobs()]
        file = write_jobs(self.folder, jobs)
        self.log(f"{file}: {len(jobs)} jobs; `linvit job {self.folder} N` runs one of them")

    def train(self) -> None:
        """Run the jobs, and copy their records into the study's, once; the files they name stay in their folders."""
        remove_parts(self.folder, self.folder / "figures")
        self.ledger = open_ledger(self.folder)
        if any(not job.finished() for job in self.jobs()):
            self.study.placement = self.placement.decide(self.progress)
        self.study.save(self.folder)
        self.all_jobs, self.late = Runs(self, self.ledger).run()

    def first_page(self) -> None:
        """With a budget, accuracies have their page at once; how long it takes is left for the last one."""
        plan, study = self.study.plan, self.study
        if plan is None or study.finished is not None:
            return
        begun, limit = self.clock(), plan.limit or self.request.limit
        more = ["Speed and memory are still to be measured."] if self.request.measured else []
        study.warnings = warnings(study, self.prepared, self.all_jobs, limit) + unfinished(self.late) + more
        study.save(self.folder)
        report.build(self.folder, figures=False)
        self.page_seconds = study.seconds["page"] = round(self.clock() - begun, 1)

    def measure(self) -> None:
        """Everything besides accuracy, and what the page says of the whole."""
        study, start = self.study, self.clock()
        before = len(self.ledger)
        self.ledger.append_new(published_records(study))
        problems: list[str] = []
        if self.request.measured:
            work = MeasureStudy(
                folder=str(self.folder.resolve()),
                jobs=tuple(self.all_jobs),
                experiment=self.prepared.designer.base,
                device=str(self.prepared.device),
                seconds=self._seconds_left(),
                threads=self.request.threads,
            )
            try:
                problems, elsewhere = self.placement.measure(work, self.progress)
                study.machine = elsewhere or study.machine
            except (WorkerDied, RuntimeError, MemoryError) as error:  # what was trained gets its page
                problems = [f"Speed and memory could not be measured: {error}."]
        if study.finished is None or len(self.ledger) != before:
            study.finished, now = time.time(), self.clock()
            for what, since in (("measuring", start), ("all", self.started)):
                study.seconds[what] = round(study.seconds.get(what, 0.0) + now - since, 1)
        problems += unfinished(self.late)
        limit = (study.plan and study.plan.limit) or self.request.limit
        study.warnings = warnings(study, self.prepared, self.all_jobs, limit) + problems
        seen = {name: len(seeds) for name, seeds in study.seeds.items()}
        if seen not in study.looks and all(not job.full or job.finished() for job in self.all_jobs):
            study.looks.append(seen)
        study.save(self.folder)

    def _seconds_left(self) -> float | None:
        """For measuring; None: as long as it takes. What is done beyond the plan is not limited by it."""
        plan = self.study.plan
        if plan is None or self.study.finished is not None:
            return None
        left = self.started + plan.seconds - self.clock() - FIGURES * self.page_seconds
        return max(measuring_seconds(plan.seconds) / 4, left)

    def report(self) -> report.Result:
        with repeated(self.progress) as tell:
            tell(0, 1, "writing the report")
            plan, ends = self.study.plan, self.clock() - self.started + FIGURES * self.page_seconds
            late = plan is not None and self.page_seconds and ends > (1 + LATE) * plan.seconds  # the page has them, too
            return report.build(self.folder, figures=self.request.measured and not late)


def _name(request: CompareRequest, dataset: Dataset | None) -> str:
    if dataset is not None:
        return dataset.name
    place = Path(request.data).expanduser()
    return place.resolve().name if place.exists() else request.data


def wanted_variants(request: CompareRequest, variants: Sequence[Variant]) -> list[Variant]:
    """One for each attention, those that are given, the control, and what the request adds to each."""
    task = request.task or (variants[0].task if variants else "classification")
    trained = request.start not in (None, backbones.SCRATCH, backbones.NAME)
    usual = CAUSAL_ATTENTIONS if TASKS[task].stem == "next-pixel" else START_ATTENTIONS if trained else ATTENTIONS
    usual = () if variants else usual
    found = [Variant(attention=spec, task=task) for spec in request.attentions or usual]
    found = [v.model_copy(update={"role": role_of(v.attention)}) for v in [*found, *variants]]
    if request.controls and not any(variant.control for variant in found):
        found.append(Variant(attention=CONTROL, task=task, role=role_of(CONTROL)))
    return found if request.with_redrawn is None else found + redrawn_variants(found, request.with_redrawn)


def redrawn_variants(variants: Sequence[Variant], every: int) -> list[Variant]:
    """Those with random features, which are redrawn every N steps."""
    found = [v for v in variants if not v.published and has_random_features(v.attention)]
    if not found:
        raise ValueError(f"with_redrawn={every} has no effect: none of these attentions has random features")
    return [v.model_copy(update={"id": "", "label": "", "options": v.options | {"redraw": every}}) for v in found]


def variant_seeds(variant: Variant, seeds: Sequence[int]) -> list[int]:
    """Those of the study's seeds for which the variant has a start."""
    found = [seed for seed in seeds if seed in (variant.starts or seeds)]
    if not found:
        raise ValueError(f"variant '{variant.id}' has no start for any of the seeds {', '.join(map(str, seeds))}")
    return found


def describe_start(starts: Mapping[str, Start]) -> str:
    if not starts:
        return "from scratch"
    several = len({start.sha256 for start in starts.values()}) > 1
    one = next(iter(starts.values()))
    kind = "each attention's own" if several else Path(one.folder).name
    what = f"linvit's backbones ({kind})" if one.shipped else one.name
    return f"from {what}; --from scratch for none"


def job_line(job: StudyJob) -> str:
    return f"job {job.number + 1} of {job.jobs}: {job.name}: {status(job.experiment, Path(job.folder))}"


def configuration(study: Study, prepared: Prepared) -> dict[str, Any]:
    """All that decides the study, defaults included: what all variants share, and each variant's experiment."""
    outcome = {"requests", "started", "finished", "placement", "machine", "warnings", "seconds", "looks", "format"}
    found = study.model_dump(mode="json", exclude={"variants", *outcome})
    variants = []
    for variant in study.variants:
        if not variant.published:
            experiment = prepared.designer.experiment(variant)
            parts = experiment.model_dump(mode="json", include={"model", "recipe", "task", "start"})
            variants.append(variant.model_dump(mode="json", exclude={"published", "place"}) | {"experiment": parts})
    return found | {"variants": variants}


def published_records(study: Study) -> list[Record]:
    found = []
    for variant in study.variants:
        for name, value in variant.published.items():
            metric = metrics.METRICS[name]
            tags: dict[str, Tag] = {
                "dataset": study.dataset.name,
                "variant": variant.id,
                "attention": variant.attention,
            }
            if "selection" in metric.per:
                tags["selection"] = "best"
            found.append(Record(name, value, metric.unit, tags=tags))
    return found
