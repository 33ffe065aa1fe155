"""Fashion-MNIST, which a package of Debian carries: no hub is needed.

70,000 photographs of clothes, 28x28 pixels, grey, in ten classes of the same size: Xiao, Rasul and
Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
arXiv:1708.07747.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from heats.recipes.offline.packages import FASHION_MNIST

if TYPE_CHECKING:
    from numpy.typing import NDArray

DATASET = "fashion-mnist"
LABELS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

_PREFIXES = {"train": "train", "test": "t10k"}
_FOLDER = "./usr/share/datasets/fashion-mnist"


class Images(NamedTuple):
    """Images (n, height, width), from 0 (black) to 255, and labels (n,), both uint8."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]


def fashion_mnist(data_dir: str, split: str) -> Images:
    """All images of a part, `train` (60,000) or `test` (10,000), in the published order.

    Raises:
        FileNotFoundError: The package is not in `data_dir`; the message tells how to get it.
        ValueError: It is not the published one, or there is no such part.
    """
    if split not in _PREFIXES:
        msg = f"{DATASET} has no part {split!r}; it has {', '.join(_PREFIXES)}."
        raise ValueError(msg)
    files = (
        f"{_FOLDER}/{_PREFIXES[split]}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")
    )
    images, labels = (
        _idx(gzip.decompress(FASHION_MNIST.read(data_dir, "data.tar.xz", file))) for file in files
    )
    return Images(images, labels)


def _idx(content: bytes) -> NDArray[np.uint8]:
    """An array in the form of the MNIST files: two zeros, 8 (uint8), rank, sizes, then the data."""
    zero, kind, rank = content[:2], content[2], content[3]
    assert (zero, kind) == (b"\0\0", 8)  # noqa: S101 - the checksum says so
    sizes = np.frombuffer(content, ">u4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(sizes)
