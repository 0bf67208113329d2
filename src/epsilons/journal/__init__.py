"""The journal of a run: gradient norms and charges, append-only and hash-chained."""

from epsilons.journal.journal import Journal, SomeKind, Verified

__all__ = ["Journal", "SomeKind", "Verified"]
