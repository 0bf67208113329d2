"""What was promised, wherever it is said: statements, ledger, report, public page, totals."""

import json

import numpy as np
import pytest
from folders import train

from epsilons import Examples, Plan, Run
from epsilons.accounting.printed import epsilon_text
from epsilons.release import (
    Cost,
    OverBudget,
    owner_statement,
    persons,
    publish,
    release_mean,
    releases_of,
    reserved,
    statement_html,
    statement_text,
)
from epsilons.release.total import CombinedRuns
from epsilons.report import write_public_report, write_report

N = 2400
RESERVE = reserved(0.5, 1e-5)


def promised_run(path, clipping="max", owners=None, **changes):
    plan = Plan(
        n=N, sample_rate=0.05, steps=100, noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-5,
        refresh_every=50, levels=32, budgets=(1.0, 4.0), clipping=clipping,
        reserve_mu=RESERVE.mu, reserve_distance=RESERVE.distance, **changes,
    )  # fmt: skip
    budgets = np.where(np.arange(N) % 4 < 2, 1.0, 4.0)
    columns = {} if owners is None else {"owners": owners}
    examples = Examples(ids=[f"id-{k:05d}" for k in range(N)], budgets=budgets, **columns)
    run = Run.create(path, plan, examples)
    train(run, 100)
    return run


@pytest.fixture(scope="module", params=["max", "filtered"])
def run(request, tmp_path_factory):
    owners = np.arange(N) // 2
    return promised_run(tmp_path_factory.mktemp("runs") / "run", request.param, owners)


def test_a_statement_begins_with_what_was_promised(run):
    single = promised_run(run.path.with_name("single"), run.plan.clipping)
    for record, budget in (("id-00000", 1.0), ("id-00002", 4.0)):
        found = owner_statement(single, record)
        (promise,) = (p for p in single.promises if p.budget == budget)
        assert found.promised == promise.at(1e-5)
        assert found.individual <= found.promised <= found.worst_case
        said = statement_text(found)
        asserted = (
            "Promised before training, whatever your record contains: "
            f"ε = {epsilon_text(found.promised)}"
        )
        assert said.index(asserted) < said.index("The worst case of this run")
        assert said.index("The worst case") < said.index("Along the training that took place")
        assert asserted in statement_html(found)
        assert found.to_dict()["promised"] == found.promised
    other = owner_statement(single, "id-00001", delta=1e-7)
    assert other.promised > owner_statement(single, "id-00001").promised
    single.journal.close()


def test_several_records_are_promised_together_by_their_chain(run):
    found = owner_statement(run, "0")
    assert len(found.records) == 2
    assert 2 * run.promises[0].epsilon < found.promised <= found.worst_case
    assert found.individual <= found.promised
    everyone = persons(run, run.epsilons())
    assert everyone.worst_case >= found.promised


def test_realised_is_below_promised_is_below_the_worst_case(run):
    values = run.verify().epsilons.cautious
    most = {promise.budget: promise.epsilon for promise in run.promises}
    limit = np.array([most[budget] for budget in run.examples.budgets])
    assert (values <= limit * (1 + 1e-9)).all()
    assert max(most.values()) == run.plan.worst_case()
    assert run.journal.worst_case(releases=releases_of(run)) <= run.plan.worst_case() * (1 + 1e-9)


def test_beyond_the_reserve_nothing_is_published(run):
    with pytest.raises(OverBudget, match="left of the reserve"):
        release_mean(run, epsilon=0.55)
    half = Cost.of(0.3, 1e-5, draws=1)
    assert half.mu < RESERVE.mu
    release_mean(run, epsilon=0.3)
    with pytest.raises(OverBudget, match="left of the reserve"):
        publish(run, epsilon=0.45)
    # the rest of it: μ's add in squares
    assert releases_of(run) == run.plan.releases
    release_mean(run, epsilon=0.3)  # asked before: costs nothing


def test_the_reserve_is_spent_to_the_last_by_what_it_was_made_for(tmp_path):
    run = promised_run(tmp_path / "run")
    release_mean(run, epsilon=0.5)
    assert run.journal.worst_case(releases=releases_of(run)) == pytest.approx(
        run.plan.worst_case(), rel=1e-9
    )
    run.verify()


def test_public_files_say_what_was_promised_and_not_to_whom(run):
    public = run.path / "public"
    stated = json.loads((public / "plan.json").read_text())
    assert [one["budget"] for one in stated["promises"]] == [1.0, 4.0]
    assert [one["epsilon"] for one in stated["promises"]] == [p.epsilon for p in run.promises]
    checked = Run.checked(run.path)
    page = write_public_report(run.path).read_text()
    assert "Promised before training" in page
    assert "with the budget 1" in page or "budget 1," in page
    checked.journal.close()
    changed = stated | {"promises": [{**stated["promises"][0], "epsilon": 0.5}]}
    (public / "plan.json").write_text(json.dumps(changed))
    try:
        with pytest.raises(ValueError, match="promises"):
            Run.checked(run.path)
    finally:
        (public / "plan.json").write_text(json.dumps(stated, indent=2) + "\n")


def test_the_report_s_first_card_has_the_promises(run):
    page = write_report(Run.checked(run.path)).read_text()
    assert page.index("Promised before training") < page.index("For whom?")


def test_a_total_prices_everyone_on_levels_of_their_own_bound(run):
    alone, releases = CombinedRuns([run]), releases_of(run)
    some = np.arange(0, N, 7)
    np.testing.assert_allclose(
        alone.epsilons([some], 1e-5).values,
        run.epsilons(releases=releases, hold="cautious", only=some).values,
        rtol=2e-6,
    )
    assert alone.worst_case(1e-5) == run.journal.worst_case(releases=releases)


def test_two_runs_are_added_up_at_the_bounds_of_each(tmp_path):
    runs = [promised_run(tmp_path / clipping, clipping) for clipping in ("max", "filtered")]
    one, both = CombinedRuns(runs[:1]), CombinedRuns(runs)
    some = np.array([0, 2])
    alone = one.epsilons([some], 1e-5).values
    found = both.epsilons([some, some], 1e-5).values
    assert (found > alone).all()
    assert found[0] < found[1] < both.worst_case(1e-5)
