"""The paper's networks go through the one-pass norms in parts of any size."""

import pytest
import torch
from torch import nn

from epsilons.gradients import clipped_gradients
from epsilons.models import mlp, resnet20, tanh_cnn, wide_resnet
from epsilons.training import supervised

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))
NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Flatten(), mlp(784, 10, [32])), 1, 28),
    "tanh_cnn": (tanh_cnn, 1, 28),
    "resnet20": (lambda: resnet20(channels=3), 3, 16),
    "wide_resnet": (wide_resnet, 3, 16),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch_dim", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_remainder_of_one_example_is_a_part_like_any_other(name, batch_dim):
    make, channels, size = NETWORKS[name]
    torch.manual_seed(0)
    model = make().to(memory_format=batch_dim)
    x, y = torch.randn(5, channels, size, size), torch.arange(5)
    whole, norms = clipped_gradients(model, LOSS, (x, y), 0.5)
    parts, same = clipped_gradients(model, LOSS, (x, y), 0.5, micro_batch=2)
    torch.testing.assert_close(same, norms, rtol=1e-5, atol=0)
    for key, total in whole.items():
        torch.testing.assert_close(parts[key], total, rtol=1e-4, atol=1e-5)
