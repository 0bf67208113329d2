"""The journal of a run: gradient norms and charges, append-only and hash-chained."""

from epsilons.journal.journal import Journal
from epsilons.journal.norm_records import SomeKind
from epsilons.journal.verification import Verified

__all__ = ["Journal", "SomeKind", "Verified"]
