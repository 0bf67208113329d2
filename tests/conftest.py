"""Lets tests import the oracles, hazards and small runs that lie beside them by name."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent / room) for room in ("gradients", "noise", "training")]
torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


@pytest.fixture
def _threads():
    """Whatever number of threads a test sets is its own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
