"""CIFAR-10: 60,000 small photographs (Krizhevsky 2009), from its binary or Python version."""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from epsilons.data.official import Publication, below, sha256
from epsilons.data.split import Data, labelled
from epsilons.examples import Examples

CIFAR10 = Publication(
    "CIFAR-10",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PIXELS = 3 * 32 * 32


def cifar10(folder: str | os.PathLike[str], *, verified: bool = True) -> Data:
    """50,000 training and 10,000 held-out images (3, 32, 32) in [−1, 1], grouped by class.

    `folder` holds the batches of the binary or of the Python version, or has them in
    `cifar-10-batches-bin` or `cifar-10-batches-py`. Python pickles are read by an unpickler that
    knows arrays alone. `verified=False` reads other batches of the same format.
    """
    place = below(folder, ["cifar-10-batches-bin", "cifar-10-batches-py"], CIFAR10.md5)
    pickled = any((place / name).is_file() for name in CIFAR10.md5 if not name.endswith(".bin"))
    names = [f"data_batch_{k}" for k in range(1, 6)]
    read = (_pickled if pickled else _binary, "" if pickled else ".bin")
    sums: dict[str, str] = {}
    train, examples = _part(place, names, read, verified, sums)
    test, test_examples = _part(place, ["test_batch"], read, verified, sums)
    return Data(train, examples, test, test_examples, CLASSES, sums)


def _part(
    folder: Path,
    names: list[str],
    read: tuple[Callable[[bytes, Path], tuple[NDArray[np.uint8], NDArray[Any]]], str],
    verified: bool,
    sums: dict[str, str],
) -> tuple[TensorDataset, Examples]:
    reader, ending = read
    images, labels = [], []
    for name in names:
        path = folder / (name + ending)
        content = CIFAR10.read(path, verified=verified)
        sums[path.name] = sha256(content)
        pixels, classes = reader(content, path)
        if classes.size and not (classes.min() >= 0 and classes.max() < len(CLASSES)):
            raise ValueError(f"{path} has labels up to {classes.max()}; expected 0 to 9")
        images.append(pixels)
        labels.append(classes)
    x = torch.from_numpy(np.concatenate(images).reshape(-1, 3, 32, 32)).float()
    y = np.concatenate(labels)
    examples = Examples(ids=np.arange(len(y)), groups={"class": np.array(CLASSES)[y]})
    return labelled(x.div_(127.5).sub_(1), y), examples


def _binary(content: bytes, path: Path) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Records of a label byte and 3072 pixel bytes: red, green and blue planes."""
    if len(content) % (1 + _PIXELS):
        raise ValueError(f"{path} is incomplete: {len(content)} bytes are no whole records of 3073")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0]


def _pickled(content: bytes, path: Path) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """A dictionary whose `data` are (n, 3072) bytes and whose `labels` are a list."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        images, labels = np.asarray(batch["data"]), np.asarray(batch["labels"])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a batch of CIFAR-10: {error}") from error
    if images.dtype != np.uint8 or images.shape != (len(labels), _PIXELS):
        raise ValueError(
            f"{path} has images {images.dtype} {images.shape} with {labels.size} labels; "
            f"expected bytes ({labels.size}, {_PIXELS})"
        )
    return images, labels


class _ArraysOnly(pickle.Unpickler):
    """Reads lists, dictionaries, strings and arrays; a pickle that names anything else is refused.

    A pickle can name any function and have it called, so that reading one is running a program.
    """

    _KNOWN = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no data")
        return getattr(importlib.import_module(module.replace("numpy.core", "numpy._core")), name)
