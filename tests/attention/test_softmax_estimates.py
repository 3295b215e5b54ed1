"""Performers as estimates of softmax: T13 (averages converge), T17 (θ starts at hyp), T18 (centring is exact)."""

from __future__ import annotations

import math

import pytest
import torch
from cases import build, inputs

from linvit.attention.performer import Performer
from linvit.kernels import create_kernel
from linvit.kernels.base import masked_mean

ESTIMATES = ["exp", "hyp", "oprf", "trig"]


def softmax(q, k):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)


def variation(a, b) -> float:
    """Total variation between rows, on average."""
    return float((a - b).abs().sum(-1).mean() / 2)


@pytest.mark.parametrize("name", ESTIMATES)
def test_averaged_numerator_and_denominator_converge_to_softmax(name):
    """T13: never the average of normalised outputs, whose ratio bias does not vanish."""
    q, k, v = inputs(sigma=0.5)
    kernel = create_kernel(f"{name}:m=11", head_dim=7).double()
    top, bottom = [], []
    for step in range(400):
        kernel.redraw(step)
        scores = kernel.phi(q * 7**-0.25) @ kernel.phi(k * 7**-0.25).transpose(2, 3)
        top.append(scores @ v)
        bottom.append(scores.sum(-1, keepdim=True))
    expected = softmax(q, k) @ v

    def error(count: int) -> tuple[float, float]:
        t, b = torch.stack(top[:count]), torch.stack(bottom[:count])
        ratio = t.mean(0) / b.mean(0)
        spread = (t - ratio * b).std(0) / b.mean(0) / math.sqrt(count)  # of a ratio of means
        return float((ratio - expected).square().mean().sqrt()), float(spread.square().mean().sqrt())

    found, predicted = error(400)
    assert found < 2 * predicted
    assert error(25)[0] > 2 * found


@pytest.mark.parametrize("name", [*ESTIMATES, "theta"])
def test_many_features_approach_softmax(name):
    """T17: error ∝ m^-½, so 64 times the features leave an eighth of it."""
    q, k, _ = inputs(sigma=0.7)
    few, many = (build(f"performer-{name}:m={m}").attention_matrix(q, k) for m in (101, 64 * 101))
    near, far = variation(many.detach(), softmax(q, k)), variation(few.detach(), softmax(q, k))
    assert near < far / 4
    assert near < variation(torch.full_like(few, 1 / 13), softmax(q, k)) / 4


@pytest.mark.parametrize("causal", [False, True])
def test_theta_starts_exactly_at_hyp(causal):
    """T17: the same Ω, gate 0, τ 1 and α ½."""
    theta, hyp = (build(f"performer-{name}:m=11", causal=causal, seed=3, layer=5) for name in ("theta", "hyp"))
    assert isinstance(theta, Performer)
    assert isinstance(hyp, Performer)
    assert torch.equal(theta.kernel.omega, hyp.kernel.omega.rows)  # type: ignore[arg-type, union-attr]
    q, k, v = inputs(dtype=torch.float32)
    for sigma in (1, 3):
        # what is left is the rounding of sums in another order, on exponents of size σ²√d
        tolerance = 20 * sigma**2 * math.sqrt(7) * torch.finfo(torch.float32).eps
        torch.testing.assert_close(theta(sigma * q, k, v), hyp(sigma * q, k, v), rtol=0, atol=tolerance)
    x = q * 7**-0.25
    torch.testing.assert_close(theta.kernel.phi(x), hyp.kernel.phi(x), rtol=1e-5, atol=1e-6)


def test_theta_leaves_hyp_when_its_parameters_move():
    theta = build("performer-theta:m=11")
    q, k, v = inputs(dtype=torch.float32)
    start = theta(q, k, v)
    for name, parameter in theta.named_parameters():
        with torch.no_grad():
            before = parameter.clone()
            if "mlp" in name:
                dict(theta.named_parameters())["kernel.gate"].fill_(0.5)
            parameter.add_(0.3)
            assert not torch.allclose(theta(q, k, v), start, atol=1e-4), name
            parameter.copy_(before)
            dict(theta.named_parameters())["kernel.gate"].zero_()
    assert torch.equal(theta(q, k, v), start)


def test_centring_leaves_softmax_unchanged():
    """T18: e^{x·y} = e^{(x−x̄)·(y−ȳ)}·e^{x̄·y}·[a constant of the row]."""
    q, k, _ = inputs(tokens=29)
    q, k = q + torch.linspace(-1, 2, 7), k + torch.linspace(2, -1, 7)
    x, y = (z.flatten(0, 1) * 7**-0.25 for z in (q, k))
    x_mean, y_mean = masked_mean(x, None), masked_mean(y, None)
    centred = (x - x_mean) @ (y - y_mean).transpose(1, 2) + (y @ x_mean.transpose(1, 2)).transpose(1, 2)
    difference = torch.softmax(centred, -1) - torch.softmax(x @ y.transpose(1, 2), -1)
    assert difference.abs().max() < 1e-6

    for name in ("exp", "hyp", "oprf", "theta"):  # the same through the attention, where features are many
        attention = build(f"performer-{name}:m=8009,center=true,projection=iid", tokens=29)
        error = variation(attention.attention_matrix(q, k).detach(), softmax(q, k))
        assert error < 0.1


@pytest.mark.parametrize("name", ["exp", "hyp", "oprf"])
def test_centring_errs_less_when_the_means_are_far(name):
    """T18: total variation to softmax, averaged over draws."""
    q, k, _ = inputs(tokens=29, sigma=0.7)
    q, k = q + 1, k + 1
    found = {}
    for center in ("true", "false"):
        attention = build(f"performer-{name}:m=61,center={center}", tokens=29)
        errors = []
        for step in range(20):
            attention.redraw(step)
            errors.append(variation(attention.attention_matrix(q, k), softmax(q, k)))
        found[center] = torch.tensor(errors)
    gap = found["false"] - found["true"]
    assert gap.mean() > 3.3 * gap.std() / math.sqrt(20)


def test_defaults_of_centring():
    for name, centred in (("exp", False), ("hyp", True), ("smreg", False), ("oprf", False), ("theta", True)):
        for causal in (False, True):
            attention = build(f"performer-{name}:m=11", causal=causal)
            assert isinstance(attention, Performer)
            assert attention.kernel.center is (centred and not causal)  # type: ignore[union-attr]


def test_oprf_measures_its_spread_without_padding():
    q, k, _ = inputs()
    attention = build("performer-oprf:m=11")
    assert isinstance(attention, Performer)
    mask = torch.arange(13) < torch.tensor([[11], [7]])
    x, y = (z[1, :, :7] * 7**-0.25 for z in (q, k))
    s = (x[:, :, None] + y[:, None]).square().sum(-1).mean((1, 2))
    phi = [torch.stack([attention.kernel.phi(z[h], s[h]) for h in range(3)]) for z in (x, y)]  # type: ignore[call-arg]
    scores = phi[0] @ phi[1].transpose(1, 2)
    expected = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(attention.attention_matrix(q, k, mask)[1, :, :7, :7], expected, rtol=1e-9, atol=1e-9)


def test_shrinking_is_softmax_of_shorter_centred_queries_and_keys():
    """s² = ln(1 + F/4) / mean‖x_i + y_j‖², of the features that there are, on what centring leaves alone."""
    q, k, _ = inputs(sigma=1.3)
    q, k = q + 0.9, k - 0.4
    attention = build("performer-hyp:m=3,shrink=true")
    x, y = (t * 7**-0.25 for t in (q, k))
    a, b = x - x.mean(2, keepdim=True), y - y.mean(2, keepdim=True)
    pairs = (a[..., :, None, :] + b[..., None, :, :]).square().sum(-1).mean((2, 3), keepdim=True)
    s = (math.log(1 + 6 / 4) / pairs).sqrt()
    assert float(s.max()) < 1
    plain = build("performer-hyp:m=3,center=false,scale=1")
    found = plain.kernel.phi(s * a) @ plain.kernel.phi(s * b).transpose(2, 3)  # type: ignore[union-attr]
    found = found * (x.mean(2, keepdim=True) @ y.transpose(2, 3)).exp()
    torch.testing.assert_close(attention.attention_matrix(q, k), found / found.sum(-1, keepdim=True))


def test_shrinking_fades_with_enough_features():
    q, k, _ = inputs(sigma=0.5)
    shrunk, plain = (build(f"performer-hyp:m=997{end}").attention_matrix(q, k) for end in (",shrink=true", ""))
    torch.testing.assert_close(shrunk, plain, rtol=0, atol=0)


def test_shrinking_comes_nearer_to_sharp_softmax():
    q, k, _ = inputs(sigma=1.5)
    q, k = q + 0.5, k + 0.5
    shrunk, plain = (build(f"performer-hyp:m=8{end}").attention_matrix(q, k) for end in (",shrink=true", ""))
    assert variation(shrunk, softmax(q, k)) < 0.9 * variation(plain, softmax(q, k))


@pytest.mark.parametrize(
    "spec",
    [
        "performer-exp:shrink=true",
        "performer-hyp:shrink=true,center=false",
        "performer-hyp:shrink=true,stabilizer=reference",
    ],
)
def test_shrinking_needs_centring(spec):
    with pytest.raises(ValueError, match="shrink=true"):
        build(spec)
    with pytest.raises(ValueError, match="shrink=true"):
        build("performer-hyp:shrink=true", causal=True)


def test_shrinking_has_its_gradients_and_sees_no_masked_token():
    attention = build("performer-hyp:m=3,shrink=true").double()
    q, k, v = (2 * x for x in inputs(sigma=1.3))
    few = [x[:1, :, :5].detach().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(attention, few, fast_mode=True)
    mask = (torch.arange(q.shape[2]) < 9).expand(len(q), -1)
    torch.testing.assert_close(attention(q, k, v, mask)[:, :, :9], attention(*(x[:, :, :9] for x in (q, k, v))))
