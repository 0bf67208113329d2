"""Parameters that training does not move are named, and no others."""

import warnings

import pytest
import torch
from torch import nn
from trained import data

from epsilons import Plan
from epsilons.training import PrivateTraining, supervised
from epsilons.training.movement import Movement

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank: B is 0, so that A has no gradient at first."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 3).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.frozen(x) + self.b(self.a(x))


class Rounding(nn.Module):
    def forward(self, x):
        return x.bfloat16()


def train(tmp_path, model, groups, **options):
    train = data()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    plan = Plan(
        n=len(train), batch_size=10, steps=12, delta=1e-4, sums="float32", **options
    )  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=0.1)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    return PrivateTraining(
        model, optimizer, LOSS, train, plan, out=tmp_path / "run", scheduler=warm, seed=1
    )


def alarms(steps):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in steps:
            pass
    return [str(w.message) for w in found if "are as they were" in str(w.message)]


@pytest.mark.parametrize("noise", [{}, {"noise_multiplier": 0.0, "clipping": "none"}])
def test_an_adapter_that_begins_at_zero_raises_no_alarm_while_the_rate_warms_up(tmp_path, noise):
    model = Adapted()
    groups = [p for p in model.parameters() if p.requires_grad]
    assert not alarms(train(tmp_path, model, groups, **noise))


def test_a_group_with_a_learning_rate_of_0_is_named(tmp_path):
    model = Adapted()
    groups = [{"params": model.a.parameters(), "lr": 0.0}, {"params": model.b.parameters()}]
    (alarm,) = alarms(train(tmp_path, model, groups))
    assert alarm.startswith("after 10 steps these trainable parameters are as they were: a.weight.")


def test_updates_that_bfloat16_loses_are_named(tmp_path):
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(4096.0)
        model.bias.zero_()
    model.bfloat16()
    rounded = nn.Sequential(Rounding(), model)
    (alarm,) = alarms(train(tmp_path, rounded, model.parameters()))
    assert "as they were: 1.weight." in alarm


def test_a_run_that_is_left_early_is_watched_when_it_goes_on(tmp_path):
    """Only the process that took the first step looked."""
    for last in (3, None):
        torch.manual_seed(0)
        model = Adapted()
        groups = [{"params": model.a.parameters(), "lr": 0.0}, {"params": model.b.parameters()}]
        for step in (steps := iter(train(tmp_path, model, groups))):
            if step.number == last:
                steps.close()
                break
            if last is None:
                assert "a.weight" in alarms(steps)[0]


def test_one_number_of_many_is_movement_enough():
    """Words that no text had stood at the head of an embedding, and it was named."""
    model = nn.Embedding(5000, 8)
    watched = Movement(model)
    with torch.no_grad():
        model.weight[4321, 5] += 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert watched.after(10) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changes_that_cancel_in_a_sum_are_movement(dtype):
    model = nn.ParameterList([torch.zeros(2, 3, dtype=dtype)])
    watched = Movement(model)
    assert watched.after(9) is watched
    with torch.no_grad():
        model[0][0, 0] += 1
        model[0][0, 1] -= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched.after(10)
    with pytest.warns(UserWarning, match="0"):
        Movement(model).after(3, last=3)
