"""The 1,797 handwritten digits that scikit-learn ships (UCI, Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from epsilons.data.split import Data
from epsilons.examples import Examples

_TEST_SHARE = 0.2


def digits(*, seed: int = 0) -> Data:
    """1,437 training and 360 held-out 8×8 images as vectors in [0, 1], grouped by class.

    `seed`: draws which are held out.
    """
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = int(len(labels) * _TEST_SHARE) + 1
    train, examples = _part(images, labels, np.sort(order[held_out:]))
    test, test_examples = _part(images, labels, np.sort(order[:held_out]))
    return Data(train, examples, test, test_examples, tuple("0123456789"))


def _part(
    images: np.ndarray, labels: np.ndarray, chosen: np.ndarray
) -> tuple[TensorDataset, Examples]:
    pixels = torch.tensor(images[chosen] / 16, dtype=torch.float32)
    classes = labels[chosen]
    return (
        TensorDataset(pixels, torch.tensor(classes)),
        Examples(ids=chosen, groups={"class": classes.astype(str)}),
    )
