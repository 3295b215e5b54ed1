"""Every metric, in one table: CSV, tables, bars, the page and the schema of records all derive from it.

A new metric is its measurement and one row here. `per` are the tags that distinguish one measurement of it from
another: two records of a metric that agree in them are the same measurement, and the newer one counts. With a `seed`
among them it is measured once per run, else once per variant. In a study of folds a record without one is of all
images, each of which was held out once. `linvit list metrics` prints the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linvit.records import Record

VARIANT, RUN, MODEL = ("variant",), ("variant", "seed", "fold"), ("variant", "seed", "fold", "selection")
CURVE = ("variant", "baseline", "attention", "tokens", "mode", "heads", "head_dim", "prefix", "batch", "seed")
SYNTHETIC = ("variant", "attention", "sigma", "features", "model", "layer", "tokens", "heads", "head_dim", "seed")
SPREAD = ("low", "high")  # quartiles, or the extremes of a few draws
DRAWN = (*SPREAD, "std")  # over draws of random features
ESTIMATED = (*DRAWN, "family", "images", "refused")
TIMED = (*SPREAD, "clock", "batch", "busy")  # busy: other programs ran
GROWN = ("image_size", "patch_size")
CONVERTED = ("model", "split", *GROWN)
TRIAL = ("variant", "trial")  # of a search
LAYERS = ("layers",)  # how many of a model's a time is the sum of
ALWAYS = ("attention", "dataset")  # on any record, for readers


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    per: tuple[str, ...]
    what: str  # one line for the schema
    better: int = 0  # +1: more is better, −1: less
    also: tuple[str, ...] = ()  # tags that say more
    column: str = ""  # of results.csv
    heading: str = ""  # of the page's table
    below: tuple[str, ...] = ()  # metrics shown small under it there
    bar: str = ""  # title of its bar chart
    artefact: str = ""  # the file it names
    timed: bool = False  # depends on the machine and what it is doing

    def show(self, value: float | None) -> str:
        """The value formatted with its unit."""
        return "–" if value is None or not math.isfinite(value) else FORMS.get(self.unit, _plain)(value)


def _plain(value: float) -> str:
    return f"{value:.3g}"


def count(value: float | None) -> str:
    return _scaled(value, 1000, ("", " k", " M", " G", " T"))


def size(value: float | None) -> str:
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float | None, base: int, units: tuple[str, ...]) -> str:
    if value is None:
        return "–"
    power = 0
    while abs(value) >= 0.9995 * base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g}{units[power]}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def percent(value: float) -> str:
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


FORMS = {
    "fraction": percent, "×": "{:.2f}×".format, "s": seconds, "bytes": size, "count": count, "MAC": count,
    "bit": "{:.3f} bits".format, "images/s": "{:,.0f}/s".format, "tokens": "{:,.0f}".format,
}  # fmt: skip


def _race(task: str, title: str, own: str) -> list[Metric]:
    """A task's speed relative to softmax and to identity, measured in one race; above 1 is faster."""
    beside = f"{task}_vs_identity"
    return [
        Metric(f"{task}_vs_softmax", "×", VARIANT, f"{title.lower()} relative to softmax; above 1 is faster", 1, TIMED,
               f"{task}_vs_softmax", title, (own, beside), timed=True),
        Metric(beside, "×", VARIANT, f"{title.lower()} relative to identity, the limit", 1, TIMED, beside, timed=True),
    ]  # fmt: skip


TABLE = (
    Metric("test_accuracy", "fraction", MODEL, "on test images; selection=best: model selected on validation data", 1),
    Metric("balanced_accuracy", "fraction", MODEL, "mean recall over the classes of the test images", 1,
           column="balanced_accuracy"),
    Metric("half_accuracy", "fraction", RUN, "test accuracy of a run with half of the steps and its own schedule",
           1),
    Metric("frozen_accuracy", "fraction", RUN, "test accuracy without training: frozen features and a fitted head", 1,
           column="frozen_accuracy", heading="Frozen"),
    Metric("start_accuracy", "fraction", RUN, "validation accuracy of pretrained weights before the first step", 1,
           column="start_accuracy", heading="Before training"),
    Metric("validation_accuracy", "fraction", RUN, "of the model selected by it", 1),
    Metric("mean_average_precision", "fraction", MODEL, "on test images with several labels, mean over classes", 1),
    Metric("half_mean_average_precision", "fraction", RUN, "the same for a run with half of the steps and its "
           "own schedule", 1),
    Metric("validation_mean_average_precision", "fraction", RUN, "of the model selected by it", 1),
    Metric("average_precision", "fraction", (*MODEL, "class"), "of one class on test images", 1),
    Metric("threshold", "", (*MODEL, "class"), "threshold of a class, with the best F1 on validation images"),
    Metric("image_precision", "", MODEL, "jackknife pseudo-values of mean average precision, per test image",
           artefact=".npz: values"),
    Metric("bits_per_dim", "bit", MODEL, "mean −log₂ p per value (masked-pixel: hidden value) of test images", -1),
    Metric("half_bits_per_dim", "bit", RUN, "the same for a run with half of the steps and its own schedule", -1),
    Metric("validation_bits_per_dim", "bit", RUN, "of the model selected by it", -1),
    Metric("image_bits", "", MODEL, "bits per dimension of each test image", artefact=".npz: bits"),
    Metric("test_loss", "nat", MODEL, "cross-entropy on test images", -1),
    *(Metric(name, "fraction", (*MODEL, "class"), f"{name.replace('f1', 'F1')} of one class on test images", 1)
      for name in ("precision", "recall", "f1")),
    *(Metric(f"macro_{name}", "fraction", MODEL, f"{name.replace('f1', 'F1')}, mean over classes, out of fold",
             1, column=f"macro_{name}") for name in ("precision", "recall", "f1")),
    Metric("confusion", "", MODEL, "test images by true (row) and predicted class", artefact='JSON {"matrix": [[…]]}'),
    Metric("predictions", "", MODEL, "the predicted class of each test image", artefact=".npz: predicted, labels; or, "
           "published, right in packed bits, labels"),
    Metric("learning_curve", "", RUN, "losses and accuracies by step", artefact="log.jsonl, a line per validation"),
    Metric("learned_parameter", "", (*RUN, "layer", "name"), "learned scalar of an attention, after the last step"),
    Metric("diverged", "step", RUN, "step with the first non-finite value", also=("layer",)),
    Metric("failed", "", RUN, "run whose process ended early", also=("why",)),
    Metric("gradient_norm", "", RUN, "largest gradient norm of all steps, before clipping", -1),
    Metric("train_seconds", "s", RUN, "wall time of training", -1, timed=True),
    Metric("test_seconds", "s", RUN, "wall time of testing", -1, timed=True),
    *_race("train_step", "Training speed", "train_step"),
    *_race("inference", "Inference speed", "inference_throughput"),
    *_race("latency", "Single-image speed", "inference_latency"),
    Metric("peak_memory", "bytes", VARIANT, "of one training step, in a fresh process", -1, ("batch", "busy"),
           "peak_memory_bytes", "Memory", bar="Peak memory", timed=True),
    Metric("parameters", "count", RUN, "that are trained", column="parameters", heading="Parameters", bar="Parameters"),
    Metric("train_step", "s", VARIANT, "median time of one training step", -1, TIMED, "train_step_s",
           bar="Training step", timed=True),
    Metric("macs", "MAC", RUN, "multiply–accumulates of one image", -1, column="macs", heading="MACs",
           bar="Multiply–accumulates per image"),
    Metric("inference_throughput", "images/s", VARIANT, "median, in batches", 1, TIMED, "inference_images_per_s",
           timed=True),
    Metric("inference_latency", "s", VARIANT, "median time of one image", -1, TIMED, "inference_latency_s", timed=True),
    Metric("attention_error", "fraction", SYNTHETIC, "mean row total variation to softmax", -1, ESTIMATED,
           "attention_error"),
    Metric("attention_error_uniform", "fraction", RUN, "the same of uniform attention on the same q and k",
           column="attention_error_uniform"),
    Metric("attention_entropy", "nat", SYNTHETIC, "mean entropy of rows; log N for uniform attention", also=ESTIMATED,
           column="attention_entropy"),
    Metric("draw_spread", "fraction", RUN, "standard deviation of the accuracy over new draws of random features", -1,
           ("draws",), "draw_spread"),
    Metric("redrawn_accuracy", "fraction", RUN, "mean accuracy over these draws", 1, ("draws",), "redrawn_accuracy"),
    Metric("output_error", "fraction", SYNTHETIC, "‖Av − softmax v‖ / ‖softmax v‖", -1, ESTIMATED),
    Metric("output_mse", "", SYNTHETIC, "mean of (Av − softmax v)²", -1, ESTIMATED),
    Metric("mse_ratio", "×", ("angle", "length", "by"), "mean squared error of trigonometric features over that of "
           "positive ones, for vectors of one length at an angle", also=(*SPREAD, "seed")),
    Metric("depth_error", "fraction", ("attention", "model", "layer", "tokens", "seed"), "‖h − h_softmax‖ / "
           "‖h_softmax‖ of a model's tokens after each layer", -1, (*DRAWN, "images")),
    *(Metric(f"map_{name}", unit, ("attention", "model", "layer", "head", "seed"), what, also=("image",))
      for name, unit, what in (
          ("entropy", "nat", "mean over rows of one head's attention matrix"),
          ("error", "fraction", "mean row total variation of one head's matrix to the model's own"))),
    Metric("attention_maps", "count", ("attention", "model", "seed"), "matrices of one image, layers × heads",
           also=("image",), artefact=".npz: maps (layers, heads, queries, keys)"),
    Metric("token_frequency", "fraction", ("dataset", "level"), "tokens of images that have a level"),
    Metric("token_similarity", "", ("attention", "model", "level", "other"), "correlation, over heads, of the "
           "attention that two levels get; expected: how near they are", also=("expected", "images")),
    Metric("attention_macs", "MAC", ("attention", "tokens", "heads", "head_dim"), "of one call, all heads", -1),
    Metric("prefix_sums", "fraction", ("attention", "tokens", "head_dim"), "largest difference between causal "
           "attention by prefix sums and by the masked matrix", -1,
           artefact=".npz: sums (step, feature, column), outputs, exact"),
    Metric("non_finite", "count", ("attention", "sigma", "heads", "head_dim"), "outputs of single tokens that are not "
           "finite, of n; negative: the share of denominators below zero", -1, ("negative",)),
    Metric("attention_time", "s", CURVE, "one call; mode=forward, or both with its backward pass", -1,
           (*TIMED, *LAYERS, "refused"), timed=True),
    Metric("model_time", "s", ("attention", "tokens", "mode", "batch"), "one pass of a whole model; mode=forward, or "
           "both: a training step", -1, (*SPREAD, "clock", "refused"), timed=True),
    Metric("attention_vs_softmax", "×", CURVE, "speed of a call relative to fused softmax", 1, (*TIMED, *LAYERS),
           timed=True),
    Metric("attention_vs_identity", "×", CURVE, "speed of a call relative to identity", 1, (*TIMED, *LAYERS),
           timed=True),
    Metric("attention_memory", "bytes", CURVE, "peak of one call without its inputs, in a fresh process", -1,
           ("refused",), timed=True),
    Metric("memory_vs_softmax", "×", CURVE, "attention_memory relative to softmax; below 1 is less", -1, timed=True),
    Metric("largest_tokens", "tokens", ("attention", "mode", "heads", "head_dim", "prefix", "batch", "seed"),
           "tokens that would fit the limit, extrapolated; to: the largest measured number", 1,
           ("limit", "to"), timed=True),
    Metric("break_even_tokens", "tokens", ("variant", "baseline", "attention", "mode"),
           "number of tokens from which it is faster than softmax", -1,
           ("from", "to", "heads", "head_dim", "prefix", "batch", "seed", *LAYERS), "break_even_tokens", timed=True),
    Metric("examples", "count", (), "test images with predictions/<variant>, confidence/<variant>, maps/<variant>",
           also=("variants",), artefact=".npz"),
    Metric("samples", "count", (), "images drawn by next-pixel models: drawn/<variant>, and real ones",
           also=("variants",), artefact=".npz"),
    Metric("conversion_accuracy", "fraction", (*CONVERTED, "mix"), "of teacher, student or a model between them", 1,
           ("replaced", "loss", "stage", "seed")),
    Metric("conversion_agreement", "fraction", CONVERTED, "share of images with the teacher's prediction", 1,
           ("replaced", "stage", "seed")),
    Metric("conversion_steps", "count", ("model",), "steps of a conversion's stage", -1, ("seed", "kept")),
    Metric("conversion_seconds", "s", ("model",), "wall time of a conversion's stage", -1, ("seed",), timed=True),
    Metric("conversion_layers", "count", ("model",), "layers for which a conversion chose the number of features",
           also=("seed",)),
    Metric("conversion_pace", "s", GROWN, "time of the teacher per image of a batch; read: time of reading one", -1,
           ("batch", "read", "seed"), timed=True),
    Metric("conversion_plan", "s", (), "expected duration of the search for a target, and its images by split", -1,
           ("batch", "search", "decide", "validation", "test", "kinds", "seed"), timed=True),
    Metric("conversion_candidate", "×", ("model", *GROWN), "inference with another attention in all softmax "
           "layers, relative to the teacher; refused: the reason; limit: no attention", 1,
           (*TIMED, "replaced", "tokens", "seed", "refused", "limit"), timed=True),
    Metric("conversion_target", "count", (), "attentions mixed by a conversion without --to; 0: none, and why",
           also=("kinds", "why", "seed")),
    Metric("conversion_pays", "pixels", ("model",), "image size (not square: its height, and shape) from which an "
           "attention is 5 % faster, by forecast; seconds: of converting there; doubled: its speed at twice the size; "
           "0: none", -1, ("shape", "seconds", "doubled", "seed"), timed=True),
    Metric("conversion_kept", "count", (), "1: a conversion without --to kept the teacher; why: speed, accuracy or mix",
           also=("why", "seed")),
    Metric("conversion_depth", "count", (), "layers of the converted model", also=("seed",)),
    Metric("conversion_drop", "fraction", ("model", "mix"), "loss of accuracy on the images held out for the decision; "
           "bound: its upper confidence limit", -1, ("bound", "risk", "of", "lost", "won", "passed", "seed")),
    Metric("conversion_lost", "fraction", (), "loss of test accuracy on the same images; low, high: 95 %", -1,
           ("low", "high", "seed")),
    Metric("conversion_speed", "images/s", ("model", *GROWN), "median, in batches", 1,
           (*TIMED, "replaced", "tokens", "seed"), timed=True),
    Metric("conversion_vs_teacher", "×", ("model", *GROWN), "the same relative to the teacher", 1,
           (*TIMED, "replaced", "tokens", "seed"), timed=True),
    Metric("trial_accuracy", "fraction", TRIAL, "highest validation accuracy in one trial of a search, or accuracy on "
           "held-out folds; how: complete, pruned, diverged or failed", 1,
           ("how", "why", "loss", "options", "seed", "folds")),
    Metric("trial_seconds", "s", TRIAL, "wall time of a trial's training", -1, ("seed", "folds"), timed=True),
    Metric("trial_steps", "count", TRIAL, "steps of a trial's training", also=("seed", "folds")),
    Metric("option_importance", "fraction", ("variant", "option"), "part of the variance of a variant's whole trials "
           "that an option explains (fANOVA)"),
    Metric("model_summary", "count", (), "layers of each variant's model, with shapes and parameters",
           also=("variants",), artefact="JSON {variant: [{name, kind, shape, parameters, times}]}"),
    Metric("illustration", "count", (), "training images: original, grid, augmented; or classes, steps, "
           "normalised", artefact=".npz"),
)  # fmt: skip
METRICS = {metric.name: metric for metric in TABLE}


def key(record: Record) -> tuple[Any, ...]:
    """What was measured: two records with one key are the same measurement."""
    metric = METRICS.get(record.metric)
    tags = metric.per if metric else sorted(set(record.tags) - set(SPREAD))
    return record.metric, *(record.tags.get(tag) for tag in tags)


def problems(record: Record) -> list[str]:
    """In what a record is not as the table says; empty if it is."""
    metric = METRICS.get(record.metric)
    if metric is None:
        return [f"{record.metric} is not in the table of metrics"]
    found = [] if record.unit == metric.unit else [f"{record.metric} has the unit '{record.unit}', not '{metric.unit}'"]
    for tag in set(record.tags) - {*metric.per, *metric.also, *ALWAYS}:
        found.append(f"{record.metric} has the tag '{tag}', which its row does not name")
    if bool(record.artefact) != bool(metric.artefact):
        found.append(f"{record.metric} has {'an' if record.artefact else 'no'} artefact")
    if "seed" in metric.per and metric.per[: len(RUN)] == RUN and record.experiment and "seed" not in record.tags:
        found.append(f"{record.metric} has no seed")
    return found
