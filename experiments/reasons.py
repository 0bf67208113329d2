"""Why a claim does not hold at our scale, as found by looking; by (where, claim)."""

from __future__ import annotations

from collections.abc import Mapping

_RARELY = (
    "{count} refreshes at this γ, where the paper's 100 epochs have {paper}: the norms of "
    "initialisation stand for a {share} of the run, in which the median norm goes from C over 1.7C "
    "to {last}C"
)
_FLOOR = (
    "two thirds of the examples have a loss below e⁻⁷, and all of these an ε of {floor}, the price "
    "of the first epochs: log loss goes on falling where ε can't; the norms of the last refresh "
    "and the loss have r = {last}"
)
_FACES = (
    "{share} of the faces have a loss below 0.05, and all of these an ε of {floor}, little above "
    "the price of the first steps; of the others r = {above}"
)

REASONS: Mapping[tuple[str, str], str] = {
    ("Fig. 1", "CIFAR-10, convolutions: share at the worst case"): (
        "with C twice the median norm nobody exceeds it at initialisation; after 40 steps 83 % do, "
        "and three quarters of the examples pay 95 % of the worst case or more"
    ),
    ("Fig. 4", "MNIST, γ = 0.5: Pearson’s r of estimated and exact ε"): _RARELY.format(
        count=10, paper=50, share="tenth", last=0.08
    ),
    ("Fig. 4", "MNIST, γ = 1: Pearson’s r of estimated and exact ε"): _RARELY.format(
        count=20, paper=100, share="twentieth", last=0.45
    ),
    ("Fig. 4", "CIFAR-10, tanh CNN, γ = 0.5: Pearson’s r of estimated and exact ε"): (
        "6 refreshes in all; the first, when no norm exceeds C, stands for a sixth of the run, "
        "though 83 % exceed it after 40 of 292 steps"
    ),
    ("Fig. 5", "MNIST: Pearson’s r of ε and log loss"): _FLOOR.format(
        floor="0.85 ± 0.09", last=0.98
    ),
    ("Fig. 5", "CIFAR-10, tanh CNN: Pearson’s r of ε and log loss"): (
        "three quarters of the examples are within 5 % of the worst case, whatever their loss; the "
        "norms of the last refresh, unclipped, and the loss have r = 0.91"
    ),
    ("Fig. 5", "UTKFace gender, ImageNet’s features: Pearson’s r of ε and log loss"): _FACES.format(
        share="half", floor="0.47 ± 0.17", above="0.92"
    ),
    ("Fig. 5", "UTKFace age, ImageNet’s features: Pearson’s r of ε and log loss"): _FACES.format(
        share="nearly a quarter", floor="0.54 ± 0.19", above="0.91"
    ),
    ("Fig. 7", "MNIST, individual clipping: Pearson’s r of ε and log loss"): _FLOOR.format(
        floor="0.81 ± 0.18", last=0.96
    ),
    ("Networks", "WRN16-4: rank correlation of accuracy and mean ε of classes"): (
        "of 72 steps, the norms rank like the loss in the second half only (0.03, −0.04, 0.01, "
        "then 0.45, 0.56, 0.67), and their class means against accuracy at the last of 6 refreshes "
        "only (0.05, 0.14, 0.44, 0.15, 0.21, then −0.13)"
    ),
    ("Adult", "Adult: Pearson’s r of ε and log loss"): (
        "half of the persons have a loss below e⁻³, and all of these an ε of 0.54 ± 0.06, the "
        "price of the first steps; above that loss r = 0.94"
    ),
}
