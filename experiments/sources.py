"""The data sets of the experiments by name, and the networks and losses for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from epsilons.data import Data, adult, cifar10, digits, fewer, mnist, utkface
from epsilons.models import network
from epsilons.training import supervised
from experiments.features import with_features
from experiments.recipes import Recipe

FACES = ("utkface", "UTKFace")
# Weights to start from, where the reader has them: the paper's faces begin with ImageNet's.
START = "utkface_start.pt"
SUBSET_SEED = 0
LOSSES = {
    "cross_entropy": nn.CrossEntropyLoss(reduction="none"),
    "hinge": nn.MultiMarginLoss(reduction="none"),
}
_FILES = {
    "mnist": ("MNIST/raw", "mnist", "train-images-idx3-ubyte.gz"),
    "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "adult": ("adult/adult.data", "adult.data"),
    "utkface": FACES,
}


def missing(name: str, folder: Path | None) -> str | None:
    """What is not there of a data set, as a sentence; None if nothing is missing."""
    family = name.partition("-")[0]
    if family == "digits":
        return None
    if folder is None:
        return f"{family} needs --data, the folder that holds it"
    paths = [folder / name for name in _FILES[family]]
    if any(path.exists() for path in paths):
        return None
    return f"{folder} has none of {', '.join(path.name for path in paths)}, hence no {family}"


def source(recipe: Recipe, folder: Path | None, cache: Path) -> Data:
    """The data set of the recipe; `cache` keeps features, which take half a minute to compute."""
    lacking = missing(recipe.data, folder)
    if lacking:
        raise ValueError(lacking)
    data = _whole(recipe.data, folder, cache, recipe.verified)
    if recipe.n_test is not None and data.test is not None and data.test_examples is not None:
        test = fewer(Data(data.test, data.test_examples), recipe.n_test, SUBSET_SEED)
        data = replace(data, test=test.train, test_examples=test.examples)
    if recipe.n is None or recipe.n >= len(data.examples):
        return data
    return fewer(data, recipe.n, SUBSET_SEED)


def model_for(recipe: Recipe, data: Data, seed: int, folder: Path | None) -> nn.Module:
    """The network, initialised by the seed; for faces from given weights, if there are any."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network(recipe.network, tuple(data.train[0][0].shape), len(data.classes))
    start = None if folder is None else folder / START
    if recipe.data.startswith("utkface") and start is not None and start.is_file():
        model.load_state_dict(torch.load(start, weights_only=True))
    if recipe.network == "tanh_cnn":
        model = model.to(memory_format=torch.channels_last)  # twice as fast on a CPU
    return model


def loss_for(recipe: Recipe) -> Callable[[nn.Module, Any], Tensor]:
    return supervised(LOSSES[recipe.loss])


@lru_cache(maxsize=1)
def _whole(name: str, folder: Path | None, cache: Path, verified: bool) -> Data:
    if name == "digits":
        return digits()
    if name == "digits-pictures":
        return _as_pictures(digits())
    assert folder is not None
    if name == "mnist":
        return mnist(folder, verified=verified)
    if name == "cifar10":
        return cifar10(folder, verified=verified)
    if name == "cifar10-features":
        return _with_cached_features(cifar10(folder, verified=verified), cache)
    if name == "adult":
        return adult(folder, verified=verified)
    if name in ("utkface-gender", "utkface-age"):
        place = next(folder / face for face in FACES if (folder / face).is_dir())
        return utkface(place, task=name.partition("-")[2], balanced=True)
    raise ValueError(f"data set {name!r} is not known")


def _with_cached_features(data: Data, cache: Path) -> Data:
    file = cache / "cifar10-features.pt"
    if not file.exists():
        found = with_features(data)
        cache.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        torch.save([part.tensors for part in (found.train, found.test)], draft)  # type: ignore[union-attr]
        draft.rename(file)
    train, test = (TensorDataset(*part) for part in torch.load(file, weights_only=True))
    return Data(train, data.examples, test, data.test_examples, data.classes, data.checksums)


def _as_pictures(data: Data) -> Data:
    """The digits (64,) as pictures (1, 28, 28), so that convolutions run on them."""

    def grown(dataset: Any) -> TensorDataset:
        x, y = dataset.tensors
        small = x.reshape(-1, 1, 8, 8)
        return TensorDataset(nn.functional.interpolate(small, size=28, mode="bilinear"), y)

    return Data(
        grown(data.train), data.examples, grown(data.test), data.test_examples, data.classes
    )
