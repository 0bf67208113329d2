"""Compiled loops and the processes that run them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from epsilons.training import SeededNoise
from epsilons.training.compiled import scratch
from epsilons.training.rules.tiles import LANES

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


LOOPS = """
import one_word
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from epsilons.training import SeededNoise
from epsilons.training.keystream import Keystream
from epsilons.training.rules.affine import linear_map
from epsilons.training.rules.attention import attention, attention_back
from epsilons.training.rules.filters import filter_gradients
from epsilons.training.rules.outer import outer_sums
from epsilons.training.rules.pairs import pair_sums
from walks import SAME, slowly

torch.manual_seed(0)
for places, d, p in ((7, 35, 13), (8, 32, 16), (5, 70, 130)):
    a, g = torch.randn(3, places, d), torch.randn(3, places, p)
    expected = g.double().mT @ a.double()
    formed, squares, totals = outer_sums(a, g)
    assert torch.allclose(formed.double(), expected, atol=1e-4)
    for found in (squares, pair_sums(a, g, 0.01)[0]):
        assert torch.allclose(found.double(), expected.square().sum((1, 2)), rtol=1e-5)
for channels, outputs in ((3, 5), (16, 8)):
    source, places = torch.randn(2, channels, 9, 9), torch.randn(2, outputs, 9, 9)
    found = filter_gradients(source, places, SAME)[0]
    assert torch.allclose(found.double(), slowly(source, places, SAME), atol=1e-4)
x, weight, bias = torch.randn(20, 24), torch.randn(128, 24), torch.randn(128)
expected = linear(x.double(), weight.double(), bias.double())
assert torch.allclose(linear_map(x, weight, bias).double(), expected, atol=1e-5)
q, k, v, g = torch.randn(4, 2, 3, 21, 19)
out, sums = attention(q, k, v, 0.2, True)
exact = [t.double().requires_grad_() for t in (q, k, v)]
expected = scaled_dot_product_attention(*exact, is_causal=True, scale=0.2)
assert torch.allclose(out.transpose(1, 2).double(), expected, atol=1e-5)
found = attention_back(g.transpose(1, 2), q, k, v, sums, 0.2, True)
for ours, theirs in zip(found, torch.autograd.grad(expected, exact, g.double())):
    assert torch.allclose(ours.double(), theirs, atol=1e-5)
units = one_word.gaussian_units(Keystream.seeded(1, b"noise").words(1002), 2.0**32)
drawn = SeededNoise(1).added_to({"w": torch.zeros(1001, dtype=torch.float64)}, 1.0)["w"]
assert (drawn.numpy() * 2**32 == units[:1001]).all()
print("agree")
"""


NARROW = """
from epsilons.training.rules import tiles
assert tiles.LANES == 8
"""

# Where a processor has no registers of sixteen numbers, compilers take two of eight.
WIDE = """
from numba import njit
from numba.core import codegen
njit(lambda: 0)()  # numba itself has asked
known, codegen.get_host_cpu_features = codegen.get_host_cpu_features, lambda: "+avx512f"
from epsilons.training.rules import tiles
codegen.get_host_cpu_features = known
assert tiles.LANES == 16
"""


NOISE = """
import numpy as np, torch
from epsilons.training import SeededNoise, cipher
words = np.zeros(2, np.uint64)
try:
    cipher.cipher_words(np.zeros(30, np.uint64), np.uint64(0), np.uint64(0), words)
except RuntimeError:
    assert not cipher.HAS_AES
else:
    assert words.any()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vectors", "avx"),
    [
        pytest.param(NARROW, "0", marks=pytest.mark.skipif(LANES == 8, reason="so they are here")),
        (WIDE, ""),
    ],
    ids=["short", "long"],
)
def test_loops_agree_with_vectors_of_any_length(vectors, avx, tmp_path):
    settings = {"NUMBA_ENABLE_AVX": avx} if avx else {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", vectors + LOOPS],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        cwd=Path(__file__).parent,
    )
    assert done.stdout == "agree\n", done.stderr


@pytest.mark.parametrize("kind", [np.float32, np.uint64])
@pytest.mark.parametrize("size", [0, 1, 7, 16, 1000])
def test_scratch_begins_with_a_line_of_memory(size, kind):
    rooms = [scratch(size, kind) for _ in range(20)]
    for room in rooms:
        assert room.ctypes.data % 64 == 0
        assert room.shape == (size,)
        assert room.dtype == kind
        assert not room.any()
        room[:] = 1
