"""A run folder as one self-contained HTML file."""

from .page import write_report

__all__ = ["write_report"]
