"""What is added to a computed norm: its own rounding, that of the grid, and that of the sum."""

import numpy as np
import pytest

from epsilons import Journal, Margin, Plan
from epsilons.accounting.sums import NORM_ERROR, grid, sum_remainder


def plan(**changes):
    constants = dict(
        n=50, batch_size=10, steps=16, noise_multiplier=1.0, max_grad_norm=2.0, delta=1e-3,
        refresh_every=8,
    )  # fmt: skip
    return Plan(**{**constants, **changes})


@pytest.mark.parametrize("sums", ["float64", "float32"])
def test_all_three_roundings_are_added(sums):
    norms = np.array([0.0, 0.3, 2.0, np.nan])
    found = Margin(parameters=10**6).charged(norms, plan(sums=sums).all_phases)
    least = norms * (1 + NORM_ERROR) + grid(2.0) * 1000
    if sums == "float64":
        least = least + sum_remainder(plan().max_batch, 2.0)
    np.testing.assert_allclose(found, least, rtol=1e-9)
    assert (found[:3] >= least[:3]).all()


def test_noise_on_no_grid_leaves_the_first_alone():
    norms = np.array([0.0, 0.3])
    found = Margin(parameters=None).charged(norms, plan().all_phases)
    np.testing.assert_array_equal(found, norms * (1 + NORM_ERROR))


def test_the_default_is_enough_for_any_model():
    phase = plan().phase(0)
    assert Margin().room(phase) > 1000 * Margin(parameters=10**6).room(phase)


@pytest.mark.parametrize("later", [{"noise_multiplier": 1e6}, {"max_grad_norm": 1e6}])
def test_a_norm_has_room_for_every_phase_in_which_it_holds(tmp_path, later):
    the_plan = plan(phases=((4, later),))
    journal = Journal.create(tmp_path / "j", the_plan, margin=Margin(parameters=10))
    journal.record(0, np.zeros(50))
    room = Margin(parameters=10).room(the_plan.phase(4))
    assert room > 1e3 * Margin(parameters=10).room(the_plan.phase(0))
    assert (journal.norms(0) >= room).all()
