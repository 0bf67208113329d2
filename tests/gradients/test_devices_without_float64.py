"""Devices without float64, such as Apple's: simulated on a device that refuses to make any."""

import numpy as np
import pytest
import torch
from small import cross_entropy, network, pictures
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from epsilons.gradients import clipped_gradients, gradient_norms
from epsilons.gradients.clip_factors import widest_dtype


class NoFloat64(TorchDispatchMode):
    """Raises where float64 is made, as Apple's device does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(out)):
            raise TypeError("this device has no float64")
        return out


@pytest.fixture
def device():
    widest_dtype.cache_clear()
    with NoFloat64():
        yield
    widest_dtype.cache_clear()


def test_float64_sums_are_refused_with_the_other_choice(device):
    with pytest.raises(ValueError, match="sums='float32', where floating-point effects"):
        clipped_gradients(network(), cross_entropy, pictures(), 1.0)


def test_norms_and_float32_sums_need_no_float64():
    model, batch = network(), pictures()
    expected, norms = clipped_gradients(model, cross_entropy, batch, 0.5)
    widest_dtype.cache_clear()
    with NoFloat64():
        found, same = clipped_gradients(model, cross_entropy, batch, 0.5, sums="float32")
        again = gradient_norms(model, cross_entropy, batch, batch_size=3)
    widest_dtype.cache_clear()
    np.testing.assert_allclose(same.numpy(), norms.numpy(), rtol=1e-5)
    np.testing.assert_allclose(again, norms.numpy(), rtol=1e-5)
    for name, total in found.items():
        torch.testing.assert_close(total.double(), expected[name], rtol=1e-4, atol=1e-7)
