"""What an audit sees of a run is what the run does."""

import numpy as np
import pytest
import torch
from loops import LOSS, data, network

from epsilons import Plan
from epsilons.audit import RecordedNoise
from epsilons.training import PrivateTraining
from epsilons.training.played import Played

PLAN = Plan(n=40, sample_rate=0.4, steps=3, noise_multiplier=0.8, max_grad_norm=1.0, delta=1e-4,
            refreshes_per_epoch=0)  # fmt: skip


def trained(folder, played=None, shards=1):
    model = network()
    training = PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.5), LOSS, data(), PLAN, out=folder,
        seed=3, compile=False, shards=shards,
    )  # fmt: skip
    if played is not None:
        training._played = played
    for _ in training:
        pass
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def recorded(folder, shards):
    found = RecordedNoise(None)

    def around(own):
        found.noise = own
        return found

    return trained(folder, Played(around), shards), found


@pytest.mark.parametrize("shards", [1, 3])
def test_a_watched_run_has_the_bits_of_one_that_is_not(shards, tmp_path):
    weights, found = recorded(tmp_path / "watched", shards)
    assert torch.equal(weights, trained(tmp_path / "plain", shards=shards))
    assert found.divisors == [PLAN.batch_size] * 3
    assert found.stds == [PLAN.noise_std] * 3


def test_sums_of_shards_are_seen_added_up(tmp_path):
    _, one = recorded(tmp_path / "one", 1)
    _, three = recorded(tmp_path / "three", 3)
    for name, total in one.sums[0].items():
        np.testing.assert_allclose(three.sums[0][name], total, rtol=1e-5, atol=1e-7)
        noise = one.residuals[0][name]
        np.testing.assert_allclose(three.residuals[0][name], noise, rtol=1e-5, atol=1e-5)
