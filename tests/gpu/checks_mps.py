"""A GPU without float64, as Apple's: what needs it is computed on the host."""

from __future__ import annotations

import pytest
import torch
from cases import defaults
from fakegpu import gpu

import linvit
from linvit.attention.multihead import MultiHead
from linvit.models.sampling import sample

IMAGES = "synthetic:images=72,size=8"
TINY = {"stem": "patch", "patch_size": 2, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "batch_size": 16}
PIXELS = {"task": "next-pixel", "stem": "next-pixel", "patch_size": None, "label_smoothing": 0.0}


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("softmax", {"mixup": 0.2}),
        ("performer-exp:m=11", {"cutmix": 1.0, "redraw": 1}),
        ("performer-theta:m=11", {"randaugment": 1}),
        ("performer-relu:m=11", PIXELS),
    ],
)
def check_training(tmp_path, attention, options):
    with gpu(float64=False):
        trained = linvit.train(
            IMAGES, attention=attention, device="cuda", out=tmp_path, start="scratch", steps=3, **TINY | options
        )
        assert not trained.diverged
        if options is PIXELS:
            model = linvit.load(tmp_path).to("cuda")
            assert sample(model, 2).dtype == torch.uint8


OPTIONS = ("rope=2d", "cpe=3", "dwc=3", "gate=silu", "qk_norm=all", "qk_norm=head,exact_cls=true")
SWITCHED = ["softmax:rope=2d", *(f"performer-relu:{option}" for option in OPTIONS)]


@pytest.mark.parametrize("spec", [*defaults(), *SWITCHED])
def check_attention(spec):
    """Built on the host, then moved; one step forward and back, and a new draw of what is random."""
    with gpu(float64=False):
        layer = MultiHead(24, heads=3, tokens=13, attention=spec, grid=(3, 4), prefix=1).to("cuda")
        x = torch.randn(2, 13, 24).to("cuda").requires_grad_()
        layer(x).sum().backward()
        layer.attention.redraw(1)
        with torch.no_grad():
            assert layer(x).isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()
