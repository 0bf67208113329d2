"""Clip factors, and squared norms added up."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from epsilons.accounting.sums import NORM_ERROR
from epsilons.gradients.clip_factors import add_up, clip_factors

SQUARES = st.floats(0, 1e300) | st.sampled_from([0.0, 5e-324, math.inf, math.nan])
BOUNDS = st.floats(1e-300, 1e300) | st.sampled_from([0.0, math.inf])  # as a plan has them


@settings(deadline=None)
@given(arrays(np.float64, 7, elements=SQUARES), arrays(np.float64, 7, elements=BOUNDS))
@example(np.full(7, 9.12510042e42), np.full(7, 1e-300))  # a subnormal factor
def test_nobody_contributes_more_than_the_bound(squares, bounds):
    norms, factors, finite = clip_factors(torch.from_numpy(squares), torch.from_numpy(bounds))
    assert (finite is None) == bool(norms.isfinite().all())
    assert np.allclose(norms.numpy(), np.sqrt(squares), rtol=1e-15, atol=0, equal_nan=True)
    assert ((factors >= 0) & (factors <= 1)).all()
    finite = norms.isfinite() if finite is None else finite
    contributed = factors * norms * (1 + NORM_ERROR / 2)
    assert (contributed[finite] <= torch.from_numpy(bounds)[finite]).all()
    assert (factors[~finite] == 0).all()


def test_small_norms_are_left_alone():
    squares = torch.tensor([0.0, 1.0, 4.0, 100.0], dtype=torch.float64)
    _, factors, finite = clip_factors(squares, torch.full((4,), 2.0, dtype=torch.float64))
    assert finite is None
    assert factors[:2].tolist() == [1.0, 1.0]
    assert factors[2:].tolist() == pytest.approx([1 / (1 + NORM_ERROR), 0.2 / (1 + NORM_ERROR)])


@pytest.mark.parametrize("dtypes", [[torch.float32] * 3, [torch.float32, torch.float64]])
def test_parts_are_added_in_float64(dtypes):
    parts = [torch.rand(9).to(dtype) * 10.0**k for k, dtype in enumerate(dtypes)]
    total = torch.rand(9, dtype=torch.float64)
    expected = total + sum(part.double() for part in parts)
    add_up(parts, total)
    assert torch.allclose(total, expected, rtol=1e-15)
    add_up([], total)
    assert torch.allclose(total, expected, rtol=1e-15)


def test_one_number_is_never_taken_for_all():
    for part in (torch.ones(1), torch.ones(()), torch.ones(4, 1)):
        with pytest.raises(RuntimeError, match="squared norms of shapes"):
            add_up([part], torch.zeros(4, dtype=torch.float64))


def test_no_parts_are_added_on_any_device():
    add_up([], torch.zeros(3, dtype=torch.float64, device="meta"))


def test_parts_that_lie_apart_in_memory_are_read_where_they_are():
    apart = torch.arange(8.0)[::2]
    total = torch.zeros(4, dtype=torch.float64)
    add_up([apart, apart], total)
    assert total.tolist() == [0, 4, 8, 12]
