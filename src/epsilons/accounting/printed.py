"""Bounds in print: an ε or a probability that is a bound is rounded up, never down."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal

_LEAST = Decimal("0.001")
_PLAIN = Decimal("1e-6")  # written out down to here


def epsilon_text(epsilon: float) -> str:
    """ε with three decimals, rounded up; below 0.001 with three significant digits.

    From the decimals of its `repr`: a number that is 2.000 stays so, and nothing falls below.

    >>> epsilon_text(1.61438), epsilon_text(2.0), epsilon_text(0.00021301), epsilon_text(0.0)
    ('1.615', '2.000', '0.000214', '0.000')
    >>> epsilon_text(1.2345e-8), epsilon_text(math.inf)
    ('1.24e-8', 'no bound')
    """
    if not math.isfinite(epsilon):
        return "no bound"
    exact = Decimal(repr(float(epsilon)))
    if exact == 0 or exact >= _LEAST:
        return f"{exact.quantize(_LEAST, ROUND_CEILING):f}"
    shown = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), ROUND_CEILING)
    return f"{shown:f}" if shown >= _PLAIN else f"{shown:.2e}"


def percent_text(probability: float, digits: int = 1) -> str:
    """A probability that is a bound in %, rounded up, at most 100; the space does not break.

    >>> percent_text(0.91701).replace("\\u00a0", " "), percent_text(0.5, 2).replace("\\u00a0", " ")
    ('91.8 %', '50.00 %')
    """
    share = min(Decimal(1), Decimal(repr(float(probability)))) * 100
    return f"{share.quantize(Decimal(1).scaleb(-digits), ROUND_CEILING):f}\u00a0%"
