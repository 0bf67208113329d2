"""Every rule against the per-example autograd loop in float64."""

import pytest
import torch
from hazards import HAZARDS
from oracle import DEVICES, assert_agrees, in_float64, to_device


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
