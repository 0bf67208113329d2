"""MNIST: 70,000 handwritten digits (LeCun, Cortes and Burges), from its idx files."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from epsilons.data.official import Publication, below, sha256
from epsilons.data.split import Data, labelled
from epsilons.examples import Examples

MNIST = Publication(
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)
_CLASSES = tuple(str(digit) for digit in range(10))


def mnist(folder: str | os.PathLike[str], *, verified: bool = True) -> Data:
    """60,000 training and 10,000 held-out images (1, 28, 28) in [0, 1], grouped by class.

    `folder` holds the four idx files, compressed or not, or has them in `MNIST/raw`.
    `verified=False` reads other data in the same files' names and format, as Fashion-MNIST.
    """
    place = below(folder, ["MNIST/raw"], MNIST.md5)
    train, examples, read = _part(place, "train", verified)
    test, test_examples, also_read = _part(place, "t10k", verified)
    return Data(train, examples, test, test_examples, _CLASSES, {**read, **also_read})


def read_idx(content: bytes, name: str) -> NDArray[np.uint8]:
    """The array of bytes in an idx file: 0, 0, 8 (bytes), dimensions, their sizes, the values."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{name} is not an idx file of bytes; it begins {content[:4].hex()}")
    header = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:header].ljust(header - 4, b"\0"), dtype=">u4").tolist())
    wanted = header + math.prod(shape)
    if len(content) != wanted:
        raise ValueError(
            f"{name} is incomplete or too long: {len(content)} bytes, and its header says {wanted}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _part(
    folder: Path, part: str, verified: bool
) -> tuple[TensorDataset, Examples, dict[str, str]]:
    read: dict[str, str] = {}
    images = _array(folder, f"{part}-images-idx3-ubyte", verified, read)
    labels = _array(folder, f"{part}-labels-idx1-ubyte", verified, read)
    if images.ndim != 3 or labels.shape != (len(images),) or labels.max(initial=0) > 9:
        raise ValueError(
            f"{folder} has {part} images {images.shape} with labels {labels.shape} up to "
            f"{labels.max(initial=0)}; expected (n, height, width) with (n,) up to 9"
        )
    pixels = torch.from_numpy(images.astype(np.float32) / 255).unsqueeze(1)
    examples = Examples(ids=np.arange(len(labels)), groups={"class": labels.astype(str)})
    return labelled(pixels, labels), examples, read


def _array(folder: Path, name: str, verified: bool, read: dict[str, str]) -> NDArray[np.uint8]:
    plain = folder / name
    path = plain if plain.is_file() else folder / f"{name}.gz"
    content = MNIST.read(path, verified=verified)
    read[path.name] = sha256(content)
    if path is not plain:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or incomplete: {error}") from error
    return read_idx(content, str(path))
