"""Teacher, student and images of a conversion, and what the student takes from the teacher's q, k and v."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from linvit.attention import create_attention
from linvit.conversion import kernels
from linvit.conversion.images import divide_images, few_images
from linvit.conversion.kernels import feature_counts, fit_kernels
from linvit.conversion.measuring import sizes_between
from linvit.conversion.stages import learning_rate, stage_shares, stage_steps
from linvit.conversion.student import make_student
from linvit.conversion.teacher import fit_model, stage_recipe
from linvit.data import load_data
from linvit.measure.error import attention_error
from linvit.measure.trained import captured
from linvit.models import model_config
from linvit.progress import ignore
from linvit.registry import parse, parse_layers
from linvit.training.checkpoint import load, read_model


@pytest.mark.parametrize("seen", [False, True])
def test_images_that_decide_are_used_for_nothing_else(digits, teacher, seen):
    about, part = read_model(teacher).about, "validation" if seen else "train"
    images = divide_images(digits, about, True, seen, 3)
    parts = [set(split.rows.tolist()) for split in (images.split(part), images.search, images.decide)]
    assert set().union(*parts) == set(getattr(digits, part).rows.tolist())
    assert sum(map(len, parts)) == len(getattr(digits, part))
    assert all(parts)
    assert images.dataset.identity != digits.identity
    assert np.array_equal(divide_images(digits, about, True, seen, 3).decide.rows, images.decide.rows)


def test_images_are_normalised_as_the_teacher_was_trained(digits, teacher):
    about = read_model(teacher).about
    assert divide_images(digits, about, False, False, 3).dataset.identity == digits.identity
    other = divide_images(digits, about | {"mean": [0.25]}, False, False, 3).dataset
    assert other.mean == (0.25,)
    assert other.identity != digits.identity


@pytest.mark.parametrize("inherit", ["all", "not-qk", "mlp"])
def test_what_a_student_inherits(teacher, inherit):
    exact = load(teacher)
    new = make_student(exact, "softmax@1+performer-relu:m=5,dwc=3@3", inherit, 7).state_dict()
    assert not new["blocks.2.attn.attention.dwc.weight"].any()  # adds nothing yet
    for key, value in exact.state_dict().items():
        fresh = key.startswith(("blocks.1", "blocks.2", "blocks.3")) and ".attn." in key
        same = torch.equal(new[key], value)
        if not fresh or inherit == "all":
            assert same, key
        elif "qkv.weight" in key:
            q, k, v = (torch.equal(a, b) for a, b in zip(new[key].chunk(3), value.chunk(3), strict=True))
            assert (q, k, v) == (False, False, inherit == "not-qk"), key
        elif "proj.weight" in key:
            assert same == (inherit == "not-qk"), key


def test_a_linformer_starts_with_pooled_keys(teacher):
    exact, x = load(teacher), torch.randn(5, 1, 8, 8)
    student = make_student(exact, "linformer:k=16", "all", 0)
    torch.testing.assert_close(student(x), exact(x), atol=1e-4, rtol=1e-4)  # as many keys as tokens
    asked = make_student(exact, "linformer:k=3,init=normal", "all", 0)
    assert (asked.attentions()[0].matrix() < 0).any()


def test_a_teacher_with_more_classes_answers_among_those_of_the_data(teacher, digits):
    stored = read_model(teacher)
    order = [*range(10)][::-1]
    head = {key: torch.cat([value[order], value[:1] * 0]) for key, value in stored.tensors.items() if "head." in key}
    wider = replace(
        stored,
        read=lambda: stored.tensors | head,
        about=stored.about | {"classes": [*digits.classes[::-1], "others"]},
        config=stored.config.model_copy(update={"classes": 11}),
    )
    model = fit_model(wider, digits)
    assert (model.config.classes, model.about["classes"]) == (10, digits.classes)
    assert all(torch.equal(value, stored.tensors[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="has no head, only features: `linvit train DATA --from` it first"):
        fit_model(replace(wider, about=stored.about | {"classes": []}), digits)
    with pytest.raises(ValueError, match="has the class '9', which the model does not know"):
        fit_model(replace(wider, about=stored.about | {"classes": digits.classes[:9]}), digits)


def test_layers_get_as_many_features_as_their_q_and_k_need(teacher, digits):
    model = load(teacher)
    with torch.no_grad():  # layer 2 attends to all tokens alike
        model.blocks[2].attn.qkv.weight[:48] *= 0
        model.blocks[2].attn.qkv.bias[:48] *= 0
    x = few_images(digits.train, model.about, 16)
    counts = [spec.options["m"] for spec in feature_counts(model, parse("performer-hyp"), x)]
    assert set(counts) <= {6, 12, 24, 48}
    assert counts[2] == 6
    assert max(counts) > 6
    assert feature_counts(model, parse("performer-hyp:m=7"), x) == [parse("performer-hyp:m=7")] * 4
    assert feature_counts(model, parse("uniform"), x) == parse_layers("uniform", 4)


def errors(student, teacher, x) -> list[float]:
    """Of every layer, on the teacher's q and k."""
    (layers,) = captured(teacher, x)
    every = zip(student.attentions(), layers, strict=True)
    return [attention_error(mine, q, k, v)["attention_error"] for mine, (_, q, k, v) in every]


@pytest.mark.parametrize("spec", ["performer-hedgehog", "performer-theta:m=7"])
def test_a_fit_brings_attention_closer_on_other_images_too(teacher, digits, spec):
    exact = load(teacher)
    student = make_student(exact, f"softmax@1+{spec}@3", "all", 0)
    old = {key: value.clone() for key, value in student.state_dict().items()}
    seen, held_out = (few_images(split, exact.about, 16) for split in (digits.train, digits.validation))
    before = errors(student, exact, seen), errors(student, exact, held_out)
    fit_kernels(student, exact, seen, ignore)
    after = errors(student, exact, seen), errors(student, exact, held_out)
    assert all(b < a for a, b in zip(before[0][1:], after[0][1:], strict=True))
    assert sum(after[1]) < 0.9 * sum(before[1])
    changed = {key for key, value in student.state_dict().items() if not torch.equal(value, old[key])}
    assert changed
    assert all(".attention.kernel." in key and not key.startswith("blocks.0.") for key in changed)
    assert all(p.grad is None for p in student.parameters())


def test_a_fit_that_does_not_help_is_undone():
    attention = create_attention("performer-hedgehog", heads=2, head_dim=7, tokens=13)
    q, k = torch.randn(2, 5, 2, 13, 7)
    with torch.no_grad():
        target = attention.attention_matrix(q, k)  # it is there already
    kernels._fit(attention, q, k, target)
    assert torch.equal(attention.kernel.weight, torch.eye(7).repeat(2, 1, 1))


def test_many_tokens_are_sampled(teacher, digits, monkeypatch):
    exact = load(teacher)
    monkeypatch.setattr(kernels, "MAX_TOKENS", 11)
    (layers,) = captured(exact, few_images(digits.train, exact.about, 16))
    attention, q, k, _ = layers[2]
    few_q, few_k, matrix = kernels._sampled(attention, q, k)
    assert few_q.shape == few_k.shape == (16, 2, 11, 12)
    expected = torch.softmax(few_q.double() @ few_k.double().mT / 12**0.5, -1)
    torch.testing.assert_close(matrix.double(), expected, atol=1e-5, rtol=1e-4)


def test_recipe_and_rate(teacher, digits, tmp_path):
    """The teacher's own batches or, if its training is not known, batches by tokens; a lower rate for small ones."""
    stored = read_model(teacher)
    assert stage_recipe(stored, digits, 16, {}).batch_size == 32
    shutil.copytree(teacher, tmp_path / "old")
    document = json.loads((teacher / "experiment.json").read_text()) | {"format": 1}
    (tmp_path / "old/experiment.json").write_text(json.dumps(document))
    assert stage_recipe(read_model(tmp_path / "old"), digits, 16, {}) == stage_recipe(stored, digits, 16, {})
    foreign, large = replace(stored, folder=tmp_path / "x/y"), load_data("synthetic:size=224,images=12,classes=3")
    sizes = [stage_recipe(foreign, large, tokens, {}).batch_size for tokens in (197, 785, 17)]
    assert sizes == [16, 4, 64]
    assert stage_recipe(foreign, large, 197, {"batch_size": 7}).batch_size == 7
    assert learning_rate("stage 2", 192, 16) == pytest.approx(0.02 / 192) == learning_rate("stage 2", 192, 64) / 2
    assert learning_rate("stage 2", 192, 128) == learning_rate("stage 2", 192, 64)


def test_lengths_of_stages():
    shares = stage_shares((1, 2, 3), search=True)
    assert shares == {"stage 1": 0.25, "stage 2": 0.25, "stage 3": 0.25, "mix, stage 2": 0.25}
    assert stage_steps(shares, 10, None, 60) == dict.fromkeys(shares, 15)
    assert stage_steps(stage_shares((2,), False), 10, 2.5, None) == {"stage 2": 25}
    assert stage_steps(stage_shares((2,), False), 10, None, None) == {"stage 2": 300}
    assert stage_steps(stage_shares((2,), False), 100, None, None) == {"stage 2": 400}


def test_sizes_between():
    config = model_config(image_size=224, patch_size=16)

    def sizes(**changes):
        return sizes_between(config, config.model_copy(update=changes))

    assert sizes() == sizes(image_size=112) == sizes(patch_size=32) == []
    assert sizes(image_size=448) == [(224, 16), (336, 16), (448, 16)]
    assert sizes(patch_size=4) == [(224, 16), (224, 8), (224, 4)]
    assert sizes(patch_size=14) == [(224, 16), (224, 14)]
    assert sizes(image_size=448, patch_size=8) == [(224, 16), (448, 16), (448, 8)]
