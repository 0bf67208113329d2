import numpy as np
import oracles
import pytest
from scipy.special import logsumexp

from epsilons.accounting.contours import NO_BOUND, contour
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


# c, h, nodes, s below, s, p: from nothing, one level to the next, wide apart, much and little drawn
STEPS_OF_NORM = [
    (7.0, 0.8, 12, 0.0, 0.05, 0.05),
    (7.0, 0.8, 12, 0.1, 0.2, 0.05),
    (40.0, 10.0, 20, 0.02, 0.03, 0.3),
    (3.0, 0.4, 30, 0.99, 1.0, 0.01),
    (1.8, 0.3, 40, 2.0, 2.01, 0.5),
    (200.0, 30.0, 24, 0.0, 0.004, 0.2),
    (5.0, 0.5, 16, 0.2, 0.25, 1.0),
]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("line", STEPS_OF_NORM)
def test_between_two_norms_the_chord_is_as_near_as_its_bound_says(line, add):
    c, h, nodes, below, s, p = line
    share = np.concatenate([[1e-4], np.linspace(0, 1, 33)])
    q = below**2 + share * (s**2 - below**2)
    table = contour(c, h, nodes, np.sqrt(q), np.full(q.size, p), add=add)
    k = cumulants(1 - c if add else c, np.sqrt(q), p)[:, None] + table.log_ratio + 1j * table.phase
    chord = k[1] + share[:, None] * (k[-1] - k[1])
    ends = contour(c, h, nodes, np.array([s]), np.array([p]), add=add, below=np.array([below]))
    gap, turn = ends.between.gap[0], ends.between.turn[0]
    sure = gap < 0.1
    assert sure[:4].all()
    off = abs(k - chord).max(axis=0)[sure]
    assert (off <= gap[sure] + 1e-12).all()
    assert (gap[:4] <= 100 * abs(k - chord).max(axis=0)[:4] + 1e-9).all()
    assert (abs(k[-1] - k[1])[sure] <= turn[sure] + 1e-12).all()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("line", STEPS_OF_NORM)
def test_between_two_norms_the_tail_is_below_the_chord_of_its_bounds(line, add):
    c, h, nodes, below, s, p = line
    ends = contour(c, h, nodes, np.array([s]), np.array([p]), add=add, below=np.array([below]))
    share = np.linspace(0.01, 0.99, 15)
    q = below**2 + share * (s**2 - below**2)
    beyond = contour(c, h, 4 * nodes, np.sqrt(q), np.full(q.size, p), add=add)
    start = cumulants(1 - c if add else c, np.sqrt(np.append(q, [below**2, s**2])), p)
    chord = start[-2] + share * (start[-1] - start[-2])
    bound = ends.between.tail_below[0] + share * (ends.between.tail[0] - ends.between.tail_below[0])
    found = np.exp(beyond.log_ratio) - beyond.error
    assert (found[:, nodes:].max(axis=1) * np.exp(start[:-2] - chord) <= np.exp(bound)).all()
    assert bound.max() < 1e-3


@pytest.mark.parametrize("below", [None, np.array([np.nan, 0.5])])
def test_a_row_that_would_take_gigabytes_is_left_out_without_a_bound(below):
    """Far out on the line a large s needs millions of places: 24 GB were not enough once."""
    s, p = np.array([0.5, 1.0]), np.array([0.02, 0.02])
    found = contour(3000.0, 400.0, 256, s, p, add=False, below=below)
    assert (found.error[1, 1:] > 1e100).all()
    assert (found.tail == 0).all()
    if found.between is not None:
        assert (found.between.gap[1] == NO_BOUND).all()


def test_where_m_may_vanish_between_two_norms_nothing_is_bounded():
    # few steps of much norm: |M| has zeros on the line, about which arg M jumps by π
    given = (2.0, 0.3, 200, np.array([2.0]), np.array([0.1]))
    gap = contour(*given, add=False, below=np.array([1.98])).between.gap[0]
    assert gap[0] < 1
    assert (gap[100:] == NO_BOUND).all()


@pytest.mark.parametrize("add", [False, True])
def test_sampling_everything_is_continuous_with_sampling_nearly_everything(add):
    given = (4.0, 0.7, 10, np.full(2, 0.2), np.array([1.0, 1 - 1e-9]))
    table = contour(*given, add=add)
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
