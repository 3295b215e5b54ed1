"""The reports' mistakes M1–M11: what is wrong, what is done instead, and an experiment that shows it.

An experiment takes a second at most, trains nothing and comes out the same on every machine. What a report prints is
taken from published.json; what only its text says stands here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from linvit.studies import Printed, published


@dataclass(frozen=True)
class Shown:
    """What an experiment showed: in a sentence, and as a table."""

    says: str
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Mistake:
    id: str
    reports: str
    title: str
    text: str
    instead: str
    show: Callable[[], Shown]


def table(study: str) -> dict[str, Printed]:
    """The published rows of one table, by name."""
    return {found.row: found for found in published() if found.study == study}


def flagged(words: str) -> list[Printed]:
    return [found for found in published() if any(words in flag for flag in found.quality)]


def small_model(stem: str, attention: str) -> tuple[Any, Any]:
    """A model behind a convolutional stem, and images for it, both in float64: rounding its answer to float32 leaves
    equal what is equal, as its error is 10⁻¹⁶, not 10⁻⁷."""
    import torch

    from linvit.models import create_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a single token leaves attention nothing to do is the point
        model = create_model(image_size=8, stem=stem, trunk=(3, 5, 7), dim=22, depth=3, heads=2, mlp_dim=13,
                             attention=attention)  # fmt: skip
    source = torch.Generator().manual_seed(0)
    images = torch.randn(5, 3, 8, 8, generator=source, dtype=torch.float64)
    return model.double().eval().requires_grad_(False), images


def one_token() -> Shown:
    import torch

    from linvit.attention import attention_names, create_attention
    from linvit.attention.performer import Performer

    def logits(stem: str, attention: str) -> torch.Tensor:
        model, images = small_model(stem, attention)
        return model(images)

    def lost(name: str) -> float:
        """The share of v that ε = 10⁻⁶ takes from φ(q)·φ(k) v / (φ(q)·φ(k) + ε), at most."""
        attention = create_attention(name, heads=2, head_dim=11, tokens=1).double()
        assert isinstance(attention, Performer)
        φ, scale = attention.kernel.phi, attention.kernel.scale
        q, k = torch.randn(2, 7, 2, 1, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()
        weight = (φ(q * scale) * φ(k * scale)).sum(-1).detach()
        return float((weight / (weight + 1e-6) - 1).abs().max())

    names = [name for name in attention_names() if name.startswith("performer-")]
    softmax = {stem: logits(stem, "softmax") for stem in ("length-one", "conv")}
    rows, same = [], 0
    for name in names:
        one, many = (logits(stem, name) for stem in softmax)
        equal = torch.equal(one.float(), softmax["length-one"].float())
        same += equal
        apart = float((many - softmax["conv"]).abs().max())
        said = "equal to the last bit" if equal else "different"
        rows.append((name, said, f"differs by up to {apart:.2g}", f"{lost(name):.1g}"))
    says = (f"{len(flagged('sequence length 1'))} of the {len(published())} published numbers are of models that see "
            f"an image as one token. No kernel can matter there: {same} of {len(names)} give softmax's answer to the "
            f"last bit of float32, since φ(q)·φ(k) v / φ(q)·φ(k) is v, but for what ε in the denominator takes from "
            f"it. With four tokens the same kernels differ.")  # fmt: skip
    return Shown(says, ("Kernel", "One token", "Four tokens", "Share of v that the report's ε takes"), rows)


def splits() -> Shown:
    """What a choice on test images adds by chance: of so many trials that are equally good the luckiest is printed, on
    10,000 images of which each trial gets a fifth right or wrong as a coin falls (two trials differ on a tenth)."""
    parts, there = {"training": 48_000, "validation": 12_000, "test": 10_000}, 50_000 + 10_000
    used, rng, coins = sum(parts.values()), np.random.default_rng(0), 2_000
    rows = [*((name, f"{count:,}") for name, count in parts.items()), ("all that it uses", f"{used:,}"),
            ("all that CIFAR-10 has", f"{there:,}")]  # fmt: skip
    for trials in (4, 16, 256):
        best = rng.binomial(coins, 0.5, size=(4_000, trials)).max(axis=1)
        gain = 100 * float(best.mean() - coins / 2) / parts["test"]
        rows.append((f"best of {trials} equal trials, chosen on the test images", f"{gain:+.2f} points"))
    tuned = len(flagged("tuned on the test split"))
    says = (f"The splits add up to {used:,} images of {there:,}: at least {used - there:,} serve twice. {tuned} "
            f"published numbers are of models tuned on the test images: in a grid of 256 settings, as its ViT's, that "
            f"alone is worth {rows[-1][1]} where all of them are equally good.")  # fmt: skip
    return Shown(says, ("What", "How many"), rows)


def temperature() -> Shown:
    """φ(x) = exp(Ωx) without −‖x‖²/2 estimates exp(‖x + y‖²/2) = exp(x·y)·exp(‖x‖²/2)·exp(‖y‖²/2). What belongs to the
    query cancels; with y = k/√d the key keeps exp(‖k‖²/2d)."""
    d, m = 16, 400_000
    rng = np.random.default_rng(0)
    omega, query = rng.normal(size=(m, d)), rng.normal(size=d) / math.sqrt(d)
    direction = rng.normal(size=d)
    direction -= query * (direction @ query) / (query @ query)  # q·k = 0: softmax gives all of them one weight
    direction /= np.linalg.norm(direction)
    seen = np.exp(omega @ query)
    rows, weights = [], {}
    for norm in (0, 2, 4, 6):
        sampled = float(np.mean(seen * np.exp(omega @ direction * norm / math.sqrt(d))))
        weights[norm] = sampled, math.exp(norm**2 / (2 * d))
    for norm, (sampled, exact) in weights.items():
        rows.append((f"{norm}", "1", f"{exact:.3f}", f"{sampled / weights[0][0]:.3f}"))
    sharp = {power: _sharpest(64, 48, power) for power in (0.5, 1.0)}
    says = (f"Keys that softmax weighs alike get up to {weights[6][1]:.2f} times the weight by their length alone. And "
            f"with q and k both scaled by d^-½, the largest of 64 weights at head width 48 is {sharp[1.0]:.3f} instead "
            f"of {sharp[0.5]:.3f} (all alike: {1 / 64:.3f}).")  # fmt: skip
    return Shown(says, ("‖k‖", "softmax", "exp(‖k‖²/2d)", f"{m:,} features"), rows)


def _sharpest(tokens: int, d: int, power: float) -> float:
    """The largest softmax weight of q·k / d^power, mean over queries."""
    q, k = np.random.default_rng(1).normal(size=(2, tokens, d))
    weights = np.exp(q @ k.T / d**power)
    return float((weights.max(axis=1) / weights.sum(axis=1)).mean())


def contradictions() -> Shown:
    every = {name: table(f"002-{name}") for name in ("vit", "relu", "elu-4", "gelu-4", "exp", "theta-mlp")}
    numbers = {name: next(iter(rows.values())).numbers for name, rows in every.items()}
    accuracy = {name: found["test_accuracy"] for name, found in numbers.items()}
    best = max(accuracy, key=accuracy.__getitem__)
    f1 = {name: found["f1"] for name, found in numbers["relu"]["per_class"].items()}
    rates = {numbers[name]["hparams"]["lr"] for name in ("relu", "gelu-4", "elu-4", "exp")}
    rows = [
        ("accuracy of GELU", f"{accuracy['gelu-4']} %", "88.46 %"),
        ("ViT, s per epoch and inference", f"{numbers['vit']['s_per_epoch']} and {numbers['vit']['inference_s']}",
         "72 and 6.5"),
        ("ReLU, the same", f"{numbers['relu']['s_per_epoch']} and {numbers['relu']['inference_s']}", "38 and 3.02"),
        ("ELU, s per epoch", f"{numbers['elu-4']['s_per_epoch']}", "31"),
        ("most accurate kernel", f"{best.split('-')[0].upper()}, {accuracy[best]} %",
         f"“ReLU”, {accuracy['relu']} %"),
        ("EXP faster than ReLU", f"{numbers['exp']['s_per_epoch']} s against {numbers['relu']['s_per_epoch']} s",
         "“faster”"),
        ("one rate, 1e-3, best for all", f"best rates {', '.join(f'{rate:g}' for rate in sorted(rates))}", "“ideal”"),
        ("cat and dog", f"F1 {f1['cat']} and {f1['dog']}", "“78 %”"),
        ("dropout of fθ", f"{numbers['theta-mlp']['hparams']['dropout_as_printed']}", "a probability is at most 1"),
        ("width 1,024 on 12 heads", f"{1024 % 12} channels left over", "in the search space"),
    ]  # fmt: skip
    says = f"{len(rows)} places in which report 002 says two things, or one that cannot be."
    return Shown(says, ("What", "One place", "Another"), rows)


def definitions() -> Shown:
    """Each word beside something that can be counted, which would come out otherwise if it meant what is said."""
    import torch

    from linvit.attention import create_attention
    from linvit.attention.performer import Performer
    from linvit.kernels.projections import Omega

    side, site = 8, {"heads": 1, "head_dim": 16, "tokens": 64, "grid": (8, 8)}
    q, k = torch.randn(2, 1, 1, 64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    place = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1).T
    far = (place[:, None] - place).abs().amax(-1) > 1  # beyond the 3 × 3 around a token
    later = torch.ones(64, 64).triu(1).bool()

    def made(spec: str, **more: Any) -> Any:
        return create_attention(spec, **{**site, **more}).double()

    def matrix(spec: str, **more: Any) -> torch.Tensor:
        with torch.no_grad():
            return made(spec, **more).attention_matrix(q, k)[0, 0]

    def share(spec: str, there: torch.Tensor) -> str:
        weights = matrix(spec).abs()
        return f"{float((weights * there).sum() / weights.sum()):.0%}"

    def doubled(spec: str) -> str:
        return f"× {made(spec, tokens=4096, grid=None).macs(4096) / made(spec, tokens=2048, grid=None).macs(2048):.2g}"

    def cosine(projection: Any) -> str:
        rows = torch.nn.functional.normalize(Omega(16, 16, projection, "chi", 0, 0).rows.double(), dim=-1)
        return f"{float((rows @ rows.T - torch.eye(16)).abs().max()):.1g}"

    def apart(spec: str) -> str:
        return f"{float((matrix(spec) - matrix(spec, seed=1)).abs().max()):.2g}"

    relu = made("performer-relu:m=64")
    assert isinstance(relu, Performer)
    φ = relu.kernel.phi
    with torch.no_grad():
        sums = (φ(q * relu.kernel.scale) @ φ(k * relu.kernel.scale).transpose(-1, -2)).sum(-1)
    softmax = 0.5 * float((matrix("performer-relu:m=64") - matrix("softmax")).abs().sum(-1).mean())
    x = np.random.default_rng(0).normal(size=1_000)
    cosh = float(np.mean(np.exp(x))), float(np.mean(np.cosh(x)))
    rows = [
        ("Linformer (000)", "attention to a window of neighbours", "keys and values projected from N to k tokens",
         f"weight beyond the neighbours: {share('linformer:k=16', far)}, of a window {share('window:size=3', far)}"),
        ("Performer-ReLU (000)", "ReLU in the feed-forward layers", "φ(x) = ReLU(Ωx) in the attention",
         f"total variation from softmax: {softmax:.2f}; with ReLU behind it, 0"),
        ("cost of a Transformer (000)", "linear in the tokens", "quadratic; the linear ones are the others",
         f"twice the tokens: {doubled('softmax')}, ReLU features {doubled('performer-relu:m=64')}"),
        ("FAVOR+ (000)", "features of cosh", "exp(Ωx − ‖x‖²/2); cosh is what its average over ±Ω comes to",
         f"mean of 1,000 exp(ω): {cosh[0]:.3f}, of cosh(ω): {cosh[1]:.3f}; √e is {math.exp(0.5):.3f}"),
        ("the output (000)", "φ(Q)φ(K)ᵀV", "D⁻¹φ(Q)φ(K)ᵀV, rows that sum to one",
         f"without D⁻¹ rows sum to {float(sums.min()):.2g} to {float(sums.max()):.2g}"),
        ("deterministic (000)", "causal masks", "no random projection: f(x) itself",
         f"weight of later tokens: {share('performer-relu:projection=none', later)}"),
        ("deterministic (002)", "sines and cosines", "no random projection: f(x) itself",
         f"two seeds differ by {apart('performer-trig:m=16')} with sines, {apart('performer-relu:projection=none')} "
         "without projection"),
        ("orthogonal features (002)", "a bias b, absent from its algorithm", "rows of Ω at right angles",
         f"largest cosine between rows: {cosine('orthogonal')}, of independent ones {cosine('iid')}"),
        ("patch 4 for all models (002)", "stated", "its Performers have no patches, but a convolutional trunk",
         f"tokens of 32 px: {small_model('length-one', 'softmax')[0].tokens} there, {(32 // 4) ** 2} with patches"),
    ]  # fmt: skip
    says = f"{len(rows)} words that the reports use for something else, each with a number that tells the two apart."
    return Shown(says, ("Term", "There", "Here", "What tells them apart"), rows)


def settings() -> Shown:
    """The models whose times stand side by side, counted."""
    from linvit.models import estimate, model_config

    said = [
        ("batch", "32", "32 and 256", "128 and 32"),
        ("epochs", "20 and 100", "30", "20"),
        ("layers", "6 and 8", "6 and 8", "4 and 8"),
        ("heads", "8", "8 and 4", "4 and 4"),
        ("framework", "PyTorch", "TensorFlow", "TensorFlow"),
        ("k of the Linformer", "not said", "–", "–"),
    ]
    work = {}
    for data, side, other, channels, batch in (("mnist", 28, 28, 1, 32), ("cifar", 72, 30, 3, 256)):
        for kind, size, images in (("torch", side, 32), ("keras", other, batch)):
            config = model_config(f"000-{kind}-{data}", image_size=size, channels=channels, classes=10,
                                  attention="softmax" if kind == "torch" else "performer-exp:m=16")  # fmt: skip
            cost = estimate(config)
            work[data, kind] = cost.parameters, cost.macs, cost.macs * images
    counted = [
        (f"{what}, MNIST and CIFAR-10",
         *(" and ".join(f"{work[data, kind][i] / 1e6:,.1f} million" for data in ("mnist", "cifar"))
           for kind in ("torch", "keras")), "–")
        for i, what in enumerate(("parameters", "products an image", "products a step"))
    ]  # fmt: skip
    ratio = {data: work[data, "torch"][1] / work[data, "keras"][1] for data in ("mnist", "cifar")}
    count = len(flagged("time not comparable"))
    says = (f"{count} published times stand side by side that were not taken of one framework, width or batch: for an "
            f"image the Transformer does {ratio['mnist']:.1f} (MNIST) and {ratio['cifar']:.1f} (CIFAR-10) times the "
            f"Performers' work, whatever their attention.")  # fmt: skip
    head = ("MNIST and CIFAR-10", "Transformer, Linformer", "Performer, first account", "second account")
    return Shown(says, head, [*said, *counted])


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
    says = (f"One layer of {heads} heads × {key} on {tokens} tokens comes to {total:,} parameters, as printed, of "
            f"which {parts['head'] / total:.0%} are in the head and {parts['attention'] / total:.1%} in an attention "
            f"that is Keras's own softmax.")  # fmt: skip
    return Shown(says, ("Part", "Parameters", "Share"), [*rows, ("all", f"{total:,}", "100.0%")])


def own_tables_000() -> Shown:
    mnist, cifar = table("000-mnist"), table("000-cifar10")
    performers = [name for name in mnist if name.startswith(("RF", "deterministic"))]
    ahead = [name for name in performers if (cifar[name].accuracy or 0) > (cifar["transformer"].accuracy or 0)]
    steps = {name: mnist[name].numbers["ms_per_step"] for name in mnist}
    faster = [name for name in performers if steps[name] < steps["transformer"]]
    features = sorted({int(name.split()[0][2:]) for name in performers if "softmax" in name and name[:2] == "RF"})
    rows = [
        ("Performers are ahead on CIFAR-10", f"{len(ahead)} of {len(performers)} are"),
        ("Performers are faster on MNIST", f"{len(faster)} of {len(performers)} are"),
        ("softmax gains with more features", f"printed for m = {', '.join(map(str, features))} alone"),
    ]
    says = (f"By its own tables {len(ahead)} of {len(performers)} Performers beat the Transformer on CIFAR-10, and "
            f"{len(faster)} of {len(performers)} are faster on MNIST.")  # fmt: skip
    return Shown(says, ("Claim", "Its own numbers"), rows)


def factors() -> Shown:
    from linvit.models.sizes import SIZES

    def changed(a: str, b: str) -> str:
        both = {key: (value, SIZES[b][key]) for key, value in SIZES[a].items()}
        return ", ".join(f"{key} {old} → {new}" for key, (old, new) in both.items() if old != new)

    tokens = [(64 // patch) ** 2 for patch in (4, 8)]
    ends = {first: list(accumulate(first * 2**i for i in range(4))) for first in (10, 12)}
    fits = [first for first, found in ends.items() if 80 in found]
    rows = [
        ("III → IV, “width”", changed("001-III", "001-IV")),
        ("VIII → IX, “features”", changed("001-VIII", "001-IX") + ", and the rate 0.0015 → 0.0016"),
        ("patch 4 → 8 on 64 px, “8×8 to 4×4”", f"{tokens[0]} → {tokens[1]} tokens"),
        *((f"cycles of {first}", f"end at epochs {', '.join(map(str, found))}") for first, found in ends.items()),
        ("ViT rows that were copied", f"{len(flagged('row copied'))} of 9"),
    ]
    says = (f"80 epochs end {'with a' if fits else 'inside a'} restart cycle, and two steps that name one factor "
            f"change several.")  # fmt: skip
    return Shown(says, ("What", "What it is"), rows)


EXPERIMENTS = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")


def ahead(row: str, other: str, key: str = "max_accuracy") -> list[str]:
    """The experiments of report 001 in which a row's printed number is above another's."""
    rows = {name: table(f"001-{name}") for name in EXPERIMENTS}
    return [name for name, found in rows.items() if found[row].numbers[key] > found[other].numbers[key]]


def own_tables_001() -> Shown:
    better = ahead("fθ", "relu")
    top, last = ahead("exp", "ViT"), ahead("exp", "ViT", "final_accuracy")
    rows = [
        ("fθ above relu “in most cases”", f"{len(better)} of {len(EXPERIMENTS)}", ", ".join(better)),
        ("exp above ViT, best epoch", f"{len(top)} of {len(EXPERIMENTS)}", ", ".join(top)),
        ("exp above ViT, last epoch", f"{len(last)} of {len(EXPERIMENTS)}", ", ".join(last)),
    ]
    says = (f"fθ is above relu in {len(better)} of {len(EXPERIMENTS)} experiments; ViT, which it calls the "
            f"most accurate throughout, is beaten by exp in {len(set(top) | set(last))}.")  # fmt: skip
    return Shown(says, ("Claim", "Count", "Experiments"), rows)


def memory() -> Shown:
    """Numbers kept: softmax L² + L·d; linear L·r + L·d + r·d."""
    d, r = 64, 64
    softmax, linear = (lambda length: length**2 + length * d), (lambda length: length * r + length * d + r * d)
    rows = []
    for length in (256, 1024, 4096, 16384):
        grows = [f"× {found(2 * length) / found(length):.2f}" for found in (softmax, linear)]
        rows.append((f"{length:,}", f"{softmax(length):,}", f"{linear(length):,}", *grows))
    z = 1.0
    says = (f"Twice the tokens take {rows[-1][4][2:]} times the memory: linear, not merely below quadratic. And hyp+ "
            f"is an estimator of its own, with {(1 - math.exp(-(z**2))) / 2:.2f} times the squared error of positive "
            f"features at ‖x + y‖ = {z:g} and as many projections.")  # fmt: skip
    return Shown(says, ("Tokens", "Softmax", f"Linear, r = {r}", "Softmax, doubled", "Linear, doubled"), rows)


MISTAKES = (
    Mistake("M1", "002", "A sequence of one token",
            "The map of the convolutional trunk is flattened to a single token. Attention over one token returns its "
            "value whatever the kernel, so what was compared are trunks and optimisers.",
            "The map stays a grid of tokens; the one-token model is kept by name, warns, and is in the literal column.",
            one_token),
    Mistake("M2", "002", "More images than there are",
            "Training, validation and test images overlap, validation images are augmented, and two models were tuned "
            "on the test images.",
            "45,000, 5,000 and 10,000 images, validation as they are, the test images seen once.", splits),
    Mistake("M3", "002", "A temperature of d, and half a kernel",
            "Queries and keys are both scaled by d^-½, so scores are divided by d. Its exponential kernel leaves "
            "−‖x‖²/2 out, so that long keys gain weight.",
            "Both are scaled by d^-¼, and the whole feature map is computed.", temperature),
    Mistake("M4", "002", "Two numbers for one thing",
            "Tables, text and summary do not agree, and some settings cannot be.",
            "Both numbers are shown. A dropout of 5.0 is read as 0.5 and as 0.05.", contradictions),
    Mistake("M5", "000, 002", "Words for other things",
            "Methods are described that are not those that were named, or that were run.",
            "The definitions of the papers, which the documentation of the attentions states.", definitions),
    Mistake("M6", "000", "Two accounts of one set-up",
            "Batch, epochs, layers and heads are given twice and differently, and Performers ran in another framework "
            "than what they are compared with.",
            "One code base, one protocol, speeds side by side in one race.", settings),
    Mistake("M7", "000", "A Performer that is a head",
            "The printed summary is of one layer of ordinary attention, and nearly all parameters are in the layers "
            "behind it.",
            "Parameters are matched to softmax's; the wide head is kept in the literal column.", keras),
    Mistake("M8", "000", "Claims beside the table",
            "The text claims what the tables deny.",
            "Every claim is a hypothesis with a test on this page.", own_tables_000),
    Mistake("M9", "001", "Several factors at once",
            "Two of its experiments change more than they name, its schedule does not fit its epochs, three GPUs are "
            "named, a kernel option is given that has no effect, and the best epoch is chosen on the images that it "
            "is then judged by.",
            "One factor at a time; the model is chosen on validation images, and the last epoch is given beside it.",
            factors),
    Mistake("M10", "001", "Most, consistently",
            "Nine single runs are summed up in words that their numbers do not bear out.",
            "Seeds, intervals and corrected tests.", own_tables_001),
    Mistake("M11", "003", "A lemma for a definition",
            "The review gives the lemma about positive features as the definition of hyp+, and calls memory that is "
            "linear sub-quadratic.",
            "hyp+ is a feature map of its own here, and memory is measured.", memory),
)  # fmt: skip
