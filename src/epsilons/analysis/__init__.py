"""What a curator looks at: comparisons between examples and groups."""

from epsilons.analysis.groups import GroupRow, group_summary

__all__ = ["GroupRow", "group_summary"]
