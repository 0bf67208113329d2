import numpy as np
import pytest
import torch

from epsilons.audit import RecordedNoise, check_coins, check_keys, check_noise
from epsilons.audit.checks import together
from epsilons.noise import SecureNoise, SeededNoise

STEPS, WIDTH, N = 30, 2_000, 400


def normal(seed=0, width=WIDTH):
    return np.random.default_rng(seed).standard_normal((STEPS, width))


def steps(x, split=700):
    return [{"a": row[:split], "b": row[split:]} for row in x]


def changed(what):
    x = normal()
    if what == "5 % less":
        x *= 0.95
    elif what == "none on a tensor":
        x[:, :700] = 0
    elif what == "half on a tensor":
        x[:, :700] *= 0.5
    elif what == "in the next step":
        x[1::2] = x[::2]
    elif what == "repeated":
        x = np.tile(x[:, : WIDTH // 8], 8)
    elif what == "uniform":
        x = np.random.default_rng(1).uniform(-np.sqrt(3), np.sqrt(3), x.shape)
    elif what == "common part":
        x = np.sqrt(0.9) * x + np.sqrt(0.1) * x[:, :1]
    elif what == "NaN":
        x[3, 5] = np.nan
    return x


NOISE = [
    "5 % less", "none on a tensor", "half on a tensor", "in the next step", "repeated", "uniform",
    "common part", "NaN",
]  # fmt: skip


@pytest.mark.parametrize("what", NOISE)
def test_wrong_noise_is_found(what):
    assert together(check_noise(steps(changed(what)), 1.0)) == "contradicted"


def test_the_library_s_noise_is_kept():
    """Seeded, since a right program fails once in 10,000 times."""
    recorded = RecordedNoise(SeededNoise(3))
    for _ in range(STEPS):
        recorded.added_to({"a": torch.ones(30, 40), "b": torch.zeros(700)}, 2.5, 64.0)
    assert together(check_noise(recorded.residuals, recorded.stds)) == "kept"
    assert recorded.divisors == [64.0] * STEPS
    np.testing.assert_array_equal(recorded.sums[0]["a"], np.ones(1200))


@pytest.mark.slow
def test_right_noise_and_coins_are_seldom_blamed():
    """2 in 10,000 for each pair of calls: 3 or more of 1,000 have a probability of 0.1 %."""
    wrong = 0
    for seed in range(1_000):
        rng = np.random.default_rng(seed)
        noise = check_noise(steps(rng.standard_normal((20, 1_000))), 1.0)
        coins = check_coins(rng.random((40, 300)) < 0.1, 0.1)
        wrong += (together(noise) != "kept") + (together(coins) != "kept")
    assert wrong < 3


def drawn(what="right", q=0.1):
    rng = np.random.default_rng(4)
    coins = rng.random((60, N)) < q
    if what == "rate":
        coins = rng.random((60, N)) < 1.1 * q
    elif what == "shuffled":
        for epoch in range(6):
            order = rng.permutation(N)
            for k in range(10):
                coins[10 * epoch + k] = np.isin(np.arange(N), order[40 * k : 40 * k + 40])
    elif what == "fixed size":
        for row in coins:
            row[:] = np.isin(np.arange(N), rng.permutation(N)[:40])
    elif what == "one for two":
        coins[:, 1::2] = coins[:, ::2]
    elif what == "one for two far apart":
        coins[:, N // 2 :] = coins[:, : N // 2]
    elif what == "repeated step":
        coins[1::2] = coins[::2]
    elif what == "never some":
        coins[:, :40] = False
    return coins


@pytest.mark.parametrize(
    "what",
    ["rate", "shuffled", "fixed size", "one for two", "one for two far apart", "repeated step",
     "never some"],
)  # fmt: skip
def test_wrong_coins_are_found(what):
    assert together(check_coins(drawn(what), 0.1)) == "contradicted"


def test_right_coins_are_kept():
    assert together(check_coins(drawn(), 0.1)) == "kept"


def test_noise_that_is_used_twice_is_found():
    one, other = normal(1), normal(2)
    assert together(check_keys(steps(one), steps(other))) == "kept"
    other[7] = one[20]
    assert together(check_keys(steps(one), steps(other))) == "contradicted"


def test_secret_noise_of_two_streams_is_independent():
    """Fails for a right program once in 10,000 times."""
    runs = [RecordedNoise(SecureNoise()) for _ in range(2)]
    for run in runs:
        for _ in range(5):
            run.added_to({"a": torch.zeros(1_000)}, 1.0, 1.0)
    assert together(check_keys(runs[0].residuals, runs[1].residuals)) == "kept"


def test_nothing_to_test_is_refused():
    with pytest.raises(ValueError, match="nothing to test"):
        check_noise([], 1.0)
    with pytest.raises(ValueError, match="is 0"):
        check_noise(steps(normal()), 0.0)
    with pytest.raises(ValueError, match="rate in"):
        check_coins(np.ones((3, 4)), 1.0)
    with pytest.raises(ValueError, match="nothing to test"):
        check_keys([], [])
