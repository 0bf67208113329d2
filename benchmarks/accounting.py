"""Speed of the accountant beside its peers, as ratios, with the peak memory of the process.

    python benchmarks/accounting.py [a b c d e f]

Compilation is left out: every case first runs once on a few examples. Peers run in the same
process, between two runs of ours; both times are printed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from epsilons.accounting import epsilons_from_blocks, individual_epsilons, least_noise
from epsilons.accounting.histories import level_norms, soft_histogram

CIFAR10 = {"sample_rate": 4096 / 50_000, "noise_std": 3.32622, "max_grad_norm": 1.0, "delta": 1e-5}
STEPS = 3662


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def best_around(ours: Callable[[], Any], peer: Callable[[], Any]) -> tuple[float, float, Any]:
    """The better of two runs of ours, and the peer's run between them."""
    first, result = timed(ours)
    theirs, _ = timed(peer)
    second, _ = timed(ours)
    return min(first, second), theirs, result


def report(case: str, text: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"({case}) {text}; peak {peak:.2f} GiB", flush=True)


def some_norms(refreshes: int, n: int, seed: int = 0) -> np.ndarray:
    """Norms that differ between examples, fall in the course of training, and fluctuate."""
    rng = np.random.default_rng(seed)
    example = rng.lognormal(-0.7, 0.9, n).astype(np.float32)
    trend = np.linspace(1.3, 0.6, refreshes, dtype=np.float32)[:, None]
    return example * trend * np.exp(0.4 * rng.standard_normal((refreshes, n), dtype=np.float32))


def even_steps(refreshes: int) -> np.ndarray:
    return np.diff(np.linspace(0, STEPS, refreshes + 1).astype(int))


def table_1() -> None:
    """(a) 1e7 pairs (norm, refresh), no rounding, to all RDP ε's."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    norms, steps = some_norms(200, 50_000), even_steps(200)
    individual_epsilons(norms[:, :200], steps, **CIFAR10, method="rdp")
    evaluations = 20

    def peer() -> None:
        for norm in norms[0, :evaluations]:
            noise = CIFAR10["noise_std"] / min(float(norm), 1.0)
            rdp.compute_rdp(
                q=CIFAR10["sample_rate"],
                noise_multiplier=noise,
                steps=1,
                orders=RDPAccountant.DEFAULT_ALPHAS,
            )

    ours, theirs, _ = best_around(
        lambda: individual_epsilons(norms, steps, **CIFAR10, method="rdp"), peer
    )
    ratio = theirs / evaluations * norms.size / ours
    report(
        "a",
        f"{norms.size:.0e} pairs to RDP ε: {ours:.2f} s; Opacus "
        f"{1e3 * theirs / evaluations:.1f} ms per norm, ratio {ratio:,.0f}",
    )


def all_tight() -> None:
    """(b) Tight ε of 50,000 examples, 900 refreshes; the peer's PLD of ten of them."""
    import logging

    from dp_accounting.pld import privacy_loss_distribution as pld

    logging.getLogger().setLevel(logging.ERROR)
    norms, steps = some_norms(900, 50_000), even_steps(900)
    individual_epsilons(norms[:, :200], steps, **CIFAR10)
    levels, chosen = 100, range(0, 50_000, 5_000)
    counts = soft_histogram(norms[:, chosen], steps, 1.0, levels=levels, rounding="up")[:, 0] >> 32
    grid = level_norms(1.0, levels)

    def peer() -> None:
        for history in counts:
            total = None
            for norm, times in zip(grid, history, strict=True):
                if norm > 0 and times > 0:
                    part = pld.from_gaussian_mechanism(
                        CIFAR10["noise_std"] / norm,
                        sampling_prob=CIFAR10["sample_rate"],
                        value_discretization_interval=5e-5,
                    ).self_compose(int(times))
                    total = part if total is None else total.compose(part)
            if total is not None:
                total.get_epsilon_for_delta(CIFAR10["delta"])

    ours, theirs, eps = best_around(lambda: individual_epsilons(norms, steps, **CIFAR10), peer)
    each = theirs / len(counts)
    report(
        "b",
        f"tight ε of {len(eps):,} examples × 900 refreshes: {ours:.2f} s; dp-accounting "
        f"{each:.2f} s per example, ratio {each * len(eps) / ours:,.0f}",
    )


def streamed() -> None:
    """(c) 1e9 pairs through bounded memory."""
    rows, width, n = 10_000, 2_000, 100_000
    norms = [some_norms(rows, width, seed) for seed in (0, 1)]
    steps = np.ones(rows, dtype=np.int64)

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for k in range(n // width):
            yield norms[k % 2], steps

    epsilons_from_blocks([(norms[0][:, :200], steps)], **CIFAR10)
    for method in ("rdp", "tight"):
        seconds, eps = timed(lambda m=method: epsilons_from_blocks(blocks(), **CIFAR10, method=m))
        report("c", f"{rows * len(eps):.0e} pairs streamed to {method} ε: {seconds:.2f} s")


def linear() -> None:
    """(d) Cost against the number of examples and of refreshes."""
    norms = some_norms(900, 50_000)
    individual_epsilons(norms[:, :200], even_steps(900), **CIFAR10)
    for n in (12_500, 25_000, 50_000):
        seconds, _ = timed(
            lambda n=n: individual_epsilons(norms[:, :n], even_steps(900), **CIFAR10)
        )
        report("d", f"n = {n:6,}, 900 refreshes: {seconds:.2f} s, {1e6 * seconds / n:.1f} µs each")
    for refreshes in (2_250, 4_500, 9_000):
        many = np.tile(norms[:, :5_000], (refreshes // 900 + 1, 1))[:refreshes]
        seconds, _ = timed(
            lambda z=many: individual_epsilons(z, np.ones(len(z), dtype=int), **CIFAR10)
        )
        report("d", f"n = 5,000, {refreshes:,} refreshes: {seconds:.2f} s")


def calibration() -> None:
    """(e) The least noise for ε = 7.8 and 2.4."""
    from opacus.accountants.utils import get_noise_multiplier

    for target, p, steps in ((7.8, 4096 / 50_000, 3662), (2.4, 1024 / 60_000, 5859)):
        least_noise(target, sample_rate=p, steps=steps, delta=1e-5)

        def peer(target: float = target, p: float = p, steps: int = steps) -> float:
            return get_noise_multiplier(
                target_epsilon=target,
                target_delta=1e-5,
                sample_rate=p,
                steps=steps,
                accountant="prv",
            )

        ours, theirs, noise = best_around(
            lambda t=target, p=p, s=steps: least_noise(t, sample_rate=p, steps=s, delta=1e-5), peer
        )
        report(
            "e",
            f"ε = {target}: noise {noise:.5f} in {ours:.3f} s; Opacus PRV {theirs:.2f} s, "
            f"ratio {theirs / ours:,.0f}",
        )


def tighter() -> None:
    """(f) RDP ε over tight ε on the norms of a real run: softmax regression on digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = np.hstack([x / 16, np.ones((len(x), 1))])
    rng = np.random.default_rng(0)
    n, p, steps, bound, sigma = len(x), 256 / len(x), 700, 1.0, 4.0
    weights, norms = np.zeros((x.shape[1], 10)), []
    for _ in range(steps):
        scores = x @ weights
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(n), y] -= 1
        norm = np.linalg.norm(x, axis=1) * np.linalg.norm(error, axis=1)
        norms.append(norm)
        drawn = rng.random(n) < p
        clip = np.minimum(1, bound / norm) * drawn
        gradient = x.T @ (error * clip[:, None]) + sigma * rng.standard_normal(weights.shape)
        weights -= 2.0 * gradient / (p * n)
    accuracy = np.mean((x @ weights).argmax(axis=1) == y)
    given = {"sample_rate": p, "noise_std": sigma, "max_grad_norm": bound, "delta": 1e-5}
    tight, rdp = (
        individual_epsilons(np.array(norms), np.ones(steps, dtype=int), **given, method=method)
        for method in ("tight", "rdp")
    )
    low, middle, high = np.quantile(rdp.values / tight.values, (0.05, 0.5, 0.95))
    report(
        "f",
        f"digits, {steps} steps, accuracy {accuracy:.2f}, worst case {tight.worst_case:.2f}: "
        f"RDP ε / tight ε is {low:.3f}, {middle:.3f}, {high:.3f} at 5, 50, 95 %",
    )


CASES = {
    "c": streamed,
    "a": table_1,
    "b": all_tight,
    "d": linear,
    "e": calibration,
    "f": tighter,
}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(CASES)
    for name in CASES:
        if name in chosen:
            CASES[name]()
