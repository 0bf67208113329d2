import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from epsilons.accounting import clipping_thresholds, sampled_gaussian_rdp
from epsilons.accounting.histories import UNIT, level_norms, soft_histogram

blocks = arrays(np.float64, (6, 3), elements=st.floats(0, 3))
times = arrays(np.int64, 6, elements=st.integers(0, 1000))


def one_by_one(norms, steps, bound, levels):
    """The definition of the soft histogram, pair by pair."""
    out = np.zeros((norms.shape[1], levels + 1))
    for r, j in np.ndindex(*norms.shape):
        u = min(norms[r, j], bound) * levels / bound
        b = min(int(u), levels - 1)
        f = (u * u - b * b) / (2 * b + 1)
        out[j, b] += (1 - f) * steps[r]
        out[j, b + 1] += f * steps[r]
    return out


@given(norms=blocks, steps=times)
def test_weights_are_those_of_the_definition(norms, steps):
    found = soft_histogram(norms, steps, 1.7, levels=16)[:, 0] / UNIT
    rounding = 2 * float(steps.sum()) / UNIT  # each step's share is a whole number of units
    np.testing.assert_allclose(found, one_by_one(norms, steps, 1.7, 16), atol=rounding + 1e-9)


@given(norms=blocks, steps=times, rounding=st.sampled_from([None, "up", "nearest"]))
def test_every_step_is_counted_exactly_once(norms, steps, rounding):
    found = soft_histogram(norms, steps, 1.7, levels=16, rounding=rounding)
    assert (found.sum(axis=(1, 2)) == np.uint64(steps.sum() * UNIT)).all()


@given(norms=blocks, steps=times, order=st.permutations(range(6)))
def test_the_order_of_rows_changes_no_bit(norms, steps, order):
    order = list(order)
    whole = soft_histogram(norms, steps, 1.7)
    assert (soft_histogram(norms[order], steps[order], 1.7) == whole).all()
    halves = [soft_histogram(norms[i], steps[i], 1.7) for i in (order[:2], order[2:])]
    assert (halves[0] + halves[1] == whole).all()


@given(norms=blocks, steps=times)
def test_second_moment_is_kept_and_never_lowered(norms, steps):
    levels = level_norms(1.7, 16)
    true = (np.minimum(norms, 1.7) ** 2 * steps[:, None]).sum(axis=0)
    soft = soft_histogram(norms, steps, 1.7, levels=16)[:, 0] / UNIT @ levels**2
    up = soft_histogram(norms, steps, 1.7, levels=16, rounding="up")[:, 0] / UNIT @ levels**2
    np.testing.assert_allclose(soft, true, rtol=1e-8, atol=1e-5)
    assert (up >= true * (1 - 1e-12)).all()


@given(norm=st.floats(0, 1), noise=st.floats(0.4, 10), p=st.sampled_from([1e-4, 0.05, 0.5]))
def test_splitting_between_levels_never_lowers_the_divergence(norm, noise, p):
    weights = soft_histogram([[norm]], [1], 1.0, levels=8)[0, 0] / UNIT
    with np.errstate(divide="ignore", over="ignore"):
        priced = weights @ sampled_gaussian_rdp(noise / level_norms(1.0, 8), p)
        true = sampled_gaussian_rdp(np.divide(noise, norm), p)
    assert (priced >= true * (1 - 1e-11)).all()


@pytest.mark.parametrize("bound", [1.0, 0.1, 15.73, 1e-3 / 3])
@pytest.mark.parametrize("levels", [3, 100, 256, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_norm_on_a_level_stays_there(bound, levels, dtype):
    grid = level_norms(bound, levels).astype(dtype)
    for rounding in ("up", None) if dtype == np.float64 else ("up",):
        found = soft_histogram(grid[None], [1], bound, levels=levels, rounding=rounding)[:, 0]
        assert (found == np.eye(levels + 1) * UNIT).all()


@given(st.floats(1e-3, 1e3), st.integers(1, 300))
def test_the_last_level_is_the_bound_to_the_last_bit(bound, levels):
    """C·B/B rounds to above C for every eighth C at 100 levels: individual clipping to the highest
    level was refused in the middle of a run, because it exceeded the bound."""
    assert level_norms(bound, levels)[-1] == bound
    assert clipping_thresholds([2 * bound], bound, levels)[0] == bound


@pytest.mark.parametrize("levels", [3, 100, 256])
def test_a_norm_just_above_a_level_is_rounded_up_to_the_next(levels):
    grid = np.nextafter(level_norms(0.3, levels)[:-1], 1)
    found = soft_histogram(grid[None], [1], 0.3, levels=levels, rounding="up")[:, 0]
    assert (found.argmax(axis=1) == np.arange(1, levels + 1)).all()


def test_nearest_is_the_papers_grid():
    norms = np.array([[0.0, 0.004, 0.006, 0.014, 0.016, 0.9949, 0.9951, 1.0, 7.0]])
    found = soft_histogram(norms, [1], 1.0, levels=100, rounding="nearest")[:, 0]
    assert found.argmax(axis=1).tolist() == [1, 1, 1, 1, 2, 99, 100, 100, 100]


def test_norms_that_are_not_numbers_or_too_large_count_as_the_bound():
    norms = np.array([[np.nan, np.inf, 2.0, 1.0]])
    for rounding in (None, "up", "nearest"):
        found = soft_histogram(norms, [5], 1.0, levels=4, rounding=rounding)[:, 0]
        assert (found[:, -1] == 5 * UNIT).all()


def test_steps_may_differ_between_examples():
    found = soft_histogram([[1.0, 1.0], [0.0, 0.0]], [[1, 2], [3, 0]], 1.0, levels=1)[:, 0] // UNIT
    assert found.tolist() == [[3, 1], [0, 2]]


def test_rows_of_a_phase_share_a_histogram_and_may_have_their_own_bound():
    found = soft_histogram(
        [[1.0], [1.0], [2.0]],
        [1, 10, 100],
        [2.0, 1.0, 2.0],
        levels=2,
        phase=np.array([0, 1, 0]),
        phases=2,
    )
    assert (found[0] // UNIT).tolist() == [[0, 1, 100], [0, 0, 10]]


def test_many_examples_are_counted_as_one_by_one():
    rng = np.random.default_rng(0)
    norms, steps = rng.uniform(0, 1.2, (50, 5000)), rng.integers(0, 9, 50)
    together = soft_histogram(norms, steps, 1.0, levels=64)
    for j in (0, 127, 128, 4999):
        assert (together[j] == soft_histogram(norms[:, [j]], steps, 1.0, levels=64)[0]).all()


def test_thresholds_are_their_own_thresholds_and_cover_the_norm():
    norms = np.random.default_rng(1).uniform(0, 1, (7, 9))
    bounds = clipping_thresholds(norms, 0.7, 256)
    assert bounds.shape == norms.shape
    assert (bounds >= np.minimum(norms, 0.7)).all()
    assert (clipping_thresholds(bounds, 0.7, 256) == bounds).all()
    assert clipping_thresholds(0.0, 0.7, 256) == 0.7 / 256


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([[-1e-9]], [1], 1.0), {}, "negative norm"),
        (([[-np.inf]], [1], 1.0), {}, "negative norm"),
        (([1.0], [1], 1.0), {}, "rows, examples"),
        (([[1.0]], [1, 2], 1.0), {}, "steps of shape"),
        (([[1.0]], [-1], 1.0), {}, "steps contains -1"),
        (([[1.0]], [0.5], 1.0), {}, "whole numbers"),
        (([[1.0]], [1], 0.0), {}, "max_grad_norm=0.0"),
        (([[1.0]], [1], np.inf), {}, "max_grad_norm=inf"),
        (([[1.0]], [1], 1.0), {"levels": 0}, "levels=0"),
        (([[1.0]], [1], 1.0), {"rounding": "down"}, "rounding='down'"),
        (([[1.0]] * 3, [2**31] * 3, 1.0), {}, "2³² steps"),
    ],
)
def test_bad_histories_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        soft_histogram(*arguments, **options)
