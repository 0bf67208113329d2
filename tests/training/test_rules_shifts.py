"""Compiled sums over products of pixels: any walk over the images, any number of threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import SAME, slowly, walks

from epsilons.training.rules.shifts import shifted_squares

SHARE = 0.5


def parts(source, places, geometry):
    """Σ_t ‖g_t p_tᵀ‖²: what the squared norm would be if places didn't meet, in float64."""
    squares = 0.0
    for t in range(math.prod(places.shape[2:])):
        alone = torch.zeros_like(places).flatten(2)
        alone[:, :, t] = places.flatten(2)[:, :, t]
        squares += slowly(source, alone.view_as(places), geometry).square().sum((1, 2, 3, 4))
    return squares


@settings(max_examples=200, deadline=None)
@given(walks(stride=1, groups=1), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_any_walk_agrees_with_taps_one_by_one(walk, channels, outputs, seed):
    geometry, size, out = walk
    if min(out) < 1:
        return
    draws = torch.Generator().manual_seed(seed)
    source = torch.randn(3, channels, *size, generator=draws)
    places = torch.randn(3, outputs, *out, generator=draws)
    found, cancelled = shifted_squares(source, places, geometry, SHARE)
    expected = slowly(source, places, geometry).square().sum((1, 2, 3, 4))
    slack = 1e-6 * slowly(source.abs(), places.abs(), geometry).square().sum((1, 2, 3, 4)) + 1e-30
    assert ((found - expected).abs() <= slack).all()
    distance = expected - SHARE * parts(source, places, geometry)
    assert cancelled[distance < -slack].all()
    assert not cancelled[distance > slack].any()


def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    source, places = torch.randn(5, 3, 7, 9), torch.randn(5, 6, 7, 9)
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found[count], _ = shifted_squares(source, places, SAME, SHARE)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[1], found[2])
    assert torch.equal(found[1], found[8])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_stays_so_and_stays_with_its_image(bad, where):
    torch.manual_seed(0)
    operands = [torch.randn(4, 2, 6, 6), torch.randn(4, 5, 6, 6)]
    clean, _ = shifted_squares(*operands, SAME, SHARE)
    operands[where][2, 1, 3, 3] = bad
    dirty, _ = shifted_squares(*operands, SAME, SHARE)
    assert not dirty[2].isfinite()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


def test_no_images_have_no_norms():
    for found in shifted_squares(torch.empty(0, 2, 6, 6), torch.empty(0, 4, 6, 6), SAME, SHARE):
        assert found.shape == (0,)
