"""Attacks by rounding: one more example turns the roundings of all the others.

In float32 the additions of a batch can be made to round up with an example and down without it.
In float64 the same attack must stay within what every example is charged.
"""

import pytest
import torch
from sum_attacks import (
    KINDS,
    LONG,
    charged,
    distance_moved,
    moved,
    pass_of,
    rounding_attack,
    sloped,
)

from epsilons.accounting.sums import sum_remainder
from epsilons.gradients import clipped_gradients

BOUND = 1.0001  # above every gradient, which is at most 1: nothing is scaled, all digits are ours
SEQUENTIAL = ("bias", "linear", "linear of 64 positions", "convolution", "embedding", "fallback")


@pytest.mark.parametrize("count", LONG)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_moves_a_float64_sum_by_no_more_than_is_charged(kind, count):
    attack = rounding_attack(kind, count)
    assert moved(*place(attack), BOUND, micro_batch=pass_of(count)) * BOUND <= charged(count, BOUND)


@pytest.mark.parametrize("count", LONG)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_in_the_last_bits_of_float64_stays_within_the_remainder(kind, count):
    # The same attack 29 bits lower: it does move a float64 sum, by what the remainder covers.
    attack = rounding_attack(kind, count, digits=52)
    assert moved(*place(attack), BOUND, micro_batch=pass_of(count)) * BOUND <= charged(count, BOUND)


@pytest.mark.parametrize("count", LONG)
def test_the_last_bits_of_float64_can_be_attacked_at_all(count):
    # With nothing of the bound left unused: the gradient of 1 is the most that may be added.
    attack = rounding_attack("bias", count, digits=52)
    excess = moved(*place(attack), BOUND, micro_batch=pass_of(count)) * BOUND - 1
    assert 0 < excess <= sum_remainder(count + 1, BOUND)


@pytest.mark.parametrize("count", [4096, 16384])
@pytest.mark.parametrize("kind", SEQUENTIAL)
def test_rounding_moves_a_float32_sum_by_more_than_the_bound(kind, count):
    # Why sums are in float64: 1.25 C at 4096 and 2.00 C at 16,384 on every CPU that adds in order.
    ratio = moved(*place(rounding_attack(kind, count)), BOUND, sums="float32")
    if ratio <= 1:
        pytest.skip(f"this machine's kernels add {kind} gradients in another order")
    assert ratio > {4096: 1.2, 16384: 1.9}[count]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("micro_batch", [16, 80, 1024, 1088, 8192])
def test_several_passes_round_no_further_than_one(micro_batch, first):
    attack = rounding_attack("bias", 4096)
    ratio = moved(*place(attack), BOUND, first=first, micro_batch=micro_batch)
    assert ratio * BOUND <= charged(4096, BOUND)


@pytest.mark.parametrize("kind", ["bias", "linear of 64 positions", "embedding"])
def test_an_example_with_a_bound_of_its_own_moves_the_sum_by_no_more(kind):
    # Scaling by an own factor each leaves no digit as it was in the attack.
    model, batch, extra = rounding_attack(kind, 4096)
    bounds = torch.linspace(0.1, 1, 4096, dtype=torch.float64)
    without, _ = clipped_gradients(model, sloped, batch, bounds, micro_batch=1024)
    for own in (0.01, 0.3, 1.0):
        joined = [torch.cat([e, b]) for b, e in zip(batch, extra, strict=True)]
        its = torch.cat([torch.tensor([own], dtype=torch.float64), bounds])
        with_it, _ = clipped_gradients(model, sloped, joined, its, micro_batch=1024)
        assert distance_moved(with_it, without) <= own + sum_remainder(4097, 1.0)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_an_example_that_is_not_finite_leaves_the_sum_as_it_was(kind, value):
    model, batch, extra = rounding_attack(kind, 1024)
    broken = (extra[0], extra[1] * value)
    for count in (95, 1024):
        part = [column[:count] for column in batch]
        ratio = moved(model, sloped, part, broken, BOUND, micro_batch=96)
        assert ratio * BOUND <= sum_remainder(count + 1, BOUND)


def place(attack):
    model, batch, extra = attack
    return model, sloped, batch, extra
