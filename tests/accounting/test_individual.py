import numpy as np
import pytest

from epsilons.accounting import (
    DEFAULT_ORDERS,
    epsilons_from_blocks,
    individual_epsilons,
    rdp_epsilon,
    sampled_gaussian_rdp,
)

SETTING = {"sample_rate": 0.05, "noise_std": 1.5, "max_grad_norm": 1.0, "delta": 1e-5}
RNG = np.random.default_rng(7)
NORMS = RNG.uniform(0, 1.3, (20, 40))
STEPS = RNG.integers(1, 60, 20)


def one_by_one(norms, steps, p, sigma, bound, method):
    """ε of one example, pair by pair and without levels."""
    rho = sum(
        n * sampled_gaussian_rdp(sigma / min(z, c), q)
        for z, n, q, sigma, c in zip(norms, steps, p, sigma, bound, strict=True)
    )
    return float(rdp_epsilon(DEFAULT_ORDERS, rho, 1e-5, method))


@pytest.mark.parametrize("method", ["rdp", "rdp-classic"])
def test_rdp_of_all_examples_is_that_of_each_norm_by_itself(method):
    eps = individual_epsilons(NORMS, STEPS, **SETTING, method=method)
    p, sigma, bound = np.full(20, 0.05), np.full(20, 1.5), np.ones(20)
    for j in range(5):
        true = one_by_one(NORMS[:, j], STEPS, p, sigma, bound, method)
        assert true * (1 - 1e-12) <= eps.values[j] <= true * (1 + 2e-5)


def test_schedules_compose():
    p = np.repeat([0.05, 0.1], 10)
    sigma = np.repeat([1.5, 2.0, 1.5, 3.0], 5)
    bound = np.repeat([1.0, 1.2, 1.0, 0.5], 5)
    eps = individual_epsilons(
        NORMS, STEPS, sample_rate=p, noise_std=sigma, max_grad_norm=bound, delta=1e-5, method="rdp"
    )
    for j in range(3):
        true = one_by_one(NORMS[:, j], STEPS, p, sigma, bound, "rdp")
        assert true * (1 - 1e-12) <= eps.values[j] <= true * (1 + 1e-4)
    worst = one_by_one(np.full(20, 9.0), STEPS, p, sigma, bound, "rdp")
    assert eps.worst_case == pytest.approx(worst, rel=1e-12)


def test_blocks_give_what_the_whole_gives_and_report_progress():
    seen = []
    blocks = ((NORMS[:, i : i + 7], STEPS) for i in range(0, 40, 7))
    eps = epsilons_from_blocks(blocks, **SETTING, progress=seen.append)
    whole = individual_epsilons(NORMS, STEPS, **SETTING)
    np.testing.assert_allclose(eps.values, whole.values, rtol=1e-13)
    assert eps.worst_case == whole.worst_case
    assert seen == [7, 14, 21, 28, 35, 40]


def test_examples_may_have_their_own_rows():
    own = np.where(RNG.random((20, 40)) < 0.5, STEPS[:, None], 0)
    eps = individual_epsilons(NORMS, own, **SETTING)
    used = own[:, 3] > 0
    alone = individual_epsilons(NORMS[used, 3:4], STEPS[used], **SETTING)
    assert eps.values[3] == pytest.approx(alone.values[0], rel=1e-13)


@pytest.mark.parametrize(
    ("options", "steps", "kind"),
    [
        ({"clipping": "individual"}, 5, "exact"),
        ({"clipping": "individual", "rounding": "up"}, 1, "exact"),
        ({}, 1, "exact"),
        ({}, 5, "estimate"),
        ({"rounding": "up"}, 1, "bound"),
        ({"rounding": "up"}, 5, "estimate"),
        ({"rounding": "nearest"}, 1, "estimate"),
    ],
)
def test_kind_says_what_the_values_are_worth(options, steps, kind):
    eps = individual_epsilons(NORMS, np.full(20, steps), **SETTING, **options)
    assert eps.kind == kind


def test_individual_clipping_charges_the_threshold():
    thresholds = np.array([[1 / 256, 0.5]])
    eps = individual_epsilons([[0.0, 0.4999]], [50], **SETTING, clipping="individual")
    charged = individual_epsilons(thresholds, [50], **SETTING, rounding="up")
    assert (eps.values == charged.values).all()


def test_without_clipping_nobody_is_protected():
    eps = individual_epsilons(NORMS, STEPS, **{**SETTING, "noise_std": 0.0}, clipping="none")
    assert eps.kind == "none"
    assert np.isinf(eps.values).all()
    assert np.isinf(eps.worst_case)


def test_without_noise_only_a_zero_norm_costs_nothing():
    eps = individual_epsilons([[0.0, 1e-9, 1.0]], [3], **{**SETTING, "noise_std": 0.0})
    assert eps.values.tolist() == [0.0, np.inf, np.inf]


def test_empty_histories_cost_nothing_and_no_examples_have_no_values():
    none = individual_epsilons(np.zeros((0, 3)), [], **SETTING)
    assert none.values.tolist() == [0.0, 0.0, 0.0]
    assert none.worst_case == 0
    nobody = individual_epsilons(np.zeros((4, 0)), [1, 1, 1, 1], **SETTING)
    assert len(nobody) == 0
    assert len(epsilons_from_blocks([], **SETTING)) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 0.0}, "delta=0.0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"sample_rate": 1024.0}, "batch_size / n"),
        ({"sample_rate": -0.1}, "not a probability"),
        ({"sample_rate": [0.1, 0.2]}, "2 entries for 20 rows"),
        ({"sample_rate": [[0.1]]}, "one per row"),
        ({"noise_std": -1.0}, "noise_std=-1.0"),
        ({"noise_std": np.nan}, "noise_std=nan"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"method": "exact"}, "method='exact'"),
        ({"rounding": "down"}, "rounding='down'"),
        ({"levels": 0}, "levels=0"),
        ({"clipping": "soft"}, "clipping='soft'"),
        ({"clipping": "individual", "rounding": "nearest"}, "charge less"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        individual_epsilons(NORMS, STEPS, **{**SETTING, **changes})


def test_bad_norms_are_refused_without_showing_them():
    with pytest.raises(ValueError, match="negative norm") as refused:
        individual_epsilons([[0.5], [-0.1234]], [1, 1], **SETTING)
    assert "0.1234" not in str(refused.value)
    with pytest.raises(ValueError, match=r"\(rows, n\)"):
        individual_epsilons([0.5], [1], **SETTING)
    with pytest.raises(ValueError, match="do not fit"):
        individual_epsilons([[0.5]], [1, 1], **SETTING)


@pytest.mark.parametrize("bound", [5e-324, 1e-310, 1e301, np.inf])
def test_a_bound_whose_levels_would_vanish_is_refused(bound):
    """With a bound of 1e-310 every norm was at level 0, and free of charge without any noise."""
    with pytest.raises(ValueError, match="from 1e-300 to 1e300"):
        individual_epsilons([[1.0]], [1], **{**SETTING, "max_grad_norm": bound, "noise_std": 0.0})
