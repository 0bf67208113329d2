import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, rdp
from opacus.accountants.analysis import rdp as opacus_rdp

from epsilons.accounting import DEFAULT_ORDERS, rdp_epsilon, sampled_gaussian_rdp

DELTA = 1e-5
OPACUS_ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))
# setting: sample rate, steps, noise multiplier; norm/C: (Mironov, Balle) at Opacus's orders
REFERENCE = {
    (4096 / 50_000, 3662, 3.32622): {1.0: (8.552, 7.800), 0.5: (3.896, 3.421), 0.1: (0.727, 0.578)},
    (1024 / 60_000, 5859, 2.50631): {
        1.0: (2.786, 2.400),
        0.5: (1.306, 1.077),
        0.1: (0.2715, 0.1887),
    },
}


@pytest.mark.parametrize("setting", REFERENCE)
def test_reference_values_of_both_conversions(setting):
    p, steps, noise = setting
    for norm, (mironov, balle) in REFERENCE[setting].items():
        rho = steps * sampled_gaussian_rdp(noise / norm, p, OPACUS_ORDERS)
        digits = 4 if norm == 0.1 and p < 0.05 else 3
        assert (
            round(float(rdp_epsilon(OPACUS_ORDERS, rho, DELTA, "rdp-classic")), digits) == mironov
        )
        assert round(float(rdp_epsilon(OPACUS_ORDERS, rho, DELTA)), digits) == balle


@pytest.mark.parametrize("setting", REFERENCE)
def test_default_orders_lose_nothing_and_win_where_others_end(setting):
    p, steps, noise = setting
    for norm in REFERENCE[setting]:
        ours, others = (
            rdp_epsilon(o, steps * sampled_gaussian_rdp(noise / norm, p, o), DELTA)
            for o in (DEFAULT_ORDERS, OPACUS_ORDERS)
        )
        assert ours <= others
    small = [
        rdp_epsilon(o, sampled_gaussian_rdp(50.0, p, o), DELTA)
        for o in (DEFAULT_ORDERS, OPACUS_ORDERS)
    ]
    assert small[0] < 0.01 < 0.1 < small[1]


def test_agrees_with_dp_accounting_at_integer_orders():
    orders = [2, 5, 30, 100]
    for p, noise in ((0.01, 0.8), (0.2, 4.0)):
        theirs = rdp.RdpAccountant(orders)
        theirs.compose(PoissonSampledDpEvent(p, GaussianDpEvent(noise)))
        np.testing.assert_allclose(
            rdp_epsilon(orders, sampled_gaussian_rdp(noise, p, orders), DELTA),
            theirs.get_epsilon(DELTA),
            rtol=1e-9,
        )


def test_agrees_with_opacus_where_it_is_sound():
    orders = [1.5, 3.7, 12.0]
    theirs = opacus_rdp.compute_rdp(q=0.05, noise_multiplier=1.1, steps=1, orders=orders)
    np.testing.assert_allclose(sampled_gaussian_rdp(1.1, 0.05, orders), theirs, rtol=1e-6)


def test_removing_costs_at_least_as_much_as_adding():
    noise = np.geomspace(0.2, 50, 12)[:, None]
    p = np.array([1e-6, 1e-3, 0.1, 0.5, 0.99, 1.0])
    remove = sampled_gaussian_rdp(noise, p)
    add = sampled_gaussian_rdp(noise, p, direction="add")
    assert (add <= remove * (1 + 1e-11)).all()


def test_axes_are_settings_then_orders():
    assert sampled_gaussian_rdp(np.ones((3, 1)), np.full(2, 0.1), [2.0, 3.0]).shape == (3, 2, 2)
    assert sampled_gaussian_rdp(1.0, 0.1, [2.0, 3.0]).shape == (2,)
    assert rdp_epsilon(DEFAULT_ORDERS, np.ones((4, 3, DEFAULT_ORDERS.size)), DELTA).shape == (4, 3)


def test_noise_edges():
    assert (sampled_gaussian_rdp(np.inf, 0.1) == 0).all()
    assert np.isinf(sampled_gaussian_rdp(0.0, 0.1)).all()
    assert (sampled_gaussian_rdp(0.0, 0.0) == 0).all()


def test_nothing_released_costs_nothing_and_an_unknown_divergence_costs_infinity():
    zero, unknown = np.zeros(DEFAULT_ORDERS.size), np.full(DEFAULT_ORDERS.size, np.nan)
    for method in ("rdp", "rdp-classic"):
        assert rdp_epsilon(DEFAULT_ORDERS, zero, DELTA, method) == 0
        assert rdp_epsilon(DEFAULT_ORDERS, unknown, DELTA, method) == np.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 0.1), "noise_multiplier=-1.0"),
        ((np.nan, 0.1), "noise_multiplier=nan"),
        ((1.0, 1.5), "batch_size / n"),
        ((1.0, np.nan), "not a probability"),
        ((1.0, 0.1, [1.0]), "above 1"),
        ((1.0, 0.1, [np.inf]), "above 1"),
    ],
)
def test_bad_steps_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sampled_gaussian_rdp(*arguments)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, np.nan, 2.0])
def test_delta_outside_the_open_interval_is_refused(delta):
    with pytest.raises(ValueError, match="delta="):
        rdp_epsilon([2.0], [1.0], delta)


def test_conversions_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="one entry for each"):
        rdp_epsilon([2.0, 3.0], [1.0], DELTA)
    with pytest.raises(ValueError, match="method='moments'"):
        rdp_epsilon([2.0], [1.0], DELTA, "moments")
