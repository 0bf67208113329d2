"""Attacks on what a training claims: can its ε be contradicted?

Everything here tries to find a fault. That nothing is found proves no privacy.
"""

from epsilons.audit.auditing import Audit, StratumFound, audit
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
from epsilons.audit.checks import Check, Outcome, together
from epsilons.audit.curve import History, TradeOff, epsilon_below, trade_off
from epsilons.audit.draws import RecordedNoise, check_coins, check_keys, check_noise
from epsilons.audit.neighbours import Play, check_neighbours
from epsilons.audit.price import check_price
from epsilons.audit.sidecar import SideCar

__all__ = [
    "Audit",
    "Check",
    "Counts",
    "History",
    "LowerBounds",
    "Outcome",
    "Play",
    "RecordedNoise",
    "SideCar",
    "StratumFound",
    "TradeOff",
    "audit",
    "check_coins",
    "check_keys",
    "check_neighbours",
    "check_noise",
    "check_price",
    "counts_bound",
    "epsilon_below",
    "exact_bound",
    "family_bound",
    "fdp_bound",
    "lower_bounds",
    "steinke_bound",
    "together",
    "trade_off",
]
