"""Load a Hugging Face ViT, make its attention linear, see what that costs and gains, and export it.

    marimo edit docs/notebooks/linear_vit.py                                     # in the browser
    python docs/notebooks/linear_vit.py                                          # as a script: a small random ViT
    python docs/notebooks/linear_vit.py -- --model google/vit-base-patch16-224 --images photos/

It needs `pip install '.[notebook]'` in a clone of linvit. `--images` is a folder with a folder for each class.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["linvit[notebook]"]
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="A linear ViT")


@app.cell
def imports():
    import copy
    import tempfile
    from pathlib import Path

    import altair as alt
    import marimo as mo
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

    import linvit
    from linvit.measure.speed import attention_speed
    from linvit.measure.timing import Timing
    from linvit.measure.trained import captured

    return (
        AutoImageProcessor,
        AutoModelForImageClassification,
        Path,
        Timing,
        ViTConfig,
        ViTForImageClassification,
        alt,
        attention_speed,
        captured,
        copy,
        linvit,
        mo,
        tempfile,
        torch,
    )


@app.cell
def options(mo):
    arguments = mo.cli_args()
    model_name = str(arguments.get("model") or "")
    image_folder = str(arguments.get("images") or "")
    attention = mo.ui.dropdown(
        ["performer-exp:m=64", "performer-relu:m=64", "linformer:k=32", "agent:n=9", "inline"],
        value="performer-exp:m=64",
        label="Attention",
    )
    spec = str(arguments.get("attention") or "")
    mo.md(
        f"""
        # A linear ViT

        Softmax attention compares every token with every other: its time grows with the square of the number of tokens
        N. Linear attention grows with N. This notebook replaces the attention of a trained model and shows the
        difference. No training is involved; `linvit convert` also trains the new attention to match the old one.

        {attention}
        """
    )
    return arguments, attention, image_folder, model_name, spec


@app.cell
def load(AutoModelForImageClassification, ViTConfig, ViTForImageClassification, mo, model_name, torch):
    if model_name:
        original = AutoModelForImageClassification.from_pretrained(model_name).eval()
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        original = ViTForImageClassification(
            ViTConfig(**sizes, image_size=48, patch_size=4, num_labels=5, initializer_range=0.2)
        ).eval()
    config = original.config
    tokens = (config.image_size // config.patch_size) ** 2 + 1
    mo.md(
        f"**{model_name or 'A small ViT with random weights'}**: {config.num_hidden_layers} layers, "
        f"{config.num_attention_heads} heads, {tokens} tokens, "
        f"{sum(p.numel() for p in original.parameters()):,} parameters."
    )
    return config, original, tokens


@app.cell
def read_images(AutoImageProcessor, config, image_folder, mo, model_name, torch):
    if image_folder:
        from linvit.data import load_data, normalise

        dataset = load_data(image_folder, image_size=config.image_size, channels=config.num_channels)
        pixels, labels = dataset.test.batch(dataset.test.order(0, 0)[:64])
        processor = AutoImageProcessor.from_pretrained(model_name) if model_name else None
        mean, std = (processor.image_mean, processor.image_std) if processor else (dataset.mean, dataset.std)
        images, classes = normalise(pixels, mean, std), dataset.classes
    else:  # smooth noise
        coarse = torch.randn(8, config.num_channels, 6, 6, generator=torch.Generator().manual_seed(0))
        images = torch.nn.functional.interpolate(coarse, (config.image_size, config.image_size), mode="bicubic")
        labels, classes = None, []
    mo.md(f"{len(images)} images of {images.shape[-1]} × {images.shape[-1]} pixels.")
    return classes, images, labels


@app.cell
def replace_attention(attention, copy, images, linvit, mo, original, spec):
    linear, report = linvit.linearize(copy.deepcopy(original), spec or attention.value, images=images[:8])
    mo.md(
        f"""
        ## Replace the attention

        `linvit.linearize(model, "{report.attention}", images=images)` changed {len(original.state_dict())} tensors into
        {len(linear.state_dict())}: {len(report.copied)} are the same, {len(report.created)} are new and
        {len(report.dropped)} are gone. The model keeps its class and its `forward`.
        """
    )
    return linear, report


@app.cell
def error(alt, mo, report):
    rows = [
        {"layer": layer + 1, "measure": text, "error": found[name]}
        for layer, found in report.distance.items()
        for name, text in (("attention_error", "attention weights"), ("output_error", "output of the layer"))
        if name in found
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(x=alt.X("layer:O"), y=alt.Y("error:Q", scale=alt.Scale(zero=True)), color=alt.Color("measure:N"))
        .properties(width=420, height=220)
    )
    mo.vstack(
        [
            mo.md(
                """
                ## What it costs: error

                Per layer, against softmax on the same q, k and v: the total variation between the rows of the two
                attention matrices (0 equal, 1 disjoint), and the relative error of the output.
                """
            ),
            chart,
        ]
    )
    return


@app.cell
def agreement(classes, config, images, labels, linear, mo, original, torch):
    with torch.inference_mode():
        before, after = (model(images).logits.argmax(-1) for model in (original, linear))
    agreed = (before == after).float().mean().item()
    lines = [f"The two models agree on {agreed:.0%} of {len(images)} images."]
    names = [config.id2label[i] for i in range(config.num_labels)]
    if labels is not None and set(classes) <= set(names):
        truth = torch.tensor([names.index(classes[i]) for i in labels])
        right = [(found == truth).float().mean().item() for found in (before, after)]
        lines.append(f"Accuracy: {right[0]:.1%} with softmax, {right[1]:.1%} with linear attention.")
    mo.md("\n\n".join(lines))
    return


@app.cell
def speed(Timing, alt, attention_speed, captured, images, linear, mo, report, tokens):
    first = next(captured(linear, images[:1]))[0][0]
    lengths = sorted({64, 256, 1024, min(tokens, 1024)})
    one = report.attention.split("+")[0].split("@")[0]
    measured = list(attention_speed([one], first.site, tokens=lengths, timing=Timing(rounds=3)))
    times = [
        {"attention": r.tags["attention"], "tokens": r.tags["tokens"], "milliseconds": 1000 * r.value}
        for r in measured
        if r.metric == "attention_time" and r.tags["mode"] == "forward" and r.value is not None
    ]
    plot = (
        alt.Chart(alt.Data(values=times))
        .mark_line(point=True)
        .encode(
            x=alt.X("tokens:Q", scale=alt.Scale(type="log")),
            y=alt.Y("milliseconds:Q", scale=alt.Scale(type="log")),
            color=alt.Color("attention:N"),
        )
        .properties(width=420, height=220)
    )
    mo.vstack(
        [
            mo.md(
                """
                ## What it gains: speed

                One layer at increasing lengths, on this machine; `identity` returns v and is the limit. Three rounds
                give a first impression: `linvit bench speed` measures properly, and `linvit advise` tells from how many
                tokens on the whole model is faster.
                """
            ),
            plot,
        ]
    )
    return


@app.cell
def maps(alt, captured, images, linear, linvit, mo):
    layer, q, k, _ = next(captured(linear, images[:1]))[-1]
    site = layer.site
    exact = linvit.create_attention("softmax", heads=site.heads, head_dim=site.head_dim, tokens=site.tokens)
    cells = []
    for _name, _attention in (("softmax", exact), ("linear", layer)):
        _looked = _attention.attention_matrix(q, k)[0].abs().mean(0)[0, site.prefix :]  # from CLS, mean over heads
        cells += [
            {"attention": _name, "row": i, "column": j, "weight": float(weight)}
            for i, line in enumerate((_looked / _looked.max()).unflatten(0, site.grid))
            for j, weight in enumerate(line)
        ]
    heat = (
        alt.Chart(alt.Data(values=cells))
        .mark_rect()
        .encode(
            x=alt.X("column:O", axis=None),
            y=alt.Y("row:O", axis=None),
            color=alt.Color("weight:Q"),
            column=alt.Column("attention:N"),
        )
        .properties(width=200, height=200)
    )
    mo.vstack([mo.md("## Where the CLS token of the last layer looks, on the same q and k"), heat])
    return


@app.cell
def export(Path, arguments, images, linear, linvit, mo, tempfile, torch):
    folder = Path(str(arguments.get("out") or tempfile.mkdtemp())) / "linear-vit"
    linear.save_pretrained(folder)
    same = linvit.load(folder)
    with torch.inference_mode():
        difference = (same(images) - linear(images).logits).abs().max().item()
    assert difference < 1e-3, difference
    mo.md(
        f"""
        ## Export it

        `linear.save_pretrained("{folder}")` wrote a folder that `linvit.load` and every linvit command take; its logits
        differ by {difference:.1g} at most. `linvit.export("{folder}", "onnx")` makes an ONNX file of it.
        """
    )
    return


if __name__ == "__main__":
    app.run()
