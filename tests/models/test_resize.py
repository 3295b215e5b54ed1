"""Weights for images of another size."""

from __future__ import annotations

import pytest
import torch

from linvit.attention import create_attention, regridded
from linvit.models import VisionTransformer, create_model
from linvit.models.resize import resized

OPTIONS = {
    "image_size": 15,
    "patch_size": 3,
    "channels": 1,
    "dim": 14,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 11,
    "classes": 3,
    "attention": "linformer:k=7",
    "prefix": 2,
}


def test_positions_are_a_picture_and_prefix_tokens_stay():
    model = create_model(**OPTIONS)
    with torch.no_grad():  # a plane is what bicubic interpolation reproduces, away from the borders
        rows, columns = torch.meshgrid(torch.arange(5.0), torch.arange(5.0), indexing="ij")
        model.position[0, 2:, 0] = (2 * rows + columns).flatten()
    tensors = model.state_dict()
    found = resized(tensors, model.config, 21)
    assert found["position"].shape == (1, 2 + 49, 14)
    assert torch.equal(found["position"][:, :2], tensors["position"][:, :2])
    at = (torch.arange(7) + 0.5) * 5 / 7 - 0.5  # the centres of the new cells among the old ones
    wanted = 2 * at[:, None] + at
    torch.testing.assert_close(found["position"][0, 2:, 0].view(7, 7)[2:5, 2:5], wanted[2:5, 2:5], atol=1e-3, rtol=0)
    larger = VisionTransformer(model.config.model_copy(update={"image_size": 21}))
    larger.load_state_dict(found)
    assert larger(torch.randn(2, 1, 21, 21)).isfinite().all()


def test_projections_of_tokens_are_those_that_the_attention_makes():
    model = create_model(**OPTIONS)
    found = resized(model.state_dict(), model.config, 21)["blocks.1.attn.attention.projection"]
    old = model.attentions()[1]
    new = model.config.model_copy(update={"image_size": 21}).site
    wanted = regridded("linformer:k=7", old.state_dict(), old.site, new)["projection"]
    assert torch.equal(found, wanted)
    assert found.shape[-1] == 2 + 49


def test_filters_of_tokens_are_stretched():
    """25 taps for 123 tokens and 5 keys become 11 for the 51 of a smaller image; a constant filter keeps its sum."""
    options = OPTIONS | {"image_size": 33, "attention": "softmax@1+linformer:k=5,kind=conv@1"}
    large = create_model(**options)
    key = "blocks.1.attn.attention.projection"
    assert large.state_dict()[key].shape[-1] == -(-123 // 5)
    with torch.no_grad():
        large.state_dict()[key][0] = 0.5
    found = resized(large.state_dict(), large.config, 21)
    torch.testing.assert_close(found[key][0], torch.full((1, 1, 11), 0.5 * 25 / 11))
    smaller = VisionTransformer(large.config.model_copy(update={"image_size": 21}))
    smaller.load_state_dict(found)
    assert smaller(torch.randn(2, 1, 21, 21)).isfinite().all()


def bilinear(old: int, new: int) -> torch.Tensor:
    """B (new², old²), column by column: what resizing makes of each pixel."""
    pixels = torch.eye(old**2, dtype=torch.float64).view(-1, 1, old, old)
    resize = torch.nn.functional.interpolate
    return resize(pixels, (new, new), mode="bilinear", align_corners=False, antialias=True).view(old**2, -1).T


@pytest.mark.parametrize("new", [5, 2, 1])
def test_filters_of_patches_are_resized_by_pseudo_inverse(new):
    """w' has the least ‖Bᵀw' − w‖; a patch in the range of Bᵀ, all of them where patches grow, keeps its tokens."""
    model = create_model(**OPTIONS | {"channels": 3, "image_size": 30, "attention": "softmax"})
    found = resized(model.state_dict(), model.config, 30, new)
    other = VisionTransformer(model.config.model_copy(update={"patch_size": new}))
    other.load_state_dict(found)
    b, w = bilinear(3, new), model.stem.embed.weight.detach().double().view(14, 3, 9)
    wanted = torch.linalg.lstsq(b.T.expand(14, 3, -1, -1), w[..., None], driver="gelsd").solution[..., 0]
    torch.testing.assert_close(found["stem.embed.weight"].double().view(14, 3, -1), wanted, atol=1e-6, rtol=1e-5)
    x = torch.randn(7, 3, 9, dtype=torch.float64) if new > 3 else torch.randn(7, 3, new**2, dtype=torch.float64) @ b
    tokens = [torch.einsum("ncp,dcp->nd", part, v) for part, v in ((x, w), (x @ b.T, wanted))]
    torch.testing.assert_close(tokens[1], tokens[0])
    assert found["position"].shape == (1, 2 + (30 // new) ** 2, 14)
    assert other(torch.randn(2, 3, 30, 30)).isfinite().all()


def test_a_stem_without_patches_has_no_other_ones():
    model = create_model(image_size=8, channels=1, stem="conv", trunk=(5, 7), pools=1, dim=12, depth=1, heads=2)
    with pytest.raises(ValueError, match="patch_size=2 has no effect: stem=conv has no patches"):
        resized(model.state_dict(), model.config, 8, 2)


def test_the_same_size_is_the_same_bits():
    model = create_model(**OPTIONS)
    found = resized(model.state_dict(), model.config, 15)
    assert all(torch.equal(value, found[key]) for key, value in model.state_dict().items())
    assert all(found[key] is value for key, value in resized(found, model.config, 15, 3).items())


def test_a_stem_whose_weights_have_a_size_is_refused():
    model = create_model(image_size=8, channels=1, stem="pixel", dim=12, depth=1, heads=2, classes=3)
    with pytest.raises(ValueError, match="stem=pixel has weights for image_size=8 alone, not 12"):
        resized(model.state_dict(), model.config, 12)


@pytest.mark.parametrize(("k", "prefix"), [(7, 2), (9, 0), (2, 2), (17, 2)])
def test_pooled_projections_average_blocks_of_the_grid(k, prefix):
    attention = create_attention(
        f"linformer:k={k}", heads=2, head_dim=7, tokens=15 + prefix, grid=(3, 5), prefix=prefix
    )
    attention.pool()
    matrix = attention.matrix()[0, 0]
    torch.testing.assert_close(matrix.sum(1), torch.ones(k))
    assert ((matrix > 0).sum(0) == 1).all()  # each token is in one average
    assert (matrix[0, :prefix] > 0).all() or k == 15 + prefix  # prefix tokens belong to the first
    if k == 15 + prefix:  # as many keys as tokens: softmax itself
        q, k_, v = torch.randn(3, 2, 2, k, 7)
        exact = create_attention("softmax", heads=2, head_dim=7, tokens=k)
        torch.testing.assert_close(attention(q, k_, v), exact(q, k_, v))
