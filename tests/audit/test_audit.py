"""The whole: audit of a plan, of a run by the command line, and what the reports show of it."""

import json
import stat
from unittest import mock

import mutants
import numpy as np
import pytest
import torch
from loops import LOSS, data, network
from typer.testing import CliRunner

from epsilons import Plan, job
from epsilons.audit import SideCar, audit, auditing, check_price, epsilon_below
from epsilons.audit.auditing import WORST
from epsilons.audit.curve import History
from epsilons.audit.fresh import canary_run, strata
from epsilons.cli import app, main
from epsilons.report import write_public_report, write_report
from epsilons.runs import Run
from epsilons.settings import Settings

SETTINGS = dict(data="digits", model="logistic", take=120, lr=0.5, noise_multiplier=0.8, delta=1e-4,
                max_grad_norm=1.0, sample_rate=0.2, steps=12, clipping="individual",
                refresh_every=4, seed=3)  # fmt: skip
PLAN = Plan(n=40, sample_rate=0.2, steps=12, noise_multiplier=0.8, max_grad_norm=1.0, delta=1e-4,
            refreshes_per_epoch=0)  # fmt: skip


def build():
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.fixture(scope="module")
def found():
    return audit(build, LOSS, data(), PLAN, seconds=1, canaries=1_500, seed=5)


def test_right_code_is_kept_and_the_bound_comes_near_the_claim(found):
    assert found.outcome == "kept", found.reasons
    worst = found.strata[0]
    assert worst.name == WORST
    assert 0.5 * worst.claim < worst.bounds.best
    assert worst.verdict <= worst.claim == pytest.approx(PLAN.worst_case())
    assert found.runs == 2
    assert {check.instrument for check in found.checks} >= {"neighbours", "noise", "coins", "keys"}


def test_the_texts_promise_nothing(found):
    said = json.dumps(found.to_dict(), ensure_ascii=False)
    assert "We tried to contradict the guarantee." in found.sentence
    assert "A lower bound never proves privacy" in found.sentence
    assert "audited ε" not in said
    assert "verified" not in said


def test_too_few_trials_are_inconclusive():
    plan = Plan.from_dict({**PLAN.to_dict(), "noise_multiplier": 4.0})
    few = audit(build, LOSS, data(), plan, seconds=0.1, canaries=100, seed=5)
    assert few.outcome == "inconclusive"
    assert "too few trials" in few.reasons[0]


def test_half_of_the_noise_is_contradicted_by_every_kind_of_look():
    with mutants.noise_times(0.5):
        found = audit(build, LOSS, data(), PLAN, seconds=0.1, canaries=1_500, seed=5)
    assert found.outcome == "contradicted"
    assert found.strata[0].outcome == "contradicted"
    assert "and could" in found.sentence


ADAPTIVE = {"initial_clipbound": 1.0, "unclipped_num_std": 10.0}


def test_estimates_are_no_claims_and_are_listed():
    plan = Plan(n=40, sample_rate=0.2, steps=12, noise_multiplier=0.8, max_grad_norm=1.0,
                delta=1e-4, refresh_every=4)  # fmt: skip
    assert [group.name for group in strata(plan, 1_000)] == [WORST]
    exact = Plan.from_dict({**plan.to_dict(), "refresh_every": 1})
    assert len(strata(exact, 1_000)) == 3
    individual = Plan.from_dict({**plan.to_dict(), "clipping": "individual"})
    assert "growing" in strata(individual, 1_000)[-1].name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clipping": "none", "noise_multiplier": 0}, "no claim"),
        ({"steps": None, "epochs": None, "refresh_every": 4, "refreshes_per_epoch": None}, "steps"),
        ({"budgets": (1.0, 2.0)}, "without budgets"),
        ({"unit": "owner", "max_records_per_owner": 2}, "unit='record'"),
        ({"max_grad_norm": "adaptive", "adaptive": ADAPTIVE}, "a bound that stays"),
    ],
)
def test_plans_that_cannot_be_audited_are_refused(changes, said):
    plan = Plan.from_dict({**PLAN.to_dict(), **changes})
    with pytest.raises(ValueError, match=said):
        audit(build, LOSS, data(), plan)


def test_canaries_have_the_gradients_that_are_prescribed(tmp_path):
    """Of the largest stratum all that is drawn adds its bound; phases keep their rates."""
    plan = Plan.from_dict({**PLAN.to_dict(), "phases": [(6, {"noise_multiplier": 1.6})]})
    found = canary_run(plan, strata(plan, 200), tmp_path / "run", seed=1)
    np.testing.assert_allclose(found.added[WORST][:6], 1 / 0.8, rtol=3e-4)
    np.testing.assert_allclose(found.added[WORST][6:], 1 / 1.6, rtol=3e-4)
    assert found.drawn.mean() == pytest.approx(0.2, abs=0.05)
    assert found.histories[WORST].steps.tolist() == [6, 6]


def test_a_side_car_has_one_weight_for_each_canary():
    car = SideCar(5)
    car.set_norms([1, 2, 3, 4, 5])
    car(torch.tensor([1, 3])).sum().backward()
    np.testing.assert_array_equal(car.gradient, [0, 2, 0, 4, 0])
    with pytest.raises(ValueError, match="at least one"):
        SideCar(0)


def test_a_price_that_is_too_low_is_contradicted():
    history = History([0.5, 1.0], 0.1, [50, 50])
    exact = epsilon_below(history, 1e-5)
    assert check_price(history, exact * 1.001, 1e-5).outcome == "kept"
    found = check_price(history, exact * 0.99, 1e-5)
    assert found.outcome == "contradicted"
    assert "cost at least" in found.reason


def test_many_norms_are_priced_a_little_lower_and_never_higher():
    rng = np.random.default_rng(2)
    history = History(rng.uniform(0.1, 1, 100), 0.1, 1)
    exact = epsilon_below(history, 1e-5, points=2**15)
    found = check_price(history, np.inf, 1e-5)
    assert 0.95 * exact < found.value <= exact * (1 + 1e-9)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return job.train(Settings.of(SETTINGS), tmp_path_factory.mktemp("audited") / "run").path


def called(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_the_verb_writes_a_private_file_and_the_reports_show_it(run):
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    result = called(run, "--seconds", "1", "--canaries", "3000", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["outcome"]) == (0, "kept"), found["reasons"]
    assert found["skipped"] == []  # the seeded run came out the same again
    written = run / "private" / "audit.json"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert {file: file.read_bytes() for file in before} == before
    page = write_report(Run.open(run)).read_text(encoding="utf-8")
    assert found["sentence"] in page
    assert "growing from" in page
    public = write_public_report(run).read_text(encoding="utf-8")
    assert found["sentence"] in public
    part = json.loads((run / "public" / "audit.json").read_text(encoding="utf-8"))
    assert {check["instrument"] for check in part["checks"]} == {"noise", "coins", "keys"}


@pytest.mark.parametrize(("outcome", "code"), [("contradicted", 1), ("inconclusive", 3)])
def test_the_exit_code_says_what_came_of_it(run, found, outcome, code):
    class Found:
        def to_dict(self):
            return {**found.to_dict(), "outcome": outcome}

    with mock.patch.object(job, "audit", return_value=Found()):
        result = called(run)
    assert result.exit_code == code
    assert "We tried to contradict" in result.stdout
    if outcome == "contradicted":  # by what is private: the public half says nothing of it
        write_public_report(run)
        assert not (run / "public" / "audit.json").exists()


def test_a_job_of_several_processes_is_refused_without_a_traceback(run, monkeypatch, capsys):
    monkeypatch.setenv("MKL_CBWR", "AUTO")  # as `main` does, until the end of the test
    monkeypatch.setattr("sys.argv", ["epsilons", "audit", str(run)])
    monkeypatch.setattr(auditing, "joined", lambda: mock.Mock(count=2))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "this job has 2" in said
    assert "Traceback" not in said


def test_runs_without_settings_are_refused_with_the_way_out(tmp_path):
    from epsilons.training import fit

    model, optimizer = build()
    fit(model, optimizer, LOSS, data(), PLAN, out=tmp_path / "own", seed=1)
    with pytest.raises(ValueError, match=r"epsilons\.audit\.audit"):
        job.audit(tmp_path / "own")
