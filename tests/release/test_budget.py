import json
import os
import stat
import subprocess
import sys

import pytest

from epsilons.accounting.composition import gaussian_epsilon, gaussian_keeps
from epsilons.release.budget import Budget, Cost, Limit, OverBudget, Spent

ONE = Cost.of(0.1, 1e-5, draws=10)


@pytest.fixture
def budget(tmp_path):
    with Budget(tmp_path / "budget.sqlite") as opened:
        yield opened


def in_its_own_process(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )


def test_a_question_is_charged_before_its_answer_is_drawn(budget):
    seen = []

    def answer():
        with Budget(budget.path) as other:
            seen.append(other.spent.units)
        return {"value": 1}

    assert budget.ask({"q": 1}, ONE, answer) == {"value": 1}
    assert seen == [ONE.units]


def test_the_same_question_gets_the_stored_answer_at_no_cost(budget):
    first = budget.ask({"a": 1, "b": 2}, ONE, lambda: {"value": 1})
    again = budget.ask({"b": 2, "a": 1}, ONE, lambda: pytest.fail("drawn twice"))
    assert again == first
    assert budget.spent == Spent(ONE.units, ONE.draws, 1)


def test_other_questions_add_up(budget):
    for k in range(5):
        budget.ask({"q": k}, ONE, dict)
    assert budget.spent == Spent(5 * ONE.units, 5 * ONE.draws, 5)
    assert budget.spent.epsilon(1e-5) == pytest.approx(
        gaussian_epsilon(5**0.5 * ONE.mu, 1e-5), rel=1e-6
    )


def test_a_question_over_the_limit_is_refused_with_what_is_left_and_costs_nothing(tmp_path):
    with Budget(tmp_path / "b", Limit(0.3, 1e-5)) as budget:
        budget.ask({"q": 1}, Cost.of(0.2, 1e-5, 10), dict)
        before, left = budget.spent, budget.left(1e-5)
        with pytest.raises(OverBudget, match=f"ε = {left:g} at δ = 1e-05"):
            budget.ask({"q": 2}, Cost.of(0.25, 1e-5, 10), lambda: pytest.fail("drawn"))
        assert budget.spent == before
        budget.ask({"q": 3}, Cost.of(left, 1e-5, 10), dict)
        assert 0.29 < budget.spent.epsilon(1e-5) <= 0.3
        assert budget.left(1e-5) < 0.02


def test_the_whole_limit_can_be_asked_for_at_once(tmp_path):
    with Budget(tmp_path / "b", Limit(0.3, 1e-5)) as budget:
        budget.ask({"q": 1}, Cost.of(0.3, 1e-5, 2000), dict)
        assert budget.left(1e-5) == 0
        with pytest.raises(OverBudget, match="ε = 0 at"):
            budget.ask({"q": 2}, Cost.of(0.001, 1e-5, 1), dict)


def test_the_limit_stays_what_it_was(tmp_path):
    Budget(tmp_path / "b", Limit(0.3, 1e-5)).close()
    with Budget(tmp_path / "b") as again:
        assert again.limit == Limit(0.3, 1e-5)
    with pytest.raises(ValueError, match="can't become"):
        Budget(tmp_path / "b", Limit(3.0, 1e-5))


@pytest.mark.parametrize("limit", [(0, 1e-5), (1, 0), (-1, 1e-5), (1, 2), (float("inf"), 1e-5)])
def test_a_limit_is_an_epsilon_and_a_delta(limit):
    with pytest.raises(ValueError, match="the limit's"):
        Limit(*limit)


def test_reading_what_was_spent_makes_no_budget(tmp_path):
    (tmp_path / "private").mkdir()
    assert Spent.of_run(tmp_path) == Spent(0, 0, 0)
    assert not list((tmp_path / "private").iterdir())


def test_only_its_owner_reads_the_file(budget):
    budget.ask({"q": 1}, ONE, dict)
    for file in budget.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_answer_that_fails_leaves_the_charge_and_can_be_drawn_later(budget):
    with pytest.raises(ZeroDivisionError):
        budget.ask({"q": 1}, ONE, lambda: 1 / 0)
    assert budget.spent.units == ONE.units
    assert budget.entries()[0].answer is None
    assert budget.ask({"q": 1}, ONE, lambda: {"value": 2}) == {"value": 2}
    assert budget.spent.units == ONE.units


def test_of_two_that_draw_at_once_one_answer_is_kept(budget):
    def slow():
        with Budget(budget.path) as other:
            assert other.ask({"q": 1}, ONE, lambda: {"value": "fast"}) == {"value": "fast"}
        return {"value": "slow"}

    assert budget.ask({"q": 1}, ONE, slow) == {"value": "fast"}
    assert budget.spent.questions == 1


KILLED = """
import os, signal, sys
from epsilons.release.budget import Budget, Cost
Budget(sys.argv[1]).ask({"q": 1}, Cost.of(0.1, 1e-5, draws=10),
                        lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_killed_between_charge_and_answer_it_is_charged_and_nothing_is_lost(budget):
    budget.ask({"q": 0}, ONE, lambda: {"value": 0})
    assert in_its_own_process(KILLED, budget.path).returncode == -9
    assert budget.spent.units == 2 * ONE.units
    assert [entry.answer for entry in budget.entries()] == [{"value": 0}, None]
    assert budget.ask({"q": 1}, ONE, lambda: {"value": 1}) == {"value": 1}
    assert budget.spent.units == 2 * ONE.units


CROWD = """
import os, sys
from epsilons.release.budget import Budget, Cost, OverBudget
path, children = sys.argv[1], []
cost = Cost.of(0.1, 1e-5, draws=10)
for k in range(100):
    child = os.fork()
    if child == 0:
        try:
            Budget(path).ask({"q": k}, cost, lambda: {"value": k})
            os._exit(0)
        except OverBudget:
            os._exit(3)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_a_hundred_processes_at_once_spend_exactly_what_there_is(tmp_path):
    with Budget(tmp_path / "b", Limit(0.6, 1e-5)) as budget:
        shown = in_its_own_process(CROWD, budget.path)
        codes = json.loads(shown.stdout)
        assert set(codes) == {0, 3}, shown.stderr
        served = codes.count(0)
        assert budget.spent == Spent(served * ONE.units, served * ONE.draws, served)
        assert len({entry.answer["value"] for entry in budget.entries()}) == served
        one_more = Spent((served + 1) * ONE.units, (served + 1) * ONE.draws, served + 1)
        assert gaussian_keeps(0.6, 1e-5, budget.spent.releases.mu, budget.spent.releases.distance)
        assert not gaussian_keeps(0.6, 1e-5, one_more.releases.mu, one_more.releases.distance)


def test_the_budget_survives_a_new_process(budget):
    budget.ask({"q": 1}, ONE, lambda: {"value": 1})
    code = (
        "import sys; from epsilons.release.budget import Budget; print(Budget(sys.argv[1]).spent)"
    )
    assert str(ONE.units) in in_its_own_process(code, os.fspath(budget.path)).stdout
