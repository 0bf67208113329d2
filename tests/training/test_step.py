import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from epsilons import Journal, Plan
from epsilons.accounting.sums import grid
from epsilons.gradients import clipped_gradients, gradient_norms
from epsilons.noise import SeededNoise
from epsilons.training import PoissonLoader, private_step, supervised

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


class Silence:
    """Adds nothing, and records its arguments."""

    def added_to(self, sums, std, divisor):
        self.std = std
        return {name: total / divisor for name, total in sums.items()}


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


def test_a_plan_with_phases_is_refused_and_its_phase_is_taken():
    """The step took the plan's first noise throughout, and the journal charged for the phase's."""
    changing = plan(phases=((3, {"noise_multiplier": 6.0}),))
    model, noise = small_model(), Silence()
    with pytest.raises(ValueError, match=r"pass plan\.phase\(step\)"):
        private_step(model, sgd(model), LOSS, batch(), changing, noise=noise)
    private_step(model, sgd(model), LOSS, batch(), changing.phase(4), noise=noise, bounds=0.5)
    assert noise.std == 3.0


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        (plan(clipping="individual", refresh_every=1), None),
        (plan(clipping="individual", refresh_every=1), 0.5),
        (plan().phase(0), None),
    ],
)
def test_bounds_that_the_plan_does_not_know_must_be_given(given, bounds):
    """Individual clipping without bounds clipped everyone to C, charged for less."""
    model = small_model()
    with pytest.raises(ValueError, match=r"bounds=journal\.bounds\(step, indices\)"):
        private_step(model, sgd(model), LOSS, batch(), given, noise=Silence(), bounds=bounds)


@pytest.mark.parametrize("clipping", ["max", "individual"])
def test_no_example_of_an_own_loop_adds_more_than_the_journal_charges(tmp_path, clipping):
    """The guide's loop in float64, one example at a time, with phases of noise and bound."""
    the_plan = plan(
        n=8, batch_size=4, clipping=clipping, refresh_every=1, levels=16,
        phases=((5, {"noise_multiplier": 3.0, "max_grad_norm": 0.4}),),
    )  # fmt: skip
    model, train = small_model(), TensorDataset(*batch())
    optimizer, noise = sgd(model), SeededNoise(2)
    size = sum(p.numel() for p in model.parameters())
    with Journal.create(tmp_path / "j", the_plan) as journal:
        for step, (indices, drawn) in enumerate(PoissonLoader(train, the_plan)):
            phase = the_plan.phase(step)
            norms = gradient_norms(model, LOSS, train, batch_size=8)
            journal.record(step, norms)
            journal.charge(step)
            bounds = journal.bounds(step, range(8))
            charged = bounds if clipping == "individual" else journal.norms(step).clip(max=bounds)
            g = grid(phase.noise_std)
            for row in range(8):
                one = [t[row : row + 1] for t in train.tensors]
                room = g * math.sqrt(size) * (1 + 1e-12)
                sums, _ = clipped_gradients(model, LOSS, one, bounds[row] - room)
                moved = torch.cat([(s.double() / g).round().flatten() * g for s in sums.values()])
                assert moved.norm() <= charged[row]
            private_step(
                model, optimizer, LOSS, drawn, phase, noise=noise,
                bounds=journal.bounds(step, indices),
            )  # fmt: skip
        assert journal.epsilons().kind == "exact"


def test_a_gradient_of_a_parameter_that_is_not_trained_is_refused():
    model, other = small_model(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    private_step(model, optimizer, LOSS, batch(), plan(), noise=Silence())
    other(torch.ones(1, 2)).sum().backward()
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in (*model.parameters(), *other.parameters())]
    with pytest.raises(ValueError, match=r"0\.weight; 0\.bias; one of shape \(1, 2\), not the mod"):
        private_step(model, optimizer, LOSS, batch(), plan(), noise=Silence())
    after = [*model.parameters(), *other.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True))
    optimizer.zero_grad(set_to_none=False)
    private_step(model, optimizer, LOSS, batch(), plan(), noise=Silence())


def test_an_optimizer_of_another_model_is_refused():
    model = small_model()
    with pytest.raises(ValueError, match="none of the model's trainable parameters"):
        private_step(model, sgd(small_model()), LOSS, batch(), plan(), noise=Silence())
