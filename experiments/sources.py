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
from experiments import features, language, pretrained
from experiments.recipes import Recipe

FACES = ("utkface", "UTKFace")
RACES = ("White", "Black", "Asian", "Indian")  # the paper's four
# Names that end so have features of pictures of that size in the pictures' place.
IMAGENET, IMAGENET_SIZE = "-imagenet", 96
HANDMADE = "-features"
SUBSET_SEED = 0
CHUNK = 2000
LOSSES = {
    "cross_entropy": nn.CrossEntropyLoss(reduction="none"),
    "hinge": nn.MultiMarginLoss(reduction="none"),
}
_FILES = {
    "mnist": ("MNIST/raw", "mnist", "train-images-idx3-ubyte.gz"),
    "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "adult": ("adult/adult.data", "adult.data"),
    "utkface": FACES,
    "sst2": ("sst2/train.tsv",),
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
        if name == "sst2":
            return language.missing()
        return pretrained.missing() if name.endswith(IMAGENET) else None
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


def model_for(recipe: Recipe, data: Data, seed: int) -> nn.Module:
    """The network, initialised by the seed."""
    if recipe.network in language.NETWORKS:
        return language.model(recipe.network, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = network(recipe.network, tuple(data.train[0][0].shape), len(data.classes))
    if recipe.network == "tanh_cnn":
        model = model.to(memory_format=torch.channels_last)  # twice as fast on a CPU
    return model


def loss_for(recipe: Recipe) -> Callable[[nn.Module, Any], Tensor]:
    if recipe.network in language.NETWORKS:
        return language.loss_fn()
    return supervised(LOSSES[recipe.loss])


@lru_cache(maxsize=1)
def _whole(name: str, folder: Path | None, cache: Path, verified: bool) -> Data:
    if name == "digits":
        return digits()
    if name == "digits-pictures":
        return _as_pictures(digits())
    assert folder is not None
    if name.endswith(IMAGENET):
        pictures = _pictures(name.removesuffix(IMAGENET), folder, IMAGENET_SIZE, verified)
        known = pretrained.weights()
        return _replaced(
            pictures, lambda some: pretrained.features(some, known, IMAGENET_SIZE),
            cache / f"{name}.pt",
        )  # fmt: skip
    if name.endswith(HANDMADE):
        pictures = _pictures(name.removesuffix(HANDMADE), folder, None, verified)
        return _replaced(pictures, features.features, cache / f"{name}.pt")
    if name == "adult":
        return adult(folder, verified=verified)
    if name == "sst2":
        return language.sst2(folder)
    return _pictures(name, folder, None, verified)


def _pictures(name: str, folder: Path, size: int | None, verified: bool) -> Data:
    """Pictures of `size` pixels, by default 32; those of MNIST and CIFAR-10 as they are."""
    if name == "mnist":
        return mnist(folder, verified=verified)
    if name == "cifar10":
        return cifar10(folder, verified=verified)
    if name in ("utkface-gender", "utkface-age"):
        place = next(folder / face for face in FACES if (folder / face).is_dir())
        return utkface(
            place, task=name.partition("-")[2], size=size or 32, balanced=True, races=RACES
        )
    raise ValueError(f"data set {name!r} is not known")


def _replaced(data: Data, features_of: Callable[[Tensor], Tensor], file: Path) -> Data:
    """The same data with features for pictures, which `file` keeps: they take a while."""
    if not file.exists():
        found = [
            torch.cat([features_of(some) for some in part.tensors[0].split(CHUNK)])  # type: ignore[union-attr]
            for part in (data.train, data.test)
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        torch.save(found, draft)
        draft.rename(file)
    train, test = torch.load(file, weights_only=True)
    return replace(
        data,
        train=TensorDataset(train, data.train.tensors[1]),  # type: ignore[attr-defined]
        test=TensorDataset(test, data.test.tensors[1]),  # type: ignore[union-attr]
    )


def _as_pictures(data: Data) -> Data:
    """The digits (64,) as pictures (1, 28, 28), so that convolutions run on them."""

    def grown(dataset: Any) -> TensorDataset:
        x, y = dataset.tensors
        small = x.reshape(-1, 1, 8, 8)
        return TensorDataset(nn.functional.interpolate(small, size=28, mode="bilinear"), y)

    return Data(
        grown(data.train), data.examples, grown(data.test), data.test_examples, data.classes
    )
