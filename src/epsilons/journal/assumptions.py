"""Assumptions of the accounting, and entries that say where a run was found to break them.

Random losses or data make every individual ε an estimate. Examples that mix within a batch make
every ε of the run wrong, so that none is returned. Where the last bits of an example's gradient
depend on its batch, floating-point effects of the sum are not covered.
"""

from __future__ import annotations

from typing import Literal, get_args

from epsilons.journal.chain import Chain
from epsilons.journal.opening import Opening

Random = Literal["loss", "data", "norms"]


def append_random(chain: Chain, opening: Opening, what: Random, step: int) -> None:
    """Append that norms of a refresh differ from those of a step; see `Journal.record_random`."""
    if what not in get_args(Random):
        raise ValueError(f"what={what!r}; expected one of {', '.join(get_args(Random))}")
    if what not in random_draws(chain, opening):
        chain.append("random", {"what": what, "step": step}, b"", b"")


def random_draws(chain: Chain, opening: Opening) -> tuple[Random, ...]:
    """What makes norms of a refresh differ from those of a step: from opening and later entries."""
    at_first = [what for what in ("loss", "data") if opening.facts.get(f"random_{what}")]
    later = [entry.facts["what"] for entry in chain.entries("random")]
    return tuple(dict.fromkeys([*at_first, *later]))


def append_batch_dependence(chain: Chain, step: int) -> None:
    """Append that at `step` bits depended on the batch; see `Journal.record_batch_dependence`."""
    if chain.last("batch dependence") is None:
        chain.append("batch dependence", {"step": step}, b"", b"")


def sums_covered(chain: Chain, opening: Opening) -> bool:
    """Whether the sums' rounding is within what is charged; see `Journal.sums_covered`."""
    tested = bool(opening.facts.get("batch_invariant"))
    found = chain.last("batch dependence") is not None
    return opening.plan.sums == "float64" and tested and not found


def append_mixing(chain: Chain, step: int) -> None:
    """Append that at `step` an example's loss depended on others; see `Journal.record_mixing`."""
    chain.append("mixing", {"step": step}, b"", b"")


def expect_separate(chain: Chain) -> None:
    """ValueError if the loss of an example was found to depend on the others of its batch."""
    found = chain.last("mixing")
    if found is not None:
        raise ValueError(
            f"{chain.path}: at step {found.facts['step']} the loss of an example was found to "
            "depend on the others of its batch, so that no figure of this run holds. Mend the "
            "loss and train anew in another folder; what this run released is not accounted for"
        )
