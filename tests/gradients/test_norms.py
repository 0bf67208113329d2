"""The public functions: what they accept, what they return, what they leave behind."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS
from oracle import DEVICES, assert_agrees, distance, looped, norms_of, to_device
from small import cross_entropy, network, pictures
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from epsilons.gradients import clipped_gradients, gradient_norms
from epsilons.gradients.norms import example_count, examples
from epsilons.gradients.rules import registry
from epsilons.training import supervised


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def as_data(kind, x, y):
    return {
        "tensors": (x, y),
        "tensor data set": TensorDataset(x, y),
        "data set": Pairs(x, y),
        "list of examples": [(x[i], int(y[i])) for i in range(len(x))],
        "sequential loader": DataLoader(TensorDataset(x, y), batch_size=2),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["tensors", "tensor data set", "data set", "list of examples", "sequential loader"]
)
def test_norms_come_in_dataset_order_from_every_kind_of_data(kind):
    model, (x, y) = network(), pictures()
    expected = norms_of(looped(model, cross_entropy, (x, y))).numpy()
    found = gradient_norms(model, cross_entropy, as_data(kind, x, y), batch_size=3)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_norms_of_dictionaries_of_tensors():
    model, loss_fn, batch = HAZARDS["dictionary_of_inputs"]()
    found = gradient_norms(model, loss_fn, batch, batch_size=2)
    np.testing.assert_allclose(found, norms_of(looped(model, loss_fn, batch)).numpy(), rtol=1e-5)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}])
def test_a_loader_that_is_not_sequential_is_refused(options):
    loader = DataLoader(TensorDataset(*pictures()), batch_size=2, **options)
    with pytest.raises(ValueError, match="dataset order"):
        gradient_norms(network(), cross_entropy, loader, batch_size=2)


def test_an_iterable_data_set_is_refused():
    with pytest.raises(TypeError, match="map-style"):
        gradient_norms(network(), cross_entropy, (row for row in ()), batch_size=2)


def test_a_device_other_than_the_models_is_refused():
    with pytest.raises(ValueError, match="move the model"):
        gradient_norms(network(), cross_entropy, pictures(), batch_size=2, device="cuda")


def test_progress_counts_to_the_end():
    seen = []
    data = pictures(7)
    gradient_norms(
        network(), cross_entropy, data, batch_size=3, progress=lambda *at: seen.append(at)
    )
    assert seen == [(3, 7), (6, 7), (7, 7)]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HAZARDS)
def test_micro_batches_change_nothing(name, device):
    model, loss_fn, batch = HAZARDS[name]()
    model, batch = model.to(device), to_device(batch, device)
    bounds = torch.linspace(0.1, 2, example_count(batch))
    whole, norms = clipped_gradients(model, loss_fn, batch, bounds)
    parts, same_norms = clipped_gradients(model, loss_fn, batch, bounds, micro_batch=2)
    torch.testing.assert_close(same_norms, norms, rtol=1e-5, atol=0)
    assert distance(parts, {n: g.double() for n, g in whole.items()}) < 1e-5


@pytest.mark.parametrize("name", HAZARDS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_every_sum_has_memory_of_its_own(name):
    model, loss_fn, batch = HAZARDS[name]()
    sums, _ = clipped_gradients(model, loss_fn, batch, 1.0)
    before = {name: total.clone() for name, total in sums.items()}
    for total in sums.values():
        total.mul_(2)
    for name, total in sums.items():
        assert torch.equal(total, 2 * before[name])


def test_an_empty_batch_sums_to_zero():
    x, y = pictures(0)
    sums, norms = clipped_gradients(network(), cross_entropy, (x, y), 1.0)
    assert norms.shape == (0,)
    assert all(not g.any() for g in sums.values())
    assert gradient_norms(network(), cross_entropy, (x, y), batch_size=2).shape == (0,)


def test_a_batch_of_one():
    assert_agrees(network(), cross_entropy, pictures(1))


def test_no_example_contributes_more_than_its_bound():
    model, batch = network(), pictures(1)
    for bound in (1e-6, 0.1, 1e6):
        sums, norms = clipped_gradients(model, cross_entropy, batch, bound)
        length = sum(g.double().square().sum() for g in sums.values()).sqrt()
        assert length <= bound
        assert length >= min(bound, norms.item()) * (1 - 1e-4)


def test_an_example_that_is_not_finite_contributes_nothing():
    model, (x, y) = network(), pictures()
    clean = [0, 1, 3, 4, 5, 6]
    expected, _ = clipped_gradients(model, cross_entropy, (x[clean], y[clean]), 1.0)
    x[2] = float("nan")
    sums, norms = clipped_gradients(model, cross_entropy, (x, y), 1.0)
    assert not norms[2].isfinite()
    assert norms[clean].isfinite().all()
    assert distance(sums, {n: g.double() for n, g in expected.items()}) < 1e-6


@pytest.mark.parametrize(
    "bounds",
    [
        torch.full((3,), 0.5, requires_grad=True),
        torch.complex(torch.zeros(3), torch.full((3,), -0.5)).to(torch.complex128).conj().imag,
    ],
    ids=["with a gradient", "negated"],
)
def test_bounds_may_require_gradients_or_be_lazily_negated(bounds):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(3, 4)
    one, two = (
        clipped_gradients(model, lambda model, x: model(x).squeeze(1), x, b)[0]["weight"]
        for b in (bounds, 0.5)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("bounds", [-1.0, float("nan"), torch.ones(3)])
def test_bounds_that_make_no_sense_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds"):
        clipped_gradients(network(), cross_entropy, pictures(), bounds)


def test_a_scalar_loss_is_refused_with_the_remedy():
    loss_fn = supervised(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match='reduction="none"'):
        clipped_gradients(network(), loss_fn, pictures(), 1.0)


def test_a_batch_of_unequal_lengths_is_refused():
    x, y = pictures()
    with pytest.raises(ValueError, match="first dimensions"):
        clipped_gradients(network(), cross_entropy, (x, y[:3]), 1.0)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        clipped_gradients(network().requires_grad_(False), cross_entropy, pictures(), 1.0)


def state(model):
    """Everything a pass might leave behind: values, gradients, flags, hooks, attributes."""
    return {
        "values": {n: t.clone() for n, t in model.state_dict(keep_vars=True).items()},
        "grads": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        "flags": {n: (p.requires_grad, sorted(vars(p))) for n, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in model.modules()
        ],
        "generator": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "grad mode": torch.is_grad_enabled(),
        "modes on the stack": torch._C._len_torch_function_stack(),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, (dict, torch.Tensor)) and key != "flags":
            torch.testing.assert_close(after[key], value, rtol=0, atol=0, msg=key)
        else:
            assert after[key] == value, key


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", ["norms", "clipped"])
def test_nothing_is_left_behind(call, fails):
    model, batch = network(dropout=0.5), pictures()
    model.append(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    model[0].weight.grad = torch.ones_like(model[0].weight)

    def loss_fn(model, batch):
        losses = cross_entropy(model, batch)
        if fails:
            raise KeyError("stop")
        return losses

    def run():
        if call == "norms":
            gradient_norms(model, loss_fn, batch, batch_size=3)
        else:
            clipped_gradients(model.eval(), loss_fn, batch, 1.0)

    if call == "clipped":
        model.eval()
    before = state(model)
    if fails:
        with pytest.raises(KeyError, match="stop"):
            run()
    else:
        run()
    assert_same(before, state(model))


def test_an_exception_on_the_way_back_leaves_nothing_behind():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise KeyError("stop")

    model, batch = network(), pictures()
    before = state(model)
    with pytest.raises(KeyError, match="stop"):
        clipped_gradients(model, lambda m, b: Failing.apply(cross_entropy(m, b)), batch, 1.0)
    assert_same(before, state(model))


def test_norms_with_dropout_are_repeatable_and_see_the_dropout():
    model, batch = network(dropout=0.5), pictures()
    first = gradient_norms(model, cross_entropy, batch, batch_size=7)
    torch.rand(3)
    np.testing.assert_array_equal(first, gradient_norms(model, cross_entropy, batch, batch_size=7))
    without = gradient_norms(model.eval(), cross_entropy, batch, batch_size=7)
    assert not np.allclose(first, without)


def test_the_step_clips_the_gradient_that_its_own_dropout_gives():
    # The same draw for batch and loop: one example, and a seed before each.
    model, batch = network(dropout=0.5), pictures(1)

    def loss_fn(model, batch):
        torch.manual_seed(3)
        return cross_entropy(model, batch)

    gradients = torch.autograd.grad(loss_fn(model, batch).sum(), list(model.parameters()))
    sums, _ = clipped_gradients(model, loss_fn, batch, 1e9)
    for found, expected in zip(sums.values(), gradients, strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", HAZARDS)
def test_scratch_is_bounded_and_does_not_show(name, monkeypatch):
    model, loss_fn, batch = HAZARDS[name]()
    monkeypatch.setattr(registry, "SCRATCH_BYTES", 1)
    assert_agrees(model, loss_fn, batch)


def test_the_callers_batch_keeps_its_objects():
    x, y = pictures()
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0])
        return cross_entropy(model, batch)

    clipped_gradients(network(), loss_fn, (x, y), 1.0, sums="float32")
    assert seen[0].data_ptr() == x.data_ptr()
    assert not vars(x)
    assert not x.requires_grad


def test_supervised_averages_within_an_example_only():
    loss_fn = supervised(nn.MSELoss(reduction="none"))
    x, y = torch.randn(5, 4, 2), torch.randn(5, 4, 2)
    expected = (x - y).square().mean((1, 2))
    torch.testing.assert_close(loss_fn(nn.Identity(), (x, y)), expected)


def test_some_examples_of_a_nested_batch():
    batch = {"x": torch.arange(4), "more": [torch.arange(8).view(4, 2), "name"]}
    part = examples(batch, slice(1, 3))
    assert part["x"].tolist() == [1, 2]
    assert part["more"][0].tolist() == [[2, 3], [4, 5]]
    assert part["more"][1] == "name"


def test_deep_copies_agree_after_a_pass():
    # A pass keeps nothing alive that a copy or a pickle of the model would stumble over.
    model, batch = network(), pictures()
    clipped_gradients(model, cross_entropy, batch, 1.0)
    twin = copy.deepcopy(model)
    assert torch.equal(F.softmax(twin(batch[0]), 1), F.softmax(model(batch[0]), 1))
