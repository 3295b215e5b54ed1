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
from typing import TYPE_CHECKING, Any

from linvit.cli._output import print_json, rows, use_threads, warnings_in_one_line
from linvit.requests import bench as requests

if TYPE_CHECKING:
    from linvit.measure.error import Draws
    from linvit.measure.trained import Subject
    from linvit.progress import Progress
    from linvit.records import Record
    from linvit.site import Site

LIMITLESS = "_to_the_limit"  # of a chart's name
FIGURE = ("performer-exp", "performer-relu", "performer-hyp", "efficient", "linformer")  # few enough for lines
Work = Callable[..., Iterator["Record"]]  # takes progress=


def error(request: requests.ErrorRequest) -> None:
    _prepare(request)
    from linvit.measure.error import random_errors
    from linvit.measure.trained import layer_errors

    if subject := _subject(request, request.images or 32):
        specs = _specs(request, None, _site(subject))
        work: Work = partial(layer_errors, subject, specs, draws=_draws(request, 4))
        _show(request, "layers", work, own=subject.own)
        return
    site, sigmas = _random_site(request, 256, 4, 64), request.sigma or (0.5, 1.0, 2.0)
    work = partial(random_errors, _specs(request, None, site), site, sigmas=sigmas, draws=_draws(request, 4))
    _show(request, "error", work)


def features(request: requests.FeaturesRequest) -> None:
    _prepare(request)
    from linvit.measure.error import FAMILIES, feature_errors
    from linvit.measure.trained import layer_feature_errors

    if subject := _subject(request, request.images or 32):
        specs, counts = _specs(request, FAMILIES, _site(subject), plain=True), request.features or (16, 32, 64)
        work: Work = partial(layer_feature_errors, subject, specs, features=counts, draws=_draws(request, 4))
    else:
        site, counts = _random_site(request, 4096, 1, 16), request.features or (16, 32, 64, 128, 256)
        given = {"features": counts, "sigmas": request.sigma or (0.5, 1.0), "draws": _draws(request, 15)}
        work = partial(feature_errors, _specs(request, FAMILIES, site, plain=True), site, **given)
    _show(request, "features", work)


def depth(request: requests.DepthRequest) -> None:
    _prepare(request)
    from linvit.measure.depth import depth_errors, untrained

    subject = _subject(request, request.images or 32)
    subject = subject or untrained(_random_site(request, 256, 4, 32), depth=request.layers or 12)
    specs = _specs(request, FIGURE, _site(subject))
    _show(request, "depth", partial(depth_errors, subject, specs, draws=_draws(request, 4)))


def angle(request: requests.AngleRequest) -> None:
    _prepare(request)
    from linvit.measure.angle import mse_ratios

    _show(request, "angle", partial(mse_ratios, seed=request.seed))


def maps(request: requests.MapsRequest) -> None:
    _prepare(request)
    from linvit.measure.maps import model_maps, store_maps

    subject = _subject(request, request.image + 1)
    assert subject is not None
    specs, weights = _specs(request, (), _site(subject)), {}

    def work(progress: Progress) -> Iterator[Record]:
        for found in model_maps(subject, specs, image=request.image, seed=request.seed, progress=progress):
            weights[found.attention] = found.weights
            yield from found.records
            if request.out is not None:
                yield store_maps(found, request.out)

    _show(request, "maps", work, chart=lambda charts, records: charts.maps(weights, records))


def speed(request: requests.SpeedRequest) -> None:
    _prepare(request)
    from linvit.measure.speed import attention_speed

    _costs(request, "speed", attention_speed, rounds=request.rounds)


def memory(request: requests.MemoryRequest) -> None:
    _prepare(request)
    from linvit.measure.memory import attention_memory

    _costs(request, "memory", attention_memory)


def _costs(request: requests.MemoryRequest, name: str, measure: Work, **timing: Any) -> None:
    import torch

    from linvit.measure.devices import pick_device
    from linvit.measure.memory import Limits, read_size
    from linvit.measure.timing import Timing
    from linvit.site import Site

    timing |= {"batch": request.batch, "device": pick_device(request.device), "dtype": getattr(torch, request.dtype)}
    most = read_size(request.most_memory) if request.most_memory else None
    site = Site(request.heads, request.head_dim, max(1, request.prefix), prefix=request.prefix, seed=request.seed)
    specs = _specs(request, FIGURE if request.until_limit else None, site.at(max(request.tokens)))
    limits = Limits(most, request.most_seconds, request.until_limit)
    work = partial(measure, specs, site, tokens=request.tokens, timing=Timing(**timing), limits=limits)
    _show(request, name + LIMITLESS * request.until_limit, work)


def _prepare(request: requests.BenchRequest | requests.AngleRequest) -> None:
    # Before torch is imported: threads that wait must sleep, or CPU time counts them as work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    use_threads(request.threads)
    if request.out is not None and request.out.exists() and not request.out.is_dir():  # now, not after minutes of work
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(request.out))


def _random_site(request: requests.ModelBenchRequest, tokens: int, heads: int, head_dim: int) -> Site:
    from linvit.site import Site, squarest

    tokens = request.tokens or tokens
    return Site(request.heads or heads, request.head_dim or head_dim, tokens, squarest(tokens), seed=request.seed)


def _site(subject: Subject) -> Site:
    from linvit.attention import attentions

    return attentions(subject.model)[0].site


def _draws(request: requests.ModelBenchRequest, count: int) -> Draws:
    import torch

    from linvit.measure.devices import pick_device
    from linvit.measure.error import Draws

    where: dict[str, Any] = {}
    if isinstance(request, requests.ErrorRequest):
        where = {"dtype": getattr(torch, request.dtype), "device": pick_device(request.device)}
    return Draws(request.draws or count, request.seed, **where)


def _specs(
    request: requests.BenchRequest, defaults: Sequence[str] | None, site: Site, plain: bool = False
) -> list[str]:
    """The attentions asked for, and the peers. Over features (`plain`) a peer without options is one family."""
    from linvit.attention import attention_names
    from linvit.measure.peers import peer_specs

    ours = [*(request.attentions or (attention_names() if defaults is None else defaults))]
    return ours if request.against is None else [*ours, *peer_specs(request.against, [] if plain else ours, site)]


def _subject(request: requests.ModelBenchRequest | requests.MapsRequest, images: int) -> Subject | None:
    """The trained model of a request with its test images, as it takes them."""
    if request.model is None or request.data is None:
        return None
    from linvit.cli._display import Display
    from linvit.data import load_data, normalise
    from linvit.measure.trained import Subject
    from linvit.training.checkpoint import load

    net = load(request.model)
    side, channels, root = net.config.image_size, net.config.channels, request.data_root
    with Display(request.quiet) as display, warnings_in_one_line():
        found = load_data(request.data, root=root, image_size=side, channels=channels, progress=display.progress)
    if not len(found.test):
        raise ValueError(f"{request.data} has no test images")
    pixels, _ = found.test.batch(slice(0, images))
    home = request.model.resolve()
    name = home.parent.name if home.name in ("best", "last") else home.name
    seen = normalise(pixels, net.about["mean"], net.about["std"])
    return Subject(net, seen, f"{name} on {found.name}", net.config.attention)


def _show(
    request: requests.BenchRequest | requests.AngleRequest,
    name: str,
    work: Work,
    own: str = "",
    chart: Callable[[Any, list[Record]], Any] | None = None,
) -> None:
    """Measure; print the tables or JSON; store the records as they come, and the chart."""
    from linvit.cli._bench import print_tables
    from linvit.cli._display import Display
    from linvit.records import Records

    out, records = request.out, []
    with Display(request.quiet) as display:
        for record in work(progress=display.progress):
            records.append(record)
            if out is not None:
                Records(out / "records.jsonl").append([record])
    if request.as_json:
        print_json(rows(records))
    elif not request.quiet:
        print_tables(name.removesuffix(LIMITLESS), records, own)
    if out is not None:
        from linvit.report import benchmarks

        drawn = getattr(benchmarks, name)(records) if chart is None else chart(benchmarks, records)
        paths = benchmarks.save(drawn, out / name.replace("_", "-"))
        if not (request.as_json or request.quiet):
            print("wrote " + ", ".join(str(path) for path in [out / "records.jsonl", *paths]))
