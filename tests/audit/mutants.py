"""Faults put into the library one at a time, and which instrument finds each.

`make audit` prints the table.
"""

import shutil
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from loops import BOUND as LOOP_BOUND
from loops import STEPS as LOOP_STEPS
from loops import WRONG as WRONG_LOOPS
from loops import data
from sum_attacks import kinked_by_shape, rounding_attack, sloped
from torch import nn
from torch.utils.data import TensorDataset

from epsilons import Plan
from epsilons.audit import check_coins, check_keys, check_neighbours, check_noise, together
from epsilons.audit.auditing import VERDICT
from epsilons.audit.bounds import lower_bounds
from epsilons.audit.checks import Check, at_most
from epsilons.audit.draws import RecordedNoise
from epsilons.audit.fresh import canary_run, charged_norms, play_of, quiet, smaller_plan, strata
from epsilons.audit.price import check_added
from epsilons.gradients import norms
from epsilons.gradients.model_checks import MixedExamples
from epsilons.journal import recorded_epsilons
from epsilons.noise.grid import GridNoise
from epsilons.training import (
    PrivateTraining,
    batches,
    noisy_sum,
    own_part,
    private_step,
    supervised,
)
from epsilons.training import loop as loops_of_runs
from epsilons.training.loop import Loop
from epsilons.training.own_part import OwnPart
from epsilons.training.played import Played

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))
CANARIES = 4_000
PLAN = Plan(n=40, sample_rate=0.1, steps=30, noise_multiplier=1.0, max_grad_norm=0.5, delta=1e-5,
            levels=16, clipping="individual", refresh_every=10)  # fmt: skip


@contextmanager
def replaced(owner, name, function):
    """`function` in place of what `owner` has by that `name`; it has to be called."""
    calls = []

    def counted(*given, **options):
        calls.append(name)
        return function(*given, **options)

    with mock.patch.object(owner, name, counted):
        yield
    assert calls, f"{name} was never called: nothing was changed"


def noise_changed(change):
    """`change(noise, state)`: what is added in place of a tensor's noise, in units of the grid."""
    real, state = GridNoise.add_units, {}

    def add_units(self, units, sizes, std, part, parts):
        noise = np.zeros_like(units)
        real(self, noise, sizes, std, part, parts)
        ends = np.cumsum(sizes)[:-1]
        for total, own in zip(np.split(units, ends), np.split(noise, ends), strict=True):
            total += np.rint(change(own.astype(np.float64), state)).astype(np.int64)

    return replaced(GridNoise, "add_units", add_units)


def noise_times(factor):
    return noise_changed(lambda noise, state: factor * noise)


def of_the_step_before(noise, state):
    """Every second step has the noise of the one before."""
    state["count"] = state.get("count", 0) + 1
    if state["count"] % 2 == 0 and state["last"].shape == noise.shape:
        return state["last"]
    state["last"] = noise
    return noise


def an_eighth(noise, state):
    part = noise[: max(1, noise.size // 8)]
    return np.tile(part, 9)[: noise.size]


def rate_times(factor):
    real = batches.poisson_draw

    def draw(stream, n, rate, **part):
        return real(stream, n, min(1.0, rate * factor), **part)

    return replaced(batches, "poisson_draw", draw)


def shuffled():
    def draw(stream, n, rate, first, last):
        assert (first, last) == (0, n)
        size = max(1, round(n * rate))
        step = stream.position // (8 * n)
        stream.words(n)
        per_epoch = n // size
        generator = np.random.default_rng(step // per_epoch)
        k = step % per_epoch
        order = generator.permutation(n)[size * k : size * (k + 1)]
        return torch.from_numpy(np.sort(order))

    return replaced(batches, "poisson_draw", draw)


def one_coin_for_two():
    real = batches.poisson_draw

    def draw(stream, n, rate, first, last):
        assert (first, last) == (0, n)
        found = real(stream, n, rate)
        drawn = np.zeros(n + 1, dtype=bool)
        drawn[found.numpy()] = True
        drawn[1:n:2] = drawn[: n - 1 : 2]
        return torch.from_numpy(np.flatnonzero(drawn[:n]))

    return replaced(batches, "poisson_draw", draw)


def same_key():
    def key(folder):
        return 7, bytes(32)

    return replaced(loops_of_runs, "new_key", key)


def clipping(change):
    """`change(squares, bounds)`: what the clip factors are computed from, or the factors."""
    real = norms.clip_factors

    def changed(squares, bounds):
        found, factors, finite = real(squares, bounds)
        return change(real, squares, bounds, found, factors, finite)

    return replaced(norms, "clip_factors", changed)


def unclipped(real, squares, bounds, found, factors, finite):
    return found, torch.ones_like(factors), finite


def as_a_whole(real, squares, bounds, found, factors, finite):
    used = squares * (bounds > 0)  # padding has a bound of 0
    return found, real(used.sum().expand_as(squares), bounds)[1], finite


def layer_missing(real, squares, bounds, found, factors, finite):
    return real(squares * 0.25, bounds)


def overflow_unclipped(real, squares, bounds, found, factors, finite):
    return found, factors.where((found < 1e5) | (bounds == 0), 1.0), finite


def bounds_of_steps(change):
    """`change(found, bound)`: what the steps clip to in place of the thresholds."""
    real = OwnPart._bounds

    def bounds(self, step, indices, bound):
        found = real(self, step, indices, bound)
        return change(found, bound) if isinstance(found, torch.Tensor) else found

    return replaced(OwnPart, "_bounds", bounds)


def not_enforced(found, bound):
    return torch.full_like(found, bound)


def twice_as_large(found, bound):
    return torch.clamp(2 * found, max=bound)


def stale_after_resume():
    """The refresh before the last holds, as if a resumed run had read the wrong one."""
    real = Loop._refresh

    def refresh(self, step):
        before = self.own.norms
        real(self, step)
        if self.plan.refresh_due(step) and before is not None:
            self.own.norms = before

    return replaced(Loop, "_refresh", refresh)


def rounded_down():
    real = recorded_epsilons.histories

    def histories(chain, opening, **options):
        bound = opening.plan.max_grad_norm
        unit = bound / 16
        for found, steps in real(chain, opening, **options):
            yield np.floor(np.minimum(found, bound) / unit) * unit, steps

    return replaced(recorded_epsilons, "histories", histories)


def half_charged():
    real_counts, real_histories = recorded_epsilons.charged_counts, recorded_epsilons.histories

    def counts(*given, **options):
        return tuple(count // 2 for count in real_counts(*given, **options))

    def histories(*given, **options):
        for found, steps in real_histories(*given, **options):
            yield found, steps // 2

    return both_replaced(
        replaced(recorded_epsilons, "charged_counts", counts),
        replaced(recorded_epsilons, "histories", histories),
    )


@contextmanager
def both_replaced(*faults):
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


def after_sums(look):
    """`look(found, optimizer, batch)` at the clipped sums of a batch."""
    real = own_part.clipped_sum

    def clipped(model, optimizer, loss_fn, batch, *given, **options):
        found = real(model, optimizer, loss_fn, batch, *given, **options)
        look(found, optimizer, batch)
        return found

    return replaced(own_part, "clipped_sum", clipped)


def divided_by_the_drawn():
    """The whole numbers are divided by the number that was drawn."""
    real, drawn = noisy_sum.from_units, []

    def values(units, std, divisor):
        return real(units, std, float(drawn[-1]))

    def look(found, optimizer, batch):
        drawn.append(max(1, len(found.norms)))

    return both_replaced(after_sums(look), replaced(noisy_sum, "from_units", values))


def noise_by_the_drawn():
    """The noise is smaller the more are drawn."""
    drawn = []

    def change(noise, state):
        return noise / drawn[-1] ** 0.5

    def look(found, optimizer, batch):
        drawn.append(max(1, len(found.norms)))

    return both_replaced(after_sums(look), noise_changed(change))


def summed_twice():
    """Every clipped sum is added twice, as if two processes had the same shard."""
    real = noisy_sum.add_rounded

    def add(units, sums, std, summands=1):
        real(units, sums, std, summands)
        real(units, sums, std, summands)

    return replaced(noisy_sum, "add_rounded", add)


def applied_without_noise():
    """The optimizer gets the clipped sums, though the noisy ones are on record."""
    real, sums = loops_of_runs.apply, []

    def look(found, optimizer, batch):
        sums.append({name: total.clone() for name, total in found.sums.items()})

    def apply(model, optimizer, noisy):
        real(model, optimizer, {name: total / 10 for name, total in sums[-1].items()})

    return both_replaced(after_sums(look), replaced(loops_of_runs, "apply", apply))


def rate_by_norms():
    def look(found, optimizer, batch):
        if batch is not None:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(found.norms.mean()))

    return after_sums(look)


def empty_skipped():
    """No step is taken where nobody was drawn."""
    real_take, real_step = OwnPart.take, Loop._step

    class Nobody(Exception):
        pass

    def take(self, *given, **options):
        part = real_take(self, *given, **options)
        if not len(part.sampled):
            raise Nobody
        return part

    def step(self, number):
        with suppress(Nobody):
            real_step(self, number)

    return both_replaced(replaced(OwnPart, "take", take), replaced(Loop, "_step", step))


def played(folder, plan=PLAN):
    """Neighbours of a run of the library: of a linear model, whose gradients have no limit."""

    def build():
        torch.manual_seed(1)
        model = nn.Linear(6, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    small, runs = smaller_plan(plan, 16, 9, sample_rate=0.4), []
    changes = {"refresh_every": 3, "max_grad_norm": 8.0, "noise_multiplier": 0.2}
    small = Plan.from_dict({**small.to_dict(), **changes})
    play = play_of(build, LOSS, small, folder, runs=runs)
    few = TensorDataset(*(part[:16] for part in data().tensors))
    return check_neighbours(
        play, few, 4, lambda: charged_norms(runs[-4], 4), 9, most=small.max_batch
    )


def canaries(folder, seed=11):
    return canary_run(PLAN, strata(PLAN, CANARIES), folder / f"canaries-{seed}", seed=seed)


def drawn(found):
    noise = check_noise(found.recorded.residuals, found.recorded.stds)
    return noise + check_coins(found.drawn, PLAN.sample_rate)


def priced(found):
    checks = [
        check_added(added, PLAN.sample_rate, found.claims[name], PLAN.delta, name=name)
        for name, added in found.added.items()
    ]
    if found.steps != PLAN.steps:
        checks.append(Check("price", "steps", "contradicted"))
    return tuple(checks)


def bounded(found):
    """Whether the lower bounds of the planted examples contradict, at the level of the verdict."""
    level = 1 - (1 - VERDICT) / (2 * len(found.scores))
    checks = []
    for name, scores in found.scores.items():
        best = lower_bounds(
            scores, found.members[name], found.histories[name], PLAN.delta, level=level,
            dependent=False,
        ).best  # fmt: skip
        checks.append(at_most("ε", name, best, found.claims[name]))
    return tuple(checks)


def keyed(folder):
    """The noise of two secret runs."""
    runs = [secret(folder / f"secret-{k}") for k in range(2)]
    return check_keys(runs[0].residuals, runs[1].residuals)


def copied(folder):
    """The noise of a secret run that was left after 3 steps, copied, and gone on with twice."""
    secret(folder / "left", leave=3)
    shutil.copytree(folder / "left", folder / "copy")
    one, other = secret(folder / "left"), secret(folder / "copy")
    return check_keys(one.residuals, other.residuals)


def secret(folder, leave=None):
    torch.manual_seed(1)
    model = nn.Linear(6, 300)
    recorded = RecordedNoise(None)

    def around(own):
        recorded.noise = own
        return recorded

    plan = Plan(n=40, sample_rate=0.2, steps=6, noise_multiplier=1.0, max_grad_norm=0.5, delta=1e-3,
                refreshes_per_epoch=0)  # fmt: skip
    with quiet():
        training = PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS, data(), plan, out=folder
        )
        training._played = Played(around)
        for step in training:
            if leave is not None and step.number + 1 == leave:
                break
    return recorded


def attacked(model, batch, extra, plan, pass_=None):
    """Neighbours of a step on a batch that is made to move the sum by its rounding."""
    together_ = TensorDataset(*(torch.cat([e, b]) for e, b in zip(extra, batch, strict=True)))

    def play(train, *, sampling, noise, watch):
        with torch.no_grad():
            state = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            coins = sampling.words(len(train)) == 0
            rows = torch.from_numpy(np.flatnonzero(coins))
            part = [tensor[rows] for tensor in train.tensors] if len(rows) else None
            private_step(model, optimizer, sloped, part, plan, noise=noise, micro_batch=pass_)
            watch(model, optimizer)
        model.load_state_dict(state)

    return check_neighbours(play, together_, 0, plan.max_grad_norm, 3, huge=False)


def sums_attack(sums):
    model, batch, extra = rounding_attack("linear", 4096)
    plan = Plan(n=8 * 4096, batch_size=4096, steps=3, noise_multiplier=1.0, max_grad_norm=1.0001,
                delta=1e-6, refreshes_per_epoch=0, sums=sums)  # fmt: skip
    return attacked(model, batch, extra, plan)


def shape_attack(sums):
    """None where passes of two shapes have the same bits."""
    torch.manual_seed(0)
    found = kinked_by_shape(nn.Linear(64, 256), torch.randn(64), 63)
    if found is None:
        return None
    model, batch, extra = found
    plan = Plan(n=8 * 63, batch_size=63, steps=3, noise_multiplier=1.0, max_grad_norm=1.0,
                delta=1e-6, refreshes_per_epoch=0, sums=sums)  # fmt: skip
    return attacked(model, batch, extra, plan)


# What is changed, and which of the instruments is to find it.
DRAWS = {
    "noise × 0.95": lambda: noise_times(0.95),
    "noise × 0.8": lambda: noise_times(0.8),
    "noise × 0.5": lambda: noise_times(0.5),
    "no noise": lambda: noise_changed(lambda noise, state: 0 * noise),
    "noise divided twice": lambda: noise_changed(lambda noise, state: noise / 4),
    "noise reused in the next step": lambda: noise_changed(of_the_step_before),
    "an eighth of the noise, repeated": lambda: noise_changed(an_eighth),
    "noise by the drawn batch": noise_by_the_drawn,
    "every sum added twice": summed_twice,
    "rate × 1.10": lambda: rate_times(1.10),
    "rate × 1.25": lambda: rate_times(1.25),
    "shuffled batches": shuffled,
    "one coin for two examples": one_coin_for_two,
}
REFUSED = {  # by the check before training, so that no step is taken
    "no clipping": lambda: clipping(unclipped),
    "batch clipped as a whole": lambda: clipping(as_a_whole),
    "layer missing from the norm": lambda: clipping(layer_missing),
}
NEIGHBOURS = {
    "overflowed norm not clipped": lambda: clipping(overflow_unclipped),
    "thresholds not enforced": lambda: bounds_of_steps(not_enforced),
    "thresholds × 2": lambda: bounds_of_steps(twice_as_large),
    "divided by the drawn batch": divided_by_the_drawn,
    "empty batch skipped": empty_skipped,
    "learning rate by norms": rate_by_norms,
    "applied without noise": applied_without_noise,
}
PRICES = {
    "thresholds not enforced": lambda: bounds_of_steps(not_enforced),
    "thresholds × 2": lambda: bounds_of_steps(twice_as_large),
    "thresholds stale after a resume": stale_after_resume,
    "rounded down": rounded_down,
    "half of the steps charged": half_charged,
}
KEYS = {
    "same key in every run": (same_key, keyed),
    "key kept in a copied folder": (same_key, copied),
}


def table():
    """Every mutant before every instrument, printed as a table."""
    changes = {"none": nullcontext, **DRAWS, **REFUSED, **NEIGHBOURS, **PRICES}
    print(f"{'mutant':34} N S P ε   (x: contradicted, c: refused by check_model)")
    for name, change in changes.items():
        with tempfile.TemporaryDirectory() as folder, change():
            marks, found = [], None
            for instrument in ("N", "S", "P", "ε"):
                try:
                    if instrument == "N":
                        outcome = together(played(Path(folder)))
                    else:
                        found = canaries(Path(folder)) if found is None else found
                        look = {"S": drawn, "P": priced, "ε": bounded}[instrument]
                        outcome = together(look(found))
                except MixedExamples:
                    outcome = "refused"
                marks.append({"contradicted": "x", "kept": "·", "refused": "c"}.get(outcome, "?"))
        print(f"{name:34} {' '.join(marks)}", flush=True)
    for name, (change, look) in KEYS.items():
        with tempfile.TemporaryDirectory() as folder, change():
            found = together(look(Path(folder)))
        print(f"{name:34} · {'x' if found == 'contradicted' else '·'} · ·", flush=True)
    for name, play in WRONG_LOOPS.items():
        found = together(check_neighbours(play, data(), 3, LOOP_BOUND, LOOP_STEPS))
        print(f"own loop: {name:24} {'x' if found == 'contradicted' else '·'}", flush=True)
    for name, attack in (
        ("float32 sums", sums_attack),
        ("passes of the batch's shape", shape_attack),
    ):
        found = attack("float32")
        mark = "(no two shapes differ here)" if found is None else together(found)
        print(f"{name:34} {'x' if mark == 'contradicted' else mark}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(table())
