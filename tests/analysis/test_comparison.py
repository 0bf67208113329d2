import numpy as np
import pytest
from made_runs import make_run
from scipy.stats import spearmanr

from epsilons.analysis import bounds_of_runs, compare


def test_a_run_differs_from_itself_in_nothing(followed):
    found = compare(followed, followed, "class")
    assert found.differences == {}
    assert found.rank_correlation == pytest.approx(1.0)
    assert found.left.numbers() == found.right.numbers()


def test_differences_of_plans_and_ranks_are_named(followed, individual):
    found = compare(followed, individual, "class")
    assert found.differences == {"clipping": ("max", "individual")}
    expected = spearmanr(followed.epsilons().values, individual.epsilons().values).statistic
    assert found.rank_correlation == pytest.approx(expected)
    assert found.shared == 400


def test_a_run_that_is_not_private_has_an_attack_and_no_epsilon(followed, tmp_path):
    bare = make_run(tmp_path / "bare", clipping="none")
    found = compare(followed, bare, "class")
    numbers = found.right.numbers()
    assert (found.left.private, found.right.private) == (True, False)
    assert numbers["worst-case ε"] == np.inf
    assert numbers["Pearson of ε and log loss"] is None
    assert 0 <= numbers["attack success"] <= 1
    assert found.rank_correlation is None


def test_runs_of_several_bounds_are_ordered_by_bound(tmp_path):
    runs = [make_run(tmp_path / str(c), n=60, max_grad_norm=c) for c in (2.0, 0.5)]
    small, large = bounds_of_runs(runs, "class")
    assert (small.max_grad_norm, large.max_grad_norm) == (0.5, 2.0)
    assert set(small.group_means) == {"ant", "bee", "cat"}
    assert 0 < small.test_accuracy < 1
