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
from linvit.report.comparison import LEVEL
from linvit.studies.hypotheses import Part
from linvit.studies.results import Results
from linvit.studies.samples import Sample, above


def positive_features(results: Results) -> Part:
    near = [ratio(math.pi - gap, 1.0) for gap in (0.1, 0.01, 0.001)]
    return Part.certain(
        "the ratio of squared errors grows without bound as the angle nears π (closed form, length 1)",
        f"{', '.join(f'{value:,.0f}' for value in near)} at 0.1, 0.01 and 0.001 before π; "
        f"{ratio(math.pi / 2, 1.0):.2f} at π/2, where trigonometric features are the better ones",
        all(b > 10 * a for a, b in pairwise(near)),
    )


NEARLY = 1.25  # times the time of attention that returns v: how "nearly as fast" is read here


def near_the_limit(records: list[Record]) -> tuple[bool | None, str]:
    """Steps of whole models with most layers take at most NEARLY times those of identity, by the quartiles of their
    rounds."""
    steps: dict[int, dict[str, tuple[float, float, float]]] = {}  # layers → attention → median and quartiles
    for record in records:
        variant = re.fullmatch(r"(.+), (\d+) layers", str(record.tags.get("variant")))
        if record.metric == "train_step" and variant and record.value:
            low, high = (float(record.tags.get(end) or record.value) for end in ("low", "high"))
            steps.setdefault(int(variant[2]), {})[variant[1]] = record.value, low, high
    if any(record.tags.get("busy") for record in records):
        return None, "measured on a busy core, which decides nothing"
    layers = max(steps)
    limit, softmax = (steps[layers].pop(name) for name in ("identity", "softmax"))
    others = steps[layers]
    holds = True if all(high < NEARLY * limit[1] for _, _, high in others.values()) else None
    holds = False if any(low > NEARLY * limit[2] for _, low, _ in others.values()) else holds
    times = ", ".join(f"{name} {step[0] / limit[0]:.2f}×" for name, step in others.items())
    return holds, (
        f"a step of {layers} layers takes {times}, softmax {softmax[0] / limit[0]:.2f}× the time of one that returns v"
    )


def lower_errors(records: list[Record], family: str, other: str) -> tuple[tuple[float, float] | None, str]:
    """At each σ and number of features, the mean squared error of the output over draws, by Welch's t-test: lower in
    all settings, or larger in one."""
    found: dict[tuple[float, int], dict[str, Record]] = {}
    uniform: dict[float, float] = {}
    for r in records:
        if r.metric != "output_mse" or r.value is None:
            continue
        sigma, features = float(r.tags["sigma"] or 0), int(r.tags.get("features") or 0)
        if r.tags.get("family") == CONTROL:
            uniform[sigma] = r.value
        found.setdefault((sigma, features), {})[str(r.tags.get("family"))] = r
    pairs = {at: (one[family], one[other]) for at, one in found.items() if {family, other} <= set(one)}
    if not pairs:
        return None, "no such errors were measured"
    p = [(above(_sample(b), _sample(a)), above(_sample(a), _sample(b))) for a, b in pairs.values()]
    lower, larger = (sum(each[side] <= LEVEL for each in p) for side in (0, 1))
    beaten = sum((a.value or 0) > uniform.get(at[0], math.inf) for at, (a, _) in pairs.items())
    holds, fails = max(each[0] for each in p), min(1.0, len(p) * min(each[1] for each in p))
    return (holds, fails), (
        f"of {len(p)} settings of σ and the number of features significantly lower in {lower}, larger in {larger}; in "
        f"{beaten} larger than that of uniform attention"
    )


def _sample(record: Record) -> Sample:
    """Of the draws of features and inputs; without their deviation nothing is significant."""
    return Sample(record.value or 0.0, float(record.tags.get("std") or math.inf), max(2, record.n))


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
        f"differs by {text} standard errors, for y = x and y = −x of length 1".replace("-", "−"),
        all(abs(z) < 4 for z in found),
    )


def grows_with_depth(records: list[Record]) -> tuple[bool | None, str]:
    """By the extremes over draws: in the last layer all above those of the first, or one estimate's all below."""
    errors: dict[str, dict[int, Record]] = {}
    for record in records:
        if record.metric == "depth_error" and record.value is not None and record.tags["attention"] != CONTROL:
            errors.setdefault(str(record.tags["attention"]), {})[int(record.tags["layer"] or 0)] = record
    ends = {name: (layers[min(layers)], layers[max(layers)]) for name, layers in errors.items()}
    found = ", ".join(f"{name} {first.value:.2f} → {last.value:.2f}" for name, (first, last) in ends.items())
    control = [r.value for r in records if r.metric == "depth_error" and r.tags["attention"] == CONTROL and r.value]
    if control:
        found += f"; uniform {control[0]:.2f} → {control[-1]:.2f}"
    spans = [(_extremes(first), _extremes(last)) for first, last in ends.values()]
    holds = True if all(last[0] > first[1] for first, last in spans) else None
    holds = False if any(last[1] < first[0] for first, last in spans) else holds
    return holds, f"from the first layer to the last: {found}"


def _extremes(record: Record) -> tuple[float, float]:
    low, high = (float(record.tags.get(end) or record.value or 0) for end in ("low", "high"))
    return low, high


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
    names = {"gelu": "GELU", "elu": "ELU", "relu": "ReLU"}
    text = ", ".join(
        f"{name} {sum(n for s, n in found.items() if f'f={f},' in s):,} of "
        f"{sum(r.n for r in records if f'f={f},' in str(r.tags['attention'])):,}"
        for f, name in names.items()
    )
    return all(elu.values()) and bool(elu) and not any(relu.values()), f"outputs that are not finite: {text}"


def clamp_is_enough(records: list[Record]) -> tuple[bool, str]:
    """In float32: the report does not say that this model was trained in half precision."""
    found = {spec: n for spec, n in failures(records).items() if "f=exp" in spec}
    kinds = {(clamp, half): 0 for clamp in (True, False) for half in (False, True)}
    for spec, count in found.items():
        kinds["clamp=" in spec, "half=" in spec] += count
    words = {True: "clamped", False: "not clamped"}, {False: "float32", True: "float16"}
    text = ", ".join(f"{words[0][clamp]} in {words[1][half]} {n:,}" for (clamp, half), n in kinds.items())
    return not kinds[True, False] and kinds[False, False] > 0, f"outputs that are not finite: {text}"
