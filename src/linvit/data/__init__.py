"""Data: a name or a path → train, validation and test images as bytes, and batched augmentation.

    ds = data.load_data("cifar10")
    images, labels = ds.train.batch(indices)                    # uint8 (B, C, H, W), int64 (B,)
    augment = ds.augment(pad_crop=4, flip="random")
    x, targets = augment(images, labels, indices, epoch=0, seed=0)

Images stay uint8 until the batch is made; validation and test are never augmented. A data set is one file in this
package (or in LINVIT_PLUGINS): a function decorated with `@DATASETS.register(name)`, or `@FORMATS.register(suffix)`
for a file format that any path can have.
"""

from linvit.data.augment import Augment, normalise
from linvit.data.dataset import Dataset, Split, alike, folded, folder_of, load_data, repeats
from linvit.data.decode import BadImage, read_image
from linvit.data.download import Missing
from linvit.data.sources import DATASETS, FORMATS, Arrays, Pictures
from linvit.data.splits import Fold
from linvit.data.surveys import Survey, decoding_seconds, survey

__all__ = [
    "DATASETS",
    "FORMATS",
    "Arrays",
    "Augment",
    "BadImage",
    "Dataset",
    "Fold",
    "Missing",
    "Pictures",
    "Split",
    "Survey",
    "alike",
    "decoding_seconds",
    "folded",
    "folder_of",
    "load_data",
    "normalise",
    "read_image",
    "repeats",
    "survey",
]
