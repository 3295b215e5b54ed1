"""Measure attentions on this machine: speed, memory, distance from softmax, and where they look.

Examples:

    linvit bench error --out runs/error
    linvit bench speed --tokens 1024 --tokens 4096 -a performer-exp:m=128 -a linformer:k=64
    linvit bench memory -a performer-relu:m=64 --against transformers
    linvit bench maps runs/photos photos/ -a performer-hyp:m=64 --out runs/maps
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from linvit.cli._output import print_json, rows, working
from linvit.requests import bench as requests

if TYPE_CHECKING:
    from linvit.cli._display import Display
    from linvit.measure.error import Draws
    from linvit.measure.trained import Subject
    from linvit.progress import Progress
    from linvit.records import Record
    from linvit.site import Site

LIMITLESS = "_to_the_limit"  # of a chart's name
FIGURE = ("performer-exp", "performer-relu", "performer-hyp", "efficient", "linformer")  # few enough for lines
Work = Callable[..., Iterator["Record"]]  # takes progress=


class Benchmark(NamedTuple):
    """What a verb measures, and how it is shown."""

    name: str  # of its tables and its chart
    work: Work
    own: str = ""  # the attention that a model was trained with
    chart: Callable[[Any, list[Record]], Any] | None = None  # None: the one of that name


def run(request: requests.BenchRequest) -> None:
    """Measure, and store the records as they come."""
    from linvit.records import Records

    # Before torch is imported: threads that wait must sleep, or CPU time counts them as work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if request.out is not None and request.out.exists() and not request.out.is_dir():  # now, not after minutes of work
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(request.out))
    benches = (error, features, depth, angle, maps, speed, memory)
    find: Any = next(bench for bench in benches if f"bench {bench.__name__}" == request.verb)
    records: list[Record] = []
    with working(request) as display:
        found: Benchmark = find(request, display)
        for record in found.work(progress=display.progress):
            records.append(record)
            if request.out is not None:
                Records(request.out / "records.jsonl").append([record])
    _show(request, found, records)


def error(request: requests.ErrorRequest, display: Display) -> Benchmark:
    from linvit.measure.error import random_errors
    from linvit.measure.trained import layer_errors

    if subject := _subject(request, display, request.images or 32):
        specs = _specs(request, None, _site(subject))
        work: Work = partial(layer_errors, subject, specs, draws=_draws(request, 4))
        return Benchmark("layers", work, own=subject.own)
    site, sigmas = _random_site(request, 256, 4, 64), request.sigma or (0.5, 1.0, 2.0)
    work = partial(random_errors, _specs(request, None, site), site, sigmas=sigmas, draws=_draws(request, 4))
    return Benchmark("error", work)


def features(request: requests.FeaturesRequest, display: Display) -> Benchmark:
    from linvit.measure.error import FAMILIES, feature_errors
    from linvit.measure.trained import layer_feature_errors

    if subject := _subject(request, display, request.images or 32):
        specs, counts = _specs(request, FAMILIES, _site(subject), plain=True), request.features or (16, 32, 64)
        work: Work = partial(layer_feature_errors, subject, specs, features=counts, draws=_draws(request, 4))
    else:
        site, counts = _random_site(request, 4096, 1, 16), request.features or (16, 32, 64, 128, 256)
        given = {"features": counts, "sigmas": request.sigma or (0.5, 1.0), "draws": _draws(request, 15)}
        work = partial(feature_errors, _specs(request, FAMILIES, site, plain=True), site, **given)
    return Benchmark("features", work)


def depth(request: requests.DepthRequest, display: Display) -> Benchmark:
    from linvit.measure.depth import depth_errors, untrained

    subject = _subject(request, display, request.images or 32)
    subject = subject or untrained(_random_site(request, 256, 4, 32), depth=request.layers or 12)
    specs = _specs(request, FIGURE, _site(subject))
    return Benchmark("depth", partial(depth_errors, subject, specs, draws=_draws(request, 4)))


def angle(request: requests.AngleRequest, display: Display) -> Benchmark:
    from linvit.measure.angle import mse_ratios

    return Benchmark("angle", partial(mse_ratios, seed=request.seed))


def maps(request: requests.MapsRequest, display: Display) -> Benchmark:
    from linvit.measure.maps import model_maps, store_maps

    subject = _subject(request, display, request.image + 1)
    assert subject is not None
    specs, weights = _specs(request, (), _site(subject)), {}

    def work(progress: Progress) -> Iterator[Record]:
        for found in model_maps(subject, specs, image=request.image, seed=request.seed, progress=progress):
            weights[found.attention] = found.weights
            yield from found.records
            if request.out is not None:
                yield store_maps(found, request.out)

    return Benchmark("maps", work, chart=lambda charts, records: charts.maps(weights, records))


def speed(request: requests.SpeedRequest, display: Display) -> Benchmark:
    from linvit.measure.speed import attention_speed

    return _costs(request, "speed", attention_speed, rounds=request.rounds)


def memory(request: requests.MemoryRequest, display: Display) -> Benchmark:
    from linvit.measure.memory import attention_memory

    return _costs(request, "memory", attention_memory)


def _costs(request: requests.MemoryRequest, name: str, measure: Work, **timing: Any) -> Benchmark:
    import torch

    from linvit.devices import pick_device
    from linvit.measure.memory import Limits, read_size
    from linvit.measure.timing import Timing
    from linvit.site import Site

    timing |= {"batch": request.batch, "device": pick_device(request.device), "dtype": getattr(torch, request.dtype)}
    most = read_size(request.most_memory) if request.most_memory else None
    site = Site(request.heads, request.head_dim, max(1, request.prefix), prefix=request.prefix, seed=request.seed)
    specs = _specs(request, FIGURE if request.until_limit else None, site.at(max(request.tokens)))
    limits = Limits(most, request.most_seconds, request.until_limit)
    work = partial(measure, specs, site, tokens=request.tokens, timing=Timing(**timing), limits=limits)
    return Benchmark(name + LIMITLESS * request.until_limit, work)


def _random_site(request: requests.ModelBenchRequest, tokens: int, heads: int, head_dim: int) -> Site:
    from linvit.site import Site, squarest

    tokens = request.tokens or tokens
    return Site(request.heads or heads, request.head_dim or head_dim, tokens, squarest(tokens), seed=request.seed)


def _site(subject: Subject) -> Site:
    from linvit.attention import attentions

    return attentions(subject.model)[0].site


def _draws(request: requests.ModelBenchRequest, count: int) -> Draws:
    import torch

    from linvit.devices import pick_device
    from linvit.measure.error import Draws

    where: dict[str, Any] = {}
    if isinstance(request, requests.ErrorRequest):
        where = {"dtype": getattr(torch, request.dtype), "device": pick_device(request.device)}
    return Draws(request.draws or count, request.seed, **where)


def _specs(
    request: requests.AttentionBenchRequest, defaults: Sequence[str] | None, site: Site, plain: bool = False
) -> list[str]:
    """The attentions asked for, and the peers. Over features (`plain`) a peer without options is one family."""
    from linvit.attention import attention_names
    from linvit.measure.peers import peer_specs

    ours = [*(request.attentions or (attention_names() if defaults is None else defaults))]
    return ours if request.against is None else [*ours, *peer_specs(request.against, [] if plain else ours, site)]


def _subject(
    request: requests.ModelBenchRequest | requests.MapsRequest, display: Display, images: int
) -> Subject | None:
    """The trained model of a request with its test images, as it takes them."""
    if request.model is None or request.data is None:
        return None
    from linvit.data import load_data, normalise
    from linvit.measure.trained import Subject
    from linvit.training.checkpoint import load

    net = load(request.model)
    side, channels, root = net.config.image_size, net.config.channels, request.data_root
    found = load_data(request.data, root=root, image_size=side, channels=channels, progress=display.progress)
    if not len(found.test):
        raise ValueError(f"{request.data} has no test images")
    pixels, _ = found.test.batch(slice(0, images))
    home = request.model.resolve()
    name = home.parent.name if home.name in ("best", "last") else home.name
    seen = normalise(pixels, net.about["mean"], net.about["std"])
    return Subject(net, seen, f"{name} on {found.name}", net.config.attention)


def _show(request: requests.BenchRequest, found: Benchmark, records: list[Record]) -> None:
    """Print the tables or JSON, and store the chart."""
    from linvit.cli._bench import print_tables

    out, name = request.out, found.name
    if request.as_json:
        print_json(rows(records))
    elif not request.quiet:
        print_tables(name.removesuffix(LIMITLESS), records, found.own)
    if out is not None:
        from linvit.report import benchmarks

        drawn = getattr(benchmarks, name)(records) if found.chart is None else found.chart(benchmarks, records)
        paths = benchmarks.save(drawn, out / name.replace("_", "-"))
        if not (request.as_json or request.quiet):
            print("wrote " + ", ".join(str(path) for path in [out / "records.jsonl", *paths]))
