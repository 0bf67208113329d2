"""Opening: the first entry of a journal, with the plan of the run and the ids of its examples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.margins import Margin
from epsilons.accounting.plan import Plan
from epsilons.journal.chain import SALT_BYTES, Chain
from epsilons.journal.promised import Promised, promised_facts, read_promised
from epsilons.randomness import Randomness

# Format 1 (openings without a number): examples and outcomes are files beside the journal.
# Format 2: they are entries of the chain; the norms of a refresh are one entry.
# Format 3: the norms of a refresh are entries of `BLOCK` examples each.
FORMAT = 3
BLOCK = 65_536
_MOST_BYTES = 10**9  # SQLite's limit for one value


class Opening(NamedTuple):
    """The first entry, parsed; `facts` is its JSON, which has everything but the ids.

    `margin`: None in a journal of an earlier version, whose loop added it to the norms. `block`:
    of how many examples one entry has norms, at most. `promised`: None for a plan without budgets.
    """

    format: int
    plan: Plan
    margin: Margin | None
    block: int
    ids: NDArray[Any]
    facts: Mapping[str, Any]
    promised: Promised | None


def validated_ids(ids: ArrayLike | None, n: int) -> NDArray[Any]:
    """The ids (n,) of the examples; 0 to n − 1 if none are given."""
    names = np.arange(n) if ids is None else np.asarray(ids)
    if names.shape != (n,) or names.dtype == object:
        raise ValueError(
            f"ids have shape {names.shape} and type {names.dtype}; "
            f"expected {n} numbers or strings, one per example of the plan"
        )
    if names.nbytes > _MOST_BYTES:
        raise ValueError(
            f"the ids take {names.nbytes / 1e9:.1f} GB and an entry of a journal holds 1 GB; "
            "give shorter ids, or numbers"
        )
    return names


def opening_facts(
    plan: Plan,
    ids: NDArray[Any],
    *,
    margin: Margin,
    random_loss: bool,
    random_data: bool,
    batch_invariant: bool,
    salt: bytes | None,
    seed: int | None,
    randomness: Randomness | None,
    assigned: NDArray[np.uint8],
) -> dict[str, Any]:
    """The facts of a new journal's first entry; see `Journal.create`."""
    secret = (os.urandom(SALT_BYTES) if salt is None else salt).hex()
    return {
        "format": FORMAT,
        "plan": plan.to_dict(),
        "margin": asdict(margin),
        "block": BLOCK,
        "id_type": ids.dtype.str,
        "random_loss": random_loss,
        "random_data": random_data,
        "batch_invariant": batch_invariant,
        "seed": seed,
        "randomness": (Randomness() if randomness is None else randomness).to_dict(),
        "salt": secret,
        **promised_facts(plan, assigned, secret),
    }


def read_opening(chain: Chain) -> Opening:
    """The opening of a chain; ValueError if it is missing or of a later format."""
    entry = chain.last("open")
    if entry is None:
        raise ValueError("the first entry is missing")
    number: int = entry.facts.get("format", 1)
    if number > FORMAT:
        raise ValueError(
            f"its format is {number}, and this version of epsilons reads up to {FORMAT}; "
            "a newer version reads it"
        )
    plan = Plan.from_dict(entry.facts["plan"])
    named, id_type = chain.indices(entry.number), np.dtype(entry.facts["id_type"])
    ids = np.frombuffer(named[: plan.n * id_type.itemsize], dtype=id_type)
    promised = read_promised(plan, entry.facts, named[ids.nbytes :])
    margin = Margin(**entry.facts["margin"]) if "margin" in entry.facts else None
    block = entry.facts.get("block", plan.n)
    return Opening(number, plan, margin, block, ids, entry.facts, promised)
