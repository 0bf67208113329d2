"""Compiled filter gradients: any walk over the images, any number of threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import SAME, slowly, walks

from epsilons.training.rules.contractions import Geometry
from epsilons.training.rules.filters import filter_gradients, filter_squares


@settings(max_examples=300, deadline=None)
@given(walks(), st.sampled_from([1, 2, 3, 8, 19, 32]), st.integers(1, 9), st.integers(0, 2**31))
def test_any_walk_agrees_with_taps_one_by_one(walk, channels, outputs, seed):
    geometry, size, out = walk
    if min(out) < 1:
        return
    draws = torch.Generator().manual_seed(seed)
    source = torch.randn(3, channels * geometry.groups, *size, generator=draws)
    places = torch.randn(3, outputs * geometry.groups, *out, generator=draws)
    expected = slowly(source, places, geometry)
    scale = slowly(source.abs(), places.abs(), geometry)  # what rounding is relative to
    found, its_squares, totals = filter_gradients(source, places, geometry)
    assert found.shape == expected.shape
    assert ((found - expected).abs() <= 1e-6 * scale + 1e-30).all()
    squares = expected.square().sum((1, 2, 3, 4))
    slack = 1e-5 * scale.square().sum((1, 2, 3, 4)) + 1e-30
    assert ((its_squares - squares).abs() <= slack).all()
    assert ((totals - places.double().sum((2, 3))).abs() <= 1e-6 * places.abs().sum((2, 3))).all()
    again = filter_squares(source, places, geometry)
    assert all(map(torch.equal, (its_squares, totals), again))


@pytest.mark.parametrize("size", [(7, 9), (40, 50)])  # within a tile, and across two
def test_any_number_of_threads_gives_the_same_bits(size):
    torch.manual_seed(0)
    source, places = torch.randn(5, 3, *size), torch.randn(5, 6, *size)
    threads = torch.get_num_threads()
    found = {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found[count] = (
                *filter_gradients(source, places, SAME),
                *filter_squares(source, places, SAME),
            )
    finally:
        torch.set_num_threads(threads)
    for count in (2, 8):
        for one, other in zip(found[1], found[count], strict=True):
            assert torch.equal(one, other)
    assert torch.allclose(found[1][0].double(), slowly(source, places, SAME), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["source", "places"])
def test_what_is_not_finite_stays_so_and_stays_with_its_image(bad, where):
    torch.manual_seed(0)
    tensors = {"source": torch.randn(4, 2, 6, 6), "places": torch.randn(4, 5, 6, 6)}
    clean, _ = filter_squares(*tensors.values(), SAME)
    tensors[where][2, 1, 3, 3] = bad
    dirty, _ = filter_squares(*tensors.values(), SAME)
    assert not dirty[2].isfinite()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("geometry", [((1, 1), (1, 10), (0, 2)), ((3, 1), (1, 10), (0, 2))])
def test_a_filter_that_sees_nothing_but_padding_has_no_gradient(geometry):
    seen = Geometry(*geometry, (1, 1), 1)
    places = torch.ones(2, 4, 6 - geometry[0][0], 1)
    squares, totals = filter_squares(torch.ones(2, 1, 5, 3), places, seen)
    assert torch.equal(squares, torch.zeros(2))
    assert torch.equal(totals, places.sum((2, 3)))


@pytest.mark.parametrize("size", [(30, 30), (90, 90)])  # lines put together, and too many for it
def test_pictures_of_any_size_agree_with_taps_one_by_one(size):
    torch.manual_seed(0)
    source, places = torch.randn(2, 1, *size), torch.randn(2, 3, *size)
    expected = slowly(source, places, SAME)
    torch.testing.assert_close(
        filter_gradients(source, places, SAME)[0].double(), expected, rtol=1e-4, atol=1e-3
    )


def test_no_images_have_no_gradients():
    gradients, *rest = filter_gradients(torch.empty(0, 2, 6, 6), torch.empty(0, 4, 6, 6), SAME)
    assert gradients.shape == (0, 4, 2, 3, 3)
    again = filter_squares(torch.empty(0, 2, 6, 6), torch.empty(0, 4, 6, 6), SAME)
    for squares, totals in (rest, again):
        assert (squares.shape, totals.shape) == ((0,), (0, 4))


def test_squares_of_a_million_numbers_are_not_summed_too_coarsely():
    torch.manual_seed(0)
    source, places = torch.randn(2, 512, 3, 3), torch.randn(2, 512, 3, 3)
    squares = filter_gradients(source, places, SAME)[0].double().square().sum((1, 2, 3, 4))
    found = filter_squares(source, places, SAME)[0].double()
    torch.testing.assert_close(found, squares, rtol=1e-6, atol=0)
