"""The trainings by name, in three sizes: `smoke` (seconds), `cpu` (what we ran), `paper`.

A name means the same part of the paper in each preset: `cifar10` is the CIFAR-10 training of
Section 4, whatever network a preset affords. Several tables and figures share a training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.recipes import Recipe

FACTORS = (0.1, 0.3, 0.5, 1.5)  # Appendix C, times the median norm
BOUNDS = (5, 10)  # Appendix E, times the bound of `cifar10`, which is 1 in the paper
FOUR_SEEDS = (1, 2, 3, 4)


def _paper() -> dict[str, Recipe]:
    """Section 4: C = 1 on CIFAR-10, else the median; γ = 3, r = 0.01C, uniform refreshes.

    Rates are those of De et al. 2022 on CIFAR-10 and of Papernot et al. 2020 for the small
    network, as the paper says; it does not tell those of MNIST and UTKFace.
    """
    cifar10 = Recipe(
        data="cifar10", network="wrn16_4", n=50_000, batch=4096, epochs=300, epsilon=7.8,
        bound=1.0, rate=4.0, follow=1000, micro_batch=64,
    )  # fmt: skip
    mnist = Recipe(
        data="mnist", network="resnet20", n=60_000, batch=1024, epochs=100, epsilon=2.4,
        rate=0.5, momentum=0.9, follow=1000, micro_batch=256,
    )  # fmt: skip
    faces = mnist.but(data="utkface-gender", n=None, epsilon=4.5)
    frozen = dict(network="logistic", micro_batch=4096, rate=1.0, momentum=0.9)
    on_cifar10 = cifar10.but(data="cifar10-imagenet", **{**frozen, "rate": 4.0})
    adult = Recipe(
        data="adult", network="logistic", batch=1024, epochs=100, epsilon=2.4, rate=0.5, follow=1000
    )
    table3 = dict(refreshes_per_epoch=1, follow=0, seeds=FOUR_SEEDS)
    small = cifar10.but(network="resnet20", bound=None, rate=0.5, momentum=0.9, follow=0)
    return {
        "mnist": mnist,
        "cifar10": cifar10,
        "cifar10-cnn": cifar10.but(network="tanh_cnn", rate=1.0),
        "cifar10-cnn-C1": cifar10.but(network="tanh_cnn", rate=1.0),
        "cifar10-hinge": cifar10.but(loss="hinge"),
        "cifar10-every-step": cifar10.but(
            refreshes_per_epoch=None, refresh_every=1, rounding=None, follow=0
        ),
        "mnist-common": mnist.but(**table3),
        "mnist-individual": mnist.but(clipping="individual", **table3),
        "cifar10-common": cifar10.but(**table3),
        "cifar10-individual": cifar10.but(clipping="individual", **table3),
        **{f"cifar10-{x}M": small.but(factor=x) for x in FACTORS},
        **{f"cifar10-C{x}": cifar10.but(bound=float(x), follow=0) for x in BOUNDS},
        "cifar10-attacked": cifar10,
        "cifar10-plain": _plain(cifar10),
        "adult": adult,
        "cifar10-unaccounted": cifar10.but(refreshes_per_epoch=None, follow=0),
        "utkface-gender": faces,
        "utkface-age": faces.but(data="utkface-age"),
        "utkface-gender-plain": _plain(faces),
        "utkface-gender-imagenet": faces.but(data="utkface-gender-imagenet", **frozen),
        "utkface-age-imagenet": faces.but(data="utkface-age-imagenet", **frozen),
        "cifar10-imagenet": on_cifar10.but(seeds=FOUR_SEEDS),
        "cifar10-imagenet-individual": on_cifar10.but(clipping="individual", **table3),
        "resnet20": mnist,
        "wrn16-4": cifar10,
        **_sentences(),
    }


def _cpu() -> dict[str, Recipe]:
    """Two cores: ResNet20-GN, the tanh CNN and linear models on features at full n.

    γ = 3 where the figures of Section 4 look. Common clipping trains the same weights whatever the
    refreshes, so that its runs also serve Table 3, where individual clipping refreshes once per
    epoch. Every γ can also be read from the followed examples, whose norms of every step are there.
    """
    mnist = Recipe(
        data="mnist", network="tanh_cnn", n=60_000, batch=1024, epochs=20, epsilon=2.4, rate=0.2,
        momentum=0.9, follow=1000, seeds=FOUR_SEEDS,
    )  # fmt: skip
    cifar10 = Recipe(
        data="cifar10-features", network="logistic", n=50_000, batch=4096, epochs=100, epsilon=7.8,
        bound=1.0, rate=16.0, momentum=0.9, follow=1000, micro_batch=4096, seeds=FOUR_SEEDS,
    )  # fmt: skip
    cnn = Recipe(
        data="cifar10", network="tanh_cnn", n=50_000, batch=2048, epochs=12, epsilon=7.8,
        factor=2.0, rate=0.3, momentum=0.9, follow=1000, micro_batch=256,
    )  # fmt: skip
    cnn_c1 = cnn.but(bound=1.0, factor=1.0, rate=0.1, epochs=5, refreshes_per_epoch=1)
    attacked = cnn_c1.but(n=10_000, batch=1024, epochs=15, follow=0, micro_batch=512)
    adult = Recipe(
        data="adult", network="logistic", batch=1024, epochs=20, epsilon=2.4, rate=0.5,
        momentum=0.9, follow=1000, micro_batch=4096, seeds=FOUR_SEEDS,
    )  # fmt: skip
    individual = dict(clipping="individual", refreshes_per_epoch=1, follow=0)
    once = dict(refreshes_per_epoch=1, follow=0, seeds=(1,))
    deep = dict(network="resnet20", refreshes_per_epoch=1, micro_batch=256, seeds=(1,))
    faces = mnist.but(data="utkface-gender", n=None, epsilon=4.5, epochs=100, follow=100, **deep)
    on_faces = faces.but(
        data="utkface-gender-imagenet", network="logistic", refreshes_per_epoch=3, follow=1000,
        micro_batch=4096, rate=1.0, seeds=(1, 2, 3),
    )  # fmt: skip
    on_cifar10 = cifar10.but(data="cifar10-imagenet", rate=4.0)
    bounded = cnn.but(epochs=10, follow=0, **deep)
    return {
        "mnist": mnist,
        "mnist-common": mnist,
        "mnist-individual": mnist.but(**individual),
        "cifar10": cifar10,
        "cifar10-common": cifar10,
        "cifar10-individual": cifar10.but(**individual),
        "cifar10-cnn": cnn,
        "cifar10-cnn-C1": cnn_c1,
        "cifar10-hinge": cifar10.but(loss="hinge", seeds=(1,)),
        "cifar10-every-step": cifar10.but(
            epochs=10, rounding=None, **{**once, "refreshes_per_epoch": None, "refresh_every": 1}
        ),
        **{f"cifar10-{x}M": bounded.but(factor=x) for x in FACTORS},
        **{f"cifar10-C{x}": cifar10.but(bound=float(x), **once) for x in BOUNDS},
        "cifar10-attacked": attacked,
        "cifar10-plain": _plain(attacked).but(epochs=30, batch=128, rate=0.02),
        "adult": adult,
        "cifar10-unaccounted": cifar10.but(**{**once, "refreshes_per_epoch": None}),
        "utkface-gender": faces,
        "utkface-age": faces.but(data="utkface-age"),
        "utkface-gender-plain": _plain(faces).but(epochs=15, batch=128, rate=0.02),
        "utkface-gender-imagenet": on_faces,
        "utkface-age-imagenet": on_faces.but(data="utkface-age-imagenet"),
        "cifar10-imagenet": on_cifar10,
        "cifar10-imagenet-individual": on_cifar10.but(**individual),
        "resnet20": mnist.but(follow=100, **deep),
        "wrn16-4": mnist.but(
            network="wrn16_4", n=2_000, n_test=1_000, batch=250, epochs=9, epsilon=50.0,
            micro_batch=64, **{**once, "refreshes_per_epoch": 2 / 3},
        ),
        **_sentences(),
    }  # fmt: skip


def _sentences(**changes: Any) -> dict[str, Recipe]:
    """Fine-tuning on SST-2, which is not in the paper: the same on any machine."""
    adapted = Recipe(
        data="sst2", network="minilm_lora", batch=512, epochs=6, epsilon=8.0, bound=1.0,
        rate=1e-3, refreshes_per_epoch=1, follow=100, micro_batch=64,
    ).but(**changes)  # fmt: skip
    head = adapted.but(network="minilm_head", rate=1e-2, follow=0)
    return {
        "sst2-3": adapted.but(epsilon=3.0),
        "sst2-8": adapted,
        "sst2-8-individual": adapted.but(clipping="individual", follow=0),
        "sst2-plain": _plain(adapted).but(rate=5e-4, epochs=3, batch=min(64, adapted.batch)),
        "sst2-3-head": head.but(epsilon=3.0),
        "sst2-8-head": head,
    }


def _smoke() -> dict[str, Recipe]:
    """The embedded digits stand in for every picture; two seeds for every four."""
    digits = Recipe(
        data="digits", network="logistic", n=1_000, batch=128, epochs=3, epsilon=8.0, bound=1.0,
        rate=2.0, follow=100, seeds=(1, 2),
    )  # fmt: skip
    once = dict(follow=0, seeds=(1,))
    pictures = digits.but(data="digits-pictures", n=200, batch=64, epochs=1, rate=0.1, seeds=(1,))
    people = digits.but(data="adult", verified=False)
    quick = dict(follow=0, refreshes_per_epoch=1)
    faces = pictures.but(data="utkface-gender", n=None, network="tanh_cnn", batch=8, follow=4)
    return {
        "mnist": digits.but(epsilon=4.0),
        "cifar10": digits,
        "cifar10-cnn": pictures.but(network="tanh_cnn"),
        "cifar10-cnn-C1": pictures.but(network="tanh_cnn"),
        "cifar10-hinge": digits.but(loss="hinge", seeds=(1,)),
        "cifar10-every-step": digits.but(
            refreshes_per_epoch=None, refresh_every=1, rounding=None, **once
        ),
        "mnist-common": digits,
        "mnist-individual": digits.but(clipping="individual", follow=0),
        "cifar10-common": digits,
        "cifar10-individual": digits.but(clipping="individual", follow=0),
        **{f"cifar10-{x}M": digits.but(bound=None, factor=x, **once) for x in FACTORS},
        **{f"cifar10-C{x}": digits.but(bound=float(x), **once) for x in BOUNDS},
        "cifar10-attacked": digits.but(**once),
        "cifar10-plain": _plain(digits).but(epochs=10, rate=1.0, seeds=(1,)),
        "adult": people,
        "cifar10-unaccounted": digits.but(refreshes_per_epoch=None, **once),
        "utkface-gender": faces,
        "utkface-age": faces.but(data="utkface-age"),
        "utkface-gender-plain": _plain(faces).but(epochs=3),
        "utkface-gender-imagenet": faces.but(network="logistic"),
        "utkface-age-imagenet": faces.but(data="utkface-age", network="logistic"),
        "cifar10-imagenet": digits,
        "cifar10-imagenet-individual": digits.but(clipping="individual", follow=0),
        "resnet20": pictures.but(network="resnet20", n=32, n_test=20, batch=16, **quick),
        "wrn16-4": pictures.but(network="wrn16_4", n=8, n_test=10, batch=4, **quick),
        **_sentences(n=32, n_test=40, batch=16, epochs=1, follow=4, micro_batch=16),
    }


def _plain(recipe: Recipe) -> Recipe:
    return recipe.but(
        epsilon=None, bound=1.0, clipping="none", refreshes_per_epoch=None, rounding=None, follow=0
    )


PRESETS: Mapping[str, Mapping[str, Recipe]] = {
    "smoke": _smoke(),
    "cpu": _cpu(),
    "paper": _paper(),
}
# Parts of data sets' names that a preset runs without: what needs them is skipped, and says so.
_RARE = frozenset({"utkface", "imagenet", "sst2"})
OPTIONAL = {"smoke": _RARE | {"adult"}, "cpu": _RARE, "paper": _RARE}
