"""Why a claim does not hold at our scale, as found by looking; by (where, claim)."""

from __future__ import annotations

from collections.abc import Mapping

_RARELY = (
    "6 epochs have {count} refreshes at this γ where the paper's 100 have {paper}, and the median "
    "norm falls from C to C/40 in between: the norms of initialisation stand for {share} of the run"
)
_FLAT = (
    "the relation is flat at both ends: whoever is learnt early pays for the first epoch alone, "
    "when every norm is near C, whatever the loss becomes; and whoever is at the worst case can't "
    "pay more"
)

REASONS: Mapping[tuple[str, str], str] = {
    ("Fig. 4", "MNIST, γ = 0.5: Pearson’s r of estimated and exact ε"): _RARELY.format(
        count=3, paper=50, share="a third"
    ),
    ("Fig. 4", "MNIST, γ = 1: Pearson’s r of estimated and exact ε"): _RARELY.format(
        count=6, paper=100, share="a sixth"
    ),
    ("Fig. 5", "MNIST: Pearson’s r of ε and log loss"): _FLAT
    + "; with exact ε's of the followed examples r is the same",
    ("Fig. 5", "CIFAR-10: Pearson’s r of ε and log loss"): _FLAT,
    ("Fig. 7", "MNIST, individual clipping: Pearson’s r of ε and log loss"): _FLAT,
    ("Fig. 7", "CIFAR-10, individual clipping: Pearson’s r of ε and log loss"): _FLAT,
    ("Adult", "Adult: Pearson’s r of ε and log loss"): _FLAT
    + " (half of the persons have a loss below e⁻³, and ε's within 0.6 to 0.7)",
}
