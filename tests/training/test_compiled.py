"""Compiled loops and the processes that run them."""

import os
import subprocess
import sys

import pytest

FORKED = """
import os, torch
from epsilons.training import SeededNoise, gradient_norms

class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 20, 3), torch.nn.Linear(40, 40)

    def forward(self, x):
        return self.linear(self.conv(x).flatten(2)).square().sum((1, 2))

def run():
    norms = gradient_norms(model, lambda model, x: model(x), x, batch_size=4)
    return norms.tobytes(), SeededNoise(0).added_to(sums, 1.0)["w"].numpy().tobytes()

torch.set_num_threads(1)
model, x, sums = Both(), torch.randn(4, 3, 10, 7), {"w": torch.zeros(100_000)}
found = run()
child = os.fork()
if not child:
    os._exit(run() != found)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes don't fork here")
def test_on_one_thread_a_forked_process_finds_the_same():
    assert subprocess.run([sys.executable, "-c", FORKED], check=False, timeout=120).returncode == 0
