"""What the records of measured figures show of the claims."""

from __future__ import annotations

import math
import re
import statistics
from itertools import pairwise

import torch

from linvit.attention import CONTROL, create_attention
from linvit.measure.angle import ratio
from linvit.records import Record
from linvit.studies.hypotheses import Part
from linvit.studies.results import Results


def positive_features(results: Results) -> Part:
    near = [ratio(math.pi - gap, 1.0) for gap in (0.1, 0.01, 0.001)]
    return Part.certain(
        "the ratio of squared errors grows without bound as the angle nears π (closed form, length 1)",
        f"{', '.join(f'{value:.2g}' for value in near)} at 0.1, 0.01 and 0.001 before π; "
        f"{ratio(math.pi / 2, 1.0):.2f} at π/2, where trigonometric features are the better ones",
        all(b > 10 * a for a, b in pairwise(near)),
    )


NEARLY = 1.25  # times the time of attention that returns v: "nearly as fast", stated before it was measured


def near_the_limit(records: list[Record]) -> tuple[bool | None, str]:
    """Steps of whole models with most layers take at most NEARLY times those of identity, by the quartiles of their
    rounds."""
    steps: dict[int, dict[str, tuple[float, float, float]]] = {}  # layers → attention → median and quartiles
    for record in records:
        variant = re.fullmatch(r"(.+), (\d+) layers", str(record.tags.get("variant")))
        if record.metric == "train_step" and variant and record.value:
            low, high = (float(record.tags.get(end) or record.value) for end in ("low", "high"))
            steps.setdefault(int(variant[2]), {})[variant[1]] = record.value, low, high
    layers = max(steps)
    limit, softmax = (steps[layers].pop(name) for name in ("identity", "softmax"))
    others = steps[layers]
    holds = True if all(high < NEARLY * limit[1] for _, _, high in others.values()) else None
    holds = False if any(low > NEARLY * limit[2] for _, low, _ in others.values()) else holds
    times = ", ".join(f"{name} {step[0] / limit[0]:.2f}×" for name, step in others.items())
    return holds, (
        f"a step of {layers} layers takes {times}, softmax {softmax[0] / limit[0]:.2f}× the time of one that returns v"
    )


def lower_errors(records: list[Record], family: str, other: str) -> tuple[bool | None, str]:
    """At each σ and number of features, the mean squared error of the output over draws."""
    found: dict[tuple[float, int], dict[str, float]] = {}
    uniform: dict[float, float] = {}
    for r in records:
        if r.metric != "output_mse" or r.value is None:
            continue
        sigma, features = float(r.tags["sigma"] or 0), int(r.tags.get("features") or 0)
        if r.tags.get("family") == CONTROL:
            uniform[sigma] = r.value
        found.setdefault((sigma, features), {})[str(r.tags.get("family"))] = r.value
    pairs = {at: (one[family], one[other]) for at, one in found.items() if {family, other} <= set(one)}
    if not pairs:
        return None, "no such errors were measured"
    lower = [at for at, (a, b) in pairs.items() if a < b]
    beaten = [at for at, (a, _) in pairs.items() if a > uniform.get(at[0], math.inf)]
    return len(lower) == len(pairs), (
        f"lower in {len(lower)} of {len(pairs)} settings of σ and the number of features; in {len(beaten)} larger than "
        "that of uniform attention"
    )


def unbiased(results: Results) -> Part:
    """φ(x)·φ(y) over many draws against e^{x·y}, along ±(1, …, 1)/√d, where missing signs would show."""
    d, x = 8, torch.full((1, 8), 8**-0.5, dtype=torch.float64)
    found = []
    for y in (x, -x):
        values = []
        for draw in range(1500):
            kernel = create_attention("performer-exp:m=16", heads=1, head_dim=d, tokens=4, seed=draw).double().kernel
            values.append(float((kernel.phi(x) * kernel.phi(y)).sum().detach()))  # type: ignore[operator, union-attr]
        error = statistics.stdev(values) / math.sqrt(len(values))
        found.append((statistics.fmean(values) - math.exp(float((x * y).sum()))) / error)
    text = " and ".join(f"{z:+.1f}" for z in found)
    return Part.certain(
        "the mean of φ(x)·φ(y) over 1,500 draws is e^{x·y}, with orthogonal features",
        f"differs by {text} standard errors, for y = x and y = −x of length 1",
        all(abs(z) < 4 for z in found),
    )


def grows_with_depth(records: list[Record]) -> tuple[bool, str]:
    errors: dict[str, dict[int, float]] = {}
    for record in records:
        if record.metric == "depth_error" and record.value is not None and record.tags["attention"] != CONTROL:
            errors.setdefault(str(record.tags["attention"]), {})[int(record.tags["layer"] or 0)] = record.value
    ends = {name: (layers[min(layers)], layers[max(layers)]) for name, layers in errors.items()}
    found = ", ".join(f"{name} {first:.2f} → {last:.2f}" for name, (first, last) in ends.items())
    control = [r.value for r in records if r.metric == "depth_error" and r.tags["attention"] == CONTROL and r.value]
    if control:
        found += f"; uniform {control[0]:.2f} → {control[-1]:.2f}"
    return all(last > first for first, last in ends.values()), f"from the first layer to the last: {found}"


def failures(records: list[Record]) -> dict[str, int]:
    """spec of the literal attention → outputs that are not finite, at all scales."""
    found: dict[str, int] = {}
    for record in records:
        if record.metric == "non_finite":
            spec = str(record.tags["attention"])
            found[spec] = found.get(spec, 0) + int(record.value or 0)
    return found


def elu_is_unstable(records: list[Record]) -> tuple[bool, str]:
    found = failures(records)
    elu, relu = ({s: n for s, n in found.items() if f"f={f}," in s} for f in ("elu", "relu"))
    of = {name: sum(n for s, n in found.items() if f"f={name}," in s) for name in ("gelu", "elu", "relu")}
    text = ", ".join(f"{name.upper()} {count:,}" for name, count in of.items())
    return all(elu.values()) and bool(elu) and not any(relu.values()), f"outputs that are not finite: {text}"


def clamp_is_enough(records: list[Record]) -> tuple[bool, str]:
    found = {spec: n for spec, n in failures(records).items() if "f=exp" in spec}
    kinds = {(clamp, half): 0 for clamp in (True, False) for half in (False, True)}
    for spec, count in found.items():
        kinds["clamp=" in spec, "half=" in spec] += count
    words = {True: "clamped", False: "not clamped"}, {False: "float32", True: "float16"}
    text = ", ".join(f"{words[0][clamp]} in {words[1][half]} {n:,}" for (clamp, half), n in kinds.items())
    holds = not (kinds[True, False] or kinds[True, True]) and kinds[False, False] + kinds[False, True] > 0
    return holds, f"outputs that are not finite: {text}"
