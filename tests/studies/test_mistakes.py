"""What the experiments about the reports' mistakes show."""

from __future__ import annotations

import math

import pytest
from test_claims import leads, number

from linvit.models import create_model
from linvit.studies.declaration import all_published
from linvit.studies.mistakes import MISTAKES

SAYS = {
    "M1": "There the kernel has no effect on values: 20 of 20 kernels give softmax's logits, bit-identical in float32",
    "M2": "70,000 images of 60,000: at least 10,000 are used twice. 2 published numbers",
    "M3": "up to 3.08 times the weight",
    "M4": "10 places",
    "M5": "9 terms",
    "M6": "1.7 (MNIST) and 20.3 (CIFAR-10) times the Performers' work",
    "M7": "5,545,489 parameters, as printed: 97% are in the head",
    "M8": "0 of 6 Performers beat the Transformer on CIFAR-10, and 0 of 6 are faster on MNIST",
    "M9": "80 epochs end inside a restart cycle",
    "M10": "fθ is above relu in 5 of 9 experiments",
    "M11": "Twice the tokens take 2.00 times the memory",
}


@pytest.fixture(scope="module")
def shown():
    return {mistake.id: mistake.show() for mistake in MISTAKES}


def test_each_says_what_it_found(shown):
    assert list(shown) == list(SAYS)
    for name, found in shown.items():
        assert SAYS[name] in found.says
        assert {len(row) for row in found.rows} == {len(found.head)}


def test_the_experiments_could_show_otherwise(shown):
    kernels = [row for row in shown["M1"].rows if row[0].startswith("performer-")]
    assert all(float(row[2].rpartition(" ")[2]) > 1e-3 for row in kernels)  # with several tokens they differ
    gelu, elu, low, relu = (int(row[4].split()[0].replace(",", "")) for row in shown["M1"].rows[len(kernels) :])
    assert gelu > elu > low > relu == 0
    assert [row[3] for row in shown["M1"].rows[len(kernels) :]][::3] == ["50%", "0%"]
    for norm, _, exact, sampled in shown["M3"].rows:
        assert float(sampled) == pytest.approx(float(exact), rel=0.01), norm
    assert ("cycles of 10", "end at epochs 10, 30, 70, 150") in shown["M9"].rows
    gains = [float(row[1].split()[0]) for row in shown["M2"].rows if row[0].startswith("best of")]
    deviation = 100 * math.sqrt(2_000 / 4) / 10_000
    assert gains == pytest.approx([1.03 * deviation, 1.77 * deviation, 2.83 * deviation], abs=0.02)  # of normal ones
    terms = {row[0]: row[3] for row in shown["M5"].rows}
    assert terms["Linformer (000)"].endswith("of a window 0%")
    assert terms["cost of a Transformer (000)"] == "twice the tokens: × 4, ReLU features × 2"
    assert terms["deterministic (002)"].endswith("0 without projection")


def test_printed_numbers_are_those_of_the_reports(shown):
    """M4, M8 and M10 quote them."""
    text = str(shown["M4"].rows)
    for study, row in (("vit", "ViT"), ("relu", "ReLU"), ("elu-4", "ELU"), ("exp", "EXP")):
        assert f"{number(f'002-{study}', row, 's_per_epoch')}" in text
    for study, row in (("gelu-4", "GELU"), ("relu", "ReLU")):
        assert f"{number(f'002-{study}', row, 'test_accuracy')} %" in text
    rates = {number(f"002-{name}", row, "hparams")["lr"] for name, row in (("relu", "ReLU"), ("gelu-4", "GELU"))}
    rates |= {number("002-elu-4", "ELU", "hparams")["lr"], number("002-exp", "EXP", "hparams")["lr"]}
    assert f"best rates {', '.join(f'{rate:g}' for rate in sorted(rates))}" in text
    classes = number("002-relu", "ReLU", "per_class")
    assert f"F1 {classes['cat']['f1']} and {classes['dog']['f1']}" in text
    performers = [row for row in all_published()["000-mnist"] if row.startswith(("RF", "det"))]
    assert len(performers) == 6
    for study, key, sign in (("000-cifar10", "valid_accuracy", 1), ("000-mnist", "ms_per_step", -1)):
        assert not [
            row for row in performers if sign * (number(study, row, key) - number(study, "transformer", key)) > 0
        ]
    assert [row[2] for row in shown["M10"].rows] == [
        leads("fθ", "relu"),
        leads("exp", "ViT"),
        leads("exp", "ViT", key="final_accuracy"),
    ]


def test_the_models_of_report_000_are_counted_as_they_are_built(shown):
    sizes = {"torch": "softmax", "keras": "performer-exp:m=16"}
    built = [
        create_model(f"000-{kind}-mnist", image_size=28, channels=1, classes=10, attention=spec).parameter_count()
        for kind, spec in sizes.items()
    ]
    row = next(row for row in shown["M6"].rows if row[0].startswith("parameters"))
    assert [text.split()[0] for text in row[1:3]] == [f"{count / 1e6:,.1f}" for count in built]
