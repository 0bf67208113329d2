import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from folders import make_run, train

from epsilons import Examples
from epsilons.accounting.composition import gaussian_epsilon
from epsilons.accounting.printed import epsilon_text
from epsilons.randomness import Randomness
from epsilons.release import (
    owner_statement,
    release_mean,
    statement_html,
    statement_text,
)
from epsilons.release.owner import chain_rule, detection


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three records are Ann's, the others have an owner each."""
    owners = ["ann"] * 3 + [f"owner-{k}" for k in range(117)]
    return make_run(tmp_path_factory.mktemp("runs") / "run", n=120, owners=owners)


@pytest.fixture(scope="module")
def before(run):
    """Statements of one record and of three before anything was published, and after."""
    return owner_statement(run, "owner-0"), owner_statement(run, "ann")


@pytest.fixture(scope="module")
def after(run, before):
    release_mean(run, epsilon=0.5)
    return owner_statement(run, "owner-0"), owner_statement(run, "ann")


def test_a_record_alone_has_its_own_epsilon_and_the_runs_worst_case(run, before):
    one, _ = before
    assert one.individual == one.records[0].epsilon
    # The search for ε ends within 1e-11 of it, wherever it began.
    assert one.individual == pytest.approx(run.epsilons().cautious[3], rel=2e-11)
    assert one.worst_case == one.training_worst_case == run.plan.worst_case()
    assert (one.kind, one.steps, one.delta) == ("estimate", 100, 1e-5)


def test_steps_that_were_repeated_are_guaranteed_for_and_told(tmp_path):
    run = make_run(tmp_path / "run", n=40)
    before = owner_statement(run, "id-00007")
    assert "repeated" not in statement_text(before)
    run.journal.restart(50)
    train(run, 50)
    now = owner_statement(run, "id-00007")
    assert now.worst_case == now.training_worst_case == run.journal.worst_case()
    assert now.worst_case == pytest.approx(run.epsilons().worst_case, rel=1e-9)
    assert now.worst_case > 1.2 * before.worst_case
    assert (now.steps, now.to_dict()["repeated_steps"]) == (100, 50)
    assert "100 steps of 100 and 50 more that were repeated" in statement_text(now)


def test_publications_raise_every_bound_by_less_than_they_cost(before, after):
    for then, now in zip(before, after, strict=True):
        assert then.worst_case < now.worst_case
        assert then.individual < now.individual < now.worst_case
        for old, new in zip(then.records, now.records, strict=True):
            assert old.epsilon < new.epsilon < old.epsilon + 0.52
    assert [now.releases for now in after] == [1, 1]


def test_several_records_are_bounded_by_more_than_their_sum(before):
    _, ann = before
    assert len(ann.records) == 3
    assert sum(record.epsilon for record in ann.records) < ann.individual < ann.worst_case
    assert ann.worst_case > 3 * ann.training_worst_case


@pytest.mark.parametrize("mus", [[0.3], [0.2, 0.2], [0.1, 0.3, 0.2]])
def test_the_chain_rule_spends_exactly_the_stated_delta(mus):
    asked = []

    def profile(mu):
        def at(delta):
            asked.append((delta, gaussian_epsilon(mu, delta)))
            return asked[-1][1]

        return at

    total = chain_rule([profile(mu) for mu in mus], 1e-5)
    spent, so_far = 0.0, 0.0
    for delta, epsilon in asked:
        spent += delta * math.exp(so_far)
        so_far += epsilon
    assert total == pytest.approx(so_far)
    assert spent == pytest.approx(1e-5)
    # Records that are moved together move a Gaussian by the sum of their distances.
    assert total >= gaussian_epsilon(sum(mus), 1e-5)


def test_very_many_records_have_no_bound():
    assert chain_rule([lambda d: 10.0] * 100, 1e-5) == math.inf


@pytest.mark.parametrize(("epsilon", "expected"), [(0.0, 0.01001), (1.0, 0.02719), (9.0, 1.0)])
def test_detection_is_bounded_by_e_to_the_epsilon_times_false_alarms_plus_delta(epsilon, expected):
    assert detection(epsilon, 1e-5) == pytest.approx(expected, abs=1e-5)
    assert detection(math.inf, 1e-5) == 1


def test_the_text_says_what_it_includes_and_what_it_can_not_know(after):
    """It once claimed "everything else drawn from the data", and saw one folder."""
    text = statement_text(after[0])
    assert "everything" not in text
    assert "publications in this run's folder" in text
    assert "Not included: other runs on the same data" in text
    assert "epsilons total" in text


def test_the_text_guarantees_the_worst_case_only(after):
    one, _ = after
    text = statement_text(one)
    guarantee, observed = text.split("What this training did")
    worst, mine = map(epsilon_text, (one.worst_case, one.individual))
    assert "false-alarm rate of 1 %" in guarantee
    assert "all intermediate models" in guarantee
    assert worst in guarantee
    assert mine not in guarantee
    assert mine in observed
    assert "models held fixed" in observed
    assert "not a guarantee" in observed
    assert one.date in text


def test_several_records_together_come_first_and_are_per_person(after):
    text = statement_text(after[1])
    guarantee, rest = text.split("What this training did")
    assert "worst case per person" in guarantee
    assert "per record" not in guarantee
    together = rest.split("Figures")[1]
    assert together.index("per person, all 3 records together") < together.index("per record")
    assert together.index("per record: worst case") < together.index("record id-00000")
    assert (after[0].to_dict()["per"], after[1].to_dict()["per"]) == ("record", "person")
    assert "worst case per record" in statement_text(after[0])


def test_a_bound_of_100_percent_is_called_no_meaningful_guarantee(after):
    """A household of 6 was told: nobody detects it with a probability above 100.00 %."""
    _, ann = after
    assert ann.meaningful
    assert "meaningful" not in statement_text(ann)
    text = statement_text(replace(ann, worst_case=17.63, individual=17.2))
    assert "no meaningful guarantee for your 3 records together" in text
    assert "nobody who sees" not in text
    assert "which rules nothing out" in text
    assert replace(ann, worst_case=17.63).to_dict()["detection"]["meaningful"] is False


def test_an_estimate_is_called_approximate_and_others_are_not(after):
    one, _ = after
    assert "approximate" in statement_text(one)
    assert "cautious of two readings" in statement_text(one)
    exact = statement_text(replace(one, kind="exact"))
    assert "approximate" not in exact
    assert "cautious" not in exact
    assert one.to_dict()["detection"]["along_trajectory_is"] == "approximate"


def test_without_secret_noise_the_statement_is_against_those_who_can_not_compute_it(after):
    one, _ = after
    assert "nobody who sees the model" in statement_text(one)
    for source in (Randomness.of_fit(7), Randomness("torch", "torch"), Randomness()):
        said = statement_text(replace(one, randomness=source))
        assert "nobody" not in said
        assert "whoever can't compute the noise" in said
        assert f"nothing here holds: this run has {source}." in said


def test_figures_are_rounded_up(after):
    one, _ = after
    shown = statement_text(replace(one, worst_case=1.00001, individual=0.50001))
    assert "1.001" in shown
    assert "0.501" in shown


def test_json_has_no_infinity(after):
    one, _ = after
    content = json.dumps(replace(one, worst_case=math.inf).to_dict(), allow_nan=False)
    assert json.loads(content)["worst_case"] is None


def test_html_is_whole_escaped_and_asks_nothing_of_the_network(after):
    one, _ = after
    page = statement_html(replace(one, owner="<script>alert(1)</script>"))
    open_tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            assert not {"src", "href"} & {name for name, _ in attributes}
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Reader().feed(page)
    assert not open_tags
    assert "<script>" not in page


def test_a_record_is_pointed_to_its_owner_and_one_held_out_is_told_so(tmp_path):
    """Once all three were told that no such record is in this run."""
    run = make_run(tmp_path / "run", n=40, owners=["H0001"] * 6 + [f"h{k}" for k in range(34)])
    held_out = Examples(ids=["id-90001"], owners=["H0700"])
    run.record_outcomes([0.0] * run.plan.n, test=held_out)
    with pytest.raises(ValueError, match="'id-00003' is a record of owner 'H0001': ask for that"):
        owner_statement(run, "id-00003")
    for held_out in ("id-90001", "H0700"):
        with pytest.raises(ValueError, match=f"{held_out!r} was held out, not used in training"):
            owner_statement(run, held_out)
    with pytest.raises(ValueError, match=r"^no record of 'id-0000' is in this run$"):
        owner_statement(run, "id-0000")


@pytest.mark.parametrize("unknown", ["nobody", "id-99999", "id-0000", "", "ann ", "owner"])
def test_an_unknown_owner_learns_nothing_of_others(run, unknown):
    with pytest.raises(ValueError, match="no record of") as refused:
        owner_statement(run, unknown)
    assert str(refused.value) == f"no record of {unknown!r} is in this run"


def test_without_owners_a_record_is_known_by_its_id(tmp_path):
    run = make_run(tmp_path / "run", n=40)
    found = owner_statement(run, "id-00007")
    assert found.records[0].id == "id-00007"
    assert found.individual == run.epsilons().cautious[7]


def test_another_owners_records_do_not_appear(after, run):
    _, ann = after
    text = statement_text(ann) + statement_html(ann) + json.dumps(ann.to_dict())
    others = run.examples.ids[3:]
    assert not [name for name in others.tolist() if name in text]
    assert not np.isin(run.epsilons().cautious[3:], [r.training_epsilon for r in ann.records]).any()
