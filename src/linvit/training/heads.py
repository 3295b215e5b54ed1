"""Heads: a linear classifier on the features of a frozen model.

The features of the training images are computed once. Of three kinds of linear heads, fitted to them by closed forms or
by a convex solver, the one with the highest cross-validated accuracy is taken:

- class means: the nearest mean, the only one where a class has few images;
- linear discriminant analysis, with the covariance shrunk as Ledoit and Wolf do;
- multinomial logistic regression with an L2 penalty, of several strengths.

Nothing is random, no test or validation image is read, and time and memory are bounded: the solver gets fewer images
where features and classes are many.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from linvit.data import Dataset
from linvit.data.augment import normalise
from linvit.data.cache import cache_root
from linvit.devices import autocast
from linvit.models import VisionTransformer
from linvit.progress import Progress, ignore
from linvit.training.features import remembering
from linvit.training.files import checksum, load_tensors, save_tensors

MEANS_IMAGES = 2048  # that class means are made from, at most, where no head is fitted
SHARPNESS = 4.0  # standard deviations between the logits of two class means, roughly
BATCH = 64
MAX_FEATURES = 2**27  # numbers: a gigabyte in float64
MIN_IMAGES = 3  # of a class on average, with which more than its mean is fitted
FOLDS = 4
PENALTIES = (300.0, 60.0, 12.0, 2.5, 0.5)  # of logistic regression, relative to the sum of the losses
ITERATIONS, MAX_ITERATIONS = 40, 150  # of the solver: typical, and at most
WORK = 2e11  # operations of the solver for all folds, and again for the final head
VERSION = 1  # of cached heads; raise it when fitting changes


class Head(NamedTuple):
    """Logits are features @ weight.T + bias."""

    weight: Tensor  # (classes, features)
    bias: Tensor
    kind: str = "class means"
    accuracy: float = 0.0  # cross-validated on the training images; 0: not known

    def right(self, features: Tensor, labels: Tensor) -> int:
        return int(((features @ self.weight.T + self.bias).argmax(1) == labels).sum())


Fit = Callable[[Tensor, Tensor, int], Head]  # features (n, d) in float64, labels (n,), number of classes


@torch.inference_mode()
def features(
    model: VisionTransformer,
    dataset: Dataset,
    chosen: np.ndarray,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress = ignore,
    remember: bool = False,
) -> tuple[Tensor, Tensor]:
    """What the head sees of these training images, float32 (n, d), and their labels; the model is left as it was.
    remember: use and extend the features in the cache."""
    found, labels, training, head = [], [], model.training, model.head
    model.head = nn.Identity()  # type: ignore[assignment]
    model.eval()
    try:
        with remembering(model, device, dtype) if remember else nullcontext(model) as trunk:
            for i in range(0, len(chosen), BATCH):
                progress(i, len(chosen), "features")
                images, some = dataset.train.batch(chosen[i : i + BATCH])
                with autocast(device, dtype):
                    found.append(trunk(normalise(images.to(device), dataset.mean, dataset.std)).float().cpu())
                labels.append(some)
    finally:
        model.head = head
        model.train(training)
    return torch.cat(found), torch.cat(labels)


def mean_head(model: VisionTransformer, dataset: Dataset, seed: int, device: torch.device) -> dict[str, Tensor]:
    """A head of class means, from some of the training images: better than chance before the first step."""
    if not isinstance(model.head, nn.Linear) or dataset.several:
        return {}
    chosen = dataset.train.order(0, seed)[:MEANS_IMAGES]
    f, y = features(model, dataset, chosen, device, torch.float32)
    return _as_weights(class_means(f.double(), y, len(dataset.classes)), model.head)


def fitted_head(
    model: VisionTransformer,
    dataset: Dataset,
    kept: bool,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress = ignore,
) -> dict[str, Tensor]:
    """The best head for these images, from all of them or as many as fit; empty where the model's own, if it is `kept`
    from the start, is right as often. What was fitted to the same model and images before is read again."""
    if not isinstance(model.head, nn.Linear):
        raise ValueError("start_head=fitted needs head=linear: no other is fitted")
    if dataset.several:
        raise ValueError("start_head=fitted needs images of one class each: leave it out")
    own = {name: value for name, value in model.state_dict().items() if kept or not name.startswith("head.")}
    config = model.config.model_dump(mode="json", exclude={"seed"})
    made_by = (VERSION, config, dataset.identity, dataset.mean, dataset.std, kept, str(device), str(dtype))
    text = json.dumps([*made_by, torch.get_num_threads(), checksum({k: v.cpu() for k, v in own.items()})])
    path = cache_root(None) / "heads" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.safetensors"
    with suppress(ValueError):  # there is none, or it is damaged
        return load_tensors(path)[0]
    chosen = dataset.train.order(0, 0)[: max(1, MAX_FEATURES // model.head.in_features)]
    f, y = features(model, dataset, chosen, device, dtype, progress, remember=True)
    head = fit(f.double(), y, len(dataset.classes))
    before = Head(model.head.weight.detach().cpu().double(), model.head.bias.detach().cpu().double())
    better = not kept or head.accuracy > before.right(f.double(), y) / len(y)
    found = _as_weights(head, model.head) if better else {}
    save_tensors(path, found, kind=head.kind, accuracy=head.accuracy)
    return found


def _as_weights(head: Head, like: nn.Linear) -> dict[str, Tensor]:
    return {"weight": head.weight.to(like.weight), "bias": head.bias.to(like.weight)}


def fit(f: Tensor, y: Tensor, classes: int) -> Head:
    """The kind of head that is most accurate when cross-validated; of equals the simplest."""
    if len(y) < MIN_IMAGES * classes:
        return class_means(f, y, classes)
    folds, most = _folds(y), int(WORK / (4 * f.shape[1] * classes))  # images × iterations
    few = most // (FOLDS * len(PENALTIES) * ITERATIONS)
    kinds: list[tuple[Fit, int, int]] = [(kind, len(y), len(y)) for kind in (class_means, discriminant)]
    if few >= min(len(y), MIN_IMAGES * classes):
        kinds += [(partial(logistic, penalty=penalty), few, most // MAX_ITERATIONS) for penalty in PENALTIES]
    right = [_validated(kind, f[:some], y[:some], folds[:some], classes) for kind, some, _ in kinds]
    best = right.index(max(right))
    kind, _, count = kinds[best]
    return kind(f[:count], y[:count], classes)._replace(accuracy=right[best])


def operations(images: int, width: int, classes: int) -> float:
    """Of fitting a head, at most."""
    return min(2 * WORK, 4.0 * images * width * classes * (FOLDS * len(PENALTIES) * ITERATIONS + MAX_ITERATIONS))


def _folds(y: Tensor) -> Tensor:
    """The fold in which each image is held out, dealt out class by class."""
    found = torch.empty_like(y)
    for label in y.unique():
        mine = (y == label).nonzero()[:, 0]
        found[mine] = torch.arange(len(mine)) % FOLDS
    return found


def _validated(kind: Fit, f: Tensor, y: Tensor, folds: Tensor, classes: int) -> float:
    right = 0
    for fold in range(FOLDS):
        out = folds == fold
        right += kind(f[~out], y[~out], classes).right(f[out], y[out])
    return right / len(y)


def class_means(f: Tensor, y: Tensor, classes: int) -> Head:
    """The nearest class mean.

    With features f, class means μ_c and their spread σ² around them, logits are s·(f·μ_c − ‖μ_c‖²/2)/σ², the
    log-likelihoods of Gaussians of one width.
    """
    f0 = f.mean(0)
    member = nn.functional.one_hot(y, classes).double()
    means = (member.T @ f + f0) / (member.sum(0)[:, None] + 1)  # as if one more image of each class were average
    spread = (f - means[y]).square().sum(1).mean() / f.shape[1] + 1e-12
    centred = means - f0
    gain = SHARPNESS / (centred.square().sum(1).mean() / spread).clamp_min(1.0)
    weight = gain * centred / spread
    return Head(weight, -(weight * (means + f0)).sum(1) / 2)


def discriminant(f: Tensor, y: Tensor, classes: int, shrinkage: float | None = None) -> Head:
    """Linear discriminant analysis: Gaussians of one covariance Σ, shrunk towards a multiple of the identity.

    Logits are f·Σ⁻¹μ_c − μ_c·Σ⁻¹μ_c/2 + log π_c, with the classes' shares π.
    """
    member = nn.functional.one_hot(y, classes).double()
    count = member.sum(0)
    means = member.T @ f / count.clamp_min(1)[:, None]
    rest = f - means[y]
    covariance = rest.T @ rest / len(y)
    s = ledoit_wolf(rest, covariance) if shrinkage is None else shrinkage
    width = covariance.diagonal().mean()
    shrunk = (1 - s) * covariance + (s * width + 1e-12) * torch.eye(f.shape[1], dtype=f.dtype)
    weight = torch.linalg.solve(shrunk, means.T).T
    share = (count.clamp_min(0.5) / len(y)).log()  # a class without images is unlikely, not impossible
    return Head(weight, share - (weight * means).sum(1) / 2, "discriminant analysis")


def ledoit_wolf(f: Tensor, covariance: Tensor) -> float:
    """The share of the identity in a covariance that makes its expected error least; features are centred."""
    n, d = f.shape
    squares = f.square()
    norm = float(covariance.square().sum())
    noise = (float((squares.T @ squares).sum()) / n - norm) / n
    distance = norm - float(covariance.diagonal().sum()) ** 2 / d
    return min(max(noise, 0.0), distance) / distance if distance > 0 else 0.0


def logistic(f: Tensor, y: Tensor, classes: int, penalty: float) -> Head:
    """Multinomial logistic regression on standardised features: minimises Σ −log p(y|f) + penalty·‖W‖²/2."""
    from scipy.optimize import minimize

    mean, std = f.mean(0), f.std(0, correction=0)
    std = torch.where(std > 1e-9 * std.max(), std, 1.0)
    x, rows = (f - mean) / std, torch.arange(len(y))

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        weight = torch.from_numpy(point).view(classes, -1)
        log_p = torch.log_softmax(x @ weight[:, :-1].T + weight[:, -1], 1)
        value = -log_p[rows, y].sum() + penalty / 2 * weight[:, :-1].square().sum()
        residual = log_p.exp_()
        residual[rows, y] -= 1
        gradient = torch.cat([residual.T @ x + penalty * weight[:, :-1], residual.sum(0)[:, None]], 1)
        return float(value) / len(y), gradient.flatten().numpy() / len(y)

    options = {"maxiter": MAX_ITERATIONS, "ftol": 1e-9, "gtol": 1e-6}
    found = minimize(loss, np.zeros(classes * (f.shape[1] + 1)), jac=True, method="L-BFGS-B", options=options)
    weight = torch.from_numpy(found.x).view(classes, -1)
    scaled = weight[:, :-1] / std
    return Head(scaled, weight[:, -1] - scaled @ mean, f"logistic regression, penalty {penalty:g}")
