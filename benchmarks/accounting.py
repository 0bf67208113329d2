"""Speed of the accountant beside its peers, as ratios, with the peak memory of the process.

    python benchmarks/accounting.py [a b c d e f r w]
    python benchmarks/accounting.py j [--largest N] [--storage uint16] [--processes P]

Compilation is left out: every case first runs once on a few examples. Peers run in the same
process, between two runs of ours; both times are printed. `j`, which is asked for by name, writes
journals of up to 10⁷ examples below /var/tmp (8 GB, or 2 GB in 16 bits) and removes them.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epsilons import Journal, Plan
from epsilons.accounting import (
    epsilons_from_blocks,
    individual_epsilons,
    least_noise,
    tight_epsilon,
)
from epsilons.accounting.histories import level_norms, soft_histogram
from epsilons.terminal import counting

Array = NDArray[Any]
# Noise multipliers (k,) and steps (k,) at CIFAR-10's sample rate and δ → ε.
PldEpsilon = Callable[[Array, Array], float]

CIFAR10 = {"sample_rate": 4096 / 50_000, "noise_std": 3.32622, "max_grad_norm": 1.0, "delta": 1e-5}
STEPS = 3662
PLD_INTERVAL = 5e-5  # of privacy losses, in both PLD accountants


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
    """(b) Tight ε of 50,000 examples, 900 refreshes; the peers' PLDs of some of them."""
    norms, steps = some_norms(900, 50_000), even_steps(900)
    individual_epsilons(norms[:, :200], steps, **CIFAR10)
    levels, chosen = 100, range(0, 50_000, 5_000)
    counts = soft_histogram(norms[:, chosen], steps, 1.0, levels=levels, rounding="up")[:, 0] >> 32
    grid = level_norms(1.0, levels)
    used = (counts > 0) & (grid > 0)
    histories = [(grid[k], n[k]) for k, n in zip(used, counts, strict=True) if k.any()]
    for name, epsilon in PLDS.items():

        def peer(epsilon: PldEpsilon = epsilon) -> None:
            for norm, times in histories:
                epsilon(CIFAR10["noise_std"] / norm, times)

        ours, theirs, eps = best_around(lambda: individual_epsilons(norms, steps, **CIFAR10), peer)
        each = theirs / len(histories)
        report(
            "b",
            f"tight ε of {len(eps):,} examples × 900 refreshes: {ours:.2f} s; {name} "
            f"{each:.3f} s per example, ratio {each * len(eps) / ours:,.0f}",
        )


def worst_case() -> None:
    """(w) The worst case of a run, one ε: 3,662 steps at the clip bound; then 100 norms."""
    for what, norm, times in (
        ("worst case", np.ones(1), np.array([STEPS])),
        ("one example with 100 norms", np.arange(1, 101) / 100, np.full(100, STEPS // 100)),
    ):
        noise = CIFAR10["noise_std"] / norm

        def ours(noise: Array = noise, times: Array = times) -> float:
            return tight_epsilon(noise, CIFAR10["sample_rate"], times, CIFAR10["delta"])

        ours()
        for name, epsilon in PLDS.items():
            mine, theirs, _ = best_around(ours, lambda e=epsilon, z=noise, n=times: e(z, n))
            report(
                "w",
                f"{what}: ε = {ours():.6f} in {1e3 * mine:.1f} ms; {name} "
                f"{epsilon(noise, times):.6f} in {1e3 * theirs:.1f} ms, ratio {theirs / mine:.1f}",
            )


def dp_accounting_epsilon(noise: Array, times: Array) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    logging.getLogger("absl").setLevel(logging.ERROR)
    total = None
    for sigma, count in zip(noise, times, strict=True):
        part = pld.from_gaussian_mechanism(
            float(sigma),
            sampling_prob=CIFAR10["sample_rate"],
            value_discretization_interval=PLD_INTERVAL,
        ).self_compose(int(count))
        total = part if total is None else total.compose(part)
    return float(total.get_epsilon_for_delta(CIFAR10["delta"]))


def opake_epsilon(noise: Array, times: Array) -> float:
    """By Opake's Rust module alone, which has no cache; its Python does not import everywhere."""
    opake = opake_module()
    config = opake.DiscretizationConfig(PLD_INTERVAL, -50.0, 10**7, 1e-15, 42, 2**15, 1e-5, 1e-6)
    total = None
    for sigma, count in zip(noise, times, strict=True):
        step = opake.poisson_pld(opake.gaussian_pld(float(sigma), config), CIFAR10["sample_rate"])
        part = step.self_compose(int(count))
        total = part if total is None else total.compose(part)
    return float(total.epsilon_at(CIFAR10["delta"]))


@cache
def opake_module() -> Any:
    file = next(
        file
        for file in metadata.files("opake-accounting") or ()
        if file.name.startswith("opake_accounting") and file.suffix in (".so", ".pyd")
    )
    spec = importlib.util.spec_from_file_location("opake_accounting", file.locate())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def opacus_epsilon(noise: Array, times: Array) -> float:
    """By Opacus's PRV accountant, to a hundredth, its default."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [
        (float(sigma), CIFAR10["sample_rate"], int(count))
        for sigma, count in zip(noise, times, strict=True)
    ]
    return float(accountant.get_epsilon(CIFAR10["delta"]))


PLDS: dict[str, PldEpsilon] = {
    "dp-accounting": dp_accounting_epsilon,
    "Opake": opake_epsilon,
    "Opacus PRV": opacus_epsilon,
}


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
        busy = time.process_time()
        seconds, eps = timed(lambda m=method: epsilons_from_blocks(blocks(), **CIFAR10, method=m))
        busy = time.process_time() - busy
        report(
            "c",
            f"{rows * len(eps):.0e} pairs streamed to {method} ε: {seconds:.2f} s, "
            f"{busy:.2f} s of processors",
        )


def few_rows() -> None:
    """(r) Cost per example against the number of refreshes, of 10 steps each."""
    for rows in (2, 5, 20, 100):
        norms, steps = some_norms(rows, 50_000), np.full(rows, 10)
        for method in ("rdp", "tight"):
            price = partial(individual_epsilons, **CIFAR10, method=method)
            price(norms[:, :200], steps)
            busy = time.process_time()
            price(norms, steps)
            each = 1e6 * (time.process_time() - busy) / norms.shape[1]
            report("r", f"{rows:3} rows of 10 steps, {method}: {each:.1f} µs of a core per example")


def journals(largest: int, storage: str, processes: int) -> None:
    """(j) Journals of 1e5 examples and more × 100 refreshes: written, read and priced."""
    for n in (10**k for k in range(5, 10) if 10**k <= largest):
        with TemporaryDirectory(dir="/var/tmp") as folder:
            path = Path(folder) / "journal.sqlite"
            plan = Plan(
                n=n, sample_rate=CIFAR10["sample_rate"], steps=1000, refresh_every=10,
                noise_multiplier=CIFAR10["noise_std"], max_grad_norm=1.0, delta=0.1 / n,
                norm_storage=storage,
            )  # fmt: skip
            write, busy = timed_journal(path, plan)
            report(
                "j",
                f"n = {n:.0e} × 100 refreshes, {storage}: {path.stat().st_size / 1e9:.2f} GB, "
                f"written in {write:.1f} s ({busy:.1f} of processors)",
            )
            with Journal.open(path) as journal:
                busy = time.process_time()
                seconds, _ = timed(lambda j=journal: deque(j.histories(2**14), maxlen=0))
                busy = time.process_time() - busy
                report("j", f"n = {n:.0e}: read in {seconds:.1f} s ({busy:.1f} of processors)")
                for method in ("rdp", "tight"):
                    busy = processors()
                    with counting(f"{n:.0e} {method}", n) as advance:
                        seconds, _ = timed(
                            lambda j=journal, m=method, a=advance: j.epsilons(
                                method=m, hold="previous", progress=a, processes=processes
                            )
                        )
                    busy = processors() - busy
                    report(
                        "j",
                        f"n = {n:.0e}: {method} ε in {seconds:.1f} s ({busy:.1f} of processors, "
                        f"{1e6 * busy / n:.1f} µs per example)",
                    )


def timed_journal(path: Path, plan: Plan) -> tuple[float, float]:
    """Seconds, and those of processors, to record and charge a run with norms like `some_norms`."""
    rng, seconds, busy = np.random.default_rng(0), 0.0, 0.0
    example = rng.lognormal(-0.7, 0.9, plan.n)
    with Journal.create(path, plan) as journal:
        for step in plan.refresh_steps:
            fluctuation = np.exp(0.4 * rng.standard_normal(plan.n, dtype=np.float32))
            norms = example * fluctuation * (1.3 - 0.7 * step / plan.steps)
            began = time.perf_counter(), time.process_time()
            journal.record(step, norms)
            journal.charge(step, step + 9)
            seconds += time.perf_counter() - began[0]
            busy += time.process_time() - began[1]
    return seconds, busy


def processors() -> float:
    """Seconds of processors so far, those of processes that have ended included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


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
    "r": few_rows,
    "w": worst_case,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, "j"], default=list(CASES))
    parser.add_argument("--largest", type=int, default=10**7, help="examples of the largest (j)")
    parser.add_argument("--storage", default="float64", choices=["float64", "uint16"])
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    for name in CASES:
        if name in given.cases:
            CASES[name]()
    if "j" in given.cases:
        journals(given.largest, given.storage, given.processes)
