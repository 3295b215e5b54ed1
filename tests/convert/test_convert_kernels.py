"""Learned kernels start from the teacher's q and k."""

from __future__ import annotations

import pytest
import torch

import linvit
from linvit.attention import create_attention
from linvit.convert import kernels
from linvit.convert.kernels import learn_kernels
from linvit.convert.student import some_images, student_of
from linvit.measure.error import attention_error
from linvit.measure.trained import captured
from linvit.progress import ignore


def errors(student, teacher, x) -> list[float]:
    """Of every layer, on the teacher's q and k."""
    (layers,) = captured(teacher, x)
    every = zip(student.attentions(), layers, strict=True)
    return [attention_error(mine, q, k, v)["attention_error"] for mine, (_, q, k, v) in every]


@pytest.mark.parametrize("spec", ["performer-hedgehog", "performer-theta:m=7", "performer-theta-mlp:m=7"])
def test_a_fit_brings_attention_closer_on_other_images_too(teacher, digits, spec):
    exact = linvit.load(teacher)
    student = student_of(exact, f"softmax@1+{spec}@3", "all", 0)
    old = {key: value.clone() for key, value in student.state_dict().items()}
    x = some_images(digits.train, exact.about)
    held = some_images(digits.validation, exact.about)
    before = errors(student, exact, x), errors(student, exact, held)
    learn_kernels(student, exact, x, ignore)
    after = errors(student, exact, x), errors(student, exact, held)
    assert all(b < a for a, b in zip(before[0][1:], after[0][1:], strict=True))
    assert sum(after[1]) < 0.9 * sum(before[1])
    changed = {key for key, value in student.state_dict().items() if not torch.equal(value, old[key])}
    assert changed
    assert all(".attention.kernel." in key and not key.startswith("blocks.0.") for key in changed)
    assert all(p.grad is None for p in student.parameters())


def test_a_fit_that_does_not_help_is_undone():
    """To what it is already."""
    attention = create_attention("performer-hedgehog", heads=2, head_dim=7, tokens=13)
    q, k = torch.randn(2, 5, 2, 13, 7)
    with torch.no_grad():
        wanted = attention.attention_matrix(q, k)
    kernels._fit(attention, q, k, wanted)
    assert torch.equal(attention.kernel.weight, torch.eye(7).repeat(2, 1, 1))


def test_of_many_tokens_a_sample_is_enough(teacher, digits, monkeypatch):
    exact = linvit.load(teacher)
    x = some_images(digits.train, exact.about)
    monkeypatch.setattr(kernels, "TOKENS", 11)
    (layers,) = captured(exact, x)
    attention, q, k, _ = layers[2]
    few_q, few_k, matrix = kernels._sampled(attention, q, k)
    assert few_q.shape == few_k.shape == (16, 2, 11, 12)
    wanted = torch.softmax(few_q.double() @ few_k.double().mT / 12**0.5, -1)
    torch.testing.assert_close(matrix.double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("inherit", "fitted"), [("all", True), ("not-qk", False)])
def test_a_conversion_begins_with_it_where_q_and_k_are_the_teachers(teacher, tmp_path, inherit, fitted):
    linvit.convert(teacher, to="performer-hedgehog", data="digits", limit=60, stages=(), inherit=inherit,
                   out=tmp_path / "one", device="cpu", report=False)  # fmt: skip
    weight = linvit.load(tmp_path / "one/zero-shot").attentions()[1].kernel.weight
    assert torch.equal(weight, torch.eye(12).repeat(2, 1, 1)) != fitted
