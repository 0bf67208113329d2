"""What the run folder states is what its journal says, or it is refused."""

import json
import sqlite3

import numpy as np
import pytest

from epsilons import Examples, Plan, Run

PLAN = Plan(
    n=5, sample_rate=0.2, steps=40, noise_multiplier=1.5, max_grad_norm=1.0, delta=1e-5,
    refresh_every=10, phases=((20, {"noise_multiplier": 2.5}),),
)  # fmt: skip


def charge(run, first, last):
    for step in range(first, last, 10):
        run.journal.record(step, np.full(5, 0.5))
        run.journal.charge(step, step + 9)


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "run", PLAN, Examples.numbered(5), seed=3)
    charge(run, 0, 40)
    return run


def stated(run):
    return json.loads((run.path / "public" / "plan.json").read_text(encoding="utf-8"))


def refused(run):
    """Whether handing out figures, and verifying, are both refused."""
    with pytest.raises(ValueError, match=r"plan\.json") as found:
        Run.checked(run.path)
    assert "can be trusted" in str(found.value)
    with pytest.raises(ValueError, match=r"plan\.json"):
        Run.open(run.path).verify()
    return True


def test_an_untouched_run_is_what_it_states(run):
    assert Run.checked(run.path).seed == 3
    assert run.verify().steps == 40


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["plan"].update(noise_multiplier=9.0),
        lambda facts: facts["plan"].update(delta=1e-3),
        lambda facts: facts.update(worst_case=dict.fromkeys(facts["worst_case"], 0.01)),
        lambda facts: facts["worst_case"].update(tight=0.999 * facts["worst_case"]["tight"]),
        lambda facts: facts["worst_case"].update(rdp=9.0),
        lambda facts: facts["worst_case"].pop("tight"),
        lambda facts: facts.update(worst_case=None),
        lambda facts: facts.update(seed=None),
        lambda facts: facts.update(repeated_steps=1),
        lambda facts: facts.pop("plan"),
        lambda facts: facts.update(plan="text"),
    ],
)
def test_a_public_plan_that_was_changed_is_found(run, change):
    facts = stated(run)
    change(facts)
    (run.path / "public" / "plan.json").write_text(json.dumps(facts))
    assert refused(run)


def test_a_public_plan_that_is_gone_or_no_plan_is_found(run):
    file = run.path / "public" / "plan.json"
    for content in ("", "{", "[]", "3"):
        file.write_text(content)
        assert refused(run)
    file.unlink()
    assert refused(run)


def test_a_worst_case_priced_more_loosely_by_another_version_is_no_change(run):
    facts = stated(run)
    facts["worst_case"]["rdp"] *= 1.0005
    (run.path / "public" / "plan.json").write_text(json.dumps(facts))
    assert Run.checked(run.path)


def test_norms_that_were_changed_are_found_before_figures_are_handed_out(run):
    run.journal.seal()
    with sqlite3.connect(run.path / "private" / "journal.sqlite") as journal:
        journal.execute("UPDATE entry SET norms = zeroblob(40) WHERE kind = 'refresh'")
    journal.close()
    assert Run.open(run.path).epsilons().values.max() < 0.01
    with pytest.raises(ValueError, match=r"is not the file that was sealed .* can be trusted"):
        Run.checked(run.path)


def test_steps_charged_again_are_in_what_is_published(run):
    before = stated(run)
    assert before["repeated_steps"] == 0
    run.journal.restart(10)
    charge(run, 10, 30)
    assert refused(run)  # the public half does not know yet
    run.publish_plan()
    now = stated(run)
    assert now["repeated_steps"] == 30
    # twice 10 steps of the first phase and 20 of the second, with the 10 that are to come
    longer = Plan(**{**PLAN.to_dict(), "steps": 70, "epochs": None, "phases": ((30, {
        "noise_multiplier": 2.5}),)})  # fmt: skip
    for method, worst in now["worst_case"].items():
        assert worst == pytest.approx(longer.worst_case(method), rel=1e-12)
        assert worst > 1.1 * before["worst_case"][method]
    charge(run, 30, 40)
    assert run.epsilons().worst_case == pytest.approx(now["worst_case"]["tight"], rel=1e-9)
    assert Run.checked(run.path).journal.repeated == 30
