"""Local softmax against softmax with every pair too far apart masked."""

from __future__ import annotations

import pytest
import torch
from cases import build, inputs, rounding
from torch import Tensor

from linvit.attention import attention_cost
from linvit.attention.window import Window

HEADS, HEAD_DIM = 3, 7


def window(size: int | None, grid: tuple[int, int], prefix: int = 0) -> Window:
    tokens = prefix + grid[0] * grid[1]
    spec = "window" if size is None else f"window:size={size}"
    attention = build(spec, tokens=tokens, grid=grid, prefix=prefix)
    assert isinstance(attention, Window)
    return attention


def oracle(q: Tensor, k: Tensor, v: Tensor, size: int, grid: tuple[int, int], prefix: int, mask=None) -> Tensor:
    """By the definition: row and column of each pair, one softmax over all tokens."""
    n = q.shape[2]
    place = torch.arange(n - prefix)
    rows, columns = place // grid[1], place % grid[1]
    near = torch.ones(n, n, dtype=torch.bool)
    far = [(x[:, None] - x[None]).abs() > size // 2 for x in (rows, columns)]
    near[prefix:, prefix:] = ~(far[0] | far[1])
    keep = near if mask is None else near & mask[:, None, None]
    scores = (q @ k.transpose(2, 3) / HEAD_DIM**0.5).masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


# one tile; tiles down only; tiles both ways with a rest in the last; a window of one token; tiles that fit exactly
PLACES = [(7, (5, 11), 1), (3, (11, 5), 2), (3, (13, 17), 1), (5, (29, 31), 0), (1, (7, 5), 1), (3, (8, 12), 2)]


@pytest.mark.parametrize(("size", "grid", "prefix"), PLACES)
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_gradients_equal_the_definition(size, grid, prefix, masked):
    attention = window(size, grid, prefix)
    tokens = attention.site.tokens
    mask = None
    if masked:  # with a corner where no key is left
        mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) < 0.7
        mask[1, : prefix + 2 * grid[1]] = False
    fast, slow = inputs(tokens=tokens, grad=True), inputs(tokens=tokens, grad=True)
    weights = inputs(5, tokens=tokens)[2]
    zeroed = slow if mask is None else [x.masked_fill(~mask[:, None, :, None], 0.0) for x in slow]
    out, expected = attention(*fast, mask=mask), oracle(*zeroed, size, grid, prefix, mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), x) for y, x in ((out, fast), (expected, slow)))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("grid", [(5, 3), (1, 23), (11, 13)])
def test_a_window_over_the_whole_grid_is_softmax(grid):
    tokens = 1 + grid[0] * grid[1]
    attention, tensors = window(2 * max(grid) - 1, grid, 1), inputs(tokens=tokens)
    softmax = build("softmax", tokens=tokens)
    assert (attention(*tensors) - softmax(*tensors)).abs().max() <= rounding(softmax, *tensors)


def test_far_tokens_do_not_matter_and_near_ones_do():
    attention, (q, k, _) = window(3, (13, 17), 1), inputs(tokens=1 + 13 * 17)
    reach = attention.attention_matrix(q, k)[0, 0, 1 + 6 * 17 + 8].nonzero().flatten().tolist()
    assert reach == [0, *(1 + row * 17 + column for row in (5, 6, 7) for column in (7, 8, 9))]


def test_memory_and_work_grow_with_the_tokens_alone():
    small, large = window(7, (32, 32)), window(7, (64, 64))
    assert small.near.shape == large.near.shape == (64, 196)
    few, many = (attention_cost("window", one.site).macs for one in (small, large))
    assert many == 4 * few
    assert not small.state_dict()


def test_the_default_is_seven_or_what_covers_the_grid():
    assert [window(None, grid).size for grid in ((11, 13), (2, 3), (1, 1))] == [7, 5, 1]


@pytest.mark.parametrize(
    ("size", "site", "message"),
    [
        (4, {"grid": (3, 4), "prefix": 1}, "size=4 must be an odd size"),
        (-3, {"grid": (3, 4), "prefix": 1}, "size=-3 must be an odd size"),
        (9, {"grid": (3, 4), "prefix": 1}, "size=9 is more than 7, which covers all of grid=.3, 4."),
        (3, {"grid": None}, "give grid="),
        (3, {"grid": (3, 4), "prefix": 1, "causal": True}, "window cannot be causal: a neighbourhood"),
    ],
)
def test_impossible_windows(size, site, message):
    with pytest.raises(ValueError, match=message):
        build(f"window:size={size}", **site)


def test_more_tokens_than_the_grid_has():
    with pytest.raises(ValueError, match=r"17 tokens do not fit grid=\(3, 5\) with prefix=1"):
        window(3, (3, 5), 1)(*inputs(tokens=17))
