"""Training under a clip bound that adapts: what is released, charged, recorded and resumed."""

import dataclasses
import math
import shutil
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from trained import LOSS, data, outcome, plan, small_model, trained

from epsilons import Examples, Journal, Plan, Run, job
from epsilons.accounting.adaptive import AdaptiveClipping
from epsilons.accounting.sums import grid
from epsilons.analysis import other_clip_bounds
from epsilons.cli import main
from epsilons.gradients import gradient_norms
from epsilons.gradients.norms import trainable
from epsilons.journal.run_entries import clip_bound, clip_moves, record_move
from epsilons.noise import SeededNoise
from epsilons.release import owner_statement, total
from epsilons.report import write_public_report, write_report
from epsilons.report.dossier import read_facts
from epsilons.settings import Settings
from epsilons.training import correct_class, fit, loop, own_part, played, private_step
from epsilons.training.keys import destroy_keys
from epsilons.training.noisy_sum import NoisySum
from epsilons.training.shards import Shards, shard_edges
from epsilons.training.step import clipped_sum

MOVES = dict(initial_clipbound=0.7, unclipped_num_std=2.0, clipbound_learning_rate=0.5)


def adapting(every=3, **changes):
    constants = dict(max_grad_norm="adaptive", adaptive=dict(MOVES, update_every=every), levels=32)
    return plan(**{**constants, **changes})


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A run of 12 steps, and the sum of each of them before the noise, with its phase."""
    where, taken = tmp_path_factory.mktemp("adaptive") / "run", []

    class Noted(NoisySum):
        def over(self, *arguments):
            taken.append((on_the_grid(self), self._phase))
            super().over(*arguments)

    with mock.patch.object(played, "NoisySum", Noted):
        run, _ = trained(where, adapting(refresh_every=1))
    return run, taken


def on_the_grid(total):
    """All coordinates of a sum, in units of the gradient."""
    return total._units * grid(total._phase.noise_std)


def summed(model, batches, phase):
    """The sum of a step over shards, before the noise."""
    shards = Shards(shard_edges(60, len(batches)))
    total = NoisySum(trainable(model), phase, shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for shard, batch in enumerate(batches):
        found = clipped_sum(
            model, optimizer, LOSS, batch, phase, bounds=phase.max_grad_norm, shards=len(batches)
        )
        total.add(shard, found)
    return total


def test_the_noise_stays_in_proportion_to_the_bound(seen):
    run, taken = seen
    bounds = [clip_bound(run.journal, step) for step in range(12)]
    assert [phase.noise_std for _, phase in taken] == bounds  # with noise multiplier 1
    assert bounds[:3] == [0.7] * 3
    assert len(set(bounds)) == 4
    assert [move.step for move in clip_moves(run.journal)] == [3, 6, 9, 12]


def test_the_count_is_one_more_coordinate_with_the_noise_it_was_promised(seen):
    """Σ(b − ½) in units in which the gradient's noise is σ_b of the count."""
    run, taken = seen
    parameters = sum(p.numel() for p in small_model().parameters())
    counted = [len(sums) - parameters for sums, _ in taken]
    assert counted == [(step + 1) % 3 == 0 for step in range(12)]
    for step in range(2, 12, 3):
        sums, phase = taken[step]
        half_counts = 2 * sums[-1] * 2.0 / phase.noise_std
        assert half_counts == pytest.approx(round(half_counts), abs=1e-8)
        # the released number is this far from it, in deviations of its noise: seeded, hence known
        move = clip_moves(run.journal)[step // 3]
        assert 0 < abs(move.released - half_counts / 2) / 2.0 < 5


def test_the_bound_follows_what_was_released(seen):
    run, _ = seen
    adaptive, bound = run.plan.adaptive, 0.7
    for move in clip_moves(run.journal):
        bound = min(bound * math.exp(-0.5 * (move.released / 20 + 0.5 - 0.5)), 1e4)
        assert move.bound == pytest.approx(bound, rel=1e-12)
        assert move.bound == adaptive.next_bound(clip_bound(run.journal, move.step - 1),
                                                 move.released, 20)  # fmt: skip


def test_norms_are_recorded_as_fractions_of_the_bound_of_their_step(tmp_path, seen):
    run, _ = seen
    norms = gradient_norms(small_model(), LOSS, data(), batch_size=20)
    assert np.allclose(run.journal.norms(0), norms * (1 + 1e-4), rtol=1e-5)
    found = []
    kept = Journal.record

    def record(journal, step, norms, indices=None):
        found.append((step, np.array(norms)))
        return kept(journal, step, norms, indices)

    def of_all(self, step, seed):
        return np.full(60, 0.35)

    with (
        mock.patch.object(Journal, "record", record),
        mock.patch("epsilons.training.norm_passes.NormPasses.of_all", of_all),
    ):
        other, _ = trained(tmp_path / "run", adapting(refresh_every=1))
    for step, recorded in found:
        expected = 0.35 * 0.7 / clip_bound(other.journal, step)
        assert recorded == pytest.approx(np.full(60, expected), rel=1e-12)


def test_everyone_is_charged_for_gradient_and_count(seen):
    run, _ = seen
    assert run.journal.worst_case() == run.plan.worst_case()
    constants = run.journal.constants()
    assert (constants.bound == 0.7).all()
    assert (constants.noise_std == 0.7).all()
    counted = np.arange(12) % 3 == 2
    assert np.array_equal(constants.beside > 0, counted)
    assert constants.beside[2] == pytest.approx(0.25, rel=1e-8)
    found = run.epsilons()
    assert found.kind == "exact"
    plain = plan(levels=32).worst_case()
    assert plain < found.worst_case == run.plan.worst_case()
    assert (found.values > 0).all()
    run.journal.verify()


def test_what_a_person_adds_is_within_bound_and_count():
    """One example more moves the released vector by no more than s deviations of its noise."""
    the_plan = adapting(every=1, n=200, batch_size=20, refreshes_per_epoch=0, refresh_every=None)
    phase, model = the_plan.phase(0), small_model()
    s = math.hypot(1 / 1.0, phase.beside)
    for scale in (0.01, 0.3, 100.0):  # far below the bound, about it, far above

        def before_noise(first, scale=scale):
            x, y = data().tensors
            return on_the_grid(summed(model, [(scale * x[first:20], y[first:20])], phase))

        apart = (before_noise(0) - before_noise(1)) / phase.noise_std
        moved = np.linalg.norm(apart)
        assert moved <= s
        assert abs(apart[-1]) == pytest.approx(0.25, rel=1e-8)  # ½ of σ_b = 2
    assert moved > 0.999 * s  # who is clipped uses all of it


def test_thresholds_of_individual_clipping_move_with_the_bound(tmp_path):
    bounds = []

    def noted(*arguments, **options):
        bounds.append(options["bounds"])
        return clipped_sum(*arguments, **options)

    the_plan = adapting(clipping="individual", refresh_every=12)
    with mock.patch.object(own_part, "clipped_sum", noted):
        run, _ = trained(tmp_path / "run", the_plan)
    assert run.epsilons(method="rdp").kind == "exact"
    for step, its in enumerate(bounds):
        now = clip_bound(run.journal, step)
        levels = np.asarray(its) / now * 32
        assert np.allclose(levels, np.round(levels), atol=1e-9)
        assert (np.asarray(its) <= now).all()
    everyone = [run.journal.bounds(step, np.arange(60)) for step in (0, 11)]
    ratio = clip_bound(run.journal, 11) / 0.7
    assert np.allclose(everyone[1], everyone[0] * ratio, rtol=1e-12)


@pytest.mark.parametrize("at", [5, pytest.param(7, marks=pytest.mark.slow)])
def test_a_run_whose_bound_adapts_resumes_to_the_same_bits(tmp_path, at):
    class Stop(Exception):
        pass

    options = dict(test=data(30, seed=1), correct_fn=correct_class)
    whole, its = trained(tmp_path / "whole", adapting(), **options)

    def stop(step):
        if step.number == at:
            raise Stop

    with pytest.raises(Stop):
        trained(tmp_path / "run", adapting(), on_step=stop, **options)
    run, theirs = trained(tmp_path / "run", adapting(), resume=True, **options)
    assert torch.equal(its, theirs)
    assert outcome(run) == outcome(whole)
    assert clip_moves(run.journal) == clip_moves(whole.journal)


def test_a_secret_run_that_is_killed_charges_counts_again(tmp_path):
    """A fresh key after a crash: the moves that it undoes are no longer in force."""

    def copied(step):  # what is on the disk then
        if step.number == 7:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    with mock.patch.object(loop, "CHECKPOINT_SECONDS", 1e9):
        trained(tmp_path / "run", adapting(), seed=None, on_step=copied)
    stopped = Run.open(tmp_path / "killed")
    before = clip_moves(stopped.journal)
    assert [move.step for move in before] == [3, 6]
    destroy_keys(stopped.private)  # as if they had been lost
    run, _ = trained(tmp_path / "killed", adapting(), seed=None, resume=True)
    assert run.journal.restarts == 1
    after = clip_moves(run.journal)
    assert [move.step for move in after] == [3, 6, 9, 12]
    assert after[0].released != before[0].released
    counted = [phase for phase in run.plan.all_phases if phase.beside]
    charged = dict(zip(run.plan.all_phases, run.journal.charged(), strict=True))
    assert charged[counted[0]] > 4
    assert run.journal.worst_case() > run.plan.worst_case()
    run.journal.verify()


def test_a_bound_that_was_changed_is_found(tmp_path):
    with Journal.create(tmp_path / "journal.sqlite", adapting()) as journal:
        for step in (0, 1, 2):
            if step == 0:
                journal.record(0, np.ones(60))
            journal.charge(step)
        with pytest.raises(ValueError, match="charged for no count"):
            record_move(journal, 1, 0.0)
        with pytest.raises(ValueError, match="charged for no count"):
            record_move(journal, 5, 0.0)
        record_move(journal, 2, 3.0)
        record_move(journal, 2, 3.0)  # the same again
        assert len(clip_moves(journal)) == 1
        assert journal.bounds(2, [0, 1]).tolist() == [0.7, 0.7]
        facts = {"step": 3, "released": 3.0, "bound": 0.9}
        journal._chain.append("clip_bound", facts, b"", b"")
        with pytest.raises(ValueError, match="is not what its count leads to"):
            journal.verify()


def test_a_restart_keeps_the_moves_of_steps_that_it_does_not_undo(tmp_path):
    with Journal.create(tmp_path / "journal.sqlite", adapting(refresh_every=12)) as journal:
        journal.record(0, np.ones(60))
        for first, last in ((0, 1), (2, 2), (3, 4), (5, 5)):
            journal.charge(first, last)
        record_move(journal, 2, 3.0)
        record_move(journal, 5, -3.0)
        journal.restart(6)  # the count of step 5 was released, and its bound is used at step 6
        assert [move.step for move in clip_moves(journal)] == [3, 6]
        journal.restart(5)
        assert [move.step for move in clip_moves(journal)] == [3]
        assert clip_bound(journal, 5) == clip_bound(journal, 3) < clip_bound(journal, 2)


def test_steps_with_and_without_a_count_are_charged_apart(tmp_path):
    with Journal.create(tmp_path / "journal.sqlite", adapting(refresh_every=12)) as journal:
        journal.record(0, np.ones(60))
        for last in (2, 3, 11):
            with pytest.raises(ValueError, match="are of two phases; charge them apart"):
                journal.charge(0, last)
        journal.charge(0, 1)
        journal.charge(2)
        assert journal.charged() == (1, 2)


def test_a_single_step_does_not_know_where_the_bound_is():
    model = small_model()
    with pytest.raises(ValueError, match="doesn't know where it is"):
        private_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS, data().tensors, adapting(),
            noise=SeededNoise(1),
        )  # fmt: skip


def test_the_bound_finds_the_quantile_that_it_is_to_find(tmp_path):
    """Norms of a frozen loss are the same at every step; the bound goes to their median."""
    adaptive = AdaptiveClipping(
        initial_clipbound=0.01, unclipped_num_std=0.5, clipbound_learning_rate=0.5, update_every=1
    )
    the_plan = Plan(
        n=60, batch_size=30, steps=60, noise_multiplier=1.0, max_grad_norm="adaptive", delta=1e-3,
        refreshes_per_epoch=0, adaptive=adaptive,
    )  # fmt: skip
    model = small_model()
    frozen = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = fit(model, frozen, LOSS, data(), the_plan, out=tmp_path / "run", seed=1)
    norms = gradient_norms(model, LOSS, data(), batch_size=60)
    last = np.median([move.bound for move in clip_moves(run.journal)][-15:])
    assert np.quantile(norms, 0.3) < last < np.quantile(norms, 0.7)


@pytest.mark.parametrize("bound", [0.05, 0.7, 1.2, 30.0])
def test_shards_add_up_to_the_count_of_one_batch(bound):
    """In whatever number of parts: each is rounded to the grid once."""
    phase = dataclasses.replace(adapting(every=1).phase(0), max_grad_norm=bound)
    model, (x, y) = small_model(), data().tensors
    parts = [(x[:20], y[:20]), None, (x[20:24], y[20:24]), (x[24:60], y[24:60])]
    below = int((gradient_norms(model, LOSS, data(), batch_size=60) <= bound).sum())
    counted = on_the_grid(summed(model, parts, phase))[-1] / phase.noise_std * 2.0
    assert counted == pytest.approx(below - 30, abs=1e-8)


def test_norms_of_16_bits_are_fractions_of_the_bound_too(tmp_path):
    """Thresholds, and so the whole run, are the same; what is stored is not below the norms."""
    found = [
        trained(tmp_path / kept, adapting(clipping="individual", norm_storage=kept))
        for kept in ("float64", "uint16")
    ]
    (wide, its), (short, theirs) = found
    assert torch.equal(its, theirs)
    assert clip_moves(wide.journal) == clip_moves(short.journal)
    for step in wide.journal.refreshes:
        full, kept = wide.journal.norms(step), short.journal.norms(step)
        assert (full <= kept).all()
        assert (kept - full <= np.maximum(0.7 * 2**-15, full * 2**-9)).all()
        for t in (step, step + 2):
            same = (run.journal.bounds(t, np.arange(60)) for run in (wide, short))
            assert np.array_equal(*same)
    assert np.array_equal(wide.epsilons(method="rdp").values, short.epsilons(method="rdp").values)
    short.journal.verify()


@pytest.mark.parametrize("clipping", ["max", "individual", "filtered"])
def test_budgets_are_refused_where_the_bound_adapts(clipping):
    with pytest.raises(ValueError, match="promised shares of a bound that stays"):
        adapting(budgets=(1.0, 2.0), clipping=clipping)


SETTINGS = dict(
    data="digits", model="logistic", lr=2.0, epsilon=3.0, delta=1e-4, batch_size=256, steps=12,
    refresh_every=4, seed=3, levels=32, max_grad_norm="adaptive", initial_clipbound=1.0,
    unclipped_num_std=12.0, update_every=4,
)  # fmt: skip


def test_settings_reports_and_status_of_a_bound_that_adapts(tmp_path, monkeypatch, capsys):
    run = job.train(Settings.of(SETTINGS), tmp_path / "run")
    assert 2.99 < run.journal.worst_case() <= 3.0
    assert run.plan.adaptive == AdaptiveClipping(
        initial_clipbound=1.0, unclipped_num_std=12.0, update_every=4
    )
    found = clip_moves(run.journal)
    assert [move.step for move in found] == [4, 8, 12]
    page = write_report(run).read_text(encoding="utf-8")
    assert "at first; it moves every 4 steps toward the 0.5 quantile" in page
    assert "; C moves every 4 steps by a count" in read_facts(run.path).mechanism
    assert "at first; it moves" in write_public_report(run.path).read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["epsilons", "status", str(run.path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert f"clip bound      {found[-1].bound:.4g} now, adaptive from 1 in 3 moves" in shown
    together = total([run])
    assert together.worst_case == pytest.approx(run.journal.worst_case(), rel=1e-6)
    told = owner_statement(run, str(run.examples.ids[0]))
    assert told.worst_case == pytest.approx(run.journal.worst_case(), rel=1e-6)
    values = np.minimum(run.epsilons().cautious, together.worst_case)
    assert together.epsilons.values == pytest.approx(values, rel=1e-6)
    with pytest.raises(ValueError, match="bound adapts can't be replayed"):
        other_clip_bounds(run)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(max_grad_norm=1.0), "initial_clipbound goes with max_grad_norm = 'adaptive'"),
        (dict(unclipped_num_std=None), "'adaptive' needs unclipped_num_std"),
        (dict(max_grad_norm="moving"), "expected a number > 0, 'median' or 'adaptive'"),
        (dict(update_every=0), "update_every = 0"),
    ],
)
def test_settings_that_disagree_are_refused(changes, match):
    given = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=match):
        Settings.of(given)


def test_persons_and_a_bound_that_adapts_go_together(tmp_path):
    people = Examples(ids=np.arange(60), owners=[f"p{k // 3}" for k in range(60)])
    the_plan = adapting(n=20, batch_size=8, unit="owner", max_records_per_owner=3)
    run, _ = trained(tmp_path / "run", the_plan, examples=people)
    assert len(run.epsilons(method="rdp").values) == 20
    assert len(clip_moves(run.journal)) == 4
