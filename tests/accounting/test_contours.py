import numpy as np
import oracles
import pytest
from scipy.special import logsumexp

from epsilons.accounting.contours import contour
from epsilons.accounting.cumulants import cumulants

# c, h, nodes, s, p: small and large steps of norm, rare and frequent sampling, high contours
LINES = [
    (5.0, 0.5, 64, 0.3, 0.08),
    (20.0, 2.0, 130, 0.1, 0.02),
    (100.0, 10.0, 64, 0.05, 0.01),
    (3.0, 0.2, 64, 2.0, 0.3),
    (1.5, 0.3, 200, 1.0, 0.9),
    (8.0, 1.0, 40, 2.5, 0.01),
    (1.4, 0.5, 100, 0.7, 1e-4),
]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("line", LINES)
def test_entries_agree_with_50_digit_integrals(line, add):
    c, h, nodes, s, p = line
    found = contour(c, h, nodes, np.array([s]), np.array([p]), add=add)
    start = oracles.quadrature(1 - c if add else c, s, p)
    for j in (1, nodes // 3, nodes - 1):
        t = complex(c, j * h)
        true = complex(oracles.quadrature(1 - t if add else t, s, p) - start)
        ours = np.exp(found.log_ratio[0, j] + 1j * found.phase[0, j])
        assert abs(ours - np.exp(true)) <= found.error[0, j] / 4


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("line", LINES)
def test_the_tail_bound_holds_everywhere_beyond_the_last_node(line, add):
    c, h, nodes, s, p = line
    bound = contour(c, h, nodes, np.array([s]), np.array([p]), add=add).tail[0]
    beyond = contour(c, h, 8 * nodes, np.array([s]), np.array([p]), add=add)
    assert bound < 0
    assert (np.exp(beyond.log_ratio) - beyond.error <= np.exp(bound))[0, nodes:].all()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("line", [*LINES, (1.5, 0.3, 60, 1.0, 0.1), (2.0, 1.0, 60, 0.5, 0.7)])
def test_the_tail_bound_is_not_below_the_best_shift_of_the_path(line, add):
    # Cut off on the left, where e^{d²/2} outgrows the normal density, the bound came out too low.
    c, h, nodes, s, p = line
    power, omega = (1 - c if add else c), h * nodes
    bound = contour(c, h, nodes, np.array([s]), np.array([p]), add=add).tail[0]
    x = np.arange(-60, abs(power) * s + 30, 1e-3)
    best = np.inf
    for d in np.linspace(0, min(0.5 * np.pi / s, 12), 60):
        likelihood = 1 - p + p * np.exp(s * (x + 1j * d) - s * s / 2)
        exponent = power * np.log(abs(likelihood)) - omega * np.angle(likelihood) - x * x / 2
        best = min(best, logsumexp(exponent) + d * d / 2)
    base = logsumexp(power * np.log1p(p * np.expm1(s * x - s * s / 2)) - x * x / 2)
    assert bound >= best - base - 0.05


@pytest.mark.parametrize("add", [False, True])
def test_curvature_is_the_second_derivative_in_the_squared_norm(add):
    c, h, nodes, p = 7.0, 0.8, 12, 0.05
    q, width = 0.04, 1e-3
    s = np.sqrt([q - width, q, q + width])
    table = contour(c, h, nodes, s, np.full(3, p), add=add, curved=True)
    start = cumulants(1 - c if add else c, s, p)
    k = start[:, None] + table.log_ratio + 1j * table.phase
    np.testing.assert_allclose(
        table.curvature[1], abs(k[0] - 2 * k[1] + k[2]) / width**2, rtol=2e-3, atol=1e-6
    )


def test_curvature_at_norm_zero_is_its_limit():
    table = contour(7.0, 0.8, 12, np.array([0.0, 1e-4]), np.full(2, 0.3), add=False, curved=True)
    np.testing.assert_allclose(table.curvature[0], table.curvature[1], rtol=1e-4)


@pytest.mark.parametrize("add", [False, True])
def test_sampling_everything_is_continuous_with_sampling_nearly_everything(add):
    given = (4.0, 0.7, 10, np.full(2, 0.2), np.array([1.0, 1 - 1e-9]))
    table = contour(*given, add=add, curved=True)
    np.testing.assert_allclose(table.log_ratio[0], table.log_ratio[1], atol=1e-6)
    np.testing.assert_allclose(table.phase[0], table.phase[1], atol=1e-6)


def test_the_phase_has_no_jumps():
    table = contour(3.0, 0.3, 300, np.array([1.5]), np.array([0.2]), add=False)
    alive = table.log_ratio[0] > -20
    assert np.abs(np.diff(table.phase[0, alive])).max() < np.pi


@pytest.mark.parametrize("add", [False, True])
def test_levels_that_share_a_step_are_as_good_as_alone(add):
    s, p = np.linspace(0, 2.5, 60), np.full(60, 0.1)
    together = contour(6.0, 0.5, 60, s, p, add=add)
    for i in (1, 7, 33, 59):
        alone = contour(6.0, 0.5, 60, s[[i]], p[[i]], add=add)
        ours, true = (np.exp(t.log_ratio + 1j * t.phase) for t in (together, alone))
        assert (abs(ours[i] - true[0]) <= alone.error[0] / 2).all()
