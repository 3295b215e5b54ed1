"""The paper's figures that take no training: costs, errors, times and maps; and those that cannot be made here."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from linvit.attention import create_attention
from linvit.attention.performer import Performer
from linvit.data import load_data, normalise
from linvit.files import slug, write_atomically
from linvit.measure import angle, depth, error, maps, speed
from linvit.measure.models import side_by_side
from linvit.measure.provenance import pick_device, provenance
from linvit.models import model_config
from linvit.randomness import generator
from linvit.records import Record
from linvit.report import benchmarks
from linvit.studies import STUDIES, Figure, NotHere, Where, paper_charts
from linvit.train import load
from linvit.train.experiment import BACKBONES

COUNTED = ("softmax", *(f"performer-relu:m={m}" for m in (16, 64, 256)), "performer-relu:projection=none")
KINDS = ("softmax", "performer-exp:m=64", "performer-relu:m=64", "performer-relu:projection=none", "linformer:k=64")


class Measured(Figure):
    report: ClassVar[str] = "004"
    takes: ClassVar[Mapping[str, str]] = {"full": "minutes", "cpu": "minutes", "smoke": "seconds"}


@STUDIES.register("paper-fig1")
class Costs(Measured):
    """What attention costs, and how linear attention changes the order of products. Expected: softmax grows by N², the
    others by N; they meet at N = 2m, or N = d without a projection.

        linvit reproduce paper-fig1
    """

    title = "Multiply–accumulates by length"
    scales = {
        "full": {"lengths": (64, 256, 1024, 4096, 16384, 65536)},
        "cpu": {"lengths": (64, 256, 1024, 4096, 16384, 65536)},
        "smoke": {"lengths": (64, 256)},
    }
    text = {"smoke": "64 and 256 tokens"}

    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        common = provenance(torch.device("cpu"), torch.float32)
        for n, spec in itertools.product(self.scales[scale]["lengths"], COUNTED):
            attention = create_attention(spec, heads=8, head_dim=64, tokens=n)
            tags: dict[str, Any] = {"attention": spec, "tokens": n, "heads": 8, "head_dim": 64}
            yield Record("attention_macs", attention.macs(n), "MAC", **common, tags=tags)

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        return paper_charts.costs(records)


@STUDIES.register("paper-fig2")
class Angles(Measured):
    """The error of trigonometric over that of positive features, by angle and length: the closed form, and by drawing.
    Expected: equal at 1.74 rad for unit length, and without bound beyond; draws agree with the closed form.

        linvit reproduce paper-fig2
    """

    title = "Trigonometric against positive features, by angle and length"
    scales = {"full": {}, "cpu": {}, "smoke": {"angles": 8, "lengths": (0.5, 1.0), "slices": (1.0,), "rows": 4096}}
    text = {"smoke": "8 angles, 2 lengths and 4,096 rows"}

    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        return angle.measure(**self.scales[scale], progress=where.progress)

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        return benchmarks.angle(records)


@STUDIES.register("paper-fig3")
class Speeds(Measured):
    """Time of attention, forward and backward, to the end of time or memory, with v itself as the limit. Expected:
    linear attentions pass fused softmax at some hundreds of tokens and end far later; the V100's times are not ours.

        linvit reproduce paper-fig3
    """

    title = "Speed to the end of memory"
    takes = {"full": "an hour on a GPU", "cpu": "20 min", "smoke": "seconds"}
    scales = {
        "full": {"tokens": (256, 1024, 4096), "until_limit": True},
        "cpu": {"tokens": (256, 1024, 4096), "until_limit": True, "rounds": 5, "most_seconds": 20.0,
                "most_memory": 4 * 2**30},
        "smoke": {"tokens": (16, 64), "rounds": 2, "heads": 2, "head_dim": 16},
    }  # fmt: skip
    text = {"cpu": "a processor, 20 seconds and 4 GiB as the limits", "smoke": "16 and 64 tokens"}

    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        device = pick_device("cpu" if scale != "full" else where.device)
        return speed.measure(KINDS[1:], **self.scales[scale], device=device, progress=where.progress)

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        return benchmarks.speed_to_the_limit(records)


@STUDIES.register("paper-fig4")
class Errors(Measured):
    """Mean squared error of attention's output by the number of features: orthogonal against independent rows,
    trigonometric against positive features; L = 4,096, d = 16, 15 draws, and uniform attention beside them. Expected:
    orthogonal below independent, positive below trigonometric; with few features all may lie above uniform.

        linvit reproduce paper-fig4
    """

    title = "Error by the number of features"
    takes = {"full": "10 min", "cpu": "10 min", "smoke": "seconds"}
    scales = {"full": {}, "cpu": {}, "smoke": {"tokens": 64, "draws": 2, "features": (8, 16), "sigmas": (1.0,)}}
    text = {"smoke": "64 tokens, 2 draws"}

    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        return error.over_features(**self.scales[scale], progress=where.progress)

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        return benchmarks.features(records)


@STUDIES.register("paper-fig8")
class PrefixSums(Measured):
    """Unidirectional attention as the paper pictures it: the running sum of φ(k)vᵀ, and what each query reads from it.
    Expected: equal to the masked quadratic form up to rounding.

        linvit reproduce paper-fig8
    """

    title = "Prefix sums of unidirectional attention"
    takes = {"full": "seconds", "cpu": "seconds", "smoke": "seconds"}
    scales = {"full": {"tokens": 8}, "cpu": {"tokens": 8}, "smoke": {"tokens": 4}}
    text = {"smoke": "4 tokens"}

    @torch.no_grad()
    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        n, d, spec = self.scales[scale]["tokens"], 4, "performer-relu:m=6"
        q, k, v = torch.randn(3, 1, 1, n, d, generator=generator("prefix-sums"), dtype=torch.float64)
        attention = create_attention(spec, heads=1, head_dim=d, tokens=n, causal=True).double()
        assert isinstance(attention, Performer)
        φ = attention.kernel.phi
        f_q, f_k = (φ(x[0, 0] * attention.kernel.scale) for x in (q, k))
        sums, z = (f_k[:, :, None] * v[0, 0, :, None]).cumsum(0), f_k.cumsum(0)
        outputs = torch.einsum("nf,nfe->ne", f_q, sums) / (f_q * z).sum(-1, keepdim=True)
        exact = attention(q, k, v)[0, 0]
        file = io.BytesIO()
        np.savez(file, sums=sums.numpy(), outputs=outputs.numpy(), exact=exact.numpy())
        write_atomically(folder / "prefix-sums.npz", file.getvalue())
        far = float((outputs - exact).abs().max() / exact.abs().max())
        yield Record("prefix_sums", far, "fraction", n, **provenance(torch.device("cpu"), torch.float64),
                     artefact="prefix-sums.npz", tags={"attention": spec, "tokens": n, "head_dim": d})  # fmt: skip

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        with np.load(folder / records[0].artefact) as stored:
            return paper_charts.prefix_sums(stored["sums"], stored["outputs"], records[0])


@STUDIES.register("paper-fig10-11")
class Maps(Measured):
    """Where a trained model looks: the matrices of every layer and head for one photo, by softmax and by estimates of
    it on the same q and k. Expected: some heads look near, some at fixed places; `hyp` is like softmax, ReLU is flat.

        linvit reproduce paper-fig10-11
    """

    title = "Attention maps of a trained model"
    scales = {
        "full": {"data": "tiny-imagenet", "image": 0},
        "cpu": {"data": "tiny-imagenet", "image": 0},
        "smoke": {"data": "digits", "image": 0},
    }
    text = {"full": "photos in place of proteins", "cpu": "photos in place of proteins", "smoke": "a digit"}

    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        model, image = load(BACKBONES / "softmax"), self.scales[scale]["image"]
        root = where.data_root if scale != "smoke" else None
        found = load_data(self.scales[scale]["data"], root=root, image_size=model.config.image_size, channels=3)
        pixels, _ = found.test.batch(torch.tensor([image]))
        x = normalise(pixels, tuple(model.about["mean"]), tuple(model.about["std"]))
        others = ["performer-hyp:m=64", "performer-relu:m=64"]
        for each in maps.measure(model, x[0], others, own="softmax", name="the backbone that ships",
                                 progress=where.progress):  # fmt: skip
            file, name = io.BytesIO(), f"maps-{slug(each.attention)}.npz"
            np.savez_compressed(file, maps=each.weights)
            write_atomically(folder / name, file.getvalue())
            records = [record.tagged(image=image) for record in each.records]
            yield from records
            tags = {key: value for key, value in records[0].tags.items() if key not in ("layer", "head")}
            yield Record("attention_maps", each.weights.shape[0] * each.weights.shape[1], "count", artefact=name,
                         device=records[0].device, dtype=records[0].dtype, tags=tags)  # fmt: skip

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        weights = {}
        for record in records:
            if record.artefact:
                with np.load(folder / record.artefact) as stored:
                    weights[str(record.tags["attention"])] = stored["maps"]
        return benchmarks.maps(weights, records)


@STUDIES.register("paper-fig14")
class Depth(Measured):
    """How an estimate of softmax goes astray through the layers of a model with softmax's weights. Expected: the error
    grows with depth, falls with the number of features, and is smaller for `hyp` than for `exp`.

        linvit reproduce paper-fig14
    """

    title = "Error through depth"
    takes = {"full": "10 min", "cpu": "5 min", "smoke": "seconds"}
    scales = {
        "full": {"depth": 12, "tokens": 1024, "draws": 15},
        "cpu": {"depth": 12, "tokens": 256, "draws": 5},
        "smoke": {"depth": 2, "tokens": 16, "draws": 2},
    }
    text = {"cpu": "256 tokens, 5 draws", "smoke": "2 layers of 16 tokens"}

    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        size = dict(self.scales[scale])
        draws = size.pop("draws")
        model, images = depth.untrained(**size)
        specs = [f"performer-{name}:m={m}" for m in (32, 128) for name in ("exp", "hyp", "trig")]
        return depth.measure(model, images, specs, draws=draws, progress=where.progress)

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        return benchmarks.depth(records)


@STUDIES.register("paper-fig20-21")
class Deeper(Measured):
    """Training steps of whole models by the number of layers, with v itself as the limit. Expected: lines, whose slopes
    are what a layer costs; at 1,024 tokens Performers' lie near the limit's. (The paper's captions refer to a list that
    it lacks.)

        linvit reproduce paper-fig20-21
    """

    title = "Training steps by the number of layers"
    takes = {"full": "minutes on a GPU", "cpu": "15 min", "smoke": "seconds"}
    scales = {
        "full": {"depths": (1, 2, 4, 8, 12), "side": 128, "dim": 512, "batch": 16, "rounds": 30},
        "cpu": {"depths": (1, 2, 4), "side": 128, "dim": 128, "batch": 4, "rounds": 15},
        "smoke": {"depths": (1, 2), "side": 16, "dim": 16, "batch": 2, "rounds": 2},
    }
    text = {"cpu": "1,024 tokens, width 128, 1 to 4 layers", "smoke": "16 tokens, width 16"}

    def parts(self) -> dict[str, tuple[str, int]]:
        depths = self.scales["full"]["depths"]
        return {f"{spec}, {n} layers": (spec, n) for spec in (*KINDS[:3], "identity") for n in depths}

    def measure(self, scale: str, folder: Path, where: Where) -> Iterator[Record]:
        size = self.scales[scale]
        configs = {
            name: model_config(image_size=size["side"], patch_size=4, dim=size["dim"], heads=4, mlp_dim=2 * size["dim"],
                               depth=layers, attention=spec)
            for name, (spec, layers) in self.parts().items() if layers in size["depths"]
        }  # fmt: skip
        device = pick_device(where.device)
        return side_by_side(configs, baselines={}, device=device, batch=size["batch"], rounds=size["rounds"],
                            progress=where.progress)  # fmt: skip

    def draw(self, records: Sequence[Record], folder: Path) -> Any:
        return paper_charts.deeper(records, self.parts())


@STUDIES.register("paper-fig9")
class AminoAcids(NotHere):
    """The frequencies of amino acids in TrEMBL: a histogram of tokens, for which its proteins are needed."""

    report, title = "004", "Frequencies of amino acids"
    why = "TrEMBL, whose proteins it counts, is no image set; with it, a histogram of its tokens is all there is to do"


@STUDIES.register("paper-fig13")
class Similarity(NotHere):
    """Similarity of amino acids from attention, beside BLOSUM: needs a model of proteins."""

    report, title = "004", "Similarity of amino acids, from attention"
    why = "it needs a model trained on proteins (36 layers, 16 × 16 TPUs); the maps of image models are paper-fig10-11"


@STUDIES.register("paper-fig6-proteins")
class Proteins(NotHere):
    """The paper's own sizes of figures 6, 7 and 18: TrEMBL, 36 layers of width 512, and ImageNet64."""

    report, title = "004", "TrEMBL and ImageNet64 at the paper's own size"
    why = "36 layers of width 512 on proteins took 16 × 16 TPUs; the image analogues are paper-fig6-7 and paper-fig18"
