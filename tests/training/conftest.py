"""Lets the tests of this folder import its oracle and its hazards by name, on one thread each."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
