"""The result of a study: study.json and its records → tables, facts and the recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linvit import metrics
from linvit.durations import duration
from linvit.metrics import METRICS, TABLE
from linvit.report import statistics
from linvit.report.evidence import Folders, StudyEvidence, as_paths, read_study
from linvit.report.merit import ACCURACY, Merit
from linvit.report.recommendation import Recommendation, recommend
from linvit.report.result import NOTHING, Cell, Facts, Result, Section, Table, commands, facts, last_request
from linvit.report.statistics import WORSE
from linvit.report.summary import Summary, VariantResult, number, summarise
from linvit.schemas.model import DATA_OPTIONS
from linvit.schemas.pixels import sides
from linvit.schemas.study import Placement

EXTRA = {  # details of accuracy
    "macro_f1": "F1",
    "balanced_accuracy": "Balanced accuracy",
    "draw_spread": "Std. dev. over feature draws",
    "redrawn_accuracy": "With redrawn features",
}


@dataclass(frozen=True, kw_only=True)
class StudyResult(Result):
    kind = "study"

    summary: Summary
    recommendation: Recommendation

    @property
    def chosen(self) -> VariantResult | None:
        return next((v for v in self.summary.variants if v.id == self.recommendation.variant), None)

    def rows(self) -> list[dict[str, Any]]:
        return [_row(variant, self.summary.merit) for variant in self.summary.variants]

    def numbers(self) -> dict[str, Any]:
        return {"recommendation": self.recommendation.variant, "variants": self.rows()}

    def sections(self) -> dict[str, Section]:
        from linvit.report import study_charts  # altair takes a second to import

        return study_charts.build(self.summary, self.recommendation.variant, self.recommendation.growth is not None)

    def context(self) -> dict[str, Any]:
        from linvit.report import images

        found = {make.__name__: make(self.summary) for make in (images.examples, images.illustration, images.samples)}
        return {"summary": self.summary, "stats": self._stats()} | found

    def _stats(self) -> dict[str, str]:
        """The numbers of the chosen variant that stand below the recommendation."""
        if self.chosen is None:
            return {}
        metrics = {"inference_vs_softmax": "Speed, softmax = 1", "peak_memory": "Peak memory"}
        more = {title: METRICS[name].show(self.chosen.get(name)) for name, title in metrics.items()}
        return {self.summary.merit.title: accuracy(self.chosen, self.summary.merit)} | more


def study_result(folders: Folders, margin: float | None = None, out: Path | str | None = None) -> StudyResult:
    """Result of one study, or of several merged; nothing is written. `out`: the folder of the page."""
    summary = summarise(read_study(folders), margin)
    advice = recommend(summary)
    command = _command(advice, summary)
    chosen = next((i for i, v in enumerate(summary.variants) if v.id == advice.variant), None)
    return StudyResult(
        title=f"Which attention for {summary.study.dataset.name}?",
        headline=advice.headline,
        answer=[("Use", advice.use), ("Why", advice.why), ("Next", advice.next if command else _ended(advice.next))],
        sentences=[*advice.more, *filter(None, [advice.attention_worth])],
        confidence=advice.confidence,
        reason=advice.reason,
        limitations=summary.limitations,
        table=_table(summary, chosen),
        details=_details(summary),
        facts=_facts(summary.evidence),
        commands=commands(summary.study.requests),
        suggested=[command] if command else [],
        page=Path(out if out is not None else as_paths(folders)[0]) / "report.html",
        summary=summary,
        recommendation=advice,
    )


def _command(advice: Recommendation, summary: Summary) -> str:
    """What to run next; empty if there is nothing, or if the study was made from Python."""
    request = last_request(summary.study.requests)
    if advice.changes is not None:
        return request.replaced(**advice.changes).command() if request else ""
    return advice.request.command() if advice.request else ""


def _ended(text: str) -> str:
    """A sentence that a command would have followed."""
    return f"{text[:-1]}." if text.endswith(":") else text


def _row(variant: VariantResult, merit: Merit) -> dict[str, Any]:
    """Of results.csv."""
    best, final, name = variant.best, variant.final, merit.metric
    standing, none = variant.standing, (None, None)
    seeds, images = standing.over_seeds or none, standing.over_images or none
    return {
        "attention": variant.attention,
        name: best and best.mean,
        f"{name}_low": best and best.low,
        f"{name}_high": best and best.high,
        "seeds": variant.seeds,
        f"final_{name.removeprefix('test_')}": final and final.mean,
        "verdict": variant.verdict,
        "behind_best": standing.behind,
        "behind_low_seeds": seeds[0],
        "behind_high_seeds": seeds[1],
        "behind_low_images": images[0],
        "behind_high_images": images[1],
        "loses_at_most": standing.loses_at_most,
        "loses_at_least": standing.loses_at_least,
        **{metric.column: variant.get(metric.name) for metric in TABLE if metric.column},
        "folds": variant.folds or None,
        "variant": variant.id,
        "label": variant.label,
        "column": variant.variant.column,
        "diverged": "; ".join(variant.diverged),
        "failed": "; ".join(variant.failed),
    }


def _table(summary: Summary, chosen: int | None) -> Table:
    """One line per variant."""
    merit = summary.merit
    rows = [
        {
            "Variant": Cell(v.label, symbol=v.index),
            merit.title: accuracy(v, merit),
            "Verdict": Cell(v.verdict, look=_look(v.verdict, merit)),
            f"To the best, {merit.unit}": _behind(v, merit),
            **{metric.heading: metric.show(v.get(metric.name)) for metric in TABLE if metric.heading},
        }
        for v in summary.variants
    ]
    note = f"{_rule(summary)} Speeds are relative to softmax, measured alternately: above 1× is faster."
    return Table.of(rows, ["Verdict"], chosen=chosen, note=note)


def _look(verdict: str, merit: Merit) -> str:
    good = verdict == merit.best or verdict.startswith("within")
    return "good" if good else "bad" if verdict in (WORSE, statistics.DIVERGED) else "open"


def accuracy(variant: VariantResult, merit: Merit, final: bool = False) -> str:
    """`97.8 ± 0.4 %`, of the model chosen on validation images, or of the last one."""
    found = variant.final if final else variant.best
    if found is None or found.low is None or found.high is None:
        return merit.show(found and found.mean)
    half = max(found.high - found.mean, found.mean - found.low)  # the interval is cut at 0 and 1; show the wider side
    return f"{merit.plain(found.mean)}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{merit.show(half)}"


def _behind(variant: VariantResult, merit: Merit) -> str:
    behind = variant.standing.behind
    return NOTHING if behind is None else merit.signed(merit.sign * behind)


def _details(summary: Summary) -> list[Table]:
    """What decided, and times."""
    merit = summary.merit

    def span(ends: tuple[float, float] | None) -> str:
        return " to ".join(map(merit.signed, sorted(merit.sign * end for end in ends))) if ends else NOTHING

    def bound(variant: VariantResult) -> str:
        found, worse = variant.standing, variant.verdict == WORSE
        if found.loses_at_most is None or found.loses_at_least is None:
            return NOTHING
        loss = merit.plain(max(0.0, found.loses_at_least if worse else found.loses_at_most))
        return f"at least {loss}" if worse else f"at most {loss}"

    runs = "folds" if summary.folds else "seeds"
    extra = {name: title for name, title in EXTRA.items() if summary.classes or name != "balanced_accuracy"}
    deciding = [
        {
            "Variant": Cell(v.label, symbol=v.index),
            "Runs" if summary.folds else "Seeds": f"{v.best.n if v.best else 0} of {summary.runs}",
            "Last epoch": accuracy(v, merit, final=True),
            f"To the best, {merit.unit}": _behind(v, merit),
            f"95 % over {runs}": span(v.standing.over_seeds),
            "95 % over images": span(v.standing.over_images),
            f"Loses, {merit.unit}": bound(v),
            **{title: METRICS[name].show(v.get(name)) for name, title in extra.items()},
        }
        for v in summary.variants
    ]
    timed = [
        {"Variant": Cell(v.label, symbol=v.index)}
        | {
            metric.heading.removesuffix(" speed") + " vs identity" * name.endswith("identity"): METRICS[name].show(
                v.get(name)
            )
            for metric in TABLE
            for name in metric.below
        }
        for v in summary.variants
    ]
    fastest = "identity returns v without mixing tokens: no attention is faster."
    tables = [
        _timeline(summary),
        Table.of(
            deciding, title="Intervals and bounds", note="The bounds on what a variant loses decide the verdicts."
        ),
        Table.of(timed, title="Times", note=f"Medians; speeds relative to identity: {fastest}"),
    ]
    return [table for table in tables if len(table.columns) > 1]


def _timeline(summary: Summary) -> Table:
    """What each part of a budget brought: its time, and the accuracies that it led to."""
    study, merit = summary.study, summary.merit
    trained, frozen = bool(study.steps), METRICS["frozen_accuracy"]

    def scores(of: Mapping[int, str]) -> dict[str, Cell | str]:
        return {v.label: of.get(v.index, NOTHING) for v in summary.variants}

    reached = {v.index: accuracy(v, merit) for v in summary.variants}
    before = {v.index: frozen.show(v.get(frozen.name)) for v in summary.variants} if trained else reached
    kinds = {
        "planning": ("Planning and decoding", {}),
        "frozen features": ("Frozen features, fitted heads", before),
        "training": ("Fine-tuning" if study.start else "Training", reached),
        "measuring": ("Speed, memory and examples", {}),
    }
    rows = [
        {"Step": title, "Time": duration(study.seconds[name]), **scores(of)}
        for name, (title, of) in kinds.items()
        if name in study.seconds
    ]
    note = f"{merit.title} on test images after each step. Half runs and all seeds are part of training."
    return Table.of(rows if "planning" in study.seconds else [], title="What the time brought", note=note, open=True)


def _rule(summary: Summary) -> str:
    """How the verdicts are to be read."""
    merit, margin = summary.merit, summary.merit.amount(summary.margin)
    over = "seeds and test images" if summary.sampled else "seeds only"
    of, sample = "mean and 95 % interval over seeds", f"Intervals and verdicts account for {over}."
    if summary.untrained:
        of, sample = "with the 95 % interval over test images", "Verdicts account for test images; there are no seeds."
    if summary.folds:
        of = f"out of fold, with the corrected resampled 95 % t-interval over {summary.repeated(summary.seeds)}"
        sample = "Folds share most of their training images, which intervals and verdicts account for."
    what = "Accuracies" if merit is ACCURACY else "Bits per dimension (fewer are better)"
    text = (
        f"{what}: {of}. “within {margin}”: shown to lose less than {margin} to every other variant; “worse”: shown to "
        f"lose more to some variant. At most 5 % of studies state the former wrongly, including a second analysis with "
        f"the suggested number of seeds. {sample}"
    )
    if summary.classes:
        least, most = summary.classes
        text += f" The test classes are unequal ({least:,} to {most:,} images): see balanced accuracy."
    return text


def _facts(evidence: StudyEvidence) -> Facts:
    """What was run, where and with what."""
    study, data = evidence.document, evidence.document.dataset
    speeds = evidence.of("train_step")
    clocks = {"cpu": "CPU time", "wall": "wall time"}
    timed = [clocks.get(str(r.tags.get("clock")), "") for r in speeds] + [f"{r.n} rounds" for r in speeds]
    timed += [f"batch {r.tags['batch']}" for r in speeds if "batch" in r.tags]
    spent = {name: sum(number(r.value) or 0 for r in evidence.of(f"{name}_seconds")) for name in ("train", "test")}
    spent["measure"] = study.seconds.get("measuring", 0.0)
    memory = study.machine.get("memory")
    machine = study.machine | ({"memory": metrics.size(memory)} if isinstance(memory, int) else {})
    counts = f"{data.train:,} train, {data.validation:,} validation, {data.test:,} test"
    start = study.start
    found = {
        "Data": f"{data.name}, {len(data.classes)} classes, {'×'.join(map(str, sides(data.image_size)))} px, {counts}",
        "Start": f"{'/'.join(Path(start.folder).parts[-2:])} ({start.sha256[:12]})" if start else "from scratch",
        "Folds": f"{study.folds}, divided differently by every seed" if study.folds else "",
        "Seeds": ", ".join(map(str, sorted({seed for seeds in study.seeds.values() for seed in seeds}))),
        "Training": _pairs({"epochs": study.epochs, "steps": study.steps, "budget": study.budget}),
        "Parameters matched": "yes" if study.match else "no",
        "Model": _pairs(study.model.model_dump(exclude={"attention", "seed", *DATA_OPTIONS})),
        "Recipe": _pairs(study.recipe.model_dump(exclude={"epochs", "steps", *study.recipe.unused()})),
        "Speeds": ", ".join(filter(None, dict.fromkeys(timed))),
        "Machine": _pairs({name: value for name, value in machine.items() if name != "device"}),
        "Jobs": _placement(study.placement),
        "Precision": ", ".join(sorted({r.dtype for r in evidence.of(evidence.merit.metric)} - {""})),
        "Time": _pairs({f"to {name}": f"{value / 60:.1f} min" for name, value in spent.items() if value}),
    }
    return facts(evidence, found, started=study.started, finished=study.finished)


def _placement(placement: Placement | None) -> str:
    """Where and how jobs ran, and the speeds by which that was chosen."""
    if placement is None:
        return ""
    speeds = ", ".join(f"{name} {rate:g} steps/s" for name, rate in placement.measured.items())
    where = f" on {placement.executor}" if placement.executor.startswith("ray") else ""
    threads = f"{placement.threads} thread{'s' * (placement.threads != 1)} each"
    return f"{placement.jobs} at a time{where}, {threads}" + (f" (measured: {speeds})" if speeds else "")


def _pairs(values: Mapping[str, Any]) -> str:
    """`name value, …` without what is off."""
    shown = {key: f"{v:g}" if isinstance(v, float) else v for key, v in values.items() if v}
    return ", ".join(key.replace("_", " ") + ("" if value is True else f" {value}") for key, value in shown.items())
