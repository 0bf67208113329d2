import numpy as np
import pytest

from epsilons.accounting import DEFAULT_ORDERS, least_noise, rdp_epsilon, sampled_gaussian_rdp


def epsilon(noise, p, steps, method):
    rho = steps * sampled_gaussian_rdp(noise, p)
    return float(rdp_epsilon(DEFAULT_ORDERS, rho, 1e-5, method))


@pytest.mark.parametrize("method", ["rdp", "rdp-classic"])
@pytest.mark.parametrize(
    ("target", "p", "steps"),
    [(7.8, 4096 / 50_000, 3662), (0.1, 0.01, 10), (50.0, 0.5, 3), (1, 1, 1)],
)
def test_lands_just_below_the_target(method, target, p, steps):
    noise = least_noise(target, sample_rate=p, steps=steps, delta=1e-5, method=method)
    assert (
        epsilon(noise, p, steps, method) <= target < epsilon(noise * (1 - 1e-6), p, steps, method)
    )


def test_nothing_released_needs_no_noise():
    assert least_noise(1.0, sample_rate=0.0, steps=100, delta=1e-5, method="rdp") == 0
    assert least_noise(1.0, sample_rate=0.1, steps=0, delta=1e-5, method="rdp") == 0


def test_an_impossible_target_says_why():
    with pytest.raises(ValueError, match="its orders end at 4001"):
        least_noise(1e-4, sample_rate=0.1, steps=10, delta=1e-5, method="rdp")


@pytest.mark.parametrize(
    ("epsilon", "changes", "message"),
    [
        (0.0, {}, "epsilon=0.0"),
        (np.inf, {}, "epsilon=inf"),
        (1.0, {"delta": 0.0}, "delta=0.0"),
        (1.0, {"sample_rate": 32.0}, "batch_size / n"),
        (1.0, {"steps": -1}, "steps=-1"),
        (1.0, {"steps": 2.5}, "steps=2.5"),
        (1.0, {"method": "moments"}, "method='moments'"),
    ],
)
def test_bad_targets_are_refused(epsilon, changes, message):
    with pytest.raises(ValueError, match=message):
        least_noise(epsilon, **{"sample_rate": 0.1, "steps": 10, "delta": 1e-5, **changes})
