"""Norm pass and private step beside Opacus, torch.func and Opake, as ratios to plain training.

Methods take turns in one process: in a round each runs once, in random order. A figure is the
median of the ratios to plain within a round, which a busy machine disturbs least; in brackets is
the ratio of the least times. Peers slower than five times plain run in one or two rounds only. Ours
draws secure noise, the peers draw torch's. Compiled methods, plain training too, are compiled
by torch, which takes the seconds that are printed first. The parts, chosen by `--what`:

    norms    every example's gradient norm ÷ forward and backward pass
    step     private step ÷ step of SGD; by default with float64 sums, in a pass that is padded to
             a little more than the batch; full: padded to nothing; float32: with float32 sums
    launch   both with tiny tensors, a batch of two and one thread: the number of calls counts and
             not the work, as on a GPU; sums: the clipped sum ÷ forward and backward pass
    memory   high-water mark of tensor bytes that a norm pass or a step adds ÷ the plain one's
    noise    secure noise as a share of the step that draws it
    linear   time of a norm pass per example at three batch sizes

A line of norms, step or launch takes `--seconds`, and as long as its peers need for `--rounds`:
with the defaults all of it takes 25 minutes; `--seconds 1 --rounds 1` is for a first look.

How often the C library returns freed memory to the system changes all figures. This script leaves
it as it is; to keep freed memory, set both variables for the whole process:

    MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824 python benchmarks/norms.py
        [--what norms,step] [--models mlp,wrn16-4] [--only epsilons,ghost] [--seconds 60]
        [--rounds 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peers
from epsilons import Plan
from epsilons.gradients import clipped_gradients, gradient_norms
from epsilons.models import mlp, resnet20, tanh_cnn, wide_resnet
from epsilons.noise import SecureNoise
from epsilons.training import supervised
from epsilons.training.step import apply, clipped_sum
from peers import BOUND, NOISE, Call, Method, sgd

CLASSES, VOCABULARY, LENGTH = 10, 1000, 64
SLOW = {1: 20, 2: 5}  # after so many rounds, a peer slower than so many times plain stops

loss_fn = supervised(nn.CrossEntropyLoss(reduction="none"))


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


class Task(NamedTuple):
    """A model, random inputs for it, and the batch sizes of norm pass and step.

    A norm pass goes over several batches where one is so fast that what our pass does once, saving
    and restoring the random generators, would count as if it were done for every batch.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    norm_batch: int
    step_batch: int
    batches: int = 1


MODELS = {
    "tanh-cnn": Task(tanh_cnn, _images(1, 28), 256, 256),
    "mlp": Task(lambda: mlp(784, CLASSES), _images(1, 28), 256, 1024, batches=4),
    "resnet20": Task(lambda: resnet20(channels=1), _images(1, 28), 64, 64),
    "transformer": Task(Transformer, _sentences(LENGTH), 32, 32),
    "wrn16-4": Task(wide_resnet, _images(3, 32), 16, 16),
}
TINY = {
    "resnet20": Task(lambda: resnet20(channels=1), _images(1, 8), 2, 2, batches=8),
    "transformer": Task(lambda: Transformer(16), _sentences(8), 2, 2, batches=8),
    "wrn16-4": Task(wide_resnet, _images(3, 8), 2, 2, batches=8),
}
NOISE_SHARE = ("resnet20", "wrn16-4")
PARTS = ("norms", "step", "launch", "memory", "noise", "linear")


def plain_pass(model: nn.Module, x: Tensor, y: Tensor, *, compile: bool = False) -> Call:
    losses = torch.compile(loss_fn, dynamic=False) if compile else loss_fn

    def run() -> None:
        model.zero_grad()
        losses(model, (x, y)).sum().backward()

    return run


def plain_step(model: nn.Module, x: Tensor, y: Tensor, *, compile: bool = False) -> Call:
    optimizer = sgd(model)
    losses = torch.compile(loss_fn, dynamic=False) if compile else loss_fn

    def run() -> None:
        optimizer.zero_grad()
        losses(model, (x, y)).mean().backward()
        optimizer.step()

    return run


def our_norms(
    model: nn.Module, x: Tensor, y: Tensor, *, batches: int = 1, compile: bool = False
) -> Call:
    data, count = (torch.cat([x] * batches), torch.cat([y] * batches)), len(x)
    options: Any = {"batch_size": count, "compile": compile}
    return lambda: torch.from_numpy(gradient_norms(model, loss_fn, data, **options)[:count])


def repeated(method: Method, batches: int, model: nn.Module, x: Tensor, y: Tensor) -> Call:
    call = method(model, x, y)

    def run() -> Any:
        for _ in range(batches):
            result = call()
        return result

    return run


def our_sums(
    model: nn.Module, x: Tensor, y: Tensor, *, sums: str = "float64", compile: bool = False
) -> Call:
    """The clipped sum alone: a private step but for noise and optimizer."""

    options: Any = {"sums": sums, "compile": compile, "micro_batch": len(x)}

    def run() -> None:
        clipped_gradients(model, loss_fn, (x, y), BOUND, **options)

    return run


def our_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    noise: Any = None,
    micro_batch: int | None = None,
    compile: bool = False,
    **settings: Any,
) -> Call:
    """Our private step, with the plan's other `settings`."""
    optimizer, noise = sgd(model), noise or SecureNoise()
    plan = Plan(
        n=100 * len(x), batch_size=len(x), epochs=1, noise_multiplier=NOISE, max_grad_norm=BOUND,
        delta=1e-5, **settings,
    )  # fmt: skip

    def run() -> None:
        found = clipped_sum(
            model, optimizer, loss_fn, (x, y), plan, micro_batch=micro_batch, compile=compile
        )
        apply(model, optimizer, noise.added_to(found.sums, plan.noise_std, plan.batch_size))

    return run


def our_full_step(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Call:
    """The same in one pass of just the batch's size: what padding costs is left out."""
    return our_step(model, x, y, micro_batch=len(x), **options)


# A method whose name begins with neither epsilons nor plain is a peer.
STEPS: dict[str, Method] = {
    "plain": plain_step,
    "plain-compiled": partial(plain_step, compile=True),
    "epsilons": our_step,
    "epsilons-compiled": partial(our_step, compile=True),
    "epsilons-full": our_full_step,
    "epsilons-full-compiled": partial(our_full_step, compile=True),
    "epsilons-float32": partial(our_step, sums="float32"),
    "epsilons-float32-compiled": partial(our_full_step, sums="float32", compile=True),
    **peers.STEPS,
}


def norm_passes(batches: int) -> dict[str, Method]:
    ours: dict[str, Method] = {
        "epsilons": partial(our_norms, batches=batches),
        "epsilons-compiled": partial(our_norms, batches=batches, compile=True),
    }
    others = {
        "plain": plain_pass,
        "plain-compiled": partial(plain_pass, compile=True),
        **peers.NORMS,
    }
    return ours | {name: partial(repeated, method, batches) for name, method in others.items()}


SUMS: dict[str, Method] = {
    "plain": plain_pass,
    "plain-compiled": partial(plain_pass, compile=True),
    "epsilons": our_sums,
    "epsilons-compiled": partial(our_sums, compile=True),
    "epsilons-float32": partial(our_sums, sums="float32"),
    "epsilons-float32-compiled": partial(our_sums, sums="float32", compile=True),
}


def batch_of(task: Task, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return task.inputs(size), torch.randint(0, CLASSES, (size,))


def calls_of(methods: dict[str, Method], task: Task, size: int) -> dict[str, Call]:
    """The calls that work, each after a first run; of the others the reason is printed.

    All methods get the same weights and batch, so that norms must agree.
    """
    x, y = batch_of(task, size)
    calls: dict[str, Call] = {}
    expected: Tensor | None = None
    for name, method in methods.items():
        torch.manual_seed(0)
        try:
            call = method(task.build(), x, y)
            start = time.perf_counter()
            norms = call()
            if "compiled" in name:
                print(f"    {name} took {time.perf_counter() - start:.0f} s to compile", flush=True)
        except Exception as error:  # a peer may refuse a model in any way it likes
            reason = " ".join(str(error).split())
            print(f"    no number for {name}: {type(error).__name__}: {reason[:80]}")
            continue
        if isinstance(norms, Tensor):
            expected = norms.double() if expected is None else expected
            if not torch.allclose(norms.double(), expected, rtol=1e-3):
                print(f"    no number for {name}: its norms are not those of the other methods")
                continue
        calls[name] = call
    return calls


def times_of(calls: dict[str, Call], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call in interleaved rounds, at least so many and for at least so long."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    gc.collect()
    gc.freeze()  # so that collecting between calls has little to scan
    end = time.perf_counter() + seconds
    number = 0
    while number < rounds or time.perf_counter() < end:
        for name in order.sample(list(calls), len(calls)):
            if number and min(times[name]) > SLOW[min(number, 2)] * min(times["plain"]):
                continue
            gc.collect()
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
        number += 1
    gc.unfreeze()
    return times


def report(title: str, plain: str, ratios: dict[str, float], texts: dict[str, str]) -> None:
    """Print one line: ours and plain compiled, the best peer, and the other peers."""
    ours = [name for name in ratios if name.startswith(("epsilons", "plain"))]
    others = sorted((name for name in ratios if name not in ours), key=ratios.__getitem__)
    line = [f"{name} {texts[name]}" for name in ours]
    line += [f"best peer {name} {texts[name]}" for name in others[:1]]
    line += [f"{name} {texts[name]}" for name in others[1:]]
    print(f"  {title:<24} plain {plain}   " + "   ".join(line), flush=True)


def compare(
    title: str, methods: dict[str, Method], task: Task, size: int, options: argparse.Namespace
) -> None:
    """Print the ratios of times to plain."""
    calls = calls_of(chosen(methods, options), task, size)
    times = times_of(calls, options.rounds, options.seconds)
    plain = times.pop("plain")
    ratios, texts = {}, {}
    for name, its in times.items():
        ratios[name] = statistics.median(a / b for a, b in zip(its, plain, strict=False))
        texts[name] = f"{ratios[name]:.2f} ({min(its) / min(plain):.2f})"
    report(f"{title} B {size} ×{len(plain)}", f"{1e3 * min(plain):7.1f} ms", ratios, texts)


def compare_memory(
    title: str, methods: dict[str, Method], task: Task, size: int, options: argparse.Namespace
) -> None:
    """Print the ratios of peak memory to plain."""
    calls = calls_of(chosen(methods, options), task, size)
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    plain = peaks.pop("plain")
    ratios = {name: peak / plain for name, peak in peaks.items()}
    texts = {name: f"{value:.2f}" for name, value in ratios.items()}
    report(f"{title} B {size}", f"{plain / 1e6:7.1f} MB", ratios, texts)


def chosen(methods: dict[str, Method], options: argparse.Namespace) -> dict[str, Method]:
    names = ("plain", *options.only.split(",")) if options.only else methods
    return {name: method for name, method in methods.items() if name in names}


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


class TimedNoise:
    """Secure noise that keeps how long it took."""

    def __init__(self) -> None:
        self.noise, self.seconds = SecureNoise(), 0.0

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        start = time.perf_counter()
        noisy = self.noise.added_to(sums, std, divisor)
        self.seconds = time.perf_counter() - start
        return noisy


def noise_share(name: str, options: argparse.Namespace) -> None:
    """Print the median share of secure noise in the time of a private step."""
    task, noise = MODELS[name], TimedNoise()
    shares: list[float] = []
    call = our_step(task.build(), *batch_of(task, task.step_batch), noise=noise)
    call()
    end = time.perf_counter() + options.seconds
    while len(shares) < options.rounds or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        shares.append(noise.seconds / (time.perf_counter() - start))
    share = statistics.median(shares)
    print(f"  {name} B {task.step_batch} ×{len(shares)}: {share:.1%} of a step", flush=True)


def linear_cost(name: str, options: argparse.Namespace) -> None:
    """Print seconds per example at three batch sizes; equal numbers are linear cost."""
    task, found = MODELS[name], []
    for size in (task.norm_batch // 2, task.norm_batch, 2 * task.norm_batch):
        call = our_norms(task.build(), *batch_of(task, size))
        least = min(times_of({"plain": call}, options.rounds, options.seconds / 3)["plain"])
        found.append(f"B {size}: {1e6 * least / size:.0f} µs")
    print(f"  {name:<24} per example  " + "   ".join(found), flush=True)


def run(part: str, name: str, options: argparse.Namespace) -> None:
    """Print the lines of one part for one model."""
    task, tiny = MODELS[name], TINY.get(name)
    if part == "norms":
        compare(name, norm_passes(task.batches), task, task.norm_batch, options)
    elif part == "step":
        compare(name, STEPS, task, task.step_batch, options)
    elif part == "launch" and tiny is not None:
        torch.set_num_threads(1)
        compare(f"{name} norms", norm_passes(tiny.batches), tiny, tiny.norm_batch, options)
        compare(f"{name} sums", SUMS, tiny, tiny.step_batch, options)
        compare(f"{name} step", STEPS, tiny, tiny.step_batch, options)
        torch.set_num_threads(options.threads)
    elif part == "memory":
        compare_memory(f"{name} norms", norm_passes(1), task, task.norm_batch, options)
        compare_memory(f"{name} step", STEPS, task, task.step_batch, options)
    elif part == "noise" and name in NOISE_SHARE:
        noise_share(name, options)
    elif part == "linear":
        linear_cost(name, options)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--what", default=",".join(PARTS))
    arguments.add_argument("--models", default=",".join(MODELS))
    arguments.add_argument("--only", default="", help="methods beside plain, by name")
    arguments.add_argument("--rounds", type=int, default=3, help="of a line, at least")
    arguments.add_argument("--seconds", type=float, default=60, help="of a line, at least")
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    kept = "MALLOC_TRIM_THRESHOLD_" in os.environ and "MALLOC_MMAP_THRESHOLD_" in os.environ
    allocator = "keeps freed memory" if kept else "is as the system has it"
    print(f"torch {torch.__version__}, {options.threads} threads; the allocator {allocator}")
    for part in options.what.split(","):
        print(part)
        for name in options.models.split(","):
            run(part, name, options)


if __name__ == "__main__":
    main()
