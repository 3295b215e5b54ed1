"""One tiny study, declared in a plugin and run once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))  # synthetic.py

TINY = """
from dataclasses import replace

from linvit.studies import Published, PublishedStudy, Rerun, Row, Scale, register

SHAPE = {"stem": "patch", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 11, "epochs": 9,
         "batch_size": 16, "pad_crop": 0}
TINY = PublishedStudy(
    "tiny",
    title="Three lines",
    about="A table of three lines. Expected: nothing.",
    data="synthetic:classes=3,images=96,size=8,channels=1",
    mistakes=("M7",),
    durations={"cpu": "seconds", "smoke": "seconds"},
    rows=[
        Row("transformer", "softmax", published=Published({"test_accuracy": 91.5}, "Table 2")),
        Row("wide", "performer-relu:m=4", literal_options={"mlp_dim": 13}),
        Row("from checkpoint", "performer-exp:m=4", "performer-exp:m=4,stabilizer=reference", checkpoint=True),
        Row("longer", "performer-exp:m=4", times=2, columns=("fair",)),
    ],
    literal=Rerun(SHAPE, cpu=Scale(seeds=1, options={"epochs": 1}, measured=False)),
    fair=Rerun(SHAPE, cpu=Scale(seeds=2, options={"epochs": 1}, measured=False)),
)
DIVERGING = replace(
    TINY,
    name="diverging",
    rows=[
        Row("transformer", "softmax", columns=("literal",)),
        Row("from checkpoint", "performer-exp:m=4", checkpoint=True, columns=("literal",)),
    ],
    literal=replace(TINY.literal, options=SHAPE | {"optimizer": "sgd", "lr": 1e30, "clip_norm": 0.0}),
)
register(TINY, DIVERGING)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The study, found as any user's would be."""
    from linvit.studies import STUDIES

    file = tmp_path_factory.mktemp("plugins") / "tiny.py"
    file.write_text(TINY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINVIT_PLUGINS", str(file))
        assert "tiny" in STUDIES.names()
        yield
    del STUDIES._entries["tiny"], STUDIES._entries["diverging"]


@pytest.fixture(scope="module")
def done(plugin, tmp_path_factory) -> Path:
    from linvit.studies import reproduce

    return reproduce("tiny", out=tmp_path_factory.mktemp("home"), jobs=1)
