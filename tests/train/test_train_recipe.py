"""Learning rates against their closed forms, optimizers, what weight decay applies to, and recipes that are refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from linvit import devices
from linvit.devices import amp_dtype
from linvit.measure.timing import Timing
from linvit.models import create_model
from linvit.schemas.model import ModelConfig
from linvit.schemas.recipe import Recipe
from linvit.training.muon import QUINTIC, Muon, orthogonalised, wide
from linvit.training.optimizers import make_optimizer
from linvit.training.recipe import create_recipe, learning_rate

TOTAL, EPOCH, LR = 100, 10, 0.3


def rates(**options) -> list[float]:
    recipe = create_recipe(lr=LR, **options)
    return [learning_rate(recipe, step, TOTAL, EPOCH) for step in range(TOTAL)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "restarts", "onecycle"])
@pytest.mark.parametrize("warmup", [0.0, 0.2])
def test_warmup_is_a_straight_line_to_the_rate(schedule, warmup):
    found = rates(schedule=schedule, warmup=warmup, step_epochs=100)
    count = round(warmup * TOTAL)
    assert found[: count + 1] == pytest.approx([LR * (i + 1) / (count + 1) for i in range(count + 1)])
    assert max(found) == pytest.approx(LR)
    assert min(found) > 0


def test_closed_forms():
    steps = range(TOTAL)
    assert rates(schedule="constant", warmup=0) == [LR] * TOTAL
    cosine = [LR * (0.1 + 0.9 * (1 + math.cos(math.pi * i / TOTAL)) / 2) for i in steps]
    assert rates(schedule="cosine", warmup=0, final_lr=0.1) == pytest.approx(cosine)
    stairs = [LR * 0.5 ** (i // 30) for i in steps]
    assert rates(schedule="step", warmup=0, step_epochs=3, step_factor=0.5) == pytest.approx(stairs)
    line = [LR * (1 - 0.8 * i / TOTAL) for i in steps]
    assert rates(schedule="onecycle", warmup=0, final_lr=0.2) == pytest.approx(line)
    cycles = [(0, 20), (20, 40), (60, 80)]  # start, length: each twice as long as the one before
    start_of = {i: (start, length) for start, length in cycles for i in range(start, start + length)}
    restarts = [LR * (1 + math.cos(math.pi * (i - start_of[i][0]) / start_of[i][1])) / 2 for i in steps]
    assert rates(schedule="restarts", warmup=0, restart_epochs=2) == pytest.approx(restarts)


@pytest.mark.parametrize("warmup", [0.0, 0.0575, 0.3])
def test_one_cycle_as_pytorch_has_it(warmup):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=TOTAL, pct_start=warmup)
    expected = []
    for _ in range(TOTAL):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step() if len(expected) < TOTAL else None
    assert rates(schedule="torch-onecycle", warmup=warmup) == pytest.approx(expected)


def test_decay_is_for_matrices_and_filters():
    specs = ("performer-theta:m=4", "softmax:qk_norm=all,gate=silu,cpe=3")
    for options in ({"stem": "pixel", "image_size": 4}, {"stem": "conv"}, *({"attention": spec} for spec in specs)):
        model = create_model(dim=8, depth=1, heads=2, pool="cls", **options)
        optimizer = make_optimizer(create_recipe(weight_decay=0.1), model)
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert len(decay) == len(list(model.parameters()))
        for name, parameter in model.named_parameters():
            last = name.split(".")[-1]
            free = parameter.ndim < 2 or last in ("bias", "position", "cls") or ".kernel." in name
            assert decay[id(parameter)] == (0.0 if free else 0.1), name


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adamw():
    options = {"image_size": 8, "stem": "conv", "trunk": (8, 16), "attention": "softmax:dwc=3,gate=silu,cpe=3"}
    model = create_model(dim=24, depth=1, heads=2, **options)
    twin = copy.deepcopy(model)
    x, y = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    recipe = create_recipe(lr=0.01, weight_decay=0.0)
    for net, name in ((model, "muon"), (twin, "adamw")):
        optimizer = make_optimizer(recipe.model_copy(update={"optimizer": name}), net)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    adam, matrices = dict(twin.named_parameters()), []
    for name, parameter in model.named_parameters():
        if torch.equal(parameter, adam[name]):
            continue
        matrices.append(name)
        step = (before[name] - parameter.detach()).flatten(1).double() / (
            0.01 * 0.2 * max(parameter.flatten(1).shape) ** 0.5
        )
        assert 0.6 < torch.linalg.svdvals(step).max() < 1.3, name
    assert sorted(matrices) == sorted(
        [
            "stem.layers.1.0.weight",
            "stem.embed.weight",
            "blocks.0.attn.qkv.weight",
            "blocks.0.attn.proj.weight",
            "blocks.0.attn.gate.weight",
            "blocks.0.mlp.0.weight",
            "blocks.0.mlp.3.weight",
        ]
    )


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (16, 16)])
def test_orthogonalised_keeps_directions_and_levels_lengths(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalised_one(matrix) @ v.T  # diagonal, if the directions are kept
    assert torch.diagonal(found).sub(1).abs().max() < 0.45
    assert (found - torch.diag(torch.diagonal(found))).abs().max() < 1e-9
    assert orthogonalised_one(torch.zeros(shape)).abs().max() == 0


def orthogonalised_one(matrix: torch.Tensor) -> torch.Tensor:
    found = orthogonalised(wide(matrix)[None])[0]
    return found if found.shape == matrix.shape else found.T


def test_muon_steps_alike_in_any_company(monkeypatch):
    """Matrices of one shape are updated together, tall and wide ones too: as if each were alone."""
    torch.manual_seed(0)
    shapes = [(6, 20), (20, 6), (6, 20), (16, 16), (6, 5, 2, 2)]
    start = [torch.randn(shape) for shape in shapes]
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(3)]

    def trained(large: int) -> list[torch.Tensor]:
        monkeypatch.setattr("linvit.training.muon.LARGE", large)
        weights = [weight.clone().requires_grad_() for weight in start]
        optimizer = Muon([{"params": weights, "weight_decay": 0.1, "orthogonal": True}], lr=0.1)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        return [weight.detach() for weight in weights]

    for together, alone in zip(trained(large=1000), trained(large=1), strict=True):
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("name", ["muon", "adam", "adamw", "sgd"])
def test_optimizers_lower_the_loss(name):
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = make_optimizer(create_recipe(optimizer=name, lr=0.2 if name == "muon" else 0.05), model)
    x, y = torch.randn(7, 5), torch.arange(7) % 3
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 0}, "lr=0"),
        ({"lr": math.inf}, "lr=inf"),
        ({"epochs": math.nan}, "epochs=nan"),
        ({"betas": (0.9, 1.0)}, "betas.1=1.0"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"learning_rate": 1}, "has no option 'learning_rate'"),
        ({"steps": -1}, "steps=-1"),
    ],
    ids=str,
)
def test_bad_recipes_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        create_recipe(**options)


def test_half_precision_is_refused_where_it_crawls(monkeypatch):
    cpu = torch.device("cpu")
    assert amp_dtype("off", cpu) == torch.float32
    with pytest.raises(ValueError, match="amp=fp16 needs a CUDA device"):
        amp_dtype("fp16", cpu)
    with pytest.raises(ValueError, match="amp=fp16 needs a CUDA device, not mps"):
        amp_dtype("fp16", torch.device("mps"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"})
    assert amp_dtype("auto", cpu) == torch.float32
    with pytest.raises(ValueError, match="no native bfloat16"):
        amp_dtype("bf16", cpu)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_bf16": True})
    assert amp_dtype("bf16", cpu) == amp_dtype("auto", cpu) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "amx_bf16": True})
    monkeypatch.setattr(devices, "_amx_runs", lambda: False)
    assert amp_dtype("auto", cpu) == torch.float32
    with pytest.raises(ValueError, match="amp=bf16: this machine stops at AMX instructions"):
        amp_dtype("bf16", cpu)
    with pytest.raises(ValueError, match="dtype=bfloat16: this machine stops at AMX"):
        Timing(dtype=torch.bfloat16)


def test_no_option_is_both_the_models_and_the_recipes():
    assert not set(Recipe.model_fields) & set(ModelConfig.model_fields)


@pytest.mark.parametrize("name", ["muon", "adam", "adamw", "sgd"])
def test_an_overflow_in_half_precision_is_skipped(name):
    model = torch.nn.Linear(32, 32)
    optimizer = make_optimizer(create_recipe(optimizer=name), model)
    scaler = torch.amp.GradScaler("cpu")
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((1, 32), math.inf)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 32)).square().sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.weight, before)
    assert torch.isfinite(model.weight).all()


def test_an_attentions_own_weights_are_not_orthogonalised():
    for spec in ("linformer:k=5", "softmax:dwc=5", "performer-theta-mlp:m=4"):
        model = create_model(dim=24, depth=1, heads=2, image_size=16, attention=spec)
        groups = make_optimizer(create_recipe(), model).param_groups
        found = {id(p) for group in groups if group.get("orthogonal") for p in group["params"]}
        assert len(found) == 5  # embedding, qkv, proj and two of the MLP
        assert not found & {id(p) for p in model.blocks[0].attn.attention.parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.6])
def test_rounds_on_the_gram_matrix_are_as_exact_as_those_on_the_matrix(decay: float) -> None:
    """Also where singular values differ by many orders of magnitude, as those of a gradient do."""
    u, _, v = torch.linalg.svd(torch.randn(37, 101, dtype=torch.float64), full_matrices=False)
    matrix = (u * decay ** torch.arange(37)) @ v
    a, b, c = QUINTIC

    def plain(x: torch.Tensor) -> torch.Tensor:
        x = x / torch.linalg.vector_norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    exact, single = plain(matrix), matrix.float()
    mine = float((orthogonalised(single[None])[0] - exact).abs().max())
    assert mine < 4 * float((plain(single) - exact).abs().max()) + 1e-6
    assert float((orthogonalised(matrix[None])[0] - exact).abs().max()) < 1e-6  # lengths have an epsilon
