"""Checks and measurements on a real GPU. Each function returns its part of the report."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from cases import defaults, site_of

import linvit
from linvit.attention import BASELINE, accelerated, build_attention, fused
from linvit.devices import settings
from linvit.measure.gate import wrong
from linvit.measure.race import quartiles, race
from linvit.measure.speed import attention_speed
from linvit.measure.timing import Timing
from linvit.records import versions
from linvit.site import Site
from linvit.study.advising import advise

CUDA = torch.device("cuda")
DTYPES = torch.float32, torch.bfloat16, torch.float16
LINEAR = "performer-relu:m=64"
PATHS = "triton", "compiled", "eager"  # of linear attention
LENGTHS = 197, 401, 577, 785, 1025, 1601, 2305, 4097


def device() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(CUDA)
    name = torch.cuda.get_device_name(CUDA)
    return {"name": name, "capability": f"{major}.{minor}", "settings": settings(CUDA), "versions": versions()}


def wrong_attentions(dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, str]:
    """Attentions whose output or gradients differ from float64 by more than rounding explains, with the reason."""
    found = {}
    for spec in defaults():
        attention = build_attention(spec, site_of(spec)).to(CUDA)
        site = attention.site
        shape = 4, 2, site.heads, site.tokens, site.head_dim
        given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for dtype in dtypes:
            if why := wrong(attention, *given.to(CUDA, dtype)):
                found[f"{spec} in {dtype}"] = why
    return found


def wrong_paths(paths: Sequence[str] = PATHS, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, str]:
    """Likewise for each path of linear attention, not only the fastest one. q, k and v are slices of one projection, as
    in a model."""
    found, source = {}, torch.Generator().manual_seed(0)
    projection = torch.randn(2, 131, 4, 3, 64, generator=source)
    for kind, dtype, path in itertools.product(fused.FUSED, dtypes, paths):
        attention = build_attention(f"performer-{kind}:m=64", Site(3, 64, 131)).to(CUDA)
        given = [x.transpose(1, 2) for x in projection.to(CUDA, dtype).unbind(2)]
        accelerated.FAILURES.clear()
        with forced(path), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                why = wrong(attention, *given)
            except Exception as error:  # part of the report, whatever it is
                why = first_line(error)
        if accelerated.FAILURES:  # eager operations were used instead
            why = first_line(accelerated.FAILURES[0])
        if why:
            found[f"{path} {kind} in {dtype}"] = why
    return found


def first_line(error: Exception) -> str:
    text, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def forced(path: str) -> Iterator[None]:
    """Linear attention takes this path, except in float64."""
    with contextlib.ExitStack() as patches:

        def wins(prepared: Any, v: torch.Tensor, needs_gradient: bool) -> bool:
            return path == "triton" and v.dtype != torch.float64

        patches.enter_context(mock.patch.object(accelerated, "_triton_wins", wins))
        if path == "eager":
            eager = mock.Mock(return_value=accelerated._checkpointed)
            patches.enter_context(mock.patch.object(accelerated, "_fastest", eager))
        yield


def softmax_against_sdpa(tokens: Sequence[int] = (197, 577, 1025, 4097), batch: int = 16) -> dict[int, list[float]]:
    """Quartiles of the time of softmax attention over that of the bare call of PyTorch, forward, in bfloat16."""
    found = {}
    for n in tokens:
        q, k, v = torch.randn(3, batch, 6, n, 64, dtype=torch.bfloat16).to(CUDA)
        attention = build_attention(BASELINE, Site(6, 64, n))
        calls = {
            "ours": torch.no_grad()(lambda q=q, k=k, v=v, attention=attention: attention(q, k, v)),
            "bare": torch.no_grad()(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v)),
        }
        found[n] = quartiles(race(calls, device=CUDA, rounds=10).ratios("ours", "bare"))
    return found


def break_even(
    folder: Path, tokens: Sequence[int] = LENGTHS, batch: int = 32, model_tokens: int = 576
) -> dict[str, Any]:
    """Tokens from which a Performer's layers are faster than softmax's: measured length by length, and by `advise`."""
    timing = Timing(batch=batch, rounds=10, device=CUDA, dtype=torch.bfloat16)
    records = list(attention_speed([LINEAR], Site(6, 64, 1), tokens=tokens, timing=timing))
    swept = {
        str(record.tags["mode"]): record.value
        for record in records
        if record.metric == "break_even_tokens" and record.tags["attention"] == LINEAR
    }
    ratios = [
        {"tokens": record.tags["tokens"], "mode": record.tags["mode"], "ratio": record.value}
        for record in records
        if record.metric == f"attention_vs_{BASELINE}" and record.tags["attention"] == LINEAR
    ]
    advice = advise(model_tokens, device="cuda", attentions=(LINEAR,), cache=folder)
    advised = {
        f"{record.tags['mode']}, batch {record.tags['batch']}": record.value
        for record in advice.records
        if record.metric == "break_even_tokens" and record.tags.get("attention") == LINEAR
    }
    return {"swept": swept, "ratios": ratios, "advised": advised, "launch_bound": advice.model.launch_bound}


def synchronisations(folder: Path, attention: str, amp: str, steps: int = 20) -> dict[str, Any]:
    """Of one short training: its accuracy, and the warnings of PyTorch that something waited for the device."""
    options: dict[str, Any] = {"steps": steps, "batch_size": 32, "dim": 64, "depth": 2, "heads": 2, "mlp_dim": 128}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            images = "synthetic:images=640,size=32"
            run = linvit.train(images, attention=attention, amp=amp, device="cuda", out=folder, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(warning.message) for warning in caught)
    found = run.find("test_accuracy") or run.find("val_accuracy")
    return {"accuracy": found and found.value, "waits": waits, "steps": steps}
