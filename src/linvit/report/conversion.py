"""The page of a conversion: convert.json and records.jsonl → report.html, report.md, results.csv and figures/."""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import dataclass
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
from linvit.report.tables import escape
from linvit.report.theme import PALETTE

COLUMNS = ("model", "attention", "linear_layers", "validation_accuracy", "agreement", "steps", "seconds",
           "test_accuracy", "images_per_s", "speed_vs_teacher")  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """The records of a conversion; where one thing was measured twice, the newest counts."""

    plan: dict[str, Any]  # convert.json
    records: list[Record]

    def of(self, metric: str, **tags: Any) -> list[Record]:
        return [r for r in self.records if r.metric == metric and all(r.tags.get(k) == v for k, v in tags.items())]

    def value(self, metric: str, **tags: Any) -> float | None:
        found = self.of(metric, **tags)
        return None if not found or found[-1].value is None else float(found[-1].value)

    @property
    def size(self) -> int:
        return int(self.plan["image_size"])

    @property
    def here(self) -> dict[str, Any]:
        """Tags of what was measured with the student's images and patches."""
        return {"image_size": self.size, "patch_size": self.student.tags.get("patch_size")}

    @property
    def student(self) -> Record:
        return self.of("conversion_accuracy", split="test", model="student")[-1]

    @property
    def teacher(self) -> Record:
        return self.of("conversion_accuracy", split="test", model="teacher")[-1]

    @property
    def validated(self) -> int:
        """Validation images."""
        return self.of("conversion_accuracy", split="validation", model="teacher")[-1].n

    @property
    def layers(self) -> list[str]:
        """The spec of each layer of the student."""
        text, depth = str(self.student.tags["attention"]), int(self.of("conversion_depth")[-1].value or 0)
        if not set(text) & set("+@"):
            return [text] * depth
        parts = (part.partition("@") for part in text.split("+"))
        return [spec for spec, _, count in parts for _ in range(int(count or 1))]

    def rows(self) -> list[dict[str, Any]]:
        """A line for each model on the way, as results.csv has it."""
        found = []
        for r in self.of("conversion_seconds"):
            name = r.tags["model"]
            accuracy = self.of("conversion_accuracy", model=name, split="validation", **self.here)[-1]
            chosen, attention = self.student.tags.get("stage") == name, accuracy.tags["attention"]
            test = self.teacher.value if name == "teacher" else self.student.value if chosen else None
            found.append(
                dict(
                    zip(
                        COLUMNS,
                        (
                            name,
                            attention,
                            accuracy.tags["linear"],
                            accuracy.value,
                            self.value("conversion_agreement", model=name, split="validation", **self.here),
                            self.value("conversion_steps", model=name),
                            r.value,
                            test,
                            self.value("conversion_speed", model=attention, **self.here),
                            self.value("conversion_vs_teacher", model=attention, **self.here),
                        ),
                        strict=True,
                    )
                )
                | {"chosen": chosen, "kept": self.of("conversion_steps", model=name)[-1].tags.get("kept")}
            )
        return found


def read(folder: Path | str) -> Evidence:
    folder = Path(folder)
    try:
        plan = json.loads((folder / "convert.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no conversion: convert.json cannot be read ({error})") from None
    records = sorted(Records(folder / "records.jsonl"), key=lambda r: r.time)
    evidence = Evidence(plan, list({metrics.key(record): record for record in records}.values()))
    if not evidence.of("conversion_accuracy", split="test", model="student"):
        raise ValueError(f"{folder}: this conversion has not finished: give its command again")
    return evidence


def headline(evidence: Evidence) -> str:
    """The answer in one line."""
    layers = evidence.layers
    linear = sum(spec.partition(":")[0] != "softmax" for spec in layers)
    reached, had = (float(r.value or 0) for r in (evidence.student, evidence.teacher))
    share = "all" if reached >= had else percent(reached / had)
    kept = f"{share} of the accuracy kept" if had else "nothing to keep"
    fast = {size: evidence.value("conversion_vs_teacher", model=evidence.student.tags["attention"],
                                 **evidence.here | {"image_size": size})
            for size in (evidence.size, 2 * evidence.size)}  # fmt: skip
    speeds = ", ".join(f"{value:.1f}\N{NO-BREAK SPACE}× at {size} px" for size, value in fast.items() if value)
    return f"{linear} of {len(layers)} layers linear, {kept}, {speeds.replace(' at', ' as fast at', 1)}".rstrip(", ")


def lost(evidence: Evidence) -> str:
    """What the student lost, with what other images could have shown."""
    reached, had = (percent(float(r.value or 0)) for r in (evidence.student, evidence.teacher))
    found = evidence.of("conversion_lost")
    if not found:
        return f"{reached} right, the teacher {had}"
    low, high = (_points(float(found[-1].tags[end] or 0)) for end in ("low", "high"))
    return f"{reached} right, the teacher {had}: {_points(found[-1].value)} points lost (95 %: {low} to {high})"


FEW = 500  # images below which one of them is worth a fifth of a point or more


def chosen_on(evidence: Evidence) -> str:
    """Which images the student was chosen on."""
    said = f"The student was chosen on {evidence.validated:,} validation images"
    split = evidence.plan.get("decided_on")
    return said + (f", its layers on others of the {split} images, {UNTOUCHED}." if split else ".")


UNTOUCHED = "on which nothing was trained here"


def weak(evidence: Evidence) -> list[str]:
    """Why somebody should not act on it without a second look."""
    plan, found = evidence.plan, []
    data, taught = plan["data"]["name"], plan.get("trained_on")
    if taught == "":
        found.append(f"The teacher is from elsewhere: if images of {data} were among those that it was trained on, its "
                     "accuracy is not that of new images, and neither is what was lost.")  # fmt: skip
    elif taught and taught != data and taught.partition(":")[0] == data.partition(":")[0]:
        found.append(f"The teacher was trained on {taught}: images of {data} may be among those.")
    if evidence.student.tags.get("stage") == "stage 3":
        rows = [row for row in evidence.rows() if row["model"] not in ("teacher", "stage 3")]
        before = f" Before, on validation images, it had {percent(rows[-1]['validation_accuracy'])}." if rows else ""
        found.append("The student was also trained on the labels, the teacher no further: what that brought hides some "
                     f"of what the conversion lost.{before}")  # fmt: skip
    counts = {"test": evidence.student.n, "validation": evidence.validated}
    found += [f"{count:,} {split} images: each is worth {100 / count:.2g} points." for split, count in counts.items()
              if count < FEW]  # fmt: skip
    speeds = evidence.of("conversion_vs_teacher", model=evidence.student.tags["attention"], **evidence.here)
    if speeds and float(speeds[-1].tags.get("high") or 1) < 1:  # in three of four rounds
        found.append(f"At {evidence.size} px the student is slower than the teacher: it takes more tokens to pay "
                     "(larger images, smaller patches; `linvit advise` tells how many).")  # fmt: skip
    return found


def build(folder: Path | str, figures: bool = True) -> Path:
    """Write the page, its tables and its figures into the conversion's folder → report.html."""
    folder = Path(folder)
    evidence = read(folder)
    sections = charts(evidence)
    every = [chart for found in sections.values() for chart in found]
    _write_csv(evidence, folder / "results.csv")
    _write_markdown(evidence, folder / "report.md", every if figures else [])
    page = folder / "report.html"
    write_atomically(page, template("conversion.html").render(
        headline=headline(evidence), lost=lost(evidence), evidence=evidence, rows=evidence.rows(), sections=sections,
        weak=weak(evidence), chosen_on=chosen_on(evidence), percent=percent, duration=duration, show=_shown,
        strip=_strip(evidence), decision=_decision(evidence),
        facts=facts(evidence), steps=_steps, untouched=UNTOUCHED, **shell(sections),
    ))  # fmt: skip
    if figures:
        draw_files({chart.name: chart.figure() for chart in every}, folder / "figures")
    return page


def charts(evidence: Evidence) -> dict[str, list[Chart]]:
    """Section → its charts; a section without data is absent."""
    return present({
        "stages": [_stages(evidence)],
        "layers": [_by_layers(evidence)],
        "speed": [_by_speed(evidence)],
        "growth": [_growth(evidence, *what) for what in GROWING],
    })  # fmt: skip


def _data(rows: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _colour(names: list[str]) -> alt.Color:
    return alt.Color("kind:N", scale=alt.Scale(domain=names))


def _stages(evidence: Evidence) -> Chart:
    rows = [{"stage": row["model"], "accuracy": row["validation_accuracy"], "shown": _shown(row["validation_accuracy"]),
             "agreement": _shown(row["agreement"]), "kind": "teacher" if row["model"] == "teacher" else "student"}
            for row in evidence.rows()]  # fmt: skip
    tips = ["stage:N", alt.Tooltip("shown:N", title="validation accuracy"),
            alt.Tooltip("agreement:N", title="as the teacher")]  # fmt: skip
    base = _data(rows).encode(y=alt.Y("stage:N", sort=None, title=None, axis=None), tooltip=tips)
    x = alt.X("accuracy:Q", title=None, axis=None, scale=alt.Scale(domain=[0, 1.15], nice=False))
    layers = [
        base.mark_bar(cornerRadiusEnd=3, height=14, yOffset=8).encode(x=x, color=_colour(["teacher", "student"])),
        base.mark_text(align="left", dx=8, dy=9, fontWeight=600).encode(x=x, text="shown:N"),
        base.mark_text(align="left", dy=-9, style="quiet").encode(x=alt.value(0), text="stage:N"),
    ]
    return Chart("stages", "Accuracy on validation images, stage by stage", ROW * len(rows), layers)


def _by_layers(evidence: Evidence) -> Chart | None:
    tried = evidence.of("conversion_accuracy", split="search")
    if not tried:
        return None
    picked = evidence.student.tags["attention"]
    rows = [{"linear": r.tags["linear"], "accuracy": r.value, "shown": _shown(r.value), "layers": r.tags["model"],
             "chosen": r.tags["model"] == picked} for r in tried]  # fmt: skip
    best: dict[Any, dict[str, Any]] = {}
    for row in rows:
        if row["linear"] not in best or row["accuracy"] > best[row["linear"]]["accuracy"]:
            best[row["linear"]] = row
    counts = sorted(best)
    x = alt.X("linear:Q", title="Linear layers", axis=alt.Axis(values=counts, format="d", grid=False),
              scale=alt.Scale(domain=[counts[0] - 0.4, counts[-1] + 0.4], nice=False))  # fmt: skip
    y = alt.Y("accuracy:Q", title="Accuracy on the images of the search", axis=alt.Axis(format="~%", tickCount=6),
              scale=alt.Scale(zero=False))  # fmt: skip
    tips = ["layers:N", alt.Tooltip("shown:N", title="accuracy")]
    base = _data(rows).encode(x=x, y=y, tooltip=tips)
    line = [{key: best[count][key] for key in ("linear", "accuracy")} for count in counts]
    layers = [
        _data(line).mark_line(strokeWidth=2, color=PALETTE[0]).encode(x=x, y=y),
        base.mark_point(filled=True, size=50, opacity=0.45, color=PALETTE[0]),
        base.mark_point(size=300, strokeWidth=2, color=PALETTE[1]).transform_filter("datum.chosen"),
    ]
    return Chart("layers", "Accuracy and the number of linear layers", 320, layers,
                 "Every mix of layers that the search tried; the line joins the best of each number, the ring marks "
                 "the chosen one.")  # fmt: skip


def _by_speed(evidence: Evidence) -> Chart | None:
    student, teacher = evidence.student, evidence.teacher
    rows = []
    for r in evidence.of("conversion_speed", **evidence.here):
        spec = r.tags["model"]
        kind = {student.tags["attention"]: "student", teacher.tags["attention"]: "teacher"}.get(spec, "mix")
        accuracy = {"student": student.value, "teacher": teacher.value}.get(kind) or evidence.value(
            "conversion_accuracy", split="search", model=spec
        )
        beside = evidence.value("conversion_vs_teacher", model=spec, **evidence.here)
        if accuracy is not None:
            rows.append({"kind": kind, "speed": r.value, "accuracy": accuracy, "shown": _shown(accuracy),
                         "pace": f"{r.value:,.0f}/s, {beside or 0:.2f}×", "layers": spec})  # fmt: skip
    if len(rows) < 3:  # of two, the table says all
        return None
    x = alt.X("speed:Q", title="Images per second (faster →)", scale=alt.Scale(zero=False),
              axis=alt.Axis(format="~s", tickCount=6))  # fmt: skip
    y = alt.Y("accuracy:Q", title="Accuracy", axis=alt.Axis(format="~%", tickCount=6), scale=alt.Scale(zero=False))
    tips = ["kind:N", "layers:N", alt.Tooltip("shown:N", title="accuracy"), alt.Tooltip("pace:N", title="inference")]
    base = _data(rows).encode(x=x, y=y, tooltip=tips)
    names = alt.Chart(alt.InlineData(values=[row for row in rows if row["kind"] != "mix"])).encode(x=x, y=y)
    layers = [
        base.mark_point(filled=True, size=130).encode(color=_colour(["teacher", "student", "mix"])),
        names.mark_text(dy=-14, style="quiet").encode(text="kind:N"),
    ]
    return Chart("speed", "Accuracy and measured speed", 320, layers,
                 "Teacher and student: test images. Mixes of the search: its images, before they were trained as a "
                 "whole.")  # fmt: skip


GROWING = (("conversion_accuracy", "Accuracy", "accuracy"), ("conversion_speed", "Images per second", "speed"))


def _growth(evidence: Evidence, metric: str, title: str, name: str) -> Chart | None:
    cut = len({r.tags.get("patch_size") for r in evidence.of("conversion_speed")}) > 1
    rows = []
    for kind, one in (("teacher", evidence.teacher), ("student", evidence.student)):
        mine = evidence.of(metric, model=one.tags["attention"]) if name == "speed" else evidence.of(
            metric, model=kind, split="growth")  # fmt: skip
        rows += [{"kind": kind, "size": _tokens(r) if cut else r.tags["image_size"], "value": r.value,
                  "shown": metrics.METRICS[metric].show(r.value), "times": _times(evidence, r)}
                 for r in mine]  # fmt: skip
    sizes = sorted({row["size"] for row in rows})
    if len(sizes) < 2:
        return None
    title_x = "Image tokens" if cut else "Side of the images in pixels"
    x = alt.X("size:Q", title=title_x, axis=alt.Axis(values=sizes, grid=False), scale=alt.Scale(zero=False))
    form = alt.Axis(format="~%" if name == "accuracy" else "~s", tickCount=6)
    y = alt.Y("value:Q", title=title, axis=form, scale=alt.Scale(zero=name == "speed"))
    tips = ["kind:N", "size:Q", "shown:N"]
    base = _data(rows).encode(x=x, y=y, color=_colour(["teacher", "student"]), tooltip=tips)
    layers = [base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=80)]
    if name == "speed":
        beside = base.transform_filter("datum.kind == 'student'")
        layers.append(beside.mark_text(dy=-14, fontWeight=600).encode(text="times:N"))
    return Chart(f"growth-{name}", f"{title} as {'patches shrink' if cut else 'images grow'}", 280, layers)


def _times(evidence: Evidence, speed: Record) -> str:
    """How many times as fast as the teacher, of the same images."""
    same = {name: speed.tags.get(name) for name in ("model", "image_size", "patch_size")}
    found = evidence.value("conversion_vs_teacher", **same) if speed.metric == "conversion_speed" else None
    return "" if found is None else f"{found:.1f} ×"


def _tokens(record: Record) -> int:
    return (int(record.tags["image_size"] or 0) // int(record.tags["patch_size"] or 1)) ** 2


def _steps(row: dict[str, Any]) -> str:
    """How many there were; and where not the last model was kept, which."""
    steps, kept = int(row["steps"] or 0), row["kept"]
    return f"{steps:,}" + (f", kept after {int(kept):,}" if kept is not None and kept < steps else "")


def _shown(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _strip(evidence: Evidence) -> list[dict[str, Any]]:
    """The layers of the student, each with the colour of its kind."""
    kinds = list(dict.fromkeys(evidence.layers))
    return [{"spec": spec, "colour": kinds.index(spec) % len(PALETTE)} for spec in evidence.layers]


def _decision(evidence: Evidence) -> list[dict[str, Any]]:
    """What was looked at on the images that decide, in this order."""
    return [
        {"layers": r.tags["model"], "drop": _points(r.value), "bound": _points(float(r.tags["bound"] or 0)),
         "risk": f"{100 * float(r.tags['risk'] or 0):.2g} %",
         "passed": bool(r.tags["passed"]), "n": r.n}
        for r in evidence.of("conversion_drop")
    ]  # fmt: skip


def _points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}".replace("-", "−")


def facts(evidence: Evidence) -> list[tuple[str, str]]:
    plan, records = evidence.plan, evidence.records
    drop = plan.get("max_drop")
    started = plan.get("started")
    found = [
        ("Teacher", f"{Path(plan['teacher']['folder']).name}, weights {plan['teacher']['sha256'][:12]}"),
        ("Data", f"{plan['data']['name']}, {evidence.size} px"),
        ("Patches", f"{plan['patch_size']} px" if plan.get("patch_size") else ""),
        ("Asked for", plan["to"]),
        ("Stages", ", ".join(map(str, plan["stages"])) or "none"),
        ("Inherited", {"all": "all weights", "not-qk": "all but q and k", "mlp": "all but attention"}[plan["inherit"]]),
        ("Drop allowed", f"{100 * drop:g} % of the teacher's accuracy" if drop else ""),
        ("Steps", ", ".join(f"{name} {count}" for name, count in plan["steps"].items())),
        ("Options", ", ".join(f"{name} {value}" for name, value in plan["options"].items())),
        ("Seed", str(plan["seed"])),
        ("Test images", f"{evidence.student.n:,}, seen once by each of the two"),
        ("Device", ", ".join(sorted({r.device for r in records}))),
        ("Threads", ", ".join(sorted({str(r.threads) for r in records}))),
        ("Versions", ", ".join(sorted({r.versions for r in records}))),
        ("Commit", ", ".join(sorted({r.commit for r in records if r.commit}))),
        ("Started", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)) if started else ""),
    ]
    return [(name, text) for name, text in found if text]


def _write_csv(evidence: Evidence, path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, "chosen"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(evidence.rows())
    write_atomically(path, text.getvalue())


def _write_markdown(evidence: Evidence, path: Path, drawn: list[Chart]) -> None:
    lines = [f"# {escape(evidence.plan['data']['name'])}: {escape(headline(evidence))}", ""]
    lines += [f"Of {evidence.student.n:,} test images: {lost(evidence)}. {chosen_on(evidence)}", ""]
    lines += [
        "| model | linear layers | validation | as the teacher | steps | time | test |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in evidence.rows():
        cells = (escape(row["model"]) + (" (chosen)" if row["chosen"] else ""), row["linear_layers"],
                 _shown(row["validation_accuracy"]), _shown(row["agreement"]), _steps(row),
                 duration(row["seconds"] or 0), _shown(row["test_accuracy"]))  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", f"Layers: `{str(evidence.student.tags['attention']).replace('`', '')}`", ""]
    if decision := _decision(evidence):
        lines += [f"Decided on {decision[0]['n']:,} {evidence.plan.get('decided_on') or 'held-out'} images:", "",
                  "| layers | drop, points | upper limit | at a risk of | |", "|---|---|---|---|---|"]  # fmt: skip
        lines += [f"| `{escape(row['layers'])}` | {row['drop']} | {row['bound']} | {row['risk']} "
                  f"| {'passed' if row['passed'] else 'not shown'} |" for row in decision]  # fmt: skip
        lines.append("")
    if found := weak(evidence):
        lines += ["## Where this is weak", "", *(f"- {escape(text)}" for text in found), ""]
    lines += [f"![{chart.title}](figures/{chart.name}.svg)\n" for chart in drawn]
    if command := evidence.plan.get("command"):
        lines += ["```sh", command, "```", ""]
    lines += ["## What was run", "", *(f"- {name}: {escape(text)}" for name, text in facts(evidence)), ""]
    write_atomically(path, "\n".join(lines))
