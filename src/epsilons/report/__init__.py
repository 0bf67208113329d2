"""A run folder as one self-contained HTML file."""

from epsilons.report.compared import write_comparison
from epsilons.report.page import write_report
from epsilons.report.published import write_public_report

__all__ = ["write_comparison", "write_public_report", "write_report"]
