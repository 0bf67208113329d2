"""Lets the tests of this folder import its oracle, its hazards and its small runs by name."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
