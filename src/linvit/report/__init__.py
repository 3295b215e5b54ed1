"""Records → statistics, tables, charts and one self-contained page. Imports only base modules.

    from linvit import report
    report.build("runs/mine")                     # → runs/mine/report.html, report.md, results.csv, figures/
    report.build(["runs/a", "runs/b"], "merged")  # several studies of the same data as one
    report.recommend(report.summarise(report.read("runs/mine")))

A report is a pure function of a study folder: study.json (as `linvit.study.Study` writes it), records.jsonl (the table
of `linvit.metrics` says which there are) and the files that the records name. Anything may be missing; its section is
then left out. A diverged or failed run is listed, never dropped. Artefact paths are relative to the study's folder and
lie inside it. Where one thing was measured twice, the newest record counts.

results.csv: one row per variant; its `verdict` is one of `most accurate`, `within 1 point` (shown to lose less than the
margin to every other), `worse` (shown to lose more to some), `undecided`, `not enough seeds to tell`, `diverged` (some
seed did), `published` (a printed number), `not compared` (trained for longer, or for less), `no result`.
"""

from linvit.report import statistics
from linvit.report.evidence import Evidence, read
from linvit.report.page import build
from linvit.report.recommendation import Recommendation, recommend
from linvit.report.summary import Result, Summary, summarise

__all__ = ["Evidence", "Recommendation", "Result", "Summary", "build", "read", "recommend", "statistics", "summarise"]
