"""Published studies that can be run again: `linvit reproduce NAME`.

A new study is one file here or in LINVIT_PLUGINS that declares a value and calls `register`
(docs/how-to/reproduce.md). Its scale says what is reduced: nothing at `full`, the report's own recipe for a GPU;
images, epochs or width at `cpu`; nearly everything at `smoke`, which only tests that the study runs.
"""

from linvit.studies.declaration import (
    STUDIES,
    Figure,
    NotReproducible,
    Published,
    PublishedStudy,
    Rerun,
    Row,
    Scale,
    register,
)
from linvit.studies.run import reproduce

__all__ = [
    "STUDIES",
    "Figure",
    "NotReproducible",
    "Published",
    "PublishedStudy",
    "Rerun",
    "Row",
    "Scale",
    "register",
    "reproduce",
]
