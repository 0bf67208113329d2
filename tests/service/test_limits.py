"""Limits: never more than the rate allows, in bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epsilons.service import Limits
from epsilons.service.limits import Bucket, network


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@given(pauses=st.lists(st.floats(0, 20), max_size=200), rate=st.floats(1, 100))
def test_never_more_pass_than_the_burst_and_the_rate(pauses, rate):
    clock = Clock()
    bucket = Bucket(rate, clock)
    passed = 0
    for pause in pauses:
        clock.now += pause
        passed += not bucket.wait(b"key")
        assert passed <= rate + clock.now * rate / 60 + 1e-6


def test_whoever_waits_as_told_is_answered():
    clock = Clock()
    bucket = Bucket(30, clock)
    while not (seconds := bucket.wait(b"key")):
        pass
    clock.now += seconds
    assert bucket.wait(b"key") == 0.0
    assert bucket.wait(b"another") == 0.0


def test_memory_is_bounded_and_the_busy_are_remembered():
    clock = Clock()
    bucket = Bucket(1, clock, most=100)
    for k in range(10_000):
        bucket.wait(b"%d" % k)
        bucket.wait(b"busy")
        assert len(bucket) <= 100
    assert bucket.wait(b"busy") > 0


def test_one_ipv6_network_is_one_address():
    assert network("2001:db8:1:2::1") == network("2001:db8:1:2:ffff::9")
    assert network("2001:db8:1:2::1") != network("2001:db8:1:3::1")
    assert network("::ffff:192.0.2.1") == network("192.0.2.1")


@pytest.mark.parametrize("wrong", [{"per_token": 0.0}, {"per_address": float("nan")}])
def test_limits_that_answer_nobody_are_refused(wrong):
    with pytest.raises(ValueError, match="answers nobody"):
        Limits(**wrong)
