"""Other packages' attentions: what they say that they compute is what they compute, or they are refused."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from linvit.attention import build_attention
from linvit.measure import peers
from linvit.measure.error import Draws, random_errors
from linvit.measure.gate import wrong
from linvit.measure.peers import PEERS, PerformerPytorch, create, installed, peer_specs
from linvit.randomness import generator
from linvit.registry import Spec
from linvit.site import Site

SITE = Site(3, 7, 19)
OPTIONS = [
    ("performer-pytorch", {"m": 11}),
    ("performer-pytorch", {"m": 11, "kernel": "relu"}),
    ("performer-pytorch", {"kernel": "efficient"}),
    ("linformer", {"k": 5}),
    ("transformers", {"implementation": "eager"}),
    ("transformers", {"implementation": "sdpa"}),
]
MODULES = {"performer-pytorch": "performer_pytorch", "linformer": "linformer", "transformers": "transformers"}


def spec_of(name: str, options: dict) -> str:
    if importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"{name} is not installed")
    return str(Spec(f"{name}=={installed(PEERS[name])}", options))


def inputs(dtype=torch.float32):
    return torch.randn(4, 2, 3, 19, 7, generator=generator("peers"), dtype=dtype)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_peer_is_what_its_package_says(name, options):
    peer = create(spec_of(name, options), SITE)
    assert wrong(peer, *inputs()) is None
    q, k, v, _ = inputs(torch.float64)
    peer = peer.double()
    torch.testing.assert_close(peer.attention_matrix(q, k), peer.definition(q, k), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(peer(q, k, v), peer.definition(q, k) @ v, rtol=1e-5, atol=1e-6)


def test_a_peer_that_is_wrong_is_refused_and_said_so(monkeypatch):
    """Consistently wrong: in float64 it is the same."""
    spec = spec_of("performer-pytorch", {"m": 11})
    attend = PerformerPytorch.attend
    monkeypatch.setattr(PerformerPytorch, "attend", lambda self, q, k, v, mask: attend(self, q, k, v, mask) * 1.01)
    assert "its definition" in (wrong(create(spec, SITE), *inputs()) or "")
    records = list(random_errors([spec], SITE, sigmas=[1.0], draws=Draws(1)))
    told = [r for r in records if r.tags["attention"] == spec]
    assert [(r.metric, r.value) for r in told] == [("attention_error", None)]
    assert "its definition" in str(told[0].tags["refused"])


def test_the_same_features_give_what_stabilizer_reference_gives():
    peer = create(spec_of("performer-pytorch", {"m": 11}), SITE)
    ours = build_attention("performer-exp:m=11,stabilizer=reference", SITE)
    ours.kernel.omega.rows.copy_(peer.module.projection_matrix)
    q, k, v, _ = inputs()
    torch.testing.assert_close(ours(q, k, v), peer(q, k, v), rtol=1e-4, atol=1e-5)


def test_random_features_are_those_of_the_seed():
    spec = spec_of("performer-pytorch", {"m": 11})
    before = torch.random.get_rng_state()
    first, again, other = (create(spec, replace(SITE, seed=seed)).module.projection_matrix for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_peers_stand_beside_what_they_can_compute_with_as_many_features():
    for name in MODULES:
        spec_of(name, {})
    ours = [
        "performer-hyp:m=8",
        "performer-exp:m=5",
        "performer-trig:m=3",
        "performer-relu:m=9",
        "performer-gelu",
        "linformer:k=4",
        "efficient",
        "uniform",
    ]
    found = peer_specs("performer-pytorch,linformer", ours, SITE)
    assert [text.partition("==")[2].partition(":")[2] for text in found] == [
        "m=16",
        "m=5",
        "m=6",
        "m=9,kernel=relu",
        "kernel=efficient",
        "k=4",
    ]
    (given,) = peer_specs("performer-pytorch:m=3", ours, SITE)
    assert given.endswith(":m=3")
    (alone,) = peer_specs("linformer", ["uniform"], SITE)
    assert alone == f"linformer=={installed(PEERS['linformer'])}"


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("performer-pytorch,linformer", ["performer-pytorch", "linformer"]),
        ("performer-pytorch:m=16,kernel=relu,linformer:k=8", ["performer-pytorch:m=16,kernel=relu", "linformer:k=8"]),
    ],
)
def test_several_peers_in_one_text(text, specs):
    assert peers._listed(text) == specs


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ("performer-torch", "unknown peer 'performer-torch'.*performer-pytorch"),
        ("performer-pytorch:n=3", "has no option 'n'"),
        ("performer-pytorch:m=0", "m=0 must be"),
        ("linformer:k=", "is not key=value"),
    ],
)
def test_bad_peers(peer, words):
    spec_of("performer-pytorch", {})
    with pytest.raises(ValueError, match=words):
        peer_specs(peer, ["uniform"], SITE)


def test_another_version_than_the_one_here():
    spec_of("linformer", {})
    with pytest.raises(ValueError, match=r"linformer .* is installed here, not 0\.0\.1"):
        create("linformer==0.0.1:k=3", SITE)


@pytest.mark.parametrize(("name", "extra"), [("performer-pytorch", "peers"), ("transformers", "hf")])
def test_a_package_that_is_not_there(monkeypatch, name, extra):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(peers, "version", missing)
    with pytest.raises(ValueError, match=rf"{name} is not installed: pip install 'linvit\[{extra}\]'"):
        peer_specs(name, ["softmax"], SITE)
