"""Several runs added up, against one long run and against rows put together by hand."""

import csv
import json
import math
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

from epsilons import Examples, Margin, Plan, Run, individual_epsilons
from epsilons.accounting.composition import Releases, composed_epsilon
from epsilons.accounting.printed import epsilon_text
from epsilons.cli import main
from epsilons.randomness import Randomness
from epsilons.release import Budget, Cost, owner_statement, statement_text, total
from epsilons.release.budget import releases_of

N = 12
CONSTANTS = dict(n=N, batch_size=2, noise_multiplier=1.5, max_grad_norm=1.0, delta=1e-5, levels=16)
RNG = np.random.default_rng(3)
# falling, so that the larger of the norms before and after a step is that before it
NORMS = np.sort(np.minimum(RNG.lognormal(-1.0, 0.7, (4, N)), 1.0), axis=0)[::-1]
IDS = np.array([f"p{k}" for k in range(N)])


def digests(ids):
    return np.array([f"content of {name}" for name in ids])


def made(path, rows, ids=IDS, taken=None, records=None, owners=None, **changes):
    """A run in which the rows of norms held for ten steps each."""
    own = {"n": len(ids), "steps": 10 * len(rows), "refresh_every": 10}
    plan = Plan(**CONSTANTS | own | changes)
    people = Examples(ids, owners=owners, digests=digests(ids) if records is None else records)
    exact = Margin(relative=0.0, parameters=None)
    run = Run.create(path, plan, people, margin=exact, randomness=Randomness.of_fit(None))
    for k, norms in enumerate(rows[:taken]):
        run.journal.record(10 * k, norms)
        run.journal.charge(10 * k, 10 * k + 9)
    return run


@pytest.mark.parametrize(
    "how",
    [{}, {"clipping": "individual"}, {"rounding": "nearest"}],
    ids=str,
)
def test_a_plan_split_into_two_runs_costs_what_the_long_run_costs(tmp_path, how):
    long = made(tmp_path / "long", NORMS, **how)
    parts = (("a", NORMS[:2]), ("b", NORMS[2:]))
    halves = [made(tmp_path / name, rows, **how) for name, rows in parts]
    found = total(halves)
    assert found.worst_case == pytest.approx(long.journal.worst_case(), rel=1e-9)
    np.testing.assert_allclose(found.epsilons.values, long.epsilons().cautious, rtol=1e-9)
    assert found.ids.tolist() == IDS.tolist()
    assert (found.kind, found.delta) == (long.epsilons().kind, 1e-5)
    assert repr(found) == "<Total of 2 runs: <Epsilons n=12 δ=1e-05 tight estimate>>".replace(
        "estimate", found.kind
    )


def test_runs_with_other_constants_and_another_order_are_the_rows_put_together(tmp_path):
    order = np.random.default_rng(1).permutation(N)
    first = made(tmp_path / "a", NORMS[:2])
    second = made(
        tmp_path / "b", NORMS[2:][:, order], IDS[order], batch_size=4, noise_multiplier=2.5,
        max_grad_norm=0.5, levels=32,
    )  # fmt: skip
    expected = individual_epsilons(
        NORMS, np.full(4, 10), sample_rate=[1 / 6, 1 / 6, 1 / 3, 1 / 3],
        noise_std=[1.5, 1.5, 1.25, 1.25], max_grad_norm=[1.0, 1.0, 0.5, 0.5], delta=1e-5, levels=32,
    )  # fmt: skip
    found = total([first, second])
    np.testing.assert_allclose(found.epsilons.values, expected.values, rtol=1e-9)
    assert found.worst_case == pytest.approx(expected.worst_case, rel=1e-6)
    other = total([second, first])
    assert other.ids.tolist() == IDS[order].tolist()
    np.testing.assert_allclose(other.epsilons.values, found.epsilons.values[order], rtol=1e-9)


def test_estimates_are_added_up_cautiously(tmp_path):
    rising = made(tmp_path / "a", NORMS[::-1])
    found, alone = total([rising]).epsilons.values, rising.epsilons()
    np.testing.assert_allclose(found, alone.cautious, rtol=1e-9)
    assert (found > alone.values).any()


@pytest.mark.parametrize("seed", range(2))
def test_never_below_a_part_and_never_above_the_sum(tmp_path, seed):
    rng = np.random.default_rng(seed)
    ways = [{"clipping": "individual"}, {}, {"rounding": "up"}, {"rounding": "nearest"}]
    runs = [
        made(
            tmp_path / str(k), rng.uniform(0, 1.2, (2, N)), noise_multiplier=rng.uniform(0.8, 4),
            batch_size=rng.uniform(1, N / 2), levels=int(rng.integers(8, 24)),
            **ways[rng.integers(4)],
        )
        for k in range(3)
    ]  # fmt: skip
    found = total(runs)
    at, third = [run.epsilons() for run in runs], [run.epsilons(1e-5 / 3) for run in runs]
    assert (found.epsilons.values >= np.max([e.values for e in at], axis=0) * (1 - 1e-6)).all()
    # norms that a run rounded to nearest are rounded up: by at most one level of eight
    rounded = any(run.plan.rounding == "nearest" for run in runs)
    if not rounded:
        most = np.sum([e.values for e in third], axis=0) * (1 + 1e-3)
        assert (found.epsilons.values <= most).all()
    assert max(e.worst_case for e in at) <= found.worst_case <= sum(e.worst_case for e in third)
    assert found.kind == "estimate"


def test_clip_bounds_and_publications_are_in_the_total(tmp_path):
    runs = [made(tmp_path / name, rows) for name, rows in (("a", NORMS[:2]), ("b", NORMS[2:]))]
    before = total(runs)
    cost = Releases()
    for run in runs:
        with Budget.of_run(run.path) as budget:
            budget.ask({"statistics": "any"}, Cost.of(0.5, 1e-6, draws=1), dict)
        cost = cost + releases_of(run)
    assert cost.mu > 0
    after = total(runs)
    by_hand = composed_epsilon([1.5], [1 / 6], [40], 1e-5, releases=cost)
    assert after.worst_case == pytest.approx(by_hand, rel=1e-9)
    assert (after.epsilons.values > before.epsilons.values).all()
    assert [part.releases for part in after.parts] == [1, 1]


def test_examples_are_the_same_by_id_and_record_or_not_added_up(tmp_path):
    first = made(tmp_path / "a", NORMS[:2])
    ids, records = IDS.copy(), digests(IDS)
    ids[0] = "new"
    records[5] = "another record"
    second = made(tmp_path / "b", NORMS[2:], ids, records=records)
    found = total([first, second])
    assert found.ids.tolist() == [name for k, name in enumerate(IDS) if k not in (0, 5)]
    for part in found.parts:
        assert part.unmatched == {"id not in all runs": 1, "id of another record elsewhere": 1}
    unknown = Run.create(tmp_path / "c", first.plan, Examples(IDS))
    found = total([first, unknown])
    assert len(found.epsilons) == 0
    assert found.parts[0].unmatched == {f"no record digests in {tmp_path / 'c'}": N}


def test_without_noise_in_one_run_nothing_is_promised(tmp_path):
    open_ = made(tmp_path / "a", NORMS[:2], clipping="none", noise_multiplier=0.0)
    found = total([made(tmp_path / "b", NORMS[2:]), open_])
    assert math.isinf(found.worst_case)
    assert np.isinf(found.epsilons.values).all()
    assert found.kind == "none"


def test_a_delta_is_asked_for_where_the_plans_differ_and_a_run_counts_once(tmp_path):
    runs = [made(tmp_path / name, NORMS[:2], delta=d) for name, d in (("a", 1e-5), ("b", 1e-6))]
    with pytest.raises(ValueError, match=r"different δ's \(1e-06, 1e-05\)"):
        total(runs)
    assert total(runs, delta=1e-7).delta == 1e-7
    with pytest.raises(ValueError, match="given twice"):
        total([runs[0], Run.open(tmp_path / "b" / ".." / "a")])


def test_copies_of_one_folder_count_each_in_full(tmp_path):
    run = made(tmp_path / "a", NORMS, taken=2)
    run.journal.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    runs = [Run.open(tmp_path / "a"), Run.open(tmp_path / "b")]
    found = total(runs)
    assert found.common == ((str(tmp_path / "a"), str(tmp_path / "b")),)
    assert found.worst_case == pytest.approx(run.plan.worst_case(steps=40), rel=1e-9)


def test_an_owner_s_records_are_added_up_over_runs(tmp_path):
    """And a record that is not the same elsewhere is said to be left out."""
    owners = np.repeat(np.arange(N // 2), 2).astype(str)
    runs = [
        made(tmp_path / name, rows, owners=owners)
        for name, rows in (("a", NORMS[:2]), ("b", NORMS[2:]))
    ]
    long = made(tmp_path / "long", NORMS, owners=owners)
    both, one = owner_statement(runs[0], "3", others=runs[1:]), owner_statement(long, "3")
    assert both.worst_case == pytest.approx(one.worst_case, rel=1e-9)
    assert both.individual == pytest.approx(one.individual, rel=1e-9)
    assert [r.epsilon for r in both.records] == pytest.approx([r.epsilon for r in one.records])
    assert f"the training of {tmp_path / 'b'}" in statement_text(both)
    said = statement_text(replace(both, worst_case=2.0))
    assert "nobody who sees all models of all these runs detects your 2 records" in said
    assert (both.unmatched, both.elsewhere) == (0, 0)

    records = digests(IDS)
    records[6] = "another record"  # the first of owner 3
    third = made(tmp_path / "c", NORMS[2:], owners=owners, records=records)
    some = owner_statement(runs[0], "3", others=[third])
    assert (some.unmatched, some.elsewhere) == (1, 1)
    alone = owner_statement(runs[0], "3")
    assert some.records[0] == alone.records[0]
    assert some.records[1].epsilon > alone.records[1].epsilon
    assert some.worst_case > both.worst_case  # three records of theirs
    said = statement_text(some)
    assert "Records of yours, 1 in number, could not be found in all of these runs" in said
    assert "Records of yours in the other runs, 1 in number, are not in this one" in said


def test_the_verb_prints_the_total_and_no_individual_value(tmp_path, monkeypatch, capsys):
    """And leaves the folders as they were."""
    for name, rows in (("a", NORMS[:2]), ("b", NORMS[2:])):
        made(tmp_path / name, rows).journal.seal()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def typed(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["epsilons", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, capsys.readouterr()

    code, shown = typed("total", "a", "b", "--out", "eps.csv")
    assert code == 0, shown.err
    found = total([Run.open(tmp_path / "a"), Run.open(tmp_path / "b")])
    assert f"together        ε = {epsilon_text(found.worst_case)} at δ = 1e-05" in shown.out
    above, below = shown.out.split("for the curator alone")
    assert "promise only if every plan was fixed before the first run" in above
    assert "matched         12 examples" in below
    table = tmp_path / "eps.csv"
    assert table.stat().st_mode & 0o777 == 0o600
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["epsilon"]) for row in rows] == found.epsilons.values.tolist()
    assert not any(row["epsilon"][:7] in shown.out for row in rows)
    assert {f: f.read_bytes() for f in before} == before
    assert {f for f in tmp_path.rglob("*") if f.is_file()} - set(before) == {table}
    code, shown = typed("owner", "a", "p3", "--with", "b", "--format", "json")
    assert json.loads(shown.out)["individual"] == pytest.approx(found.epsilons.values[3])
    for wrong, sentence in ((["a", "a"], "given twice"), (["a", "b", "--out", "x.txt"], ".csv")):
        code, shown = typed("total", *wrong)
        assert code == 2
        assert sentence in shown.err
