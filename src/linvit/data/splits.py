"""Which images train, which validate, which test: stratified, chosen once, stored as an index file.

The draw uses raw Philox bits, which NumPy guarantees never to change, so the same seed gives the same images on every
machine; the file makes the choice inspectable and fixed. The test images of a set that brings none depend on its
content alone, never on the seed: five seeds are scored on one test set. Folds are dealt out anew by every seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from linvit.data.sources import check_labels
from linvit.randomness import permutation
from linvit.schemas.experiment import Fold

TEST_FRACTION, VALIDATION_FRACTION = 0.2, 0.1


def choose(
    labels: np.ndarray, counts: Mapping[str, int], *, validation: float, seed: int, limit: int | None
) -> dict[str, np.ndarray]:
    """The rows of each split: the set's own where it has them, else taken from train."""
    labels, first = strata(labels), counts["train"]
    second = first + counts.get("validation", 0)
    train, held, test = np.arange(first), np.arange(first, second), np.arange(second, len(labels))
    if "test" not in counts:
        train, test = stratified(train, labels, TEST_FRACTION, "test")
    if "validation" not in counts and validation > 0:
        train, held = stratified(train, labels, validation, "validation", seed)
    rows = {"train": train, "validation": held, "test": test}
    return rows if limit is None else {name: thin(part, labels, limit, name, seed) for name, part in rows.items()}


def strata(labels: np.ndarray) -> np.ndarray:
    """int64 (n,) by which images are drawn evenly: their class; of several, the one that has the fewest images."""
    if labels.ndim == 1:
        return labels
    rank = np.argsort(np.argsort(labels.sum(0, dtype=np.int64), kind="stable"), kind="stable")
    rarest = np.where(labels > 0, rank, len(rank)).argmin(1)
    return np.where(labels.any(1), rarest, len(rank)).astype(np.int64)


def stratified(rows: np.ndarray, labels: np.ndarray, fraction: float, *key: int | str) -> tuple[np.ndarray, np.ndarray]:
    """(kept, taken): `fraction` of each class is taken, at least one image of it, and at least one is kept."""
    taken = []
    for label in np.unique(labels[rows]):
        mine = rows[labels[rows] == label]
        count = min(max(1, round(fraction * len(mine))), len(mine) - 1)
        taken.append(mine[permutation(len(mine), *key, int(label))[:count]])
    chosen = np.sort(np.concatenate(taken)) if taken else rows[:0]
    return np.setdiff1d(rows, chosen, assume_unique=True), chosen


def fold(labels: np.ndarray, classes: Sequence[str], which: Fold) -> dict[str, np.ndarray]:
    """The places of the images that train, validate and, held out, test.

    They are dealt out class by class: folds, and the images of a class in them, differ by at most one in number.
    """
    if labels.ndim == 2:
        raise ValueError(f"folds={which.of}: folds are stratified by class, and these images have several labels each")
    counts = np.bincount(labels, minlength=len(classes)).tolist()
    if which.of < 2:
        raise ValueError(f"folds={which.of} must be at least 2")
    if (fewest := min(counts)) < which.of:
        raise ValueError(
            f"folds={which.of} needs as many images of every class, but '{classes[counts.index(fewest)]}' has "
            f"{fewest}: {f'give at most {fewest}, or ' if fewest > 1 else ''}add images or remove the class"
        )
    each = [np.flatnonzero(labels == label) for label in range(len(classes))]
    dealt = np.concatenate([mine[permutation(len(mine), "fold", which.seed, i)] for i, mine in enumerate(each)])
    hand = np.empty(len(labels), np.int64)
    hand[dealt] = np.arange(len(labels)) % which.of
    rest, test = np.flatnonzero(hand != which.index), np.flatnonzero(hand == which.index)
    train, validation = stratified(rest, labels, VALIDATION_FRACTION, "fold", which.seed, which.of, which.index)
    return {"train": train, "validation": validation, "test": test}


def thin(rows: np.ndarray, labels: np.ndarray, limit: int, *key: int | str) -> np.ndarray:
    """At most `limit` of the rows, as evenly over the classes as they allow."""
    if len(rows) <= limit:
        return rows
    order = rows[permutation(len(rows), *key)]
    turn = np.empty(len(order), np.int64)  # the how-manieth of its class an image is
    for label in np.unique(labels[order]):
        mine = np.flatnonzero(labels[order] == label)
        turn[mine] = np.arange(len(mine))
    return np.sort(order[np.argsort(turn, kind="stable")[:limit]])


def check(
    where: str, labels: np.ndarray, counts: Mapping[str, int], classes: list[str], validation: float, limit: int | None
) -> None:
    """Every class needs an image to train on and one for each split taken from train."""
    check_labels(where, labels, len(classes))
    if len(classes) < 2:
        raise ValueError(f"{where}: there is only one class ('{classes[0]}'): add a second")
    held_out = ("validation" not in counts and validation > 0) + ("test" not in counts)
    trained = labels[: counts["train"]]
    images = (np.bincount(trained, minlength=len(classes)) if labels.ndim == 1 else trained.sum(0, dtype=int)).tolist()
    if (fewest := min(images)) <= held_out:
        raise ValueError(
            f"{where}: class '{classes[images.index(fewest)]}' has {fewest} training image{'s' * (fewest != 1)}, "
            f"but needs at least {held_out + 1}: one to train on and one for each split taken from train; "
            "add images or remove the class"
        )
    if limit is not None and limit < len(classes):
        raise ValueError(f"limit={limit} is too few for the {len(classes)} classes of {where}")
