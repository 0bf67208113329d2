"""Buffers that hold data are found; those that merely change are not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from epsilons.gradients import UnsupportedLayer, gradient_norms
from epsilons.gradients.buffer_checks import check_buffers
from epsilons.training import supervised

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))
CPU = torch.device("cpu")


class Keeping(nn.Module):
    """Passes its input on and does something to its buffer."""

    def __init__(self, keep, start=None, **options):
        super().__init__()
        self.keep = keep
        self.register_buffer("kept", torch.zeros(5) if start is None else start, **options)

    def forward(self, x):
        if self.training:
            self.keep(self, x.detach())
        return x


def in_place(layer, x):
    layer.kept.mul_(0.9).add_(0.1 * x.mean(0))


def by_data(layer, x):
    layer.kept.data.add_(x.mean(0))


def assigned(layer, x):
    layer.kept = 0.9 * layer.kept + 0.1 * x.mean(0)


def lately(layer, x):
    if "late" not in layer._buffers:
        layer.register_buffer("late", x.mean(0))


def model_with(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), layer, nn.Linear(5, 3))


def batch(size=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, generator=generator), torch.arange(size) % 3]


@pytest.mark.parametrize("keep", [in_place, by_data, assigned])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_running_mean_is_refused_by_name_and_the_model_left_alone(keep, persistent):
    """It was accepted where the loss didn't use it, and saved with the weights."""
    model = model_with(Keeping(keep, persistent=persistent))
    with pytest.raises(UnsupportedLayer, match=r"^1\.kept: the model keeps something"):
        check_buffers(model, LOSS, batch(), CPU)
    assert (model[1].kept == 0).all()


def test_a_buffer_that_is_made_of_the_first_batch_is_refused():
    model = model_with(Keeping(lately))
    with pytest.raises(UnsupportedLayer, match=r"^1\.late: "):
        check_buffers(model, LOSS, batch(), CPU)
    assert "late" not in model[1]._buffers


def test_a_pass_for_norms_leaves_no_buffer_behind():
    model = model_with(Keeping(lately))
    model[1].register_buffer("later", None)
    model[1].keep = lambda layer, x: (lately(layer, x), setattr(layer, "later", x.mean(0)))
    gradient_norms(model, LOSS, batch(), batch_size=2)
    assert "late" not in model[1]._buffers
    assert model[1].later is None


def counting(layer, x):
    layer.kept += 1


def counting_by_data(layer, x):
    layer.kept.data += 1


def shape(layer, x):
    layer.kept = torch.arange(x.shape[1]).float()


def drawing(layer, x):
    layer.kept = torch.randn(5)


@pytest.mark.parametrize("keep", [counting, counting_by_data, shape, drawing])
def test_buffers_that_merely_change_are_fine(keep):
    model = model_with(Keeping(keep))
    check_buffers(model, LOSS, batch(), CPU)
    assert (model[1].kept == 0).all()


@pytest.mark.parametrize("normed", [parametrizations.spectral_norm, old_spectral_norm])
def test_spectral_norm_is_fine(normed):
    model = model_with(normed(nn.Linear(5, 5)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_buffers(model, LOSS, batch(), CPU)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "start",
    [
        torch.tensor([torch.nan, torch.inf, 0.0, 1.0, 2.0]),
        torch.eye(5).to_sparse(),
        torch.tensor(True),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.zeros(0),
    ],
    ids=["no number", "sparse", "one truth", "complex", "empty"],
)
def test_constants_of_any_type_are_fine(start):
    check_buffers(model_with(Keeping(lambda *_: None, start)), LOSS, batch(), CPU)


def test_statistics_that_are_frozen_are_fine():
    model = model_with(Keeping(in_place)).eval()
    check_buffers(model, LOSS, batch(), CPU)
    check_buffers(model_with(nn.BatchNorm1d(5).eval()), LOSS, batch(), CPU)
