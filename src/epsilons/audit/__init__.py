"""Attacks on what a training claims: can its ε be contradicted?

Everything here tries to find a fault. That nothing is found proves no privacy.
"""

from epsilons.audit.bounds import (
    Counts,
    LowerBounds,
    counts_bound,
    exact_bound,
    family_bound,
    fdp_bound,
    lower_bounds,
    steinke_bound,
)
from epsilons.audit.curve import History, TradeOff, epsilon_below, trade_off

__all__ = [
    "Counts",
    "History",
    "LowerBounds",
    "TradeOff",
    "counts_bound",
    "epsilon_below",
    "exact_bound",
    "family_bound",
    "fdp_bound",
    "lower_bounds",
    "steinke_bound",
    "trade_off",
]
