"""The attacks on sums, on what a private step and a run hand over to the noise."""

import numpy as np
import pytest
import torch
from sum_attacks import (
    KINDS,
    LONG,
    Kinked,
    distance_moved,
    kinked_by_shape,
    rounding_attack,
    sloped,
)
from torch import nn
from torch.utils.data import TensorDataset
from trained import LOSS, data, plan, small_model

from epsilons import Margin, Plan
from epsilons.training import fit, own_part, private_step
from epsilons.training.step import clipped_sum

BOUND = 1.0001
KEPT = ("bias", "linear of 64 positions", "convolution", "embedding", "tied", "bfloat16")


class Recorder:
    """Noise that adds none and remembers the sum it was given."""

    def added_to(self, sums, std, divisor):
        self.sums = {name: total.clone() for name, total in sums.items()}
        return {name: total / divisor for name, total in sums.items()}


def plan_for(count, **changes):
    constants = dict(
        n=20 * count, batch_size=count, steps=10, noise_multiplier=1.0, max_grad_norm=BOUND,
        delta=1e-6,
    )  # fmt: skip
    return Plan(**{**constants, **changes})


def released(model, batch, the_plan, bounds=None, micro_batch=None):
    """The sum before the noise of one private step, and the norms; the model stays as it is."""
    recorder = Recorder()
    norms = private_step(
        model, torch.optim.SGD(model.parameters(), lr=0.0), sloped, batch, the_plan,
        noise=recorder, bounds=bounds, micro_batch=micro_batch,
    )  # fmt: skip
    return recorder.sums, norms


def charged(norms, model, the_plan):
    """What a journal charges for computed norms."""
    margin = Margin(parameters=sum(p.numel() for p in model.parameters()))
    return margin.charged(norms, the_plan.all_phases)


def joined(extra, batch):
    return tuple(torch.cat([e, b]) for e, b in zip(extra, batch, strict=True))


@pytest.mark.parametrize("count", LONG)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_moves_a_step_by_no_more_than_the_bound(kind, count):
    # The step itself keeps room for the remainder: nothing on top of the bound is left.
    model, batch, extra = rounding_attack(kind, count)
    the_plan = plan_for(count)
    without, _ = released(model, batch, the_plan)
    with_it, _ = released(model, joined(extra, batch), the_plan)
    assert distance_moved(with_it, without) <= BOUND


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("digits", [23, 52])
def test_rounding_moves_a_step_by_no_more_than_the_norm_charged(kind, digits):
    model, batch, extra = rounding_attack(kind, 4096, digits)
    the_plan = plan_for(4096, max_grad_norm=2.0)  # nothing is clipped: an example adds its norm
    without, _ = released(model, batch, the_plan)
    with_it, norms = released(model, joined(extra, batch), the_plan)
    (own,) = charged(norms[:1].numpy(), model, the_plan)
    assert distance_moved(with_it, without) <= own


def test_a_float32_step_is_moved_by_more_than_the_bound():
    model, batch, extra = rounding_attack("bias", 16384)
    the_plan = plan_for(16384, sums="float32")
    without, _ = released(model, batch, the_plan)
    with_it, _ = released(model, joined(extra, batch), the_plan)
    if distance_moved(with_it, without) <= BOUND:
        pytest.skip("this machine's kernels add gradients in another order")
    assert distance_moved(with_it, without) > 1.9 * BOUND


@pytest.mark.parametrize("own", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("micro_batch", [None, 100, 1024])
def test_an_individual_bound_holds_in_a_step(own, micro_batch):
    model, batch, extra = rounding_attack("linear", 4096)
    the_plan = plan_for(4096, clipping="individual", refresh_every=1)
    bounds = torch.linspace(0.2, 1.0, 4096, dtype=torch.float64)
    its = torch.cat([torch.tensor([own], dtype=torch.float64), bounds])
    without, _ = released(model, batch, the_plan, bounds, micro_batch)
    with_it, norms = released(model, joined(extra, batch), the_plan, its, micro_batch)
    (charge,) = np.minimum(charged(norms[:1].numpy(), model, the_plan), own)
    assert distance_moved(with_it, without) <= charge


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [3, 7, 15, 1024])
def test_kinks_move_a_step_by_no_more_than_the_bound(count, threads):
    torch.set_num_threads(threads)
    for wide, narrow in ((784, 100), (100, 64)):
        torch.manual_seed(0)
        attack = kinked_by_shape(nn.Linear(wide, narrow), torch.randn(wide), count)
        if attack is None:  # then any thresholds will do
            attack = untouched(wide, narrow, count)
        model, batch, extra = attack
        the_plan = plan_for(count)
        without, _ = released(model, batch, the_plan)
        with_it, _ = released(model, joined(extra, batch), the_plan)
        assert distance_moved(with_it, without) <= BOUND


def untouched(wide, narrow, count):
    model = Kinked(nn.Linear(wide, narrow), torch.zeros(narrow))
    batch = (torch.randn(count, wide), torch.ones(count, narrow))
    return model, batch, (torch.zeros(1, wide), torch.zeros(1, narrow))


def test_an_example_that_is_not_finite_leaves_a_step_as_it_was():
    model, batch, extra = rounding_attack("convolution", 1024)
    the_plan = plan_for(1024)
    without, _ = released(model, batch, the_plan)
    with_it, _ = released(model, joined((extra[0], extra[1] * torch.nan), batch), the_plan)
    assert distance_moved(with_it, without) <= 1e-5 * BOUND


@pytest.fixture
def sums_of_runs(monkeypatch):
    """A list of what every step of the runs to come hands over to its noise."""
    found = []

    def recorded(*arguments, **options):
        taken = clipped_sum(*arguments, **options)
        found.append({name: total.clone() for name, total in taken.sums.items()})
        return taken

    monkeypatch.setattr(own_part, "clipped_sum", recorded)
    return found


@pytest.mark.parametrize("clipping", ["max", "individual"])
def test_a_record_moves_the_first_step_of_a_run_by_no_more_than_its_bound(
    clipping, tmp_path, sums_of_runs
):
    # One record exchanged for one without a gradient, in runs with the same draws.
    the_plan = plan(steps=1, batch_size=60, refresh_every=1, clipping=clipping)
    whole = data()
    weightless = TensorDataset(whole.tensors[0].clone(), whole.tensors[1])
    weightless.tensors[0][7] = torch.nan
    for name, train in (("whole", whole), ("without", weightless)):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        fit(model, optimizer, LOSS, train, the_plan, out=tmp_path / name, seed=5)
    with_it, without = sums_of_runs
    assert 0 < distance_moved(with_it, without) <= the_plan.max_grad_norm
