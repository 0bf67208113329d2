"""Rows of the reproduction page: what the paper says, what we measured, and whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NETWORKS = {
    "tanh_cnn": "tanh CNN",
    "logistic": "linear",
    "resnet20": "ResNet20-GN",
    "wrn16_4": "WRN16-4",
    "minilm_lora": "MiniLM-L6 with LoRA",
    "minilm_head": "head on MiniLM-L6",
}
DATA = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar10-features": "CIFAR-10 features",
    "adult": "Adult",
    "utkface-gender": "UTKFace gender",
    "utkface-age": "UTKFace age",
    "utkface-gender-imagenet": "UTKFace gender, ImageNet’s features",
    "utkface-age-imagenet": "UTKFace age, ImageNet’s features",
    "cifar10-imagenet": "CIFAR-10, ImageNet’s features",
    "sst2": "SST-2",
    "digits": "digits",
    "digits-pictures": "digits",
}

TITLES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar10-cnn": "CIFAR-10, tanh CNN",
    "adult": "Adult",
    "resnet20": "ResNet20-GN",
    "wrn16-4": "WRN16-4",
    "utkface-gender": "UTKFace gender",
    "utkface-age": "UTKFace age",
    "utkface-gender-imagenet": "UTKFace gender, ImageNet’s features",
    "utkface-age-imagenet": "UTKFace age, ImageNet’s features",
    "cifar10-0.5M": "CIFAR-10, ResNet20-GN",
}


@dataclass(frozen=True)
class Row:
    """One claim. `agrees`: True, False, or None where there is nothing to compare with."""

    where: str
    claim: str
    paper: str
    ours: str
    scale: str
    agrees: bool | None
    why: str = ""

    @property
    def verdict(self) -> str:
        said = {True: "yes", False: "**no**", None: "–"}[self.agrees]
        return f"{said}: {self.why}" if self.why else said


def spread(
    values: Sequence[float], digits: int = 2, factor: float = 1.0, *, signed: bool = False
) -> str:
    """Mean ± standard deviation over seeds; of one seed the value alone, of none a dash.

    >>> spread([0.97, 0.98], 1, 100)
    '97.5 ± 0.7'
    """
    found = factor * np.asarray(values, dtype=float)
    if not len(found):
        return "–"
    shown = f"{found.mean():{'+' if signed else ''}.{digits}f}"
    return shown if len(found) < 2 else f"{shown} ± {found.std(ddof=1):.{digits}f}"


def scale(facts: Mapping[str, Any]) -> str:
    """Data, size, network, length and seeds of a training in a few words."""
    n, seeds = facts["found"][0]["n"], len(facts["seeds"])
    length = f"{facts['epochs']:g} epoch{'s' if facts['epochs'] != 1 else ''}"
    return (
        f"{DATA[facts['data']]}, n = {n:,}, {NETWORKS[facts['network']]}, {length}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
    )


def mean(values: Sequence[float]) -> float:
    """The mean; of nothing, not a number."""
    return float(np.mean(values)) if len(values) else float("nan")
