"""Why one ε for all records of a person is not had by giving each of m records ε/m.

ε falls more slowly than the noise multiplier rises. One coin for all records of a person, and one
bound for the sum of their gradients (`Plan(unit="owner")`), is what holds.
"""

from __future__ import annotations

from epsilons.accounting import checks
from epsilons.accounting.composition import gaussian_epsilon, gaussian_mu
from epsilons.accounting.plan import Plan


def divided_epsilon(epsilon: float, records: int, delta: float) -> float:
    """What `records` of one person cost together, if each was given `epsilon` / `records`.

    Of a Gaussian mechanism that uses everyone: m records move it by m times as much as one. With
    sampling it is more. `delta`: in (0, 1). ValueError for values out of range.

    >>> for m in (1, 2, 5):
    ...     print(m, round(divided_epsilon(1.0, m, delta=1e-5), 4))
    1 1.0
    2 1.0673
    5 1.1595
    """
    checks.whole("records", records, least=1)
    mu = gaussian_mu(float(checks.positive("epsilon", epsilon)) / records, delta)
    return gaussian_epsilon(records * mu, delta)


def expect_drawn_together(plan: Plan, what: str) -> None:
    """ValueError if the plan is per person, and `what` would draw or clip single records."""
    if plan.records_at_once > 1:
        raise ValueError(
            f"unit='owner': one coin draws all records of a person, and {what}. To give each of m "
            "records ε/m instead is no ε per person: halves of ε = 1 cost 1.068 together, fifths "
            "1.160. Use PrivateTraining, fit or `epsilons train`, which draw and clip owners"
        )
