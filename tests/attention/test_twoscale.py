"""`twoscale` against its definition, written out query by query in float64; and the limits in which it is softmax."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import build, inputs
from torch import Tensor

from linvit.attention import attention_cost
from linvit.attention.base import softmax_attention
from linvit.attention.twoscale import Cut, TwoScale

HEAD_DIM = cases.SITE["head_dim"]
# spec, grid: cells that divide the grid and cells that do not, one band at an edge and several
CASES = [
    ("twoscale:cell=2,far=tangent", (6, 4)),
    ("twoscale:cell=2,far=tangent", (7, 5)),
    ("twoscale:cell=3,far=tangent", (7, 8)),
    ("twoscale:cell=2,far=bands", (7, 5)),
    ("twoscale:cell=2,reach=1", (9, 6)),
    ("twoscale:cell=2,reach=1,far=bands", (9, 6)),
    ("twoscale:cell=3,far=mean", (8, 7)),
    ("twoscale:cell=2,reach=1,far=mean", (10, 3)),
]
every_case = pytest.mark.parametrize(("spec", "grid"), CASES)


def made(spec: str, grid: tuple[int, int], prefix: int = 1) -> TwoScale:
    attention = build(spec, tokens=prefix + grid[0] * grid[1], grid=grid, prefix=prefix)
    assert isinstance(attention, TwoScale)
    return attention


def data(attention: TwoScale, **options) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(tokens=attention.site.tokens, **options)


def holes(tokens: int) -> Tensor:
    mask = torch.rand(cases.BATCH, tokens, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[1, : tokens // 2] = False  # whole cells without a key
    mask[:, -1] = True
    return mask


def summary(keys: Tensor, values: Tensor, queries: Tensor, tangent: bool) -> tuple[Tensor, Tensor, Tensor]:
    """k_c, v_c and b_c of a cell; queries are those of the whole image, divided by √d."""
    mean = queries.mean(0) if tangent else torch.zeros(HEAD_DIM).double()
    scores = keys @ mean
    w = scores.softmax(0)
    key = w @ keys
    variance = w @ (keys - key).square()
    second = (queries.var(0, correction=0) * variance).sum() / 2 if tangent else 0.0
    return key, w @ values, scores.logsumexp(0) - mean @ key + second


def rows_seen(row: int, rows: int, side: int, reach: int) -> range:
    """Rows that the queries of a row see exactly: whole bands; at an edge, as many as elsewhere."""
    bands = -(-rows // side)
    first = min(max(row // side - reach, 0), bands - 2 * reach - 1)
    return range(first * side, min((first + 2 * reach + 1) * side, rows))


def oracle(attention: TwoScale, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """One sequence of one head."""
    (rows, columns, side, reach), first = attention.cut, attention.site.prefix
    q = q / HEAD_DIM**0.5
    place = {first + i: divmod(i, columns) for i in range(rows * columns)}
    cells: dict[tuple[int, int], list[int]] = {}
    for j, (row, column) in place.items():
        if keep[j]:
            cells.setdefault((row // side, column // side), []).append(j)
    bands: dict[int, list[int]] = {}  # band → its kept queries
    for i, (row, _) in place.items():
        bands.setdefault(row // side, []).extend([i] * bool(keep[i]))
    none = torch.zeros(1, HEAD_DIM).double()
    if attention.far != "bands":
        every = [i for own in bands.values() for i in own]
        bands = dict.fromkeys(bands, every)
    far = {
        band: {c: summary(k[at], v[at], q[own] if own else none, attention.far != "mean") for c, at in cells.items()}
        for band, own in bands.items()
    }
    out = []
    for i in range(len(q)):
        seen = rows_seen(place[i][0], rows, side, reach) if i >= first else range(rows)
        exact = [j for j in range(len(q)) if keep[j] and (j < first or place[j][0] in seen)]
        scores, values = [k[exact] @ q[i]], [v[exact]]
        for (down, _), (key, value, bias) in far[place[i][0] // side].items() if i >= first else ():
            if down * side not in seen:
                scores.append((key @ q[i] + bias)[None])
                values.append(value[None])
        out.append(torch.cat(scores).softmax(0) @ torch.cat(values))
    return torch.stack(out)


@pytest.mark.parametrize("masked", [False, True])
@every_case
def test_outputs_and_gradients_equal_the_definition(spec, grid, masked):
    attention = made(spec, grid)
    q, k, v = data(attention, grad=True)
    mask = holes(q.shape[2]) if masked else None
    keep = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if mask is None else mask
    out = attention(q, k, v, mask)
    expected = torch.stack(
        [
            torch.stack([oracle(attention, q[b, h], k[b, h], v[b, h], keep[b]) for h in range(q.shape[1])])
            for b in range(q.shape[0])
        ]
    )
    shown = keep[:, None, :, None]  # outputs of dropped queries do not matter
    torch.testing.assert_close(out * shown, expected * shown, rtol=0, atol=1e-12)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * shown
    for ours, theirs in zip(
        *(torch.autograd.grad(y, (q, k, v), weight, retain_graph=True) for y in (out, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@every_case
def test_rows_sum_to_one_and_equal_shifts_of_keys_change_nothing(spec, grid):
    attention = made(spec, grid)
    q, k, v = data(attention)
    matrix = attention.attention_matrix(q, k)
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), rtol=0, atol=1e-12)
    assert (matrix >= 0).all()
    shift = torch.randn(HEAD_DIM, dtype=torch.float64)
    torch.testing.assert_close(attention(q, k + shift, v), attention(q, k, v), rtol=0, atol=1e-12)
    torch.testing.assert_close(attention(q, k, v), matrix @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["twoscale:cell=1", "twoscale:cell=6", "twoscale:cell=2,reach=1", "twoscale"])
def test_it_is_softmax_where_no_cell_is_summarised(spec):
    attention = made(spec, (6, 5))
    assert attention.is_softmax
    q, k, v = data(attention)
    assert torch.equal(attention(q, k, v), softmax_attention(q, k, v, None))
    assert attention_cost(spec, attention.site).macs == attention_cost("softmax", attention.site).macs


@pytest.mark.parametrize("far", ["tangent", "bands", "mean"])
def test_it_is_softmax_where_the_keys_of_a_cell_are_equal(far):
    attention = made(f"twoscale:cell=2,far={far}", (6, 4))
    q, k, v = data(attention)
    place = torch.arange(24)
    cell = 1 + (place // 8 * 2) * 4 + (place % 4) // 2 * 2  # the first token of each
    k = torch.cat([k[:, :, :1], k[:, :, cell]], 2)
    torch.testing.assert_close(attention(q, k, v), softmax_attention(q, k, v, None), rtol=0, atol=1e-12)


def test_the_tangent_is_nearer_to_softmax_than_the_mean():
    """With queries whose mean is not zero, as trained ones have; and nearer with one for each band, if these differ."""
    error = {}
    for far in ("bands", "tangent", "mean"):
        attention = made(f"twoscale:cell=2,far={far}", (8, 8))
        q, k, v = data(attention)
        rows = torch.cat([torch.zeros(1), torch.arange(64) // 16]).double()[:, None]
        q, k = q + rows, k * 0.5
        error[far] = (attention(q, k, v) - softmax_attention(q, k, v, None)).square().mean()
    assert error["bands"] < 0.5 * error["tangent"]
    assert error["tangent"] < 0.5 * error["mean"]


def test_summaries_are_those_of_bands_where_cells_save_no_time():
    assert [made("twoscale:cell=2", (n, n)).far for n in (8, 14, 28)] == ["bands", "bands", "tangent"]
    assert made("twoscale:cell=2,far=tangent", (8, 8)).far == "tangent"
    assert not made("twoscale:cell=2", (8, 8)).is_softmax
    costs = [attention_cost(f"twoscale:cell=2{far}", made("twoscale", (8, 8)).site) for far in ("", ",far=bands")]
    assert costs[0] == costs[1]


def test_cells_are_chosen_from_the_grid():
    """Softmax on a small grid; larger cells on a larger one, by which keys grow more slowly than tokens."""
    cuts = [made("twoscale", (n, n)).cut for n in (8, 14, 28, 42, 64, 128)]
    assert [cut.exact for cut in cuts] == [True, True, False, False, False, False]
    shares = [cut.keys() / (cut.rows * cut.columns) for cut in cuts[1:]]
    assert shares == sorted(shares, reverse=True)
    assert cuts[-1].keys() < 128**2 / 12
    assert Cut(14, 14, 2, 0).keys() == 2 * 14 + 6 * 7
    assert Cut(28, 28, 4, 0).keys() == 4 * 28 + 6 * 7
    assert Cut(7, 5, 3, 0).keys() == pytest.approx((6 * (3 * 5 + 2 * 2) + 1 * (1 * 5 + 2 * 2)) / 7)


def test_bad_options_are_one_line():
    for options, text in {"cell=0": "cell=0", "reach=-1": "reach=-1", "cell=2.5": "cell=2.5"}.items():
        with pytest.raises(ValueError, match=text):
            build(f"twoscale:{options}", tokens=17, grid=(4, 4), prefix=1)
    with pytest.raises(ValueError, match="give grid="):
        build("twoscale", tokens=17, grid=None)
