import mpmath
import pytest
from scipy.stats import binom

from epsilons.accounting.sums import batch_cap, delta_within_cap, pass_size, sum_remainder

TAIL = mpmath.mpf(2) ** -120
DRAWS = [  # n, sample rate: small, the paper's, very large, nearly all, hardly any
    (1, 0.5),
    (10, 0.3),
    (60, 1 / 3),
    (1000, 0.016),
    (60_000, 1024 / 60_000),
    (10**6, 0.016384),
    (200, 0.97),
    (10**6, 1e-9),
]


def reached(cap, n, rate):
    """P[Bin(n, rate) ≥ cap], summed with 60 digits from the largest term down."""
    cap -= 1
    with mpmath.workdps(60):
        p = mpmath.mpf(rate)
        term = mpmath.binomial(n, cap + 1) * p ** (cap + 1) * (1 - p) ** (n - cap - 1)
        total = mpmath.mpf(0)
        for k in range(cap + 1, n + 1):
            total += term
            term *= mpmath.mpf(n - k) / (k + 1) * p / (1 - p)
            if k > n * p and term < total * mpmath.mpf(10) ** -40:
                break
        return total


@pytest.mark.parametrize(("n", "rate"), DRAWS)
def test_a_batch_reaches_its_cap_with_probability_at_most_2_to_the_minus_120(n, rate):
    cap = batch_cap(n, rate)
    assert cap == n or reached(cap, n, rate) <= TAIL


@pytest.mark.parametrize(("n", "rate"), DRAWS)
def test_no_smaller_cap_would_do(n, rate):
    cap = batch_cap(n, rate)
    assert cap == 0 or reached(cap - 1, n, rate) > TAIL


def test_the_oracle_agrees_with_scipy():
    assert float(reached(26, 60, 1 / 3)) == pytest.approx(binom.sf(25, 60, 1 / 3), rel=1e-12)


@pytest.mark.parametrize(
    ("n", "rate", "cap"), [(0, 0.5, 0), (7, 0.0, 1), (7, 1.0, 7), (1, 1e-40, 1)]
)
def test_caps_at_the_edges(n, rate, cap):
    assert batch_cap(n, rate) == cap


def test_the_cap_grows_with_the_rate_and_with_the_data():
    caps = [batch_cap(1000, k / 100) for k in range(101)]
    assert caps == sorted(caps)
    assert caps[-1] == 1000
    caps = [batch_cap(n, 0.1) for n in range(0, 2000, 50)]
    assert caps == sorted(caps)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match="sample_rate"):
        batch_cap(10, rate)


def test_a_run_of_2_to_the_40_steps_pays_2_to_the_minus_80_of_its_delta():
    for delta in (1e-3, 1e-5, 1e-12, 2.0**-79):
        exact = mpmath.mpf(delta) - 2**40 * TAIL
        assert exact * (1 - mpmath.mpf(2) ** -51) <= delta_within_cap(delta) <= exact
    with pytest.raises(ValueError, match="expected more than 2⁻⁸⁰"):
        delta_within_cap(2.0**-80)


@pytest.mark.parametrize("cap", [1, 8, 1024, 1379, 16_384, 20_000, 10**6])
def test_the_remainder_is_the_formula_rounded_up(cap):
    with mpmath.workdps(50):
        terms = mpmath.mpf(2 * cap + 8) * mpmath.mpf(2) ** -53
        exact = 2 * terms / (1 - terms) * 32 * cap * mpmath.mpf(0.7)
        assert exact <= sum_remainder(cap, 0.7) <= exact * (1 + mpmath.mpf(2) ** -38)


def test_the_remainder_grows_with_the_batch_and_in_proportion_to_the_bound():
    found = [sum_remainder(cap, 1.0) for cap in range(1, 40_000, 97)]
    assert found == sorted(set(found))
    assert sum_remainder(1000, 3.0) == pytest.approx(3 * sum_remainder(1000, 1.0), rel=1e-12)
    assert sum_remainder(0, 1.0) == 0


def test_the_remainder_is_at_most_1e_5_of_the_bound_for_16384_examples():
    cap = batch_cap(10**6, 16_384 / 10**6)
    assert cap > 16_384
    assert sum_remainder(cap, 2.5) <= 1e-5 * 2.5


def test_passes_take_whole_vectors_and_about_two_deviations_more_than_is_expected():
    for expected in (*range(1, 3000), 4096, 16_384, 100_000, 0.5, 20.7):
        size, room = pass_size(expected, cap=10**6), expected + 2 * expected**0.5
        unit = 8 if room < 128 else 32
        assert size % unit == 0
        assert size == unit or abs(size - room) <= unit / 2


def test_passes_are_no_larger_than_the_cap_needs():
    for n in (1, 5, 8, 20, 90, 100, 1000):
        assert pass_size(n, cap=n) == 8 * -(-n // 8)


@pytest.mark.parametrize(("asked", "size"), [(1, 1), (7, 7), (8, 8), (100, 96), (2000, 1088)])
def test_a_micro_batch_is_kept_to_whole_vectors(asked, size):
    assert pass_size(1024, cap=1450, micro_batch=asked) == size


def test_most_draws_fit_into_one_pass():
    for expected in (16, 64, 1024, 16_384):
        size = pass_size(expected, cap=10**6)
        assert binom.sf(size, 10**6, expected / 10**6) < 0.05
