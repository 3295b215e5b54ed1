"""The page of a search: search.json and records.jsonl → report.html, report.md, results.csv and figures/.

It answers whether tuning changes which attention wins, as far as one seed and validation images can.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import altair as alt

from linvit import metrics
from linvit.files import write_atomically
from linvit.metrics import percent
from linvit.progress import duration
from linvit.records import Record, Records
from linvit.report.charts import ROW, Chart, present
from linvit.report.page import draw_files, shell, template
from linvit.report.tables import cell, escape

COLUMNS = ("variant", "trial", "how", "validation_accuracy", "validation_loss", "seconds", "steps", "why", "folds")
HOWS = ("complete", "pruned", "diverged", "failed")
GOOD = 0.25  # of a variant's trials are drawn strongly


@dataclass(frozen=True)
class Trial:
    variant: str
    number: int
    how: str
    why: str
    accuracy: float | None
    loss: float
    options: dict[str, Any]
    seconds: float
    steps: int
    images: int


def trials(records: Sequence[Record], variant: str) -> list[Trial]:
    """Of a variant, by number; where one was measured twice, the newest counts."""
    newest = {metrics.key(r): r for r in sorted(records, key=lambda r: r.time)}
    found = []
    for r in newest.values():
        if r.metric != "trial_accuracy" or r.tags["variant"] != variant:
            continue
        number, tags = int(r.tags["trial"] or 0), r.tags
        beside = [newest.get((name, variant, number)) for name in ("trial_seconds", "trial_steps")]
        seconds, steps = (float(b.value or 0) if b else 0.0 for b in beside)
        loss = math.inf if tags.get("loss") is None else float(tags["loss"] or 0.0)
        accuracy = None if r.value is None else float(r.value)
        found.append(Trial(variant, number, str(tags["how"]), str(tags.get("why") or ""), accuracy, loss,
                           json.loads(str(tags["options"])), seconds, int(steps), r.n))  # fmt: skip
    return sorted(found, key=lambda trial: trial.number)


def best(found: Sequence[Trial]) -> Trial | None:
    """Of those that were trained to the end the most accurate; of equals, that with the lower loss."""
    whole = [trial for trial in found if trial.how == "complete" and trial.accuracy is not None]
    return max(whole, key=lambda trial: (trial.accuracy, -trial.loss, -trial.number), default=None)


@dataclass(frozen=True)
class Row:
    """A variant on the page."""

    id: str
    label: str
    colour: int
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        return best(self.trials)

    @property
    def first(self) -> Trial | None:
        """The trial that all variants began with, if it was trained to the end."""
        return next((t for t in self.trials if t.number == 0 and t.how == "complete"), None)

    @property
    def gain(self) -> float | None:
        if self.best is None or self.first is None:
            return None
        return (self.best.accuracy or 0.0) - (self.first.accuracy or 0.0)

    def count(self, how: str) -> int:
        return sum(trial.how == how for trial in self.trials)

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)


@dataclass(frozen=True)
class Evidence:
    plan: dict[str, Any]  # search.json
    records: list[Record]

    @cached_property
    def rows(self) -> list[Row]:
        """As they were asked for."""
        return [Row(v["id"], v.get("label") or v["id"], i, trials(self.records, v["id"]))
                for i, v in enumerate(self.plan["variants"])]  # fmt: skip

    @property
    def folds(self) -> int | None:
        """That every trial was judged by; None: by validation images."""
        return self.plan.get("folds")

    @property
    def data(self) -> str:
        """As a command takes it."""
        return shlex.quote((self.plan.get("source") or {}).get("data") or self.plan["dataset"]["name"])

    @property
    def measure(self) -> str:
        return "out-of-fold accuracy" if self.folds else "validation accuracy"

    @property
    def images(self) -> int:
        return max((trial.images for row in self.rows for trial in row.trials), default=1)

    def noise(self, accuracy: float) -> float:
        """By so much two equally good models of this accuracy differ on these images in 5 % of cases, by chance. Two
        images more that are right and two that are wrong (Agresti and Coull) keep few images from proving anything."""
        n = self.images + 4
        p = (accuracy * self.images + 2) / n
        return 1.96 * math.sqrt(2 * p * (1 - p) / n)

    def leaders(self, tuned: bool) -> list[tuple[Row, float]]:
        """Variants by the accuracy of their best trial; or of their first, if all began with the same options."""
        began = [[(k, v) for k, v in row.first.options.items() if "." not in k] for row in self.rows if row.first]
        if not tuned and any(one != began[0] for one in began):
            return []
        found = [(row, row.best if tuned else row.first) for row in self.rows]
        known = [(row, trial.accuracy or 0.0) for row, trial in found if trial is not None]
        return sorted(known, key=lambda pair: -pair[1])

    @property
    def importance(self) -> list[Record]:
        return [r for r in self.records if r.metric == "option_importance"]


def read(folder: Path | str) -> Evidence:
    folder = Path(folder)
    try:
        plan = json.loads((folder / "search.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no search: search.json cannot be read ({error})") from None
    records = sorted(Records(folder / "records.jsonl"), key=lambda r: r.time)
    evidence = Evidence(plan, list({metrics.key(record): record for record in records}.values()))
    if not any(row.trials for row in evidence.rows):
        raise ValueError(f"{folder}: no trial of this search has finished: give its command again")
    return evidence


@dataclass(frozen=True)
class Answer:
    headline: str
    sentence: str
    caution: str


def answer(evidence: Evidence) -> Answer:
    """Whether tuning changes which attention wins, in words that one seed and validation images allow."""
    after, before = evidence.leaders(True), evidence.leaders(False)
    which = f"images in {evidence.folds}-fold cross-validation" if evidence.folds else "validation images"
    caution = (f"One seed per trial and {evidence.images:,} {which}, by which the search has chosen, too: "
               "numbers flatter, the more so the more trials. ")  # fmt: skip
    settle = "linvit compare --config best.toml decides, with seeds and test images."
    if not after:
        return Answer("No trial was trained to the end", "All were pruned, diverged or failed.", caution)
    (top, accuracy), *others = after
    noise = evidence.noise(accuracy)
    caution += f"Differences below {100 * noise:.1f} points are within chance. {settle}"
    began = "the defaults" if evidence.plan.get("defaults") else "the first trial's options, the same for all"
    reached = f"{top.label} reaches {percent(accuracy)}"
    if top.gain is not None:
        reached += f" with {began}" if top.best == top.first else f", {_signed(top.gain)} points from {began}"
    if not others:
        return Answer(f"Tuned, {top.label} reaches {percent(accuracy)}", f"{reached}.", caution)
    second, follows = others[0]
    lead = f"{reached}; {second.label} follows with {percent(follows)}."
    open = f"{top.label} and {second.label} cannot be told apart"
    leads = accuracy - follows > noise
    if len(before) < 2:
        return Answer(f"Tuned, {top.label} leads" if leads else f"Tuned, {open}", lead, caution)
    (first, was), (_, beside) = before[:2]
    led = was - beside > evidence.noise(was)
    lead += f" With {began}, {first.label} {'led' if led else 'was first'} with {percent(was)}."
    heads = {
        (True, True): f"Tuning does not change the winner: {top.label}" if first.id == top.id
        else f"Tuning changes the winner, from {first.label} to {top.label}",
        (False, True): f"Tuned, {top.label} leads; before, nobody did",
        (True, False): f"Tuned, {open}; before, {first.label} led",
        (False, False): f"{open}, tuned or not",
    }  # fmt: skip
    return Answer(heads[led, leads], lead, caution)


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f}".replace("-", "−")


def build(folder: Path | str, figures: bool = True) -> Path:
    """Write the page, its tables and its figures into the search's folder → report.html."""
    folder = Path(folder)
    evidence = read(folder)
    said, sections = answer(evidence), charts(evidence)
    every = [chart for found in sections.values() for chart in found]
    _write_csv(evidence, folder / "results.csv")
    _write_markdown(evidence, said, folder / "report.md", every if figures else [])
    page = folder / "report.html"
    write_atomically(page, template("tuning.html").render(
        answer=said, evidence=evidence, sections=sections, percent=percent, duration=duration, show=_shown,
        signed=_signed, options=_options, hows=HOWS, facts=facts(evidence), **shell(sections),
    ))  # fmt: skip
    if figures:
        draw_files({chart.name: chart.figure() for chart in every}, folder / "figures")
    return page


def charts(evidence: Evidence) -> dict[str, list[Chart]]:
    """Section → its charts; a section without data is absent."""
    return present({
        "spread": [_spread(evidence)],
        "history": [_history(evidence)],
        "coordinates": [_coordinates(evidence, row) for row in evidence.rows],
        "importance": [_importance(evidence)],
    })  # fmt: skip


def _data(rows: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _colour(evidence: Evidence) -> alt.Color:
    return alt.Color("variant:N", scale=alt.Scale(domain=[row.label for row in evidence.rows]))


def _point(row: Row, trial: Trial) -> dict[str, Any]:
    return {"variant": row.label, "trial": trial.number, "accuracy": trial.accuracy, "how": trial.how,
            "shown": _shown(trial.accuracy), "options": _options(trial.options)}  # fmt: skip


def _tips(evidence: Evidence) -> list[Any]:
    return ["variant:N", "trial:Q", "how:N", alt.Tooltip("shown:N", title=evidence.measure), "options:N"]


def _spread(evidence: Evidence) -> Chart | None:
    """Every whole trial of each variant, with its best and the one that all began with."""
    rows = [_point(row, t) | {"best": t == row.best, "first": t == row.first}
            for row in evidence.rows for t in row.trials if t.how == "complete" and t.accuracy is not None]  # fmt: skip
    if not rows:
        return None
    values = sorted(row["accuracy"] for row in rows)
    high, middle = values[-1], values[len(values) // 2]
    firsts = [row["accuracy"] for row in rows if row["first"] or row["best"]]
    low = min(max(values[0], high - 4 * max(high - middle, 0.005)), *firsts)
    pad = 0.08 * (high - low or 0.01)
    x = alt.X("accuracy:Q", title=evidence.measure.capitalize(), axis=alt.Axis(format="~%", tickCount=5),
              scale=alt.Scale(domain=[max(0.0, low - pad), min(1.0, high + pad)], nice=False))  # fmt: skip
    y = alt.Y("variant:N", sort=None, title=None, axis=None)
    base = _data(rows).encode(y=y, x=x, tooltip=_tips(evidence))
    names = _data([{"variant": label} for label in dict.fromkeys(row["variant"] for row in rows)])
    layers = [
        base.mark_point(filled=True, size=60, opacity=0.4, clip=True, yOffset=8).encode(color=_colour(evidence)),
        base.transform_filter("datum.first").mark_tick(thickness=3, size=26, yOffset=8),
        base.transform_filter("datum.best").mark_point(filled=True, size=190, yOffset=8).encode(
            color=_colour(evidence)),
        names.mark_text(align="left", dy=-12, style="quiet").encode(y=y, x=alt.value(0), text="variant:N"),
    ]  # fmt: skip
    what = "the defaults" if evidence.plan.get("defaults") else "the first trial, whose options all share"
    cut = sum(value < low for value in values)
    note = f"Each point is a trial that was trained to the end; the large one is the best, the mark is {what}."
    note += f" {cut} trial{'s' * (cut != 1)} further left {'are' if cut != 1 else 'is'} not shown." if cut else ""
    return Chart("spread", "What tuning can do to each variant", (ROW + 8) * len(evidence.rows), layers, note)


def _history(evidence: Evidence) -> Chart | None:
    rows, so_far = [], []
    for row in evidence.rows:
        top = -math.inf
        for trial in row.trials:
            if trial.accuracy is None:
                continue
            rows.append(_point(row, trial) | {"whole": trial.how == "complete"})
            if trial.how == "complete" and trial.accuracy > top:
                top = trial.accuracy
            if top > -math.inf:
                so_far.append({"variant": row.label, "trial": trial.number, "accuracy": top})
    if not rows:
        return None
    x = alt.X("trial:Q", title="Trial", axis=alt.Axis(format="d", tickMinStep=1, grid=False),
              scale=alt.Scale(nice=False, padding=8))  # fmt: skip
    y = alt.Y("accuracy:Q", title=evidence.measure.capitalize(), axis=alt.Axis(format="~%", tickCount=6),
              scale=alt.Scale(zero=False))  # fmt: skip
    layers = [
        _data(so_far).mark_line(strokeWidth=2, interpolate="step-after").encode(x=x, y=y, color=_colour(evidence)),
        _data(rows).mark_point(filled=True, size=60).encode(
            x=x, y=y, color=_colour(evidence), tooltip=_tips(evidence),
            opacity=alt.when("datum.whole").then(alt.value(0.9)).otherwise(alt.value(0.25))),
    ]  # fmt: skip
    until = "that of their folds until then" if evidence.folds else "the best accuracy until then"
    return Chart("history", "Trial after trial", 300, layers, "Lines: the best so far. Faint: trials that were ended "
                 f"early, with {until}.")  # fmt: skip


def _coordinates(evidence: Evidence, row: Row) -> Chart | None:
    """One line for each trial through the values of its options."""
    whole = [trial for trial in row.trials if trial.accuracy is not None and trial.options]
    if len(whole) < 2:
        return None
    names = list(whole[0].options)
    by_accuracy = sorted(whole, key=lambda trial: -(trial.accuracy or 0.0))
    good = {trial.number for trial in by_accuracy[: max(1, round(GOOD * len(whole)))]}
    low, high = by_accuracy[-1].accuracy or 0.0, by_accuracy[0].accuracy or 0.0
    axes = [_bare(name) for name in names] + ["accuracy"]
    lines, ends = [], [{"axis": "accuracy", "place": end, "shown": percent(v)} for end, v in ((0, low), (1, high))]
    for name in names:
        first, last = _ends(evidence, name)
        ends += [{"axis": _bare(name), "place": end, "shown": value} for end, value in ((0, first), (1, last))]
    for trial in whole:
        about = _point(row, trial) | {"good": trial.number in good}
        lines += [about | {"axis": _bare(n), "place": _place(evidence, n, trial.options[n])} for n in names]
        share = ((trial.accuracy or 0.0) - low) / (high - low) if high > low else 1.0
        lines.append(about | {"axis": "accuracy", "place": share})
    x = alt.X("axis:N", title=None, scale=alt.Scale(domain=axes),
              axis=alt.Axis(labelAngle=-30, labelLimit=100, grid=True))  # fmt: skip
    y = alt.Y("place:Q", title=None, axis=None, scale=alt.Scale(domain=[-0.08, 1.08], nice=False))
    text = _data(ends).encode(x=x, y=y, text="shown:N")
    base = _data(lines).encode(x=x, y=y, detail="trial:Q", color=_colour(evidence), tooltip=_tips(evidence))
    layers = [
        base.transform_filter("!datum.good").mark_line(strokeWidth=1, opacity=0.2),
        base.transform_filter("datum.good").mark_line(strokeWidth=2, opacity=0.85),
        text.transform_filter("datum.place < 0.5").mark_text(fontSize=10, dy=10, style="quiet"),
        text.transform_filter("datum.place > 0.5").mark_text(fontSize=10, dy=-10, style="quiet"),
    ]
    return Chart(f"coordinates-{row.colour}", row.label, 260, layers)


def _values(evidence: Evidence, name: str) -> Any:
    """What a space says of an option."""
    part, _, bare = name.rpartition(".")
    return evidence.plan["space"]["attention" if part else "options"][bare]


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def _place(evidence: Evidence, name: str, value: Any) -> float:
    """Between 0 and 1: where a value stands in its range, or in its list."""
    values = _values(evidence, name)
    if isinstance(values, list):
        return values.index(value) / max(1, len(values) - 1)
    low, high = float(values["low"]), float(values["high"])
    if values.get("log"):
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _ends(evidence: Evidence, name: str) -> tuple[str, str]:
    values = _values(evidence, name)
    ends = (values[0], values[-1]) if isinstance(values, list) else (values["low"], values["high"])
    return _value(ends[0]), _value(ends[1])


def _importance(evidence: Evidence) -> Chart | None:
    labels = {row.id: row.label for row in evidence.rows}
    rows = [{"variant": labels[str(r.tags["variant"])], "option": _bare(str(r.tags["option"])), "share": r.value,
             "trials": r.n} for r in evidence.importance if str(r.tags["variant"]) in labels]  # fmt: skip
    if not rows:
        return None
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["option"]] = sums.get(row["option"], 0.0) + float(row["share"] or 0.0)
    options, names = sorted(sums, key=lambda name: -sums[name]), [row.label for row in evidence.rows]
    spec = _data(rows).mark_bar(cornerRadiusEnd=2).encode(
        y=alt.Y("option:N", scale=alt.Scale(domain=options), title=None, axis=alt.Axis(labelLimit=130, grid=False)),
        yOffset=alt.YOffset("variant:N", scale=alt.Scale(domain=names)),
        x=alt.X("share:Q", title="Part of the variance explained", axis=alt.Axis(format="~%", tickCount=5)),
        color=_colour(evidence),
        tooltip=["variant:N", "option:N", alt.Tooltip("share:Q", format=".0%"),
                 alt.Tooltip("trials:Q", title="whole trials")],
    )  # fmt: skip
    height = max(120, 14 * len(names) * len(options))
    least = min(int(r.n) for r in evidence.importance)
    note = f"fANOVA over the trials that were trained to the end, from {least} up: a hint, not a proof."
    return Chart("importance", "Which options matter", height, [spec], note)


def _shown(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{_bare(name)} {_value(value)}" for name, value in options.items())


def facts(evidence: Evidence) -> list[tuple[str, str]]:
    plan, records = evidence.plan, evidence.records
    data, recipe, space = plan["dataset"], plan["recipe"], plan["space"]
    counts = ", ".join(f"{data[part]:,} {part}" for part in ("train", "validation"))
    trial = f"{recipe['epochs']:g} epochs"
    if evidence.folds:
        counts = f"{data['train'] + data['validation']:,} images in {evidence.folds} folds"
        trial = f"{evidence.folds} folds of {trial}"
    when = [time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(plan[k])) if plan.get(k) else ""
            for k in ("started", "finished")]  # fmt: skip
    found = [
        ("Data", f"{data['name']}, {data['image_size']} px, {counts}"),
        ("Test images", "not read"),
        ("Space", f"{space['name']}: {', '.join([*space['options'], *space['attention']])}"),
        ("Fixed", _options(plan["options"])),
        ("Sampler", plan["sampler"]),
        ("Pruning", plan["pruner"]),
        ("Each variant", f"{plan['trials']} trials" if plan["trials"] else f"{duration(plan['share'] or 0)} of training"
         if plan["share"] else "the whole grid"),
        ("A trial", trial),
        ("Seed", str(plan["seed"])),
        ("Parameters matched", "yes" if plan["match"] else "no"),
        ("Storage", plan["storage"]),
        ("Device", ", ".join(sorted({r.device for r in records if r.device}))),
        ("Threads", ", ".join(sorted({str(r.threads) for r in records if r.threads}))),
        ("Versions", ", ".join(sorted({r.versions for r in records}))),
        ("Commit", ", ".join(sorted({r.commit for r in records if r.commit}))),
        ("Started", when[0]),
        ("Finished", when[1]),
        ("Time to train", duration(sum(row.seconds for row in evidence.rows))),
    ]  # fmt: skip
    return [(name, text) for name, text in found if text]


def _write_csv(evidence: Evidence, path: Path) -> None:
    every = [(row, trial) for row in evidence.rows for trial in row.trials]
    names = list(dict.fromkeys(name for _, trial in every for name in trial.options))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*COLUMNS, *names], lineterminator="\n")
    writer.writeheader()
    for row, t in every:
        loss = t.loss if math.isfinite(t.loss) else None
        cells = (row.id, t.number, t.how, t.accuracy, loss, t.seconds, t.steps, t.why, evidence.folds)
        found = dict(zip(COLUMNS, cells, strict=True)) | t.options
        writer.writerow({name: cell(value) for name, value in found.items()})
    write_atomically(path, text.getvalue())


def _write_markdown(evidence: Evidence, said: Answer, path: Path, drawn: list[Chart]) -> None:
    lines = [f"# {escape(evidence.plan['dataset']['name'])}: {escape(said.headline)}", "", escape(said.sentence), ""]
    lines += [escape(said.caution), ""]
    lines += ["| variant | first trial | best | gain, points | trials | pruned | diverged | failed | time | options |",
              "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in evidence.rows:
        top, first = row.best, row.first
        cells = (escape(row.label), _shown(first and first.accuracy), _shown(top and top.accuracy),
                 "–" if row.gain is None else _signed(row.gain), len(row.trials), row.count("pruned"),
                 row.count("diverged"), row.count("failed"), duration(row.seconds),
                 escape(_options(top.options)) if top else "–")  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *(f"![{escape(chart.title)}](figures/{chart.name}.svg)\n" for chart in drawn)]
    lines += ["## What was run", "", *(f"- {name}: {escape(text)}" for name, text in facts(evidence)), ""]
    if commands := evidence.plan.get("commands"):
        fence = [line.replace("`", "'") for command in commands for line in str(command).splitlines()]
        lines += ["## Run it again", "", "```", *fence, "```", ""]
    write_atomically(path, "\n".join(lines))
