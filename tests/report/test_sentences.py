from types import SimpleNamespace

import numpy as np

from epsilons import Examples
from epsilons.accounting.results import Epsilons
from epsilons.analysis import group_summary, loss_relation
from epsilons.report import sentences


def epsilons(values, worst_case):
    return Epsilons(
        values=np.asarray(values), delta=1e-5, method="tight", kind="exact", worst_case=worst_case
    )


def test_no_share_is_said_to_be_above_the_worst_case():
    few = sentences.histogram(SimpleNamespace(epsilons=epsilons(np.linspace(0.1, 2, 100), 2.0)))
    many = sentences.histogram(SimpleNamespace(epsilons=epsilons([1.0] * 80 + [2.0] * 20, 2.0)))
    assert "10 % above 1.8" in few
    assert "above" not in many
    assert "20.0\u00a0% are at the worst case" in many


def test_a_falling_epsilon_is_told_as_lower():
    falling = loss_relation(epsilons([3.0, 2.0, 1.0], 5.0), [1.0, 10.0, 100.0])
    assert "an ε lower by 1.00." in sentences.loss(falling)


def test_a_group_hardly_above_average_is_not_at_risk():
    groups = np.repeat(["low", "middle", "high"], 200)
    found = epsilons(np.repeat([1.0, 1.18, 1.3], 200), 5.0)
    people = Examples(ids=range(600), groups={"g": groups})
    main = group_summary(found, people, None, "g")
    assert main.rows[1].interval.low > found.values.mean()
    risky = sentences.at_risk(SimpleNamespace(main=main, private=True, epsilons=found))
    assert [row.group for row in risky] == ["high"]
