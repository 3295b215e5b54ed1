"""Everything together: a study → report.html, report.md, results.csv and figures/."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from linvit import metrics
from linvit.files import write_atomically
from linvit.report import charts, curves, images, tables, theme
from linvit.report.charts import Chart
from linvit.report.evidence import Evidence, as_paths, read
from linvit.report.recommendation import Recommendation, recommend
from linvit.report.summary import Result, Summary, number, summarise

HERE = Path(__file__).parent


def build(
    folders: Path | str | Sequence[Path | str], out: Path | str | None = None, *, margin: float | None = None,
    figures: bool = True,
) -> Path:  # fmt: skip
    """Write the report of one study, or of several merged, into `out` (default: the first folder) → report.html.

    `margin` is the accuracy that may be given up for speed (default: the study's, or 0.01). `figures=False` leaves the
    figure files out."""
    paths = as_paths(folders)
    study = read(paths)
    summary = summarise(study, margin)
    if out is None and len(paths) > 1:
        raise ValueError("several studies are merged into a folder of their own: give --out")
    target = Path(out) if out is not None else paths[0]
    if [target.resolve()] != [path.resolve() for path in paths] and (target / "study.json").exists():
        raise ValueError(f"{target} holds a study of its own: choose another --out")
    target.mkdir(parents=True, exist_ok=True)
    advice = recommend(summary)
    sections = charts.build(summary, advice.variant)
    specs = {chart.name: chart.figure() for found in sections.values() for chart in found} if figures else {}
    page = target / "report.html"
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(draw_files, specs, target / "figures")
        tables.write_csv(summary, target / "results.csv")
        shown = ("pareto", "growth", "cost", "scaling", "learning") if figures else ()
        titles = [(chart.name, chart.title) for name in shown for chart in sections.get(name, [])]
        about = facts(study)
        tables.write_markdown(summary, advice, target / "report.md", titles, about)
        write_atomically(page, render(summary, advice, sections, about))
        drawn.result()
    return page


def draw_files(specs: dict[str, Any], folder: Path) -> None:
    """The charts as SVG and PNG files, drawn by another process."""
    if not specs:
        return
    call = [sys.executable, "-P", str(HERE / "draw.py"), str(folder)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}  # what can be imported here can be there
    done = subprocess.run(call, input=json.dumps(specs), env=os.environ | paths, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise OSError(errno.EIO, f"could not be drawn ({why})", str(folder))


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from vl-convert: nothing is fetched."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


def script_json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "percent": lambda value: f"{100 * value:.0f}\N{NO-BREAK SPACE}%", "breakable": breakable, "parts": parts,
    }  # fmt: skip
    return environment.get_template(name)


def shell(sections: dict[str, list[Chart]]) -> dict[str, Markup]:
    """What makes a page work by itself: its charts, style and scripts."""
    return {
        "specs": script_json({chart.name: chart.page() for found in sections.values() for chart in found}),
        "style": Markup(theme.css() + (HERE / "page.css").read_text(encoding="utf-8")),
        "library": Markup(_library()),
        "script": Markup((HERE / "page.js").read_text(encoding="utf-8")),
    }


def render(
    summary: Summary, advice: Recommendation, sections: dict[str, list[Chart]], about: list[tuple[str, str]]
) -> str:
    chosen = next((v for v in summary.variants if v.id == advice.variant), None)
    return template("page.html").render(
        summary=summary, advice=advice, chosen=chosen, sections=sections, tables=tables,
        breaks=curves.break_even, untimed=curves.not_timed(summary), examples=images.examples(summary),
        illustration=images.illustration(summary), samples=images.samples(summary), merit=summary.merit,
        confused={v.label: found for v in summary.variants if (found := curves.confused(summary, v))},
        models=_models(summary), unlearned=curves.unlearned(summary),
        facts=about, colours=len(theme.PALETTE), shapes=theme.SHAPES, **shell(sections),
    )  # fmt: skip


def _models(summary: Summary) -> list[tuple[Result, list[dict[str, Any]]]]:
    """The layers of each variant's model, from the file that says them; none if it cannot be read."""
    for record in summary.study.of("model_summary"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(Path(record.artefact).read_bytes())
            return [(v, [row | {"total": row["times"] * row["parameters"]} for row in told[v.id]])
                    for v in summary.variants if v.id in told]  # fmt: skip
    return []


def breakable(spec: str) -> Markup:
    """A spec that may wrap after its separators."""
    return Markup("<wbr>").join(re.split(r"(?<=[:,+])", spec))


def parts(spec: str) -> Markup:
    """A spec as a headline: its name, and its options smaller below."""
    name, colon, options = spec.partition(":")
    if not colon or set(spec) & set("+@"):
        return breakable(spec)
    return Markup("{}<small>{}</small>").format(name, Markup(" <wbr>").join(options.split(",")))


def facts(study: Evidence) -> list[tuple[str, str]]:
    """What was run, where and with what."""
    info, data = study.info, study.dataset
    counts = [f"{data[part]:,} {part}" for part in ("train", "validation", "test") if part in data]
    side = data.get("image_size")
    shape = f"{side}×{side} px" if side else ""
    classes = f"{len(study.classes)} classes" if study.classes else ""
    model, recipe, machine = (info.get(key) or {} for key in ("model", "recipe", "machine"))
    if isinstance(memory := machine.get("memory"), int):
        machine = machine | {"memory": metrics.size(memory)}
    spent = {name: sum(number(r.value) or 0 for r in study.of(f"{name}_seconds")) for name in ("train", "test")}
    spent["measure"] = (info.get("seconds") or {}).get("measuring", 0)
    speeds = study.of("train_step")
    clocks = {"cpu": "CPU time", "wall": "wall time"}
    found = [
        ("Data", ", ".join(filter(None, [data.get("name"), classes, shape, *counts]))),
        ("Start", _start(info.get("start"))),
        ("Folds", f"{study.folds}, dealt out anew by every seed; images are counted in one" if study.folds else ""),
        ("Seeds", _seeds(info.get("seeds") or {})),
        ("Training", _pairs({key: info.get(key) for key in ("epochs", "steps", "budget")})),
        ("Parameters matched", {True: "yes", False: "no", None: ""}[info.get("match")]),
        ("Model", _pairs(model)),
        ("Recipe", _pairs(recipe, without=("epochs", "steps"))),  # what was made of them stands under Training
        ("Speeds", ", ".join(filter(None, [
            _all(clocks.get(str(r.tags.get("clock")), "") for r in speeds), _all(f"{r.n} rounds" for r in speeds),
            _all(f"batch {r.tags['batch']}" for r in speeds if "batch" in r.tags)]))),
        ("Machine", _pairs(machine, without=("device",))),  # named below, as it was used
        ("Device", _all(r.device for r in study.records)),
        ("Trainings", _placing(info.get("placing"))),
        ("Threads", _all(str(r.threads or "") for r in study.records)),
        ("Precision", _all(r.dtype for r in study.of(study.merit.metric))),
        ("Versions", _all(r.versions for r in study.records)),
        ("Commit", _all(r.commit for r in study.records)),
        ("Started", _when(info.get("started"))),
        ("Finished", _when(info.get("finished"))),
        ("Time", _pairs({f"to {name}": f"{value / 60:.1f} min" for name, value in spent.items() if value})),
    ]  # fmt: skip
    return [(name, text) for name, text in found if text]


def _seeds(seeds: dict[str, list[int]]) -> str:
    """Of all variants, or of groups that have the same."""
    groups: dict[str, list[str]] = {}
    for name, mine in seeds.items():
        groups.setdefault(", ".join(map(str, mine)), []).append(name)
    return next(iter(groups), "") if len(groups) < 2 else "; ".join(f"{', '.join(of)}: {s}" for s, of in groups.items())


def _start(start: dict[str, Any] | None) -> str:
    """Where the trained weights lie, and which they are."""
    return f"{'/'.join(Path(start['folder']).parts[-2:])} ({start['sha256'][:12]})" if start else "from nothing"


def _placing(placing: dict[str, Any] | None) -> str:
    """How trainings were placed, and what was measured of the ways."""
    if not placing:
        return ""
    jobs, threads = placing["jobs"], placing["threads"]
    speeds = ", ".join(f"{name} {rate:g} steps/s" for name, rate in placing["measured"].items())
    where = f" on {placing['runner']}" if str(placing.get("runner")).startswith("ray") else ""
    return (f"{jobs if jobs > 1 else 'one'} at a time{where}, {threads} thread{'s' * (threads != 1)} each"
            + (f" (measured: {speeds})" if speeds else ""))  # fmt: skip


def _all(values: Iterable[str]) -> str:
    return ", ".join(sorted(filter(None, set(values))))


def _pairs(values: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """`name value, …` without what is off."""
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in values.items()
             if value and key not in without}  # fmt: skip
    return ", ".join(key.replace("_", " ") + ("" if value is True else f" {value}") for key, value in shown.items())


def _when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else ""
