"""A GPU made of CPU memory, for a CPU build of PyTorch: tensors on "cuda" with real numbers and real autograd.

Needs the hooks of `hooks.py`, which must be loaded before torch. Inside `with gpu() as device:` there is one CUDA
device. A tensor on it wraps a CPU tensor, and every operation on it goes through `_run`, which

- raises on mixed devices, as CUDA does, and, with `float64=False`, on float64, as MPS does;
- records each synchronisation (`.item()`, boolean masks, copies that block) with the line of linvit that caused it;
- counts kernel launches: operations that are neither views nor allocations.

It shows neither speed nor memory. Processes started inside do not have the device.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.cuda.amp.common
import torch.nn.functional as F
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map_only

# Neither a kernel nor a copy.
FREE = frozenset(
    [
        "view",
        "_unsafe_view",
        "as_strided",
        "expand",
        "permute",
        "transpose",
        "t",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "unbind",
        "split",
        "split_with_sizes",
        "unfold",
        "_reshape_alias",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "lift_fresh",
        "is_same_size",
        "diagonal",
        "view_as_real",
        "squeeze_",
        "unsqueeze_",
        "resize_",
        "set_",
        "transpose_",
    ]
)
# The host waits for the device.
WAITS = frozenset(["_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim"])
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_"])
# May have arguments on both devices.
MIXES = INDEXING | {"copy_", "_to_copy", "set_", "_foreach_copy_"}


@dataclass
class Device:
    """What has happened on it."""

    float64: bool = True
    waits: Counter[str] = field(default_factory=Counter)  # "what at file:line" → times
    launches: Counter[str] = field(default_factory=Counter)  # operation → kernels
    sdpa_dtypes: Counter[torch.dtype] = field(default_factory=Counter)  # of the inputs of fused softmax attention

    def reset(self) -> None:
        for counter in (self.waits, self.launches, self.sdpa_dtypes):
            counter.clear()

    def wait(self, what: str) -> None:
        self.waits[f"{what} at {_line()}"] += 1


current: Device | None = None


def _line() -> str:
    """The innermost line of linvit that is being run."""
    for frame in reversed(traceback.extract_stack()):
        if "/linvit/" in frame.filename and "/tests/" not in frame.filename:
            return f"{frame.filename.split('/linvit/')[-1]}:{frame.lineno}"
    return "?"


class CudaTensor(torch.Tensor):
    """A CPU tensor that says it is on cuda:0."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("cuda", 0),
        )
        made.inner = inner
        return made

    def __repr__(self, **_) -> str:
        return f"CudaTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self):
        _device().wait("tolist")
        return self.inner.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            with torch.no_grad():
                copied = CudaTensor(self.inner.clone())
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            else:
                copied.requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]


def _device() -> Device:
    assert current is not None, "a tensor of the fake GPU is used outside of `with gpu():`"
    return current


def _inner(tree):
    return tree_map_only(CudaTensor, lambda x: x.inner, tree)


def _wrapped(tree):
    return tree_map_only(torch.Tensor, lambda x: x if isinstance(x, CudaTensor) else CudaTensor(x), tree)


def _on_gpu(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _run(func, args, kwargs):
    name = func._schema.name.removeprefix("aten::")
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return _decomposed(func, args, kwargs)  # inference mode does not take them apart
    if name == "_to_copy":
        return _moved(func, *args, **kwargs)
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, CudaTensor)]
    here = [x for x in tensors if not isinstance(x, CudaTensor) and x.dim()]
    target = kwargs.get("device")
    if not (_on_gpu(target) if target is not None else ours):
        return func(*args, **kwargs)
    _look(name, args, kwargs, ours, here)
    plain = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if _on_gpu(target):
        plain["device"] = torch.device("cpu")
    if func is torch.ops.aten.bmm.dtype:  # a product of halves summed in float32, which CPUs have not
        func, (*args, dtype) = torch.ops.aten.bmm.default, args
        args = [CudaTensor(x.inner.to(dtype)) for x in args]
    out = func(*_inner(args), **_inner(plain))
    _count(name, out, _kernels(name, args))
    if name == "_local_scalar_dense":
        return out
    if func._schema.is_mutable or name.endswith("_"):
        return return_and_correct_aliasing(func, args, kwargs, _wrapped(out))
    if name in FREE and torch.is_inference_mode_enabled() and ours and not ours[0].is_inference():
        with torch.inference_mode(False):  # a view of an ordinary tensor is one
            return _wrapped(out)
    return _wrapped(out)


def _decomposed(func, args, kwargs):
    with _Everywhere():
        out = func.decompose(*args, **kwargs)
    aliased = isinstance(out, CudaTensor) and torch.is_inference_mode_enabled() and any(out is x for x in args)
    return CudaTensor(out.inner) if aliased else out


def _moved(func, source, **kwargs):
    """`.to(…)`: between the two memories, or between dtypes."""
    device, target = _device(), kwargs.get("device")
    was_ours = isinstance(source, CudaTensor)
    goes = _on_gpu(target) if target is not None else was_ours
    options = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    out = func(source.inner if was_ours else source, **options)
    if not was_ours and not goes:
        return out
    if was_ours and not goes:
        device.wait("copy to the host")
        return out
    if not was_ours and not (kwargs.get("non_blocking") and getattr(source, "pinned_by_test", False)):
        device.wait("blocking copy to the device")
    _count("_to_copy", out)
    return CudaTensor(out)


def _look(name, args, kwargs, ours, here) -> None:
    """Record or refuse what a GPU waits for or refuses."""
    device = _device()
    if name == "copy_" and isinstance(args[0], CudaTensor) != isinstance(args[1], CudaTensor):
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not (non_blocking and isinstance(args[0], CudaTensor) and getattr(args[1], "pinned_by_test", False)):
            device.wait("copy_ between host and device")
    elif here and ours and name not in MIXES:
        shapes = [tuple(x.shape) for x in here]
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} got cuda:0 and cpu {shapes}")
    elif here and ours and name in INDEXING:
        device.wait(f"{name} with indices on the host")
    if name in WAITS:
        device.wait(name)
    if name in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        device.wait(f"{name} with a boolean mask")


def _kernels(name, args) -> int:
    """One for a list of tensors, if the lists agree in dtypes and layouts; else CUDA takes one tensor after another."""
    lists = [xs for xs in args if isinstance(xs, (list, tuple)) and xs and isinstance(xs[0], torch.Tensor)]
    if not name.startswith("_foreach_") or all(
        len({(x.dtype, x.shape, x.stride()) for x in same}) == 1 for same in zip(*lists, strict=True)
    ):
        return 1
    return len(lists[0])


def _count(name, out, kernels: int = 1) -> None:
    device = _device()
    if not device.float64 and any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_iter(out)):
        raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({name} at {_line()})")
    if name not in FREE:
        device.launches[name] += kernels


class _Everywhere(TorchDispatchMode):
    """Also sees operations that have no tensor on the device yet, such as torch.empty(…, device="cuda")."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _pin(self: torch.Tensor, *_, **__) -> torch.Tensor:
    made = self.clone()
    made.pinned_by_test = True
    return made


class _Fused(torch.autograd.Function):
    """Fused softmax attention: one kernel forward and one backward, as CUDA has."""

    @staticmethod
    def forward(ctx, q, k, v, mask, is_causal, scale):
        ctx.inputs = [x.inner.detach().requires_grad_() for x in (q, k, v)]
        _count("scaled_dot_product_attention", q.inner)
        with torch.enable_grad():
            ctx.out = sdpa(*ctx.inputs, attn_mask=_inner(mask), is_causal=is_causal, scale=scale)
        return CudaTensor(ctx.out.detach())

    @staticmethod
    def backward(ctx, gradient):
        _count("scaled_dot_product_attention_backward", gradient.inner)
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.out, ctx.inputs, gradient.inner)
        return *(CudaTensor(x) for x in found), None, None, None


sdpa = F.scaled_dot_product_attention


def _fused(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """`sdpa`, on this device noting the dtype in which it computes."""
    if not isinstance(query, CudaTensor):
        return sdpa(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    assert query.dtype == key.dtype == value.dtype, "CUDA's kernels take one dtype"
    _device().sdpa_dtypes[query.dtype] += 1
    return _Fused.apply(query, key, value, attn_mask, is_causal, scale)


GIB = 1 << 30
CUDA = {  # what linvit, and PyTorch's own Python code, ask of torch.cuda
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "_is_in_bad_fork": lambda: False,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device_count": lambda: 1,
    "get_device_name": lambda device=None: "fake GPU",
    "get_device_capability": lambda device=None: (8, 0),
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda device=None: (40 * GIB, 40 * GIB),
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 1,
    "reset_peak_memory_stats": lambda device=None: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device="cuda": None,
}


@contextlib.contextmanager
def gpu(float64: bool = True) -> Iterator[Device]:
    """Inside, there is one CUDA device. float64=False: it has no float64, as Apple's have not."""
    global current
    current = device = Device(float64)
    patches = [(torch.cuda, name, value) for name, value in CUDA.items()]
    patches += [
        (torch.cuda, "synchronize", lambda device=None: _device().wait("torch.cuda.synchronize")),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (F, "scaled_dot_product_attention", _fused),
        (torch.Tensor, "pin_memory", _pin),
        (torch.Tensor, "is_pinned", lambda self, *_: getattr(self, "pinned_by_test", False)),
    ]
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in patches]
    lifted, overwrite = torch._C._only_lift_cpu_tensors(), torch.__future__.get_overwrite_module_params_on_conversion()
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        torch._C._set_only_lift_cpu_tensors(True)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.to("cuda")` makes new parameters
        _foreach_utils._foreach_supported_types.append(CudaTensor)
        with _Everywhere():
            yield device
    finally:
        _foreach_utils._foreach_supported_types.remove(CudaTensor)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        torch._C._set_only_lift_cpu_tensors(lifted)
        for owner, name, value in before:
            setattr(owner, name, value)
        current = None
