"""Kernels of Performers. A new one is one file here or in LINVIT_PLUGINS."""

from linvit.kernels.base import KERNELS, FeatureMap, Features, Prepared, Size, register
from linvit.registry import Spec, check_options, parse, signature_options
from linvit.site import Site

__all__ = ["KERNELS", "FeatureMap", "Features", "Prepared", "Site", "Size", "create_kernel", "register"]


def create_kernel(
    spec: str | Spec, *, head_dim: int, layer: int = 0, seed: int = 0, causal: bool = False
) -> FeatureMap:
    """The feature map that a spec such as `exp:m=128` names, for vectors of head_dim."""
    spec = parse(spec)
    kernel = KERNELS[spec.name]
    options = check_options(spec, signature_options(kernel))
    return kernel(Site(1, head_dim, 1, layer=layer, seed=seed, causal=causal), **options)  # type: ignore[call-arg]
