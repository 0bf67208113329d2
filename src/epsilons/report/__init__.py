"""A run folder as one self-contained HTML file."""

from epsilons.report.page import write_report

__all__ = ["write_report"]
