"""The reports' mistakes M1–M11: what is wrong, what is done instead, and an experiment that shows it.

An experiment takes at most a second, trains nothing and gives the same result on every machine. What a report prints is
taken from published.json; what only its text says is written here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from linvit.attention import attention_cost, attention_names, create_attention
from linvit.attention.performer import Performer
from linvit.kernels.projections import Omega
from linvit.models import create_model, estimate, model_config
from linvit.models.vit import VisionTransformer
from linvit.report import Table
from linvit.schemas.sizes import SIZES
from linvit.site import Site
from linvit.studies.declaration import all_published
from linvit.studies.half_precision import non_finite


@dataclass(frozen=True)
class Shown:
    """What an experiment showed: a sentence and a table."""

    says: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @property
    def table(self) -> Table:
        return Table.of([dict(zip(self.head, row, strict=True)) for row in self.rows], self.head)


@dataclass(frozen=True)
class Mistake:
    id: str
    reports: str
    title: str
    text: str  # what is wrong
    instead: str  # what is done here
    show: Callable[[], Shown]


MISTAKES: list[Mistake] = []


def mistake(id: str, reports: str, title: str, text: str, instead: str) -> Callable[[Callable[[], Shown]], object]:
    """Add a mistake, with the decorated function as its experiment, which is made once per process."""
    return lambda show: MISTAKES.append(Mistake(id, reports, title, text, instead, cache(show)))


def flagged(words: str) -> int:
    """The number of published results with a flag that contains these words."""
    results = [result for rows in all_published().values() for result in rows.values()]
    return sum(any(words in flag for flag in result.flags) for result in results)


def small_model(stem: str, attention: str) -> tuple[VisionTransformer, torch.Tensor]:
    """A model behind a convolutional stem, and images for it, in float64: outputs that are equal in exact arithmetic
    are then bit-identical once rounded to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single token leaves attention without effect, which is the point
        model = create_model(
            image_size=8, stem=stem, trunk=(3, 5, 7), dim=22, depth=3, heads=2, mlp_dim=13, attention=attention
        )
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model.double().eval().requires_grad_(False), images


def feature_map(attention: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """φ of a Performer, with its scale of q and k."""
    assert isinstance(attention, Performer)
    return lambda x: attention.kernel.phi(x * attention.kernel.scale)


def as_reported(options: str) -> tuple[Any, str]:
    """The report's attention with one token, q and k ~ N(0, 0.1²): the record of 20,000 heads in float16, and how far
    its values are from v in float32."""
    spec = f"literal:{options}"
    q, k, v = torch.randn(3, 20_000, 1, 1, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = create_attention(spec, heads=1, head_dim=48, tokens=1)(0.1 * q, 0.1 * k, v)
    middle = (out / v - 1).abs()[..., 0].median()
    return non_finite(f"{spec},half=everywhere", 48, 0.1, 20_000), f"{float(middle):.1g}"


@mistake(
    "M1",
    "002",
    "A sequence of one token",
    "The map of the convolutional trunk is flattened to a single token. Attention over one token returns its value "
    "whatever the kernel, so the report compares trunks and optimisers; but not whether numbers stay finite, which its "
    "unprotected denominators decide.",
    "The map stays a grid of tokens, and denominators are kept away from zero. The one-token model is available by "
    "name, warns, and is in the literal column, with the report's own denominators.",
)
def one_token() -> Shown:
    def logits(stem: str, attention: str) -> torch.Tensor:
        model, images = small_model(stem, attention)
        return model(images)

    names = [name for name in attention_names() if name.startswith("performer-")]
    one_softmax, many_softmax = logits("length-one", "softmax"), logits("conv", "softmax")
    rows, equal = [], 0
    for name in names:
        same = torch.equal(logits("length-one", name).float(), one_softmax.float())
        difference = float((logits("conv", name) - many_softmax).abs().max())
        equal += same
        one, many = "bit-identical" if same else "different", f"differs by up to {difference:.2g}"
        rows.append((name, one, many, "–", "–"))
    bad = {}
    for options in ("f=gelu", "f=elu", "f=elu,alpha=0.25", "f=relu"):
        record, change = as_reported(options)
        bad[options] = int(record.value or 0)
        negative = f"{record.tags['negative']:.0%}"
        found = f"{bad[options]:,} of {record.n:,}"
        rows.append((f"literal:{options}", f"v within {change} (median)", "–", negative, found))
    says = (
        f"{flagged('sequence length 1')} of the {sum(map(len, all_published().values()))} published numbers are "
        f"of models that see an image as one token. There the kernel has no effect on values: {equal} of {len(names)} "
        f"kernels give softmax's logits, bit-identical in float32, since φ(q)·φ(k) v / φ(q)·φ(k) is v. With four "
        f"tokens the same kernels differ. It has an effect on stability: with the report's D = φ(q)·φ(k) + 1e-6, which "
        f"is negative in up to half of the heads, {bad['f=gelu']:,} of 20,000 outputs are not finite in float16 with "
        f"GELU, {bad['f=elu']:,} with ELU, {bad['f=relu']:,} with ReLU (q and k at scale 0.1, 1/D "
        f"rounded, too; 002-non-finite has what autocast rounds)."
    )
    head = ("Kernel", "One token", "Four tokens", "Negative denominators", "Not finite in float16")
    return Shown(says, head, rows)


@mistake(
    "M2",
    "002",
    "More images than there are",
    "Training, validation and test images overlap, validation images are augmented, and two models were tuned on the "
    "test images.",
    "45,000, 5,000 and 10,000 images; validation images are not augmented, and test images are used once.",
)
def splits() -> Shown:
    """What selection on test images gains by chance: the best of n equally good trials on 10,000 images, of which each
    trial gets a fifth right or wrong at random (two trials differ on a tenth)."""
    parts, available, coins = {"training": 48_000, "validation": 12_000, "test": 10_000}, 60_000, 2_000
    used, rng = sum(parts.values()), np.random.default_rng(0)
    rows = [(name, f"{count:,}") for name, count in parts.items()]
    rows += [("all that it uses", f"{used:,}"), ("all that CIFAR-10 has", f"{available:,}")]
    for trials in (4, 16, 256):
        best = rng.binomial(coins, 0.5, size=(4_000, trials)).max(axis=1)
        gain = 100 * float(best.mean() - coins / 2) / parts["test"]
        rows.append((f"best of {trials} equal trials, chosen on the test images", f"{gain:+.2f} points"))
    says = (
        f"The splits add up to {used:,} images of {available:,}: at least {used - available:,} are used twice. "
        f"{flagged('tuned on the test split')} published numbers are of models tuned on the test images: in a "
        f"grid of 256 settings, as for its ViT, that alone gains {rows[-1][1]} if all settings are equally good."
    )
    return Shown(says, ("What", "How many"), rows)


@mistake(
    "M3",
    "002",
    "A temperature of d, and an incomplete kernel",
    "Queries and keys are both scaled by d^-½, so scores are divided by d. The exponential kernel omits −‖x‖²/2, so "
    "long keys gain weight.",
    "Both are scaled by d^-¼, and the complete feature map is computed.",
)
def temperature() -> Shown:
    """φ(x) = exp(Ωx) without −‖x‖²/2 estimates exp(‖x + y‖²/2) = exp(x·y)·exp(‖x‖²/2)·exp(‖y‖²/2). The query's factor
    cancels; with y = k/√d the key keeps exp(‖k‖²/2d)."""
    d, m = 16, 400_000
    rng = np.random.default_rng(0)
    omega, query = rng.normal(size=(m, d)), rng.normal(size=d) / math.sqrt(d)
    direction = rng.normal(size=d)
    direction -= query * (direction @ query) / (query @ query)  # q·k = 0: softmax gives all keys the same weight
    direction /= np.linalg.norm(direction)
    φ_query = np.exp(omega @ query)
    sampled = {norm: float(np.mean(φ_query * np.exp(omega @ direction * norm / math.sqrt(d)))) for norm in (0, 2, 4, 6)}
    exact = {norm: math.exp(norm**2 / (2 * d)) for norm in sampled}
    rows = [(f"{norm}", "1", f"{exact[norm]:.3f}", f"{value / sampled[0]:.3f}") for norm, value in sampled.items()]

    def sharpest(power: float) -> float:
        """The largest of 64 softmax weights of q·k / d^power at head width 48, mean over queries."""
        q, k = np.random.default_rng(1).normal(size=(2, 64, 48))
        weights = np.exp(q @ k.T / 48**power)
        return float((weights.max(axis=1) / weights.sum(axis=1)).mean())

    says = (
        f"Keys with equal softmax weight get up to {exact[6]:.2f} times the weight, by their length alone. With q and "
        f"k both scaled by d^-½, the largest of 64 weights at head width 48 is {sharpest(1.0):.3f} instead of "
        f"{sharpest(0.5):.3f} (uniform: {1 / 64:.3f})."
    )
    return Shown(says, ("‖k‖", "softmax", "exp(‖k‖²/2d)", f"{m:,} features"), rows)


@mistake(
    "M4",
    "002",
    "Two numbers for one thing",
    "Tables, text and summary disagree, and some settings are impossible.",
    "Both numbers are shown. A dropout of 5.0 is read as 0.5 and as 0.05.",
)
def contradictions() -> Shown:
    rows = [
        ("accuracy of GELU", "88.64 %", "88.46 %"),
        ("ViT, s per epoch and inference", "56 and 5", "72 and 6.5"),
        ("ReLU, the same", "31 and 3.06", "38 and 3.02"),
        ("ELU, s per epoch", "13.11", "31"),
        ("most accurate kernel", "GELU, 88.64 %", "“ReLU”, 87.39 %"),
        ("EXP faster than ReLU", "34 s against 31 s", "“faster”"),
        ("one rate, 1e-3, best for all", "best rates 6.25e-05, 0.0005, 0.001, 0.0017", "“ideal”"),
        ("cat and dog", "F1 74 and 80", "“78 %”"),
        ("dropout of fθ", "5.0", "a probability is at most 1"),
        ("width 1,024 on 12 heads", "4 channels left over", "in the search space"),
    ]
    says = f"{len(rows)} places where report 002 contradicts itself or states something impossible."
    return Shown(says, ("What", "One place", "Another"), rows)


# the term; what the report means by it; what it is
TERMS = (
    ("Linformer (000)", "attention to a window of neighbours", "keys and values projected from N to k tokens"),
    ("Performer-ReLU (000)", "ReLU in the feed-forward layers", "φ(x) = ReLU(Ωx) in the attention"),
    ("cost of a Transformer (000)", "linear in the tokens", "quadratic; that of linear attention is linear"),
    ("FAVOR+ (000)", "features of cosh", "exp(Ωx − ‖x‖²/2), whose average over ±Ω is cosh"),
    ("the output (000)", "φ(Q)φ(K)ᵀV", "D⁻¹φ(Q)φ(K)ᵀV, with rows that sum to one"),
    ("deterministic (000)", "causal masks", "no random projection: f(x) itself"),
    ("deterministic (002)", "sines and cosines", "no random projection: f(x) itself"),
    ("orthogonal features (002)", "a bias b, absent from its algorithm", "rows of Ω at right angles"),
    ("patch 4 for all models (002)", "stated", "its Performers have no patches, but a convolutional trunk"),
)
SITE = {"heads": 1, "head_dim": 16, "tokens": 64, "grid": (8, 8)}


@mistake(
    "M5",
    "000, 002",
    "Wrong names",
    "The methods described are not those named, or not those that were run.",
    "The definitions of the papers, as the documentation of the attentions states them.",
)
def definitions() -> Shown:
    """For each term a number that would differ if the term meant what the report says."""
    q, k = torch.randn(2, 1, 1, 64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    place = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    far = (place[:, None] - place).abs().amax(-1) > 1  # beyond the 3 × 3 around a token
    later = torch.ones(64, 64).triu(1).bool()
    relu, plain, trig = "performer-relu:m=64", "performer-relu:projection=none", "performer-trig:m=16"

    def matrix(spec: str, seed: int = 0) -> torch.Tensor:
        with torch.no_grad():
            return create_attention(spec, **SITE, seed=seed).double().attention_matrix(q, k)[0, 0]

    def share(spec: str, where: torch.Tensor) -> str:
        weights = matrix(spec).abs()
        return f"{float((weights * where).sum() / weights.sum()):.0%}"

    def doubled(spec: str) -> str:
        short, long = (attention_cost(spec, Site(heads=1, head_dim=16, tokens=n)).macs for n in (2048, 4096))
        return f"× {long / short:.2g}"

    def largest_cosine(projection: Any) -> str:
        rows = torch.nn.functional.normalize(Omega(16, 16, projection, "chi", 0, 0).rows.double(), dim=-1)
        return f"{float((rows @ rows.T - torch.eye(16)).abs().max()):.1g}"

    def seed_difference(spec: str) -> str:
        return f"{float((matrix(spec) - matrix(spec, seed=1)).abs().max()):.2g}"

    φ = feature_map(create_attention(relu, **SITE).double())
    sums = (φ(q) @ φ(k).transpose(-1, -2)).sum(-1).detach()
    variation = 0.5 * float((matrix(relu) - matrix("softmax")).abs().sum(-1).mean())
    x = np.random.default_rng(0).normal(size=1_000)
    tokens = small_model("length-one", "softmax")[0].tokens
    evidence = (
        f"weight beyond the neighbours: {share('linformer:k=16', far)}, of a window {share('window:size=3', far)}",
        f"total variation from softmax: {variation:.2f}; with ReLU after the attention, 0",
        f"twice the tokens: {doubled('softmax')}, ReLU features {doubled(relu)}",
        f"mean of 1,000 exp(ω): {np.exp(x).mean():.3f}, of cosh(ω): {np.cosh(x).mean():.3f}; √e is {math.exp(0.5):.3f}",
        f"without D⁻¹ rows sum to {float(sums.min()):.2g} to {float(sums.max()):.2g}",
        f"weight of later tokens: {share(plain, later)}",
        f"two seeds differ by {seed_difference(trig)} with sines, {seed_difference(plain)} without projection",
        f"largest cosine between rows: {largest_cosine('orthogonal')}, of independent ones {largest_cosine('iid')}",
        f"tokens of 32 px: {tokens} there, {(32 // 4) ** 2} with patches",
    )
    rows = [(*term, found) for term, found in zip(TERMS, evidence, strict=True)]
    says = f"{len(rows)} terms that the reports use for something else, each with a number that shows the difference."
    return Shown(says, ("Term", "There", "Here", "Evidence"), rows)


@mistake(
    "M6",
    "000",
    "Two descriptions of one setup",
    "Batch, epochs, layers and heads are given twice and differently, and Performers ran in another framework than the "
    "models they are compared with.",
    "One code base, one protocol, speeds measured side by side in one run.",
)
def settings() -> Shown:
    """The models whose times are compared, counted."""
    rows = [
        ("batch", "32", "32 and 256", "128 and 32"),
        ("epochs", "20 and 100", "30", "20"),
        ("layers", "6 and 8", "6 and 8", "4 and 8"),
        ("heads", "8", "8 and 4", "4 and 4"),
        ("framework", "PyTorch", "TensorFlow", "TensorFlow"),
        ("k of the Linformer", "not stated", "–", "–"),
    ]
    work = {}
    for kind, data, side, channels, batch in (
        ("torch", "mnist", 28, 1, 32),
        ("torch", "cifar", 72, 3, 32),
        ("keras", "mnist", 28, 1, 32),
        ("keras", "cifar", 30, 3, 256),
    ):
        attention = "softmax" if kind == "torch" else "performer-exp:m=16"
        size = {"image_size": side, "channels": channels, "classes": 10}
        cost = estimate(model_config(f"000-{kind}-{data}", **size, attention=attention))
        work[kind, data] = cost.parameters, cost.macs, cost.macs * batch
    for i, what in enumerate(("parameters", "MACs per image", "MACs per step")):
        both = {
            kind: " and ".join(f"{work[kind, data][i] / 1e6:,.1f} million" for data in ("mnist", "cifar"))
            for kind in ("torch", "keras")
        }
        rows.append((f"{what}, MNIST and CIFAR-10", both["torch"], both["keras"], "–"))
    mnist, cifar = (work["torch", data][1] / work["keras", data][1] for data in ("mnist", "cifar"))
    says = (
        f"{flagged('time not comparable')} published times are compared across frameworks, widths or batch sizes: "
        f"per image the Transformer does {mnist:.1f} (MNIST) and {cifar:.1f} (CIFAR-10) times the Performers' work, "
        f"independent of their attention."
    )
    head = ("MNIST and CIFAR-10", "Transformer, Linformer", "Performer, first description", "second description")
    return Shown(says, head, rows)


@mistake(
    "M7",
    "000",
    "A Performer that is mostly a head",
    "The printed summary shows one layer of ordinary attention, and nearly all parameters are in the layers after it.",
    "Parameters are matched to softmax's; the wide head is kept in the literal column.",
)
def keras() -> Shown:
    """The printed summary, layer by layer, from its description: one block, 25 tokens of width 64, a head on all."""
    side, patch, dim, heads, key, mlp, classes = 32, 6, 64, 4, 128, 128, 10
    tokens, inner = (side // patch) ** 2, heads * key

    def dense(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    parts = {
        "normalisation of the input": 2 * 3 + 1,
        "patches and positions": dense(3 * patch**2, dim) + tokens * dim,
        "attention": 3 * dense(dim, inner) + dense(inner, dim),
        "feed-forward": dense(dim, mlp) + dense(mlp, dim),
        "three norms": 3 * 2 * dim,
        "head": dense(tokens * dim, 2048) + dense(2048, 1024) + dense(1024, classes),
    }
    total = sum(parts.values())
    rows = [(name, f"{count:,}", f"{count / total:.1%}") for name, count in parts.items()]
    says = (
        f"One layer of {heads} heads × {key} on {tokens} tokens has {total:,} parameters, as printed: "
        f"{parts['head'] / total:.0%} are in the head and {parts['attention'] / total:.1%} in the attention, which is "
        f"Keras's own softmax attention."
    )
    return Shown(says, ("Part", "Parameters", "Share"), [*rows, ("all", f"{total:,}", "100.0%")])


@mistake(
    "M8",
    "000",
    "Claims contradicted by the tables",
    "The text claims what the tables contradict.",
    "Every claim is a hypothesis with a test on this page.",
)
def tables_of_000() -> Shown:
    rows = [
        ("Performers are ahead on CIFAR-10", "0 of 6 are"),
        ("Performers are faster on MNIST", "0 of 6 are"),
        ("softmax gains with more features", "printed for m = 16 alone"),
    ]
    says = "By its own tables 0 of 6 Performers beat the Transformer on CIFAR-10, and 0 of 6 are faster on MNIST."
    return Shown(says, ("Claim", "Its own numbers"), rows)


@mistake(
    "M9",
    "001",
    "Several factors at once",
    "Two of its experiments change more than they name, its schedule does not fit its epochs, three GPUs are named, a "
    "kernel option is given that has no effect, and the best epoch is selected on the images that the model is then "
    "judged by.",
    "One factor at a time; the model is selected on validation images, and the last epoch is reported with it.",
)
def factors() -> Shown:
    def changed(a: str, b: str) -> str:
        both = {key: (value, SIZES[b][key]) for key, value in SIZES[a].items()}
        return ", ".join(f"{key} {old} → {new}" for key, (old, new) in both.items() if old != new)

    tokens = [(64 // patch) ** 2 for patch in (4, 8)]
    ends = {first: list(accumulate(first * 2**i for i in range(4))) for first in (10, 12)}
    rows = [
        ("III → IV, “width”", changed("001-III", "001-IV")),
        ("VIII → IX, “features”", changed("001-VIII", "001-IX") + ", and the learning rate 0.0015 → 0.0016"),
        ("patch 4 → 8 on 64 px, “8×8 to 4×4”", f"{tokens[0]} → {tokens[1]} tokens"),
        *((f"cycles of {first}", f"end at epochs {', '.join(map(str, epochs))}") for first, epochs in ends.items()),
        ("ViT rows that were copied", f"{flagged('row copied')} of 9"),
    ]
    end = "with" if any(80 in epochs for epochs in ends.values()) else "inside"
    says = f"80 epochs end {end} a restart cycle, and two steps that name one factor change several."
    return Shown(says, ("What", "What it is"), rows)


@mistake(
    "M10",
    "001",
    "“Most”, “consistently”",
    "Nine single runs are summarised in words that their numbers do not support.",
    "Seeds, intervals and corrected tests.",
)
def tables_of_001() -> Shown:
    rows = [
        ("fθ above relu “in most cases”", "5 of 9", "I, II, III, V, VII"),
        ("exp above ViT, best epoch", "2 of 9", "VIII, IX"),
        ("exp above ViT, last epoch", "3 of 9", "V, VI, VIII"),
    ]
    says = (
        "fθ is above relu in 5 of 9 experiments; exp is above ViT, which the report calls the most accurate "
        "throughout, in 4."
    )
    return Shown(says, ("Claim", "Count", "Experiments"), rows)


@mistake(
    "M11",
    "003",
    "A lemma in place of a definition",
    "The review gives the lemma about positive features as the definition of hyp+, and calls linear memory "
    "sub-quadratic.",
    "hyp+ is a feature map of its own here, and memory is measured.",
)
def memory() -> Shown:
    """Numbers kept: softmax L² + L·d; linear L·r + L·d + r·d."""
    d, r = 64, 64
    kept = (lambda length: length**2 + length * d), (lambda length: length * r + length * d + r * d)
    rows = []
    for length in (256, 1024, 4096, 16384):
        counts = [f"{count(length):,}" for count in kept]
        rows.append((f"{length:,}", *counts, *(f"× {count(2 * length) / count(length):.2f}" for count in kept)))
    error = (1 - math.exp(-1)) / 2
    says = (
        f"Twice the tokens take {rows[-1][4][2:]} times the memory: linear, not merely sub-quadratic. hyp+ is an "
        f"estimator of its own, with {error:.2f} times the squared error of positive features at ‖x + y‖ = 1 and "
        f"equal numbers of projections."
    )
    return Shown(says, ("Tokens", "Softmax", f"Linear, r = {r}", "Softmax, doubled", "Linear, doubled"), rows)
