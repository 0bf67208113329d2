"""The journal of a run: gradient norms and charges, append-only and hash-chained."""

from epsilons.journal.journal import Journal
from epsilons.journal.norm_records import Constants, SomeKind
from epsilons.journal.verification import Verified

__all__ = ["Constants", "Journal", "SomeKind", "Verified"]
