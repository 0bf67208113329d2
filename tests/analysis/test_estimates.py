import numpy as np
import pytest
from made_runs import make_run

from epsilons import individual_epsilons
from epsilons.analysis import Agreement, estimate_error, fewer_refreshes


def test_agreement_is_its_definition():
    rng = np.random.default_rng(2)
    exact = rng.random(200)
    estimated = exact + 0.1 * rng.normal(size=200) + 0.05
    found = Agreement.of(estimated, exact)
    assert found.pearson == pytest.approx(np.corrcoef(estimated, exact)[0, 1])
    assert found.mean_error == pytest.approx(np.abs(estimated - exact).mean())
    assert found.worst_error == pytest.approx(np.abs(estimated - exact).max())
    assert found.bias == pytest.approx((estimated - exact).mean())


def test_error_is_between_the_runs_estimate_and_every_step(followed):
    found = estimate_error(followed)
    chosen, _ = followed.journal.followed()
    assert found.reference == "every step"
    assert found.estimated == pytest.approx(followed.epsilons().values[chosen])
    assert found.exact == pytest.approx(followed.journal.followed_epsilons().values)
    # norms fall, so those of the last refresh are too high
    assert found.agreement.bias > 0
    assert found.agreement.pearson > 0.98


def test_both_readings_are_compared_with_every_step(followed):
    found, chosen = estimate_error(followed), followed.journal.followed()[0]
    exact, cautious = found.exact, followed.epsilons().cautious[chosen]
    assert found.cautious == Agreement.of(cautious, exact)
    assert found.agreement.mean_error < found.cautious.mean_error
    assert found.cautious.below <= found.agreement.below
    a = Agreement.of(np.array([0.98, 0.995, 3.0]), np.array([1.0, 1.0, 2.0]))
    assert (a.below, a.lowest) == (pytest.approx(1 / 3), pytest.approx(0.02))


def test_norms_that_do_not_move_need_no_second_refresh(tmp_path):
    run = make_run(tmp_path / "run", n=50, follow=20, moving=0.0)
    for row in estimate_error(run).others:
        assert row.agreement.worst_error < 1e-9


def test_other_schedules_hold_the_followed_norms(followed):
    _, norms = followed.journal.followed()
    row = next(r for r in estimate_error(followed).others
               if (r.schedule, r.refreshes) == ("uniform", 2))  # fmt: skip
    plan = followed.plan
    by_hand = individual_epsilons(
        norms[[0, 20]], [11, 29], sample_rate=plan.sample_rate, noise_std=plan.noise_std,
        max_grad_norm=plan.max_grad_norm, delta=plan.delta, levels=plan.levels,
    )  # fmt: skip
    expected = Agreement.of(by_hand.values, followed.journal.followed_epsilons().values)
    assert row.agreement.mean_error == pytest.approx(expected.mean_error)


def test_fewer_refreshes_are_never_better_while_norms_fall(followed):
    errors = [row.agreement.mean_error for row in fewer_refreshes(followed).others]
    assert errors == sorted(errors)
    assert errors[0] > 0


def test_nothing_is_estimated_under_individual_clipping(individual):
    for look in (estimate_error, fewer_refreshes):
        with pytest.raises(ValueError, match="leaves no estimates"):
            look(individual)


def test_without_followed_examples_there_is_nothing_exact(tmp_path):
    with pytest.raises(ValueError, match="followed"):
        estimate_error(make_run(tmp_path / "run", n=20))
