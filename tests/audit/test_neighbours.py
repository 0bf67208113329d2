import loops
import pytest
import torch
from loops import BOUND, LOSS, RIGHT, STEPS, WRONG, N, data
from torch.utils.data import Dataset

from epsilons.audit import check_neighbours, together
from epsilons.training import private_step


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_raise_no_alarm(name):
    found = check_neighbours(RIGHT[name], data(), 3, BOUND, STEPS)
    assert together(found) == "kept", [c for c in found if c.outcome != "kept"]
    assert len(found) > 20


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_are_contradicted(name):
    found = check_neighbours(WRONG[name], data(), 3, BOUND, STEPS)
    assert together(found) == "contradicted"


def test_a_bound_below_what_is_added_is_contradicted():
    found = check_neighbours(RIGHT["SGD"], data(), 3, 0.9 * BOUND, STEPS)
    assert together(found) == "contradicted"
    worst = next(c for c in found if c.name == "alone it adds at most its bound")
    assert 1.1 < worst.value < 1.12


def test_bounds_may_be_of_each_step_and_known_afterwards():
    found = check_neighbours(RIGHT["SGD"], data(), 3, lambda: [BOUND] * STEPS, STEPS)
    assert together(found) == "kept"


class Records(Dataset):
    def __init__(self):
        self.of = data()

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.of[index]


def test_data_sets_that_are_no_tensors_are_played_too():
    found = check_neighbours(RIGHT["SGD"], Records(), 3, BOUND, STEPS)
    assert together(found) == "kept"
    found = check_neighbours(WRONG["no clipping"], Records(), 3, BOUND, STEPS)
    assert together(found) == "contradicted"


def test_dropout_makes_it_inconclusive():
    """Its draws depend on how often the loop was played."""
    state = {"plays": 0}

    def step(model, optimizer, loss_fn, batch, the_plan, *, noise):
        state["plays"] += 1
        torch.manual_seed(state["plays"])
        return private_step(model, optimizer, loss_fn, batch, the_plan, noise=noise)

    random = loops.loop(lambda: loops.network(torch.nn.Dropout(0.5)), step=step)
    found = check_neighbours(random, data(), 3, BOUND, STEPS)
    assert together(found) == "inconclusive"
    assert "random" in found[0].reason


def test_an_example_without_gradient_is_inconclusive():
    def nothing(model, batch):
        return LOSS(model, batch) * (batch[1] != 0)

    def step(model, optimizer, loss_fn, batch, the_plan, *, noise):
        return private_step(model, optimizer, nothing, batch, the_plan, noise=noise)

    found = check_neighbours(loops.loop(step=step), data(), 3, BOUND, STEPS)
    assert together(found) == "inconclusive"


def test_an_index_outside_the_data_is_refused():
    with pytest.raises(ValueError, match="index=40"):
        check_neighbours(RIGHT["SGD"], data(), N, BOUND, STEPS)
