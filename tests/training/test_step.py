import math

import pytest
import torch
from torch import nn

from epsilons import Plan
from epsilons.training import SeededNoise, private_step, supervised

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


class Silence:
    """Adds nothing, and remembers what it was asked for."""

    def added_to(self, sums, std):
        self.std = std
        return sums


def plan(**changes):
    constants = dict(
        n=100, batch_size=20, steps=10, noise_multiplier=1.5, max_grad_norm=0.5, delta=1e-5
    )
    return Plan(**{**constants, **changes})


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(size=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator) * torch.logspace(-1, 1, size)[:, None]
    return [x, torch.arange(size) % 3]


def gradients_one_by_one(model, x, y):
    """Each example's gradient as one float64 vector, by autograd."""
    model = small_copy(model).double()
    rows = []
    for one, label in zip(x.double(), y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(one[None]), label[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(rows)


def small_copy(model):
    copy = small_model()
    copy.load_state_dict(model.state_dict())
    return copy


def flat_grad(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def sgd(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_step_takes_the_clipped_sum_over_the_expected_batch():
    model, (x, y) = small_model(), batch()
    rows = gradients_one_by_one(model, x, y)
    norms = private_step(model, sgd(model), LOSS, [x, y], plan(), noise=Silence())
    torch.testing.assert_close(norms.double(), rows.norm(dim=1), rtol=1e-5, atol=1e-7)
    clipped = rows * (0.5 / rows.norm(dim=1)).clamp(max=1)[:, None]
    torch.testing.assert_close(flat_grad(model).double(), clipped.sum(0) / 20, rtol=1e-4, atol=1e-6)


def test_bounds_clip_each_example_to_its_own():
    model, (x, y) = small_model(), batch()
    rows = gradients_one_by_one(model, x, y)
    bounds = torch.linspace(0.01, 0.5, 8)
    private_step(model, sgd(model), LOSS, [x, y], plan(), noise=Silence(), bounds=bounds)
    clipped = rows * (bounds / rows.norm(dim=1)).clamp(max=1)[:, None]
    torch.testing.assert_close(flat_grad(model).double(), clipped.sum(0) / 20, rtol=1e-4, atol=1e-6)


def test_one_example_moves_the_sum_by_at_most_its_bound():
    for position in range(8):
        model, (x, y) = small_model(), batch()
        alone = [x[position : position + 1], y[position : position + 1]]
        private_step(model, sgd(model), LOSS, alone, plan(), noise=Silence())
        assert flat_grad(model).double().norm() * 20 <= 0.5


def test_noise_has_the_plans_standard_deviation():
    # 40,000 draws: a right program is off by 4 % once in 10¹⁵ seeds
    model = nn.Linear(200, 200, bias=False)
    noise = SeededNoise(3)
    private_step(model, sgd(model), LOSS, None, plan(), noise=noise)
    assert flat_grad(model).std() == pytest.approx(1.5 * 0.5 / 20, rel=0.04)
    assert abs(flat_grad(model).mean()) < 5 * 1.5 * 0.5 / 20 / math.sqrt(40_000)


def test_an_empty_batch_adds_noise_only_and_is_a_step():
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    noise = SeededNoise(3)
    norms = private_step(model, sgd(model), LOSS, None, plan(), noise=noise)
    assert norms.shape == (0,)
    assert all((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_an_example_without_a_finite_gradient_adds_nothing():
    model, (x, y) = small_model(), batch()
    x[3] = torch.nan
    others = [i for i in range(8) if i != 3]
    norms = private_step(model, sgd(model), LOSS, [x, y], plan(), noise=Silence())
    assert not norms[3].isfinite()
    with_all = flat_grad(model)
    model = small_model()
    private_step(model, sgd(model), LOSS, [x[others], y[others]], plan(), noise=Silence())
    torch.testing.assert_close(with_all, flat_grad(model))


def test_frozen_parameters_get_no_gradient():
    model, data = small_model(), batch()
    model[0].requires_grad_(False)
    private_step(model, sgd(model[2]), LOSS, data, plan(), noise=Silence())
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_a_bound_above_the_plans_is_refused():
    model = small_model()
    with pytest.raises(ValueError, match=r"exceeds max_grad_norm=0\.5"):
        private_step(
            model, sgd(model), LOSS, batch(), plan(), noise=Silence(), bounds=torch.full((8,), 0.6)
        )
