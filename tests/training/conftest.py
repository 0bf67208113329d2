"""Lets the tests of this folder import its oracle, its hazards and its small runs by name."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


@pytest.fixture
def _threads():
    """Whatever number of threads a test sets is its own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
