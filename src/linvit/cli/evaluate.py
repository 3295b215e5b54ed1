"""`linvit evaluate`: the accuracy of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from linvit.cli import _options as options


def run(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or of a model (…/best).")],
    data: Annotated[str | None, typer.Argument(
        metavar="[DATA]", help="A data set's name or a path. [default: as in training]")] = None,
    split: Annotated[Literal["test", "validation"], typer.Option(help="Which images.")] = "test",
    confusion: Annotated[bool, typer.Option("--confusion", help="Show the confusion matrix too.")] = False,
    summary: Annotated[bool, typer.Option(
        "--summary", help="Show the model's layers, their shapes and parameters instead; no image is read.")] = False,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
    data_root: options.DataRoot = None,
    threads: options.Threads = 0,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Accuracy of a trained model, in all and per class.

    Examples:

        linvit evaluate runs/photos
        linvit evaluate runs/photos more-photos/ --confusion
        linvit evaluate runs/photos/last --split validation --json
        linvit evaluate runs/photos --summary
    """
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.measure.accuracy import wilson
    from linvit.measure.likelihood import Likelihood
    from linvit.train.use import evaluate_folder

    if summary:
        _print_layers(model, json)
        return
    with Display(quiet) as display, _output.warnings_in_one_line():
        done = evaluate_folder(
            model, data, split=split, device=device, data_root=data_root, limit=limit, skip_bad=skip_bad,
            progress=display.progress,
        )  # fmt: skip
    result = done.result
    if isinstance(result, Likelihood):
        if json:
            _output.print_json({
                "model": str(done.folder), "data": done.data, "split": split, "n": len(result.bits),
                "bits_per_dim": result.bits_per_dim, "loss": result.loss,
                "same_data": None if done.changed is None else not done.changed,
            })  # fmt: skip
        else:
            images = f"the {len(result.bits):,} {split} images of {done.data}"
            print(f"{result.bits_per_dim:.4f}" + ("" if quiet else f" bits per dimension of {images}: {done.folder}"))
        return
    n = len(result.labels)
    low, high = wilson(result.accuracy, n)
    counts = result.confusion()
    classes: list[dict[str, Any]] = [
        {"class": name, "images": int(counts[i].sum()), "precision": precision, "recall": recall, "f1": f1}
        for i, (name, precision, recall, f1) in enumerate(result.per_class())
    ]
    if json:
        found: dict[str, Any] = {
            "model": str(done.folder), "data": done.data, "split": split, "n": n, "accuracy": result.accuracy,
            "accuracy_low": low, "accuracy_high": high, "loss": result.loss,
            "same_data": None if done.changed is None else not done.changed, "classes": classes,
        }  # fmt: skip
        _output.print_json(found | ({"confusion": counts.tolist()} if confusion else {}))
        return
    if quiet:
        print(f"{result.accuracy:.4f}")
        return
    rows = [{key: f"{v:.4f}" if isinstance(v, float) else v for key, v in row.items()} for row in classes]
    notes = [
        f"accuracy {result.accuracy:.4f} [{low:.4f}, {high:.4f}], loss {result.loss:.4f}, n = {n}",
        f"{done.folder} on the {split} images of {done.data}",
    ]
    if done.changed:
        notes.append("These data have changed since the model was trained: it may have seen some of these images.")
    _output.print_table(rows, notes=notes, right=["images", "precision", "recall", "f1"])
    if confusion:
        names = result.classes
        table = [{"true \\ predicted": name} | dict(zip(names, row, strict=True))
                 for name, row in zip(names, counts.tolist(), strict=True)]  # fmt: skip
        _output.print_table(table, right=names)


def _print_layers(folder: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from linvit.cli import _output
    from linvit.models.summary import summary
    from linvit.train import load

    model = load(folder)
    layers = summary(model)
    if as_json:
        _output.print_json([asdict(layer) for layer in layers])
        return
    rows = [
        {"layer": layer.name, "kind": layer.kind, "output": " × ".join(map(str, layer.shape)),
         "parameters": f"{layer.times} × {layer.parameters:,}" if layer.times > 1 else f"{layer.parameters:,}"}
        for layer in layers
    ]  # fmt: skip
    total = f"{model.parameter_count():,} parameters, {model.tokens:,} tokens, {model.macs():,} MACs per image"
    _output.print_table(rows, notes=[total], right=["output", "parameters"])
