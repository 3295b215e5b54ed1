"""`linvit evaluate`: the accuracy of a trained model."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from linvit.cli._output import print_json, print_table, working
from linvit.requests import EvaluateRequest

if TYPE_CHECKING:
    from linvit.measure.accuracy import Evaluation
    from linvit.measure.likelihood import Likelihood
    from linvit.measure.several import Several
    from linvit.training.evaluate import Evaluated


def run(request: EvaluateRequest) -> None:
    from linvit.measure.likelihood import Likelihood
    from linvit.measure.several import Several
    from linvit.training.evaluate import evaluate_folder

    if request.summary:
        print_layers(request.model, request.as_json)
        return
    with working(request) as display:
        done = evaluate_folder(
            request.model,
            request.data,
            split=request.split,
            device=request.device,
            data_root=request.data_root,
            limit=request.limit,
            skip_bad=request.skip_bad,
            progress=display.progress,
        )
    if isinstance(done.result, Several):
        print_several(request, done, done.result)
    elif isinstance(done.result, Likelihood):
        print_likelihood(request, done, done.result)
    else:
        print_accuracy(request, done, done.result)


def _facts(done: Evaluated, n: int) -> dict[str, Any]:
    same = None if done.changed is None else not done.changed
    return {"model": str(done.folder), "data": done.data, "split": done.split, "n": n, "same_data": same}


def print_likelihood(request: EvaluateRequest, done: Evaluated, result: Likelihood) -> None:
    if request.as_json:
        scores = {"bits_per_dim": result.bits_per_dim, "loss": result.loss}
        print_json(_facts(done, len(result.bits)) | scores)
    elif request.quiet:
        print(f"{result.bits_per_dim:.4f}")
    else:
        images = f"the {len(result.bits):,} {done.split} images of {done.data}"
        print(f"{result.bits_per_dim:.4f} bits per dimension of {images}: {done.folder}")


def print_several(request: EvaluateRequest, done: Evaluated, result: Several) -> None:
    score, n = result.mean_average_precision, len(result.labels)
    names = ("class", "average_precision", "precision", "recall", "f1")
    images = [int(count) for count in result.labels.sum(0)]
    classes = [
        dict(zip(names, row, strict=True)) | {"images": count, "threshold": float(threshold)}
        for row, count, threshold in zip(result.per_class(), images, result.thresholds, strict=True)
    ]
    if request.as_json:
        scores = {"mean_average_precision": score, "right": result.right, "loss": result.loss}
        print_json(_facts(done, n) | scores | {"classes": [{k: _finite(v) for k, v in row.items()} for row in classes]})
    elif request.quiet:
        print(f"{score:.4f}")
    else:
        table = [{key: f"{v:.4f}" if isinstance(v, float) else v for key, v in row.items()} for row in classes]
        notes = [
            f"mean average precision {score:.4f}, loss {result.loss:.4f}, n = {n}",
            f"{done.folder} on the {done.split} images of {done.data}",
        ]
        print_table(table, notes=notes, right=[*names[1:], "images", "threshold"])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_accuracy(request: EvaluateRequest, done: Evaluated, result: Evaluation) -> None:
    from linvit.measure.accuracy import wilson

    n, counts = len(result.labels), result.confusion()
    low, high = wilson(result.accuracy, n)
    classes: list[dict[str, Any]] = [
        {"class": name, "images": int(counts[i].sum()), "precision": precision, "recall": recall, "f1": f1}
        for i, (name, precision, recall, f1) in enumerate(result.per_class())
    ]
    if request.as_json:
        scores = {"accuracy": result.accuracy, "accuracy_low": low, "accuracy_high": high, "loss": result.loss}
        found = _facts(done, n) | scores | {"classes": classes}
        print_json(found | ({"confusion": counts.tolist()} if request.confusion else {}))
        return
    if request.quiet:
        print(f"{result.accuracy:.4f}")
        return
    table = [{key: f"{v:.4f}" if isinstance(v, float) else v for key, v in row.items()} for row in classes]
    notes = [
        f"accuracy {result.accuracy:.4f} [{low:.4f}, {high:.4f}], loss {result.loss:.4f}, n = {n}",
        f"{done.folder} on the {done.split} images of {done.data}",
    ]
    if done.changed:
        notes.append("These data have changed since the model was trained: it may have seen some of these images.")
    print_table(table, notes=notes, right=["images", "precision", "recall", "f1"])
    if request.confusion:
        named = zip(result.classes, counts.tolist(), strict=True)
        rows = [{"true \\ predicted": name} | dict(zip(result.classes, row, strict=True)) for name, row in named]
        print_table(rows, right=result.classes)


def print_layers(folder: str, as_json: bool) -> None:
    from linvit.models.summary import summary
    from linvit.training.checkpoint import load

    model = load(folder)
    layers = summary(model)
    if as_json:
        print_json([asdict(layer) for layer in layers])
        return
    rows = [
        {
            "layer": layer.name,
            "kind": layer.kind,
            "output": " × ".join(map(str, layer.shape)),
            "parameters": f"{layer.times} × {layer.parameters:,}" if layer.times > 1 else f"{layer.parameters:,}",
        }
        for layer in layers
    ]
    total = f"{model.parameter_count():,} parameters, {model.tokens:,} tokens, {model.macs():,} MACs per image"
    print_table(rows, notes=[total], right=["output", "parameters"])
