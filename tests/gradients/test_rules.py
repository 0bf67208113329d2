"""Every rule against the per-example autograd loop in float64."""

import pytest
import torch
from hazards import HAZARDS
from oracle import DEVICES, assert_agrees, in_float64, to_device

from epsilons.gradients.norms import batch_norms
from epsilons.gradients.rules.registry import square_norms


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HAZARDS)
def test_hazard_agrees_with_the_loop(name, dtype, device):
    torch.manual_seed(0)
    model, loss_fn, batch = HAZARDS[name]()
    if dtype == torch.float64:
        model, batch = model.double(), in_float64(batch)
    assert_agrees(model.to(device), loss_fn, to_device(batch, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 12_289, 5_000_000])
def test_squared_norms_do_not_come_out_too_small(size, dtype):
    torch.manual_seed(0)
    rows = torch.randn(size, 3, dtype=dtype).T
    expected = rows.double().square().sum(1)
    torch.testing.assert_close(square_norms(rows).double(), expected, rtol=1e-6, atol=0)
    rows[1:, :1] = torch.nan
    assert square_norms(rows).isfinite().tolist() == [True, size == 0, size == 0]


def test_a_large_layer_has_its_full_norm():
    # Long sequences, so that the gradient of 4.2 million numbers is materialized.
    torch.manual_seed(0)
    model, x = torch.nn.Linear(2048, 2048, bias=False), torch.randn(1, 3000, 2048)
    (norm,) = batch_norms(model, lambda model, x: model(x).square().sum((1, 2)), x)
    g = 2 * x[0].double() @ model.weight.detach().double().T
    assert norm.item() == pytest.approx((g.T @ x[0].double()).norm().item(), rel=1e-5)
