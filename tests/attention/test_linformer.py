"""T15: Linformer's projections."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from cases import build, inputs

from linvit.attention import regridded
from linvit.attention.linformer import Linformer

HEADS, TOKENS = 3, 13


def linformer(options: str = "k=5", **site: object) -> Linformer:
    attention = build(f"linformer:{options}", **site)
    assert isinstance(attention, Linformer)
    return attention


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value", "layerwise"])
def test_identity_projections_are_softmax(sharing):
    q, k, v = inputs()
    attention = linformer(f"k=13,init=identity,sharing={sharing}")
    torch.testing.assert_close(attention(q, k, v), build("softmax")(q, k, v), rtol=1e-12, atol=1e-12)


MATRICES = {"none": 2 * HEADS, "headwise": 2, "key-value": 1, "layerwise": 1}


@pytest.mark.parametrize(("sharing", "matrices"), MATRICES.items())
@pytest.mark.parametrize("k", [5, 11])
def test_parameters_of_each_sharing(sharing, matrices, k):
    """2hkN, 2kN, kN, and kN in total."""
    assert sum(p.numel() for p in linformer(f"k={k},sharing={sharing}").parameters()) == matrices * k * TOKENS


@pytest.mark.parametrize("kind", ["learned", "pool", "conv"])
def test_by_definition(kind):
    q, k, v = inputs()
    for sharing in ("headwise", "layerwise") if kind == "pool" else ("none", "headwise", "key-value", "layerwise"):
        attention = linformer(f"k=5,kind={kind},sharing={sharing}")
        matrix = attention.matrix().double().expand(-1, HEADS, -1, -1)
        e, f = matrix[0], matrix[-1]
        keys, values = torch.einsum("hkn,bhnd->bhkd", e, k), torch.einsum("hkn,bhnd->bhkd", f, v)
        expected = torch.softmax(q @ keys.transpose(2, 3) / math.sqrt(7), -1) @ values
        torch.testing.assert_close(attention(q, k, v), expected, rtol=1e-11, atol=1e-11)


def test_pooled_projections_average_neighbours():
    matrix = linformer("k=5,kind=pool").matrix()[0, 0]
    assert not list(linformer("k=5,kind=pool").parameters())
    torch.testing.assert_close(matrix.sum(1), torch.ones(5))
    for row in matrix:
        members = row.nonzero().squeeze(1)
        assert torch.equal(members, torch.arange(int(members[0]), int(members[-1]) + 1))
        assert len(row[members].unique()) == 1
    assert torch.equal((matrix > 0).sum(0), torch.ones(TOKENS, dtype=torch.long))
    assert torch.equal(linformer("k=5,init=pool").matrix()[0, 0], matrix)


def test_strided_convolution_is_one_filter():
    attention = linformer("k=5,kind=conv")
    assert attention.projection.shape[-1] == 3
    matrix = attention.matrix()[0, 0]
    for row in range(4):
        torch.testing.assert_close(matrix[row, 3 * row : 3 * row + 3], attention.projection[0, 0, 0])
        assert matrix[row].count_nonzero() == 3


def test_normal_initialisation_has_variance_one_over_k():
    values = linformer("k=89,sharing=none", tokens=601).matrix()
    assert abs(float(values.detach().std()) * math.sqrt(89) - 1) < 4 / math.sqrt(2 * values.numel())


def test_shared_projections_are_stored_once():
    layers = torch.nn.ModuleList(linformer("k=5,sharing=layerwise", layer=layer) for layer in range(3))
    for layer in layers[1:]:
        layer.share(layers[0])  # type: ignore[arg-type]
    assert sum(p.numel() for p in layers.parameters()) == 5 * TOKENS
    assert list(layers.state_dict()) == ["0.projection"]
    q, k, v = inputs()
    with torch.no_grad():
        layers[0].projection.mul_(2)  # type: ignore[union-attr]
    outs = [layer(q, k, v) for layer in layers]
    assert torch.equal(outs[0], outs[2])
    outs[2].sum().backward()
    assert layers[0].projection.grad.any()  # type: ignore[union-attr]
    again = copy.deepcopy(layers)
    with torch.no_grad():
        again[0].projection.zero_()  # type: ignore[operator, union-attr]
    assert not again[1](q, k, v).any()
    assert torch.equal(layers[1](q, k, v), outs[1])


def test_shared_pools_are_stored_once():
    layers = torch.nn.ModuleList(linformer("k=5,sharing=layerwise,kind=pool", layer=layer) for layer in range(2))
    layers[1].share(layers[0])  # type: ignore[arg-type]
    assert list(layers.state_dict()) == ["0.projection"]
    q, k, v = inputs()
    assert torch.equal(layers[0](q, k, v), layers[1](q, k, v))


def test_layers_that_share_start_alike_and_others_do_not():
    first, second = (linformer("k=5,sharing=layerwise", layer=layer).matrix() for layer in (0, 1))
    assert torch.equal(first, second)
    first, second = (linformer("k=5", layer=layer).matrix() for layer in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("mine", "owner"), [("headwise", "layerwise"), ("layerwise", "headwise")])
def test_only_layerwise_shares(mine, owner):
    with pytest.raises(ValueError, match="sharing=layerwise"):
        linformer(f"k=5,sharing={mine}").share(linformer(f"k=5,sharing={owner}"))
    with pytest.raises(ValueError, match="same k"):
        linformer("k=5,sharing=layerwise").share(linformer("k=7,sharing=layerwise"))


def test_sharing_in_a_circle_is_refused():
    first, second = (linformer("k=5,sharing=layerwise") for _ in range(2))
    with pytest.raises(ValueError, match="share"):
        first.share(first)
    second.share(first)
    with pytest.raises(ValueError, match="share"):
        first.share(second)


def test_fewer_tokens_use_the_first_columns():
    q, k, v = inputs()
    attention = linformer()
    short = attention(q[:, :, :11], k[:, :, :11], v[:, :, :11])
    padded = [torch.cat([x[:, :, :11], torch.zeros_like(x[:, :, 11:])], 2) for x in (q, k, v)]
    torch.testing.assert_close(short, attention(*padded)[:, :, :11], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"17 tokens.*made for 13.*regridded"):
        attention(*inputs(tokens=17))


def moved(options: str, old: Linformer, grid: tuple[int, int]) -> Linformer:
    """The same attention on another grid."""
    tokens = old.site.prefix + grid[0] * grid[1]
    new = linformer(options, grid=grid, prefix=old.site.prefix, tokens=tokens)
    new.load_state_dict(regridded(f"linformer:{options}", old.state_dict(), old.site, new.site))
    return new


@pytest.mark.parametrize("kind", ["learned", "pool"])
@pytest.mark.parametrize("grid", [(7, 11), (2, 3), (3, 5)])
def test_another_grid(kind, grid):
    options = f"k=5,kind={kind}"
    old = linformer(options, grid=(3, 5), prefix=2, tokens=17)
    new = moved(options, old, grid)
    tokens = 2 + grid[0] * grid[1]
    assert new.matrix().shape == (2, 1, 5, tokens)
    assert torch.equal(new.matrix()[..., :2], old.matrix()[..., :2])
    if grid == (3, 5):
        torch.testing.assert_close(new.matrix(), old.matrix())
    q, k, v = inputs(tokens=tokens)
    assert new(q, k, v).shape == v.shape


def test_another_grid_keeps_what_constant_images_become():
    """A row's response to a constant image is its sum: kept exactly for a constant row, and nearly for a smooth one."""
    old = linformer("k=5", grid=(11, 13), prefix=0, tokens=143)
    with torch.no_grad():
        old.projection.copy_(torch.linspace(1, 2, 5)[:, None].expand_as(old.projection))
    torch.testing.assert_close(moved("k=5", old, (5, 3)).matrix().sum(-1), old.matrix().sum(-1))


def test_a_much_smaller_grid_loses_no_token():
    """Every old token has a say in the new projection: each is in reach of the interpolation."""
    old = linformer("k=143,init=identity", grid=(11, 13), tokens=143)
    new = regridded("linformer:k=143", old.state_dict(), old.site, replace(old.site, tokens=6, grid=(3, 2)))
    assert (new["projection"][0, 0].abs().sum(1) > 0).all()


def test_another_grid_takes_the_convolution_along_and_leaves_shared_projections_to_their_owner():
    old = linformer("k=5,dwc=3", grid=(5, 7), tokens=35)
    assert torch.equal(moved("k=5,dwc=3", old, (3, 5)).dwc.weight, old.dwc.weight)
    owner, other = (linformer("k=5,sharing=layerwise", grid=(5, 7), tokens=35) for _ in range(2))
    other.share(owner)
    new = replace(old.site, tokens=15, grid=(3, 5))
    assert regridded("linformer:k=5,sharing=layerwise", other.state_dict(), other.site, new) == {}


def test_causal_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"linformer.*causal.*later"):
        linformer(causal=True)


@pytest.mark.parametrize("k", [0, -1, 14])
def test_impossible_k(k):
    with pytest.raises(ValueError, match=f"k={k}"):
        linformer(f"k={k}")
