"""Records → one typed result → tables, charts and one self-contained page. Imports only base modules.

    from linvit import report
    result = report.build("runs/mine")            # → runs/mine/report.html, report.md, results.csv, figures/
    report.build(["runs/a", "runs/b"], "merged")  # several studies of the same data as one
    report.study_result("runs/mine").summary      # the same numbers; nothing is written

A result is a pure function of a folder: study.json, search.json or convert.json, records.jsonl (`linvit.metrics` says
which records there are) and the files that the records name. Any record may be missing; its section is then left out.
A diverged or failed run is listed, never dropped. Where one thing was measured twice, the newest record counts.
"""

from __future__ import annotations

from pathlib import Path

from linvit.report import statistics
from linvit.report.conversion import ConversionResult, conversion_result
from linvit.report.evidence import Folders, as_paths, read_study
from linvit.report.recommendation import Recommendation
from linvit.report.result import Result, Table
from linvit.report.study import StudyResult, study_result
from linvit.report.summary import Summary, VariantResult, summarise
from linvit.report.tuning import SearchResult, search_result
from linvit.schemas.conversion import Conversion
from linvit.schemas.search import Search
from linvit.schemas.study import Study

__all__ = [
    "ConversionResult",
    "Recommendation",
    "Result",
    "SearchResult",
    "StudyResult",
    "Summary",
    "Table",
    "VariantResult",
    "build",
    "conversion_result",
    "read_study",
    "search_result",
    "statistics",
    "study_result",
    "summarise",
]


def build(
    folders: Folders, out: Path | str | None = None, *, margin: float | None = None, figures: bool = True
) -> Result:
    """Write the page of a study, search or conversion, or of several studies merged, and return its content.

    Args:
        folders: Result folders. Several must hold studies of the same data.
        out: Where the page is written. Default: the folder itself.
        margin: Accuracy that a faster variant may lose. Default: the study's.
        figures: Whether figure files are written, too.
    """
    from linvit.report.page import write

    paths = as_paths(folders)
    try:
        result = _result(paths, None if out is None else Path(out), margin)
        write(result, figures)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        where, what = ", ".join(map(str, paths)), f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{where}: the page cannot be made from the files there ({what}): if nobody changed them, please report "
            "it, with what LINVIT_TRACEBACK=1 shows"
        ) from error
    return result


def _result(paths: list[Path], out: Path | None, margin: float | None) -> Result:
    for kind, make in ((Search, search_result), (Conversion, conversion_result)):
        if (found := [path for path in paths if kind.path(path).is_file()]) and not Study.path(paths[0]).is_file():
            if len(paths) > 1 or margin is not None:
                raise ValueError(f"{found[0]} holds a {kind.kind}: only studies can be merged or have a margin")
            return make(paths[0], out)
    if out is None and len(paths) > 1:
        raise ValueError("several studies are merged into another folder: give --out")
    if out is not None and [out.resolve()] != [path.resolve() for path in paths] and Study.path(out).exists():
        raise ValueError(f"{out} holds another study: choose another --out")
    return study_result(paths, margin, out)
