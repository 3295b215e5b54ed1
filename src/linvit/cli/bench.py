"""`linvit bench`: what each attention costs, how far it is from softmax, and where it looks, on this machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from linvit.cli import _bench
from linvit.cli import _options as options

if TYPE_CHECKING:
    from linvit.models import VisionTransformer
    from linvit.records import Record

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Heads = Annotated[int, typer.Option(min=1)]
HeadDim = Annotated[int, typer.Option(min=1)]
Lengths = Annotated[
    list[int] | None, typer.Option("--tokens", min=1, help="Sequence length N; repeat it. [default: 64 256 1024 4096]")
]
Prefix = Annotated[int, typer.Option(min=0, help="How many of the N tokens come before the image's (CLS).")]
Batch = Annotated[int, typer.Option(min=1)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of q, k and v.")]
Against = Annotated[
    str | None,
    typer.Option(metavar="PEERS", help="Other packages beside them: performer-pytorch, linformer, transformers, with "
                 "commas between. One without options computes what the attentions given do, with as many features."),
]  # fmt: skip
UntilLimit = Annotated[
    bool, typer.Option("--until-limit", help="Double the greatest length until nothing is within the limits.")
]
MostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Refuse what would take more, e.g. 4GB. [default: half of the free]")
]
MostSeconds = Annotated[
    float, typer.Option(min=0.01, metavar="SECONDS", help="Refuse what would take longer to be checked once.")
]
Trained = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A trained model: q and k are its own, for --images of --data.")
]
FIGURE = ("performer-exp", "performer-relu", "performer-hyp", "efficient", "linformer")  # few enough for lines


@app.callback()
def bench() -> None:
    """Measure attentions here: speed, memory, distance from softmax, and where they look.

    Examples:

        linvit bench error --out runs/error
        linvit bench speed --tokens 1024 --tokens 4096 -a performer-exp:m=128 -a linformer:k=64
        linvit bench memory -a performer-relu:m=64 --against transformers
        linvit bench maps runs/photos photos/ -a performer-hyp:m=64 --out runs/maps
    """
    # Before torch is imported: threads that wait must sleep, or CPU time counts them as work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@app.command()
def error(
    attention: options.Attentions = None,
    over: Annotated[Literal["sigma", "features", "angle", "depth"], typer.Option(
        help="What is varied: the deviation of random q and k, the number of features, the angle between two vectors, "
        "or the number of layers.")] = "sigma",
    against: Against = None,
    model: Trained = None,
    data: Annotated[str | None, typer.Option(metavar="DATA", help="The data set of --model's images.")] = None,
    images: Annotated[int | None, typer.Option(
        min=1, help="How many of its test images --model sees. [default: 32]")] = None,
    sigma: Annotated[list[float] | None, typer.Option(
        help="Deviation of random q and k; repeat it. [default: 0.5 1 2, over features 0.5 1]")] = None,
    features: Annotated[list[int] | None, typer.Option(
        min=1, help="Features, for --over features; repeat it. [default: 16 32 64 128 256, of a model to 64]")] = None,
    tokens: Annotated[int | None, typer.Option(
        min=2, help="Sequence length N. [default: 256, over features 4096]")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="[default: 4, over features 1]")] = None,
    head_dim: Annotated[int | None, typer.Option(
        min=1, help="[default: 64, over features 16, over depth 32]")] = None,
    layers: Annotated[int | None, typer.Option(
        min=1, help="Of the untrained model, for --over depth. [default: 12]")] = None,
    draws: Annotated[int | None, typer.Option(
        min=1, help="How many times random features are drawn. [default: 4, over features 15 without --model]")] = None,
    device: Annotated[str | None, typer.Option(help="Where attentions are computed. [default: cpu]")] = None,
    dtype: Annotated[Literal["float64", "float32", "bfloat16", "float16"] | None, typer.Option(
        help="Of q, k and v; softmax of the same is always computed in float64. [default: float64]")] = None,
    seed: options.Seed = 0,
    data_root: options.DataRoot = None,
    threads: options.Threads = 0,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Distance from exact softmax, with uniform attention as the control.

    Total variation of a row (0 equal, 1 disjoint), its entropy, and the relative error of the output. An attention
    further from softmax than `uniform` estimates nothing there. q and k are random, or with --model those of a trained
    model. --over features, angle and depth are the paper's figures 4, 2 and 14.

    Examples:

        linvit bench error
        linvit bench error -a performer-exp:m=64 -a performer-exp:m=256 -a performer-hyp --sigma 1 --out runs/error
        linvit bench error --model runs/photos --data photos/ -a performer-hyp:m=32 --against performer-pytorch
        linvit bench error --dtype float16 -a performer-exp -a performer-hyp --sigma 4
        linvit bench error --over features --out runs/fig4
        linvit bench error --over depth -a performer-hyp:m=32 -a performer-hyp:m=128
    """
    import torch

    from linvit.attention import attention_names
    from linvit.measure import angle, depth
    from linvit.measure import error as errors
    from linvit.measure import trained as of_trained
    from linvit.measure.provenance import pick_device

    given = {"--attention": attention, "--against": against, "--model": model, "--data": data, "--sigma": sigma,
             "--features": features, "--tokens": tokens, "--heads": heads, "--head-dim": head_dim,
             "--draws": draws, "--images": images, "--layers": layers, "--device": device,
             "--dtype": dtype}  # fmt: skip
    _refuse_idle(over, model is not None, given)
    if (model is None) != (data is None):
        raise ValueError("--model and --data go together: a trained model, and the data set of the images it sees")
    if over == "angle":
        _run("angle", partial(angle.measure, seed=seed), _bench.angle_table, out, json, quiet)
        return
    many = over == "features"
    shape = {"tokens": tokens or (4096 if many else 256), "heads": heads or (1 if many else 4),
             "head_dim": head_dim or (16 if many else 32 if over == "depth" else 64)}  # fmt: skip
    defaults = errors.FAMILIES if many else FIGURE if over == "depth" else attention_names()
    net, x, name = (
        _trained(model, data, images or 32, data_root, quiet) if model is not None and data else (None, None, "")
    )
    if net is not None:
        site = net.attentions()[0].site
        shape = {"tokens": site.tokens, "heads": site.heads, "head_dim": site.head_dim, "grid": site.grid,
                 "prefix": site.prefix}  # fmt: skip
    specs = [*(attention or defaults), *_peers(against, attention or defaults, plain=many, **shape)]
    common = {"draws": draws or (15 if many and net is None else 4), "seed": seed}
    if over != "depth":
        common |= {"device": pick_device(device or "cpu"), "dtype": getattr(torch, dtype or "float64")}
    if many and net is not None and x is not None:
        sizes = features or (16, 32, 64)
        work = partial(of_trained.over_features, net, x, specs, name=name, features=sizes, **common)
        _run("features", work, _bench.features_table, out, json, quiet)
    elif many:
        work = partial(errors.over_features, specs, features=features or (16, 32, 64, 128, 256),
                       sigmas=sigma or (0.5, 1.0), **shape, **common)  # fmt: skip
        _run("features", work, _bench.features_table, out, json, quiet)
    elif over == "depth":
        if net is None or x is None:
            net, x = depth.untrained(depth=layers or 12, **shape, seed=seed)
        work = partial(depth.measure, net, x, specs, name=name or depth.UNTRAINED, **common)
        _run("depth", work, _bench.depth_table, out, json, quiet)
    elif net is not None and x is not None:
        own = net.config.attention
        work = partial(of_trained.over_layers, net, x, specs, name=name, own=own, **common)
        _run("layers", work, partial(_bench.layers_table, own=own), out, json, quiet)
    else:
        work = partial(errors.measure, specs, sigmas=sigma or (0.5, 1.0, 2.0), **shape, **common)
        _run("error", work, _bench.error_table, out, json, quiet)


@app.command()
def speed(
    attention: options.Attentions = None,
    against: Against = None,
    tokens: Lengths = None,
    until_limit: UntilLimit = False,
    most_memory: MostMemory = None,
    most_seconds: MostSeconds = 20.0,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    prefix: Prefix = 0,
    batch: Batch = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; each times everything once.")] = 30,
    device: options.Device = "cpu",
    dtype: Dtype = "float32",
    seed: options.Seed = 0,
    threads: options.Threads = 0,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Time of forward and forward+backward, as ratios to PyTorch's fused softmax in the same run.

    An attention whose output or gradients are wrong is not timed, nor one that would not fit the limits. softmax and
    identity (returns v, the speed limit) are always measured. With a prefix, lengths of a square and the prefix give
    `dwc` its grid. --until-limit is the paper's figure 3.

    Examples:

        linvit bench speed --threads 2 --out runs/speed
        linvit bench speed --tokens 1024 --rounds 10 -a performer-relu:m=64 -a efficient
        linvit bench speed --tokens 256 --until-limit --most-memory 4GB --most-seconds 10 --out runs/fig3
        linvit bench speed --tokens 1024 -a performer-exp:m=64 -a linformer:k=64 --against performer-pytorch,linformer
    """
    from linvit.measure.speed import measure

    work, name = _costs(measure, attention, against, tokens or (64, 256, 1024, 4096), until_limit, most_memory,
                        most_seconds, "speed", heads=heads, head_dim=head_dim, prefix=prefix, batch=batch,
                        seed=seed, device=device, dtype=dtype)  # fmt: skip
    _run(name, partial(work, rounds=rounds), _bench.speed_tables, out, json, quiet)


@app.command()
def memory(
    attention: options.Attentions = None,
    against: Against = None,
    tokens: Lengths = None,
    until_limit: UntilLimit = False,
    most_memory: MostMemory = None,
    most_seconds: MostSeconds = 20.0,
    heads: Heads = 8,
    head_dim: HeadDim = 64,
    prefix: Prefix = 0,
    batch: Batch = 1,
    device: options.Device = "cpu",
    dtype: Dtype = "float32",
    seed: options.Seed = 0,
    threads: options.Threads = 0,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Peak memory of one call, forward and forward+backward, beside fused softmax's; and how many tokens would fit.

    Each attention and length has a process of its own, which takes some seconds to start. What q, k and v take
    themselves is not counted, but must fit the limit too.

    Examples:

        linvit bench memory -a performer-relu:m=64 -a linformer:k=64 --tokens 1024 --tokens 4096
        linvit bench memory --tokens 1024 --until-limit --most-memory 2GB -a performer-exp --against transformers
    """
    from linvit.measure.memory import measure

    work, name = _costs(measure, attention, against, tokens or (256, 1024, 4096), until_limit, most_memory,
                        most_seconds, "memory", heads=heads, head_dim=head_dim, prefix=prefix, batch=batch, seed=seed,
                        device=device, dtype=dtype)  # fmt: skip
    _run(name, work, _bench.memory_tables, out, json, quiet)


@app.command()
def maps(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a run, or of a model.")],
    data: options.Data,
    attention: Annotated[list[str] | None, typer.Option(
        "--attention", "-a", metavar="SPEC", help="Beside the model's own, on the same q and k; repeat it.")] = None,
    against: Against = None,
    image: Annotated[int, typer.Option(min=0, help="Which test image, from 0.")] = 0,
    seed: options.Seed = 0,
    data_root: options.DataRoot = None,
    threads: options.Threads = 0,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Where a trained model looks: the attention matrix of every layer and head for one image.

    With other attentions, their matrices on the same q and k stand beside the model's own. --out gets the picture, and
    the matrices as an .npz file for each attention. These are the paper's figures 10 and 11.

    Examples:

        linvit bench maps runs/photos photos/ --out runs/maps
        linvit bench maps runs/photos photos/ -a performer-hyp:m=64 -a uniform --image 7 --out runs/maps
    """
    from linvit.measure.maps import measure

    net, x, name = _trained(model, data, image + 1, data_root, quiet)
    if len(x) <= image:
        raise ValueError(f"image={image}: {data} has only {len(x)} test images, from 0")
    site = net.attentions()[0].site
    shape = {"tokens": site.tokens, "heads": site.heads, "head_dim": site.head_dim, "grid": site.grid,
             "prefix": site.prefix}  # fmt: skip
    specs = [*(attention or ()), *_peers(against, attention or (), **shape)]
    weights: dict[str, Any] = {}

    def work(progress: Callable[[int, int, str], None]) -> Iterator[Record]:
        for found in measure(net, x[image], specs, own=net.config.attention, name=name, seed=seed, progress=progress):
            weights[found.attention] = found.weights
            records = [record.tagged(image=image) for record in found.records]
            yield from records
            if out is not None:
                yield _stored(found.attention, found.weights, out, records[0])

    _run("maps", work, _bench.maps_table, out, json, quiet, chart=lambda charts, records: charts.maps(weights, records))


def _stored(attention: str, weights: Any, out: Path, like: Record) -> Record:
    """The matrices in a file beside the records, and the record that names it."""
    import io
    from dataclasses import replace

    import numpy as np

    from linvit.files import slug, write_atomically

    file = io.BytesIO()
    np.savez_compressed(file, maps=weights)
    path = out / f"maps-{slug(attention)}.npz"
    write_atomically(path, file.getvalue())
    tags = {key: value for key, value in like.tags.items() if key not in ("layer", "head")}
    count = weights.shape[0] * weights.shape[1]
    return replace(like, metric="attention_maps", value=count, unit="count", n=1, artefact=path.name, tags=tags)


def _trained(
    model: Path, data: str, images: int, data_root: Path | None, quiet: bool
) -> tuple[VisionTransformer, Any, str]:
    """A model, so many of the test images as it takes them, and its name."""
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.data import load_data, normalise
    from linvit.train.checkpoint import load

    net = load(model)
    config, about = net.config, net.about
    with Display(quiet) as display, _output.warnings_in_one_line():
        found = load_data(data, root=data_root, image_size=config.image_size, channels=config.channels,
                          progress=display.progress)  # fmt: skip
    if not len(found.test):
        raise ValueError(f"{data} has no test images")
    pixels, _ = found.test.batch(slice(0, images))
    home = model.resolve()
    name = home.parent.name if home.name in ("best", "last") else home.name
    return net, normalise(pixels, about["mean"], about["std"]), f"{name} on {found.name}"


def _refuse_idle(over: str, trained: bool, given: dict[str, Any]) -> None:
    """An option that would change nothing is an error."""
    idle = {
        "sigma": ["--features", "--layers"], "features": ["--layers"],
        "depth": ["--sigma", "--features", "--device", "--dtype"],
        "angle": [*given],
    }[over] + (["--sigma", "--tokens", "--heads", "--head-dim", "--layers"] if trained else ["--images"])  # fmt: skip
    for name in idle:
        if given[name] is not None:
            beside = f"--over {over}" + (" and --model" if trained else "")
            raise ValueError(f"{name}={given[name]} has no effect with {beside}")


def _peers(against: str | None, specs: Iterable[str], plain: bool = False, **site: Any) -> list[str]:
    """The specs of the peers asked for. Over features (`plain`) one without options is one family."""
    if against is None:
        return []
    from linvit.measure import peers
    from linvit.measure.cost import squarest

    site = {"grid": squarest(site["tokens"])} | site
    return peers.beside(peers.listed(against), [] if plain else specs, **site)


def _costs(
    measure: Callable[..., Iterator[Record]], attention: list[str] | None, against: str | None, tokens: Any,
    until_limit: bool, most_memory: str | None, most_seconds: float, name: str, *, device: str, dtype: str,
    **setting: Any,
) -> tuple[Callable[..., Iterator[Record]], str]:  # fmt: skip
    """What speed and memory are called with, and the name of their chart."""
    import torch

    from linvit.attention import attention_names
    from linvit.measure.memory import read_size
    from linvit.measure.provenance import pick_device
    from linvit.measure.setting import Setting

    limit = read_size(most_memory) if most_memory else None
    where = {**setting, "device": pick_device(device), "dtype": getattr(torch, dtype)}
    specs = attention or (FIGURE if until_limit else attention_names())
    specs = [*specs, *_peers(against, specs, **Setting(**where).site(max(tokens)))]
    work = partial(measure, specs, tokens=tokens, until_limit=until_limit, most_memory=limit,
                   most_seconds=most_seconds, **where)  # fmt: skip
    return work, f"{name}_to_the_limit" if until_limit else name


def _run(
    name: str, work: Callable[..., Iterator[Record]], show: Callable[[list[Record]], None],
    out: Path | None, json: bool, quiet: bool, chart: Callable[[Any, list[Record]], Any] | None = None,
) -> None:  # fmt: skip
    from linvit.cli import _output
    from linvit.cli._display import Display
    from linvit.records import Records

    if out is not None and out.exists() and not out.is_dir():  # now rather than after minutes of work
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
    records: list[Record] = []
    with Display(quiet) as display:
        for record in work(progress=display.progress):
            records.append(record)
            if out is not None:
                Records(out / "records.jsonl").append([record])
    if json:
        _output.print_json(_output.rows(records))
    elif not quiet:
        show(records)
    if out is not None:
        from linvit.report import benchmarks

        drawn = getattr(benchmarks, name)(records) if chart is None else chart(benchmarks, records)
        paths = benchmarks.save(drawn, out / name.replace("_", "-"))
        if not (json or quiet):
            print("wrote " + ", ".join(str(path) for path in [out / "records.jsonl", *paths]))
