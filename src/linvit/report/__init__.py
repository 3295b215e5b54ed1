"""Records → statistics, tables, charts and one self-contained page. Imports only `records` and `files`.

    from linvit import report
    report.build("runs/mine")                     # → runs/mine/report.html, report.md, results.csv, figures/
    report.build(["runs/a", "runs/b"], "merged")  # several studies of the same data as one
    report.recommend(report.summarise(report.load("runs/mine")))

A report is a pure function of a study folder: study.json, records.jsonl and the files that the records name. Anything
may be missing; its section is then left out. A diverged run is listed, never dropped.

study.json
    {"format": 1, "command": "linvit compare …", "started": …, "finished": …,    # seconds since 1970, or a text
     "dataset": {"name", "classes": [names], "image_size", "channels", "train", "validation", "test"},   # counts
     "attentions": [specs as requested], "seeds": [0, 1, 2], "epochs", "steps", "budget": null | "10m",
     "model": {…}, "recipe": {…}, "parameter_matching": true,
     "machine": {"cpu", "cores", "memory", "device", "os"}, "warnings": [sentences],
     "seconds": {"measuring"}}                                 # of the calls that were not killed

records.jsonl: every record has the tag `attention` (the spec's text), but for `examples` and `illustration`.

    metric                     unit      tags beside attention            value, artefact
    ------------------------------------------------------------------------------------------------------------------
    test_accuracy              fraction  seed, selection=best|final       None: not finite; n = test images
    validation_accuracy        fraction  seed, selection
    test_loss                            seed, selection
    precision, recall, f1      fraction  seed, class (its name)           of the validation-selected model
    confusion                            seed                             artefact .json {"matrix": [[…]]}, row = true
    learning_curve                       seed                             artefact log.jsonl: {"epoch", "step",
                                                                          "train_loss", "validation_loss",
                                                                          "validation_accuracy", …} a line
    diverged                             seed, layer (where)              the step at which it happened
    train_seconds, test_seconds s        seed
    parameters, macs                                                      macs per image
    train_step                 s         low, high (quartiles)            median
    inference_throughput       images/s
    inference_latency          s                                          batch of one
    train_step_vs_softmax      ratio     low, high (quartiles)            side by side; > 1: faster than softmax
    inference_vs_softmax       ratio                                      same; a batch
    latency_vs_softmax         ratio                                      same; a batch of one
    …_vs_identity              ratio                                      the three beside identity (the speed limit)
    peak_memory                bytes                                      in a fresh process
    attention_error                                                       mean row total variation to softmax
    attention_error_uniform                                               the control: uniform attention, same q, k
    attention_entropy
    attention_time             s         tokens, mode=forward|both        one call; the scaling curve
    break_even_tokens          tokens    mode (optional)                  None: not within the range
    examples                             –                                artefact .npz: images uint8 (n, H, W, C),
                                                                          labels (n,), and for each attention
                                                                          predictions/<spec> (n,), confidence/<spec>
                                                                          (n,), maps/<spec> (n, gh, gw)
    illustration                         –                                artefact .npz: original uint8 (H, W, C), grid
                                                                          (gh, gw), augmented uint8 (k, H, W, C)

`selection=best` is the validation-selected model, `final` the last epoch. Artefact paths are relative to the study
folder and lie inside it. Where one thing was measured twice, the newest record counts. Metrics "once per attention" may
carry a seed: their mean is shown. Attention errors are measured on trained q, k.

results.csv: one row per requested spec; its `verdict` is against the most accurate variant and is one of
`most accurate`, `not distinguishable`, `worse`, `better` (over the seeds they share), `not enough seeds to tell`,
`diverged` (some seed did), `no result`.
"""

from linvit.report import statistics
from linvit.report.load import Study, load
from linvit.report.page import build
from linvit.report.recommendation import Recommendation, recommend
from linvit.report.summary import Summary, Variant, summarise

__all__ = [
    "Recommendation",
    "Study",
    "Summary",
    "Variant",
    "build",
    "load",
    "recommend",
    "statistics",
    "summarise",
]
