import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epsilons.accounting.printed import epsilon_text, percent_text

SOURCES = Path(__file__).parents[2] / "src" / "epsilons"


@given(st.floats(1e-300, 1e6))
def test_what_is_printed_is_never_below_and_hardly_above(epsilon):
    shown, exact = Fraction(epsilon_text(epsilon)), Fraction(repr(epsilon))
    assert exact <= shown < exact + (Fraction(1, 1000) if epsilon >= 1e-3 else exact / 100)


@given(st.integers(0, 10**6))
def test_a_number_of_three_decimals_is_printed_as_it_is(thousandths):
    assert epsilon_text(thousandths / 1000) == f"{thousandths / 1000:.3f}"


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (1.61438, "1.615"),  # was "1.614", in "ε ≤ 1.614"
        (3.999999862, "4.000"),
        (0.1 + 0.2, "0.301"),
        (0.0009999, "0.001000"),
        (0.000213, "0.000213"),  # was "0.000"
        (5e-324, "5.00e-324"),
        (math.inf, "no bound"),
        (math.nan, "no bound"),
    ],
)
def test_printed(epsilon, shown):
    assert epsilon_text(epsilon) == shown


@given(st.floats(0, 1), st.integers(0, 3))
def test_a_probability_is_rounded_up(probability, digits):
    shown = Fraction(percent_text(probability, digits).removesuffix("\u00a0%")) / 100
    exact = Fraction(repr(probability))
    assert exact <= shown < exact + Fraction(1, 10 ** (digits + 2))


def test_no_worst_case_is_printed_by_another_format():
    """A worst case is a bound wherever it stands: all of them go through `epsilon_text`."""
    in_python = r"((?<!below_)(?<!at_)worst(?!_error)\w*|total)(\([^)]*\)|\[[^]]*\])*\)?:\.\d[fg]"
    in_templates = r"%\.\d[fg]\"\|format\([^)]*(worst(?!_error)|total)"
    rounded = re.compile(f"{in_python}|{in_templates}")
    for file in [*SOURCES.rglob("*.py"), *SOURCES.rglob("*.j2")]:
        assert not rounded.search(file.read_text(encoding="utf-8")), file
