"""What the run folder states is what its journal says, or it is refused."""

import dataclasses
import json
import re
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from epsilons import Examples, Plan, Run
from epsilons.examples import packed
from epsilons.journal import journal as journal_module
from epsilons.journal import opening, run_entries
from epsilons.journal.chain import Chain
from epsilons.randomness import Randomness
from epsilons.runs import publish_plan

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


def test_a_run_says_where_noise_and_coins_come_from(run, tmp_path):
    assert run.journal.randomness == Randomness("seeded", "seeded")
    assert stated(run)["randomness"] == {"noise": "seeded", "coins": "seeded"}
    other = Run.create(tmp_path / "other", PLAN, Examples.numbered(5))  # a loop of one's own
    assert other.journal.randomness == Randomness("unknown", "unknown")
    assert not other.journal.randomness.secret


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
        lambda facts: facts.update(randomness=Randomness.of_fit(None).to_dict()),
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


def test_a_crash_between_a_restart_and_the_public_plan_is_no_change(run):
    for step in (30, 20):
        run.journal.restart(step)
        assert Run.checked(run.path).verify().steps == step
    publish_plan(run)
    assert Run.checked(run.path)
    assert stated(run)["repeated_steps"] == 20


def test_a_plan_published_while_a_reader_opens_the_run_is_read_with_its_journal(run, monkeypatch):
    look = journal_module.Journal.open

    def restarted_meanwhile(*arguments, **options):
        journal = look(*arguments, **options)
        monkeypatch.undo()
        run.journal.restart(20)
        publish_plan(run)
        return journal

    monkeypatch.setattr(journal_module.Journal, "open", restarted_meanwhile)
    reader = Run.checked(run.path)
    assert reader.journal.steps_charged == 20
    charge(run, 20, 40)
    run.journal.restart(0)
    publish_plan(run)
    assert reader.verify().steps == 20


def test_steps_charged_again_are_in_what_is_published(run):
    before = stated(run)
    assert before["repeated_steps"] == 0
    run.journal.restart(10)
    charge(run, 10, 30)
    assert refused(run)  # the public half does not know yet
    publish_plan(run)
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


def people():
    return Examples(
        ids=["i0", "i1", "i2", "i3", "i4"],
        owners=["ann", "bea", "bea", "cyd", "dan"],
        groups={"town": ["x", "x", "y", "y", "y"]},
        digests=[b"0a", b"1a", b"2a", b"3a", b"4a"],
    )


def finished(path):
    """A sealed run with owners, groups, digests and outcomes; its journal is closed."""
    run = Run.create(path, PLAN, people())
    charge(run, 0, 40)
    held_out = Examples(ids=["h0", "h1"], owners=["eve", "ann"]).with_outcomes([3.0, 4.0], [1, 0])
    run.record_outcomes([0.1, 0.2, 0.3, 0.4, 0.5], [True, True, False, True, True], held_out)
    run.journal.seal()
    run.journal.close()
    return path


def test_what_is_known_of_the_examples_comes_back(tmp_path):
    run = Run.checked(finished(tmp_path / "run"))
    for name in ("ids", "owners", "digests"):
        np.testing.assert_array_equal(getattr(run.examples, name), getattr(people(), name))
    np.testing.assert_array_equal(run.examples.groups["town"], people().groups["town"])
    assert run.examples.losses.tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert run.examples.correct.tolist() == [True, True, False, True, True]
    assert run.test.owners.tolist() == ["eve", "ann"]
    assert run.test.losses.tolist() == [3.0, 4.0]


def rolled(examples, name):
    """The same examples with one column moved on by one."""
    if name in examples.groups:
        return replace(examples, groups={name: np.roll(examples.groups[name], 1)})
    return replace(examples, **{name: np.roll(getattr(examples, name), 1)})


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("name", ["owners", "town", "digests", "losses", "correct", "held out"])
def test_a_column_that_was_rolled_is_found(tmp_path, name, sealed):
    """examples.npz stood beside the chain: rolled owners had another's ε, and verify said OK."""
    path = finished(tmp_path / "run")
    anchor, file = path / "public" / "anchor.json", path / "private" / "journal.sqlite"
    if not sealed:
        anchor.write_text(json.dumps({**json.loads(anchor.read_text()), "seal": None}))
    run = Run.open(path)
    if name == "held out":
        blob = ("norms", "outcomes", packed(rolled(run.test, "owners")))
    elif name in ("losses", "correct"):
        outcomes = Examples(run.examples.ids, losses=run.examples.losses,
                            correct=run.examples.correct)  # fmt: skip
        blob = ("indices", "outcomes", packed(rolled(outcomes, name), ids=False))
    else:
        blob = ("norms", "open", packed(rolled(people(), name), ids=False))
    with sqlite3.connect(file) as journal:
        journal.execute(f"UPDATE entry SET {blob[0]} = ? WHERE kind = ?", (blob[2], blob[1]))
    journal.close()
    assert Run.open(path).examples  # it can be read, and is not what was written
    with pytest.raises(ValueError, match=r"(is not the file that was sealed|was changed).*trusted"):
        Run.checked(path)
    with pytest.raises(ValueError, match=r"is not the file that was sealed|was changed"):
        Run.open(path).verify()


def test_outcomes_recorded_again_after_a_crash_are_the_last_ones(tmp_path):
    run = Run.create(tmp_path / "run", PLAN, people())
    charge(run, 0, 40)
    run.record_outcomes([9.0] * 5)
    assert Run.checked(run.path).examples.losses.tolist() == [9.0] * 5
    run.record_outcomes([1.0] * 5)
    again = Run.checked(run.path)
    assert again.examples.losses.tolist() == [1.0] * 5
    assert again.examples.correct is again.test is None


def of_format_1(path):
    """A run as earlier versions left it: no format number, examples beside the journal."""
    run = Run.create(path, PLAN, people(), seed=3)
    opening = dict(run_entries.opening(run.journal).facts)
    del opening["format"]
    ids = run.journal.ids.tobytes()
    run.journal.close()
    for file in ("private/journal.sqlite", "public/anchor.json"):
        (path / file).unlink()
    Chain.create(
        path / "private" / "journal.sqlite", path / "public" / "anchor.json", "open", opening, ids
    ).close()
    for name, examples in (("examples", people()), ("test", Examples.numbered(2))):
        (path / "private" / f"{name}.npz").write_bytes(packed(examples))
    return path


def test_a_run_of_an_earlier_version_is_readable(tmp_path):
    run = Run.checked(of_format_1(tmp_path / "run"))
    assert run_entries.opening(run.journal).format == 1
    assert run.examples.owners.tolist() == people().owners.tolist()
    assert len(run.test) == 2
    file = run.path / "private" / "examples.npz"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"examples\.npz is not there or damaged; put it back"):
        assert Run.checked(run.path).examples


def test_a_run_of_a_later_version_is_refused(tmp_path, monkeypatch):
    known = opening.FORMAT
    monkeypatch.setattr(opening, "FORMAT", known + 1)
    Run.create(tmp_path / "run", PLAN, people()).journal.close()
    monkeypatch.undo()
    refused = rf"its format is {known + 1}, and this version .* reads up to {known}"
    with pytest.raises(ValueError, match=refused):
        Run.open(tmp_path / "run")


def test_more_records_of_one_owner_than_promised_are_refused_at_the_door(tmp_path):
    promised = dataclasses.replace(PLAN, max_records_per_owner=2)
    for owners, why in [(None, "have no owners"), (list("abbbc"), "more records than")]:
        with pytest.raises(ValueError, match=why) as refused:
            Run.create(tmp_path / "run", promised, Examples(ids=range(5), owners=owners))
        assert not re.search("3|'b'", str(refused.value))  # neither who nor how many
        assert not (tmp_path / "run").exists()
    run = Run.create(tmp_path / "run", promised, Examples(ids=range(5), owners=list("abbcc")))
    assert Run.open(run.path).plan.max_records_per_owner == 2


def test_a_run_from_before_records_were_limited_can_be_read(run):
    """It promises nothing per person."""
    facts = stated(run)
    del facts["plan"]["max_records_per_owner"]
    (run.path / "public" / "plan.json").write_text(json.dumps(facts))
    assert Run.checked(run.path).plan.max_records_per_owner is None
