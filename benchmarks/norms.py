"""Norm pass and private step beside Opacus and torch.func, as ratios to plain training.

One process, methods interleaved, two threads; small models get more rounds. A figure is the median
of the ratios within a round, which a busy machine disturbs least; in brackets is the ratio of the
least times. All of it takes half an hour; `--seconds 2` is for a first look. Memory is the
high-water mark of tensor bytes that a call adds, relative to the plain call's.

`launch` has tiny tensors, a batch of two and one thread, so that the number of calls counts and not
the work, as on a GPU.

How often the C library returns freed memory to the system changes all figures. This script leaves
it as it is; to keep freed memory, set both variables for the whole process:

    MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824 python benchmarks/norms.py
        [--models mlp,wrn16-4] [--rounds 25] [--seconds 20]
        [--what norms,step,memory,linear,launch] [--only epsilons,ghost]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from epsilons import Plan
from epsilons.gradients.norms import batch_norms
from epsilons.models import mlp, resnet20, tanh_cnn, wide_resnet
from epsilons.noise import SecureNoise
from epsilons.training import private_step, supervised

Call = Callable[[], Any]
BOUND, NOISE, RATE = 1.0, 1.0, 1e-6
CLASSES, VOCABULARY, LENGTH = 10, 1000, 64


class Block(nn.Module):
    """A pre-norm transformer block in the layers that every peer knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).movedim(2, 0).unbind(0)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Four blocks, a class from the mean over the sequence."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
        hidden = self.blocks(self.words(ids) + self.positions(positions))
        return self.head(self.norm(hidden).mean(1))


def _images(channels: int, size: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, channels, size, size)


def _sentences(length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(0, VOCABULARY, (count, length))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int, int]] = {
    "tanh-cnn": (tanh_cnn, _images(1, 28), 256, 256),
    "mlp": (lambda: mlp(784, CLASSES), _images(1, 28), 256, 1024),
    "resnet20": (lambda: resnet20(channels=1), _images(1, 28), 64, 64),
    "transformer": (Transformer, _sentences(LENGTH), 32, 32),
    "wrn16-4": (wide_resnet, _images(3, 32), 16, 16),
}  # build, inputs, batch of the norm pass, batch of the step
TINY = {
    "resnet20": (lambda: resnet20(channels=1), _images(1, 8)),
    "transformer": (lambda: Transformer(16), _sentences(8)),
    "wrn16-4": (wide_resnet, _images(3, 8)),
}

loss_fn = supervised(nn.CrossEntropyLoss(reduction="none"))


def norm_passes(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Call]:
    """The calls that end with every example's norm, and the plain one."""
    plain, ours, single = build(), build(), build()
    hooks = GradSampleModule(build(), loss_reduction="sum")
    ghost = GradSampleModuleFastGradientClipping(
        build(), loss_reduction="sum", max_grad_norm=BOUND, use_ghost_clipping=True
    )
    weights = GradSampleModuleExpandedWeights(build(), loss_reduction="sum")
    gradients = _per_example(single)
    parameters = dict(single.named_parameters())

    def run_plain() -> None:
        plain.zero_grad()
        loss_fn(plain, (x, y)).sum().backward()

    def run_samples(model: Any) -> Tensor:
        model.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        return _lengths([p.grad_sample for p in model.parameters()])

    def run_ghost() -> Tensor:
        ghost.zero_grad()
        F.cross_entropy(ghost(x), y, reduction="sum").backward()
        return ghost.get_norm_sample()

    return {
        "plain": run_plain,
        "epsilons": lambda: batch_norms(ours, loss_fn, (x, y)),
        "hooks": lambda: run_samples(hooks),
        "ghost": run_ghost,
        "ew": lambda: run_samples(weights),
        "vmap": lambda: _lengths(list(gradients(parameters, x, y).values())),
    }


def steps(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Call]:
    """One optimizer step each: plain SGD, and private with clipping and noise.

    Ours draws secure noise; the peers draw torch's.
    """
    plain, ours, single = build(), build(), build()
    plain_optimizer, our_optimizer = _sgd(plain), _sgd(ours)
    hooks = GradSampleModule(build(), loss_reduction="mean")
    weights = GradSampleModuleExpandedWeights(build(), loss_reduction="mean")
    ghost = GradSampleModuleFastGradientClipping(
        build(), loss_reduction="mean", max_grad_norm=BOUND, use_ghost_clipping=True
    )
    options = {"noise_multiplier": NOISE, "max_grad_norm": BOUND, "expected_batch_size": len(x)}
    hooks_optimizer = DPOptimizer(_sgd(hooks), **options)
    weights_optimizer = DPOptimizer(_sgd(weights), **options)
    ghost_optimizer = DPOptimizerFastGradientClipping(_sgd(ghost), **options)
    ghost_loss = DPLossFastGradientClipping(
        ghost, ghost_optimizer, nn.CrossEntropyLoss(reduction="mean")
    )
    gradients = _per_example(single)
    parameters = dict(single.named_parameters())
    single_optimizer = _sgd(single)
    plan = Plan(
        n=100 * len(x), batch_size=len(x), epochs=1, noise_multiplier=NOISE, max_grad_norm=BOUND,
        delta=1e-5,
    )  # fmt: skip
    secure = SecureNoise()

    def run_plain() -> None:
        plain_optimizer.zero_grad()
        (loss_fn(plain, (x, y)).sum() / len(x)).backward()
        plain_optimizer.step()

    def run_ours() -> None:
        private_step(ours, our_optimizer, loss_fn, (x, y), plan, noise=secure)

    def run_opacus(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def run_ghost() -> None:
        ghost_optimizer.zero_grad()
        ghost_loss(ghost(x), y).backward()
        ghost_optimizer.step()

    def run_vmap() -> None:
        found = gradients(parameters, x, y)
        factors = (BOUND / _lengths(list(found.values()))).clamp(max=1)
        sums = {name: torch.tensordot(factors, g, dims=1) for name, g in found.items()}
        _noisy_step(single, single_optimizer, sums, len(x))

    return {
        "plain": run_plain,
        "epsilons": run_ours,
        "hooks": lambda: run_opacus(hooks, hooks_optimizer),
        "ghost": run_ghost,
        "ew": lambda: run_opacus(weights, weights_optimizer),
        "vmap": run_vmap,
    }


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def _noisy_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, sums: dict[str, Tensor], count: int
) -> None:
    for name, p in model.named_parameters():
        p.grad = torch.normal(0.0, NOISE * BOUND, p.shape).add_(sums[name]).div_(count)
    optimizer.step()


def _lengths(gradients: list[Tensor]) -> Tensor:
    squares = [g.reshape(len(g), -1).square().sum(1) for g in gradients]
    return torch.stack(squares).sum(0).sqrt()


def _per_example(model: nn.Module) -> Callable[..., dict[str, Tensor]]:
    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (x.unsqueeze(0),))
        return F.cross_entropy(logits, y.unsqueeze(0), reduction="sum")

    return vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")


def working(calls: dict[str, Call]) -> dict[str, Call]:
    """The calls that run at all, with those that don't named on the way."""
    result = {}
    for name, call in calls.items():
        try:
            call()
            result[name] = call
        except Exception as error:  # a peer may refuse a model in any way it likes
            print(f"    {name} does not run: {type(error).__name__}: {str(error)[:90]}")
    return result


def times_of(calls: dict[str, Call], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call in several interleaved rounds; slow peers get fewer.

    In all rounds together the plain call takes at least so many seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.freeze()  # so that collecting between calls has little to look at
    number = 0
    while number < rounds or number < seconds / min(times["plain"]):
        number += 1
        for name, call in calls.items():
            if number > 3 and min(times[name]) > 5 * min(times["plain"]):
                continue
            gc.collect()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: list[float], plain: list[float]) -> str:
    """To plain: the median within a round, and in brackets of the least times."""
    within = statistics.median(ours / its for ours, its in zip(times, plain, strict=False))
    return f"{within:.2f} ({min(times) / min(plain):.2f})"


def peak_bytes(call: Call) -> int:
    """The high-water mark of tensor bytes that a call adds."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    allocations = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    level = peak = 0
    for _, size in sorted(allocations, key=lambda pair: pair[0]):
        level += size
        peak = max(peak, level)
    return peak


def _labels(count: int) -> Tensor:
    return torch.randint(0, CLASSES, (count,))


def compare(title: str, calls: dict[str, Call], rounds: int, seconds: float, memory: bool) -> None:
    """Print one line of ratios to plain."""
    calls = working(calls)
    times = times_of(calls, rounds, seconds)
    plain = times.pop("plain")
    ratios = "  ".join(f"{name} {ratio(its, plain)}" for name, its in times.items())
    print(f"  {title:<22} plain {1e3 * min(plain):7.1f} ms   {ratios}", flush=True)
    if memory:
        peaks = {name: peak_bytes(call) for name, call in calls.items()}
        ratios = "  ".join(f"{name} {peaks[name] / peaks['plain']:.2f}" for name in calls)
        over = (peaks["epsilons"] - peaks["plain"]) / 1e6
        print(f"  {'memory':<22} plain {peaks['plain'] / 1e6:7.1f} MB   {ratios}  ({over:+.1f} MB)")


def linear_cost(name: str, rounds: int, seconds: float) -> None:
    """Print seconds per example at three batch sizes; equal numbers are linear cost."""
    build, inputs, batch, _ = MODELS[name]
    found = []
    for size in (batch // 2, batch, 2 * batch):
        model, data = build(), (inputs(size), _labels(size))
        call = {"plain": lambda model=model, data=data: batch_norms(model, loss_fn, data)}
        found.append(
            f"B {size}: {1e6 * min(times_of(call, rounds, seconds)['plain']) / size:.0f} µs"
        )
    print(f"  {name:<22} per example  " + "   ".join(found), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", default=",".join(MODELS))
    arguments.add_argument("--rounds", type=int, default=25)
    arguments.add_argument("--seconds", type=float, default=20, help="of plain calls, at least")
    arguments.add_argument("--what", default="norms,step,memory,linear,launch")
    arguments.add_argument("--only", default="", help="methods beside plain, by name")
    options = arguments.parse_args()
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    what = options.what.split(",")
    kept = "MALLOC_TRIM_THRESHOLD_" in os.environ and "MALLOC_MMAP_THRESHOLD_" in os.environ
    allocator = "keeps freed memory" if kept else "is as the system has it"
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; the allocator {allocator}"
    )
    print("ratios to plain")
    only = ("plain", *options.only.split(",")) if options.only else ()

    def run(title: str, calls: dict[str, Call], memory: bool) -> None:
        chosen = {name: call for name, call in calls.items() if not only or name in only}
        compare(title, chosen, options.rounds, options.seconds, memory)

    for name in options.models.split(","):
        build, inputs, batch, step_batch = MODELS[name]
        for part, calls_of, size in (("norms", norm_passes, batch), ("step", steps, step_batch)):
            if part in what:
                torch.manual_seed(0)
                calls = calls_of(build, inputs(size), _labels(size))
                run(f"{name} {part} B {size}", calls, "memory" in what)
            if "launch" in what and name in TINY:
                torch.manual_seed(0)
                build_tiny, tiny = TINY[name]
                torch.set_num_threads(1)
                run(f"{name} {part}, tiny", calls_of(build_tiny, tiny(2), _labels(2)), False)
                torch.set_num_threads(2)
        if "linear" in what:
            linear_cost(name, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
