"""What secure noise costs per coordinate, beside torch.randn.

Each line takes the best of interleaved rounds in one process. The figure to hold: at most 8 ns per
coordinate from 10,000 on. Its share of a private step is in `norms.py`, part `noise`.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import torch
from torch import Tensor

from epsilons.noise import SecureNoise

STD = 1.3


def best(rounds: int, **peers: Callable[[], object]) -> dict[str, float]:
    """Least seconds of each peer, the peers taking turns."""
    least = dict.fromkeys(peers, float("inf"))
    for _ in range(rounds + 1):  # the first round compiles and warms the caches
        for name, run in peers.items():
            start = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def float_noise(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: total + STD * torch.randn_like(total) for name, total in sums.items()}


def per_coordinate(count: int, rounds: int, *, tensors: int = 1, threads: int = 1) -> None:
    noise, sums = SecureNoise(), {str(i): torch.zeros(count) for i in range(tensors)}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds = best(
        rounds, secure=lambda: noise.added_to(sums, STD), randn=lambda: float_noise(sums)
    )
    each = {name: value / (tensors * count) * 1e9 for name, value in seconds.items()}
    tracemalloc.start()
    noise.added_to(sums, STD)
    scratch = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    torch.set_num_threads(before)
    print(
        f"{tensors:>2} × {count:>10,} coordinates, threads {threads}: secure "
        f"{each['secure']:5.1f} ns each, torch.randn {each['randn']:5.1f} ns, ratio "
        f"{each['secure'] / each['randn']:.2f}, scratch {scratch:.1f} MiB"
    )


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    per_coordinate(1_000, 200)
    per_coordinate(270_000, 30)
    for threads in sorted({1, torch.get_num_threads()}):
        per_coordinate(1_000_000, 30, threads=threads)
        per_coordinate(10_000, 30, tensors=60, threads=threads)
    per_coordinate(10_000_000, 4)
