"""The same noise and norms in forked processes and for other processors."""

import os
import subprocess
import sys

import pytest
import torch

from epsilons.noise import SeededNoise

FORKED = """
import os, torch
from epsilons.gradients import gradient_norms
from epsilons.noise import SeededNoise

class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 20, 3), torch.nn.Linear(40, 40)

    def forward(self, x):
        return self.linear(self.conv(x).flatten(2)).square().sum((1, 2))

def run():
    norms = gradient_norms(model, lambda model, x: model(x), x, batch_size=4)
    noisy = SeededNoise(0).added_to({"w": torch.zeros(100_000)}, 1.0)["w"]
    return norms.tobytes(), noisy.numpy().tobytes()

torch.set_num_threads(1)
model, x = Both(), torch.randn(4, 3, 10, 7)
found = run()
child = os.fork()
if not child:
    os._exit(run() != found)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes don't fork here")
def test_on_one_thread_a_forked_process_finds_the_same():
    assert subprocess.run([sys.executable, "-c", FORKED], check=False, timeout=120).returncode == 0


NOISE = """
import torch
from epsilons.noise import SeededNoise
print(SeededNoise(3).added_to({"w": torch.zeros(1001)}, 1.0)["w"].double().sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_FEATURES": ""},
        {"NUMBA_CPU_FEATURES": "+avx2,+fma,+aes"},
    ],
    ids=str,
)
def test_noise_is_the_same_for_any_processor(settings, tmp_path):
    """For a generic one, instructions that it lacks ended the process."""
    expected = SeededNoise(3).added_to({"w": torch.zeros(1001)}, 1.0)["w"].double().sum().item()
    done = subprocess.run(
        [sys.executable, "-c", NOISE],
        capture_output=True,
        text=True,
        env={**os.environ, **settings, "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert done.stdout == f"{expected}\n", done.stderr
