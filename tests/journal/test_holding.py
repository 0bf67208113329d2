"""Which record a step is charged, against a loop over examples and steps."""

import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons import Journal, Margin, Plan
from epsilons.accounting.holding import HOLDS, held

EXACT = Margin(relative=0.0, parameters=None)
N, STEPS = 4, 16
PHASES = ((6, {"max_grad_norm": 0.5}), (9, {"noise_multiplier": 3.0, "batch_size": 2.0}))


def plan_of(every, phases=(), **changes):
    constants = dict(n=N, batch_size=1, steps=STEPS, noise_multiplier=2.0, max_grad_norm=1.0)
    return Plan(**constants, delta=1e-3, refresh_every=every, phases=phases, **changes)


class Story:
    """A run told to a journal and remembered step by step, in lives that restarts begin."""

    def __init__(self, path, plan, seed, unmeasured=0):
        self.plan, self.random, self.unmeasured = plan, np.random.default_rng(seed), unmeasured
        self.journal = Journal.create(path, plan, margin=EXACT)
        self.step, self.recorded = 0, False
        self.charged = []  # (life, step)
        self.lives = [([], {})]  # refreshes (step, norms); sampled {example: [(step, norm)]}

    def norms(self, count):
        found = self.random.uniform(0, 1.2, count)
        return np.where(self.random.random(count) < 0.1, np.nan, found)

    def refresh_if_due(self):
        refreshes, _ = self.lives[-1]
        if not self.plan.refresh_due(self.step) or self.step in dict(refreshes):
            return
        if self.recorded or self.step >= self.unmeasured:
            norms, self.recorded = self.norms(N), True
            self.journal.record(self.step, norms)
            refreshes.append((self.step, norms))

    def go_on(self, until, rate):
        while self.step < until:
            self.refresh_if_due()
            plan, first = self.plan, self.step
            ends = (t for t in range(first + 1, until) if plan.refresh_due(t))
            self.step = min(next(ends, until), plan.phase(first).end)
            self.journal.charge(first, self.step - 1)
            steps = range(first, self.step)
            self.charged += [(len(self.lives) - 1, step) for step in steps]
            drawn = [np.flatnonzero(self.random.random(N) < rate) for _ in steps]
            if any(map(len, drawn)):
                norms, self.recorded = [self.norms(len(some)) for some in drawn], True
                self.journal.record_some("sampled", first, drawn, norms)
                for step, some, theirs in zip(steps, drawn, norms, strict=True):
                    for example, norm in zip(some.tolist(), theirs, strict=True):
                        self.lives[-1][1].setdefault(example, []).append((step, norm))

    def restart(self, step):
        self.journal.restart(step)
        kept = [pair for pair in self.lives[-1][0] if pair[0] <= step]
        self.lives.append((kept, {}))
        self.step = step

    def charged_norm(self, life, step, example, hold):
        """The norm that one example is charged in one step, in words of the documentation."""
        refreshes, sampled = self.lives[life]
        phase = self.plan.phase(step)
        own = [(t, z) for t, z in sampled.get(example, []) if self.plan.phase(t) == phase]
        of_all = [(t, norms[example]) for t, norms in refreshes]
        earlier = [pair for pair in of_all if pair[0] <= step][-1:]
        later = [pair for pair in of_all if pair[0] > step][:1]
        low, high = (pair[0][0] if pair else end for pair, end in ((earlier, 0), (later, STEPS)))
        between = [pair for pair in own if low <= pair[0] < high]
        earlier = (earlier + [pair for pair in between if pair[0] <= step])[-1:]
        later = ([pair for pair in between if pair[0] > step] + later)[:1]
        if not earlier:
            return phase.max_grad_norm
        if earlier[0][0] == step or not later or hold == "previous":
            return earlier[0][1]
        (before, norm), (after, next_norm) = earlier[0], later[0]
        if hold == "cautious":
            return np.nan if np.isnan([norm, next_norm]).any() else max(norm, next_norm)
        return next_norm if after - step < step - before else norm

    def expected(self, example, hold):
        found = Counter()
        for life, step in self.charged:
            found[
                self.key(self.charged_norm(life, step, example, hold), self.plan.phase(step))
            ] += 1
        return found

    @staticmethod
    def key(norm, phase):
        constants = phase.sample_rate, phase.noise_std, phase.max_grad_norm, phase.beside
        return repr(float(norm)), *constants

    def found(self, example, hold, *, sampled=True):
        rows = list(self.journal.histories(3, sampled=sampled, hold=hold))
        norms = np.concatenate([block for block, _ in rows], axis=1)[:, example]
        steps = np.concatenate(
            [np.broadcast_to(t if t.ndim == 2 else t[:, None], z.shape) for z, t in rows], axis=1
        )[:, example]
        constants = self.journal.constants(sampled=sampled, hold=hold)
        found = Counter()
        for norm, count, *known in zip(norms, steps, *constants, strict=True):
            if count:
                found[repr(float(norm)), *map(float, known)] += int(count)
        return found


@settings(max_examples=25, deadline=None)
@given(
    every=st.integers(1, 8),
    phases=st.sampled_from([(), PHASES[:1], PHASES]),
    unmeasured=st.sampled_from([0, 0, 5, 30]),
    rate=st.sampled_from([0.0, 0.2, 0.6]),
    turns=st.lists(st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)), max_size=2),
    refreshed_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_step_is_charged_as_by_a_loop(
    every, phases, unmeasured, rate, turns, refreshed_last, seed
):
    with tempfile.TemporaryDirectory() as folder:
        story = Story(Path(folder) / "j", plan_of(every, phases), seed, unmeasured)
        for until, back in turns:
            story.go_on(until, rate)
            story.restart(min(back, story.step))
        story.go_on(max(story.step, 1 + seed % STEPS), rate)
        if refreshed_last and story.step < STEPS:
            story.refresh_if_due()  # made, and its step not charged yet
        for hold in HOLDS:
            for example in range(N):
                assert story.found(example, hold) == story.expected(example, hold)
        story.journal.close()


@pytest.mark.parametrize(("method", "phases"), [("tight", ()), ("rdp", PHASES)])
def test_no_value_is_above_its_cautious_reading_nor_that_above_the_worst_case(
    tmp_path, method, phases
):
    story = Story(tmp_path / "j", plan_of(5, phases), 8)
    for until, back in ((7, 4), (9, 2), (STEPS, STEPS)):
        story.go_on(until, 0.3)
        story.restart(back)
    found = story.journal.epsilons(method=method)
    previous = story.journal.epsilons(method=method, hold="previous")
    for lower in (found, previous):
        assert (found.cautious >= lower.values * (1 - 1e-9)).all()
    assert (found.cautious >= found.values).all()
    assert (found.cautious <= found.worst_case).all()
    assert found.worst_case == previous.worst_case


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(1, 40), max_size=6), st.integers(1, 60), st.integers(0, 9))
def test_records_alone_hold_as_by_a_loop(others, length, seed):
    at = np.array([0, *sorted(t for t in others if t < length)])
    norms = np.random.default_rng(seed).random((len(at), 3))
    for hold in HOLDS:
        rows, steps = held(norms, at, length, hold)
        for step, row in enumerate(np.repeat(rows, steps, axis=0)):
            before, after = np.flatnonzero(at <= step)[-1], np.flatnonzero(at > step)[:1]
            expected = norms[before]
            if len(after) and at[before] != step:
                (after,) = after
                if hold == "cautious":
                    expected = np.maximum(norms[before], norms[after])
                elif hold == "nearest" and at[after] - step < step - at[before]:
                    expected = norms[after]
            np.testing.assert_array_equal(row, expected)
        assert steps.sum() == length


def test_an_unknown_way_to_hold_is_refused(tmp_path):
    journal = Journal.create(tmp_path / "j", plan_of(4))
    for ask in (
        journal.epsilons,
        journal.constants,
        lambda hold: list(journal.histories(hold=hold)),
    ):
        with pytest.raises(ValueError, match="hold='next'"):
            ask(hold="next")
    with pytest.raises(ValueError, match="hold='next'"):
        held(np.ones((1, 1)), np.zeros(1, dtype=int), 3, "next")


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(1),
        plan_of(1, rounding="up"),
        plan_of(1, PHASES),
        plan_of(4, clipping="individual", levels=8),
        plan_of(4, PHASES, clipping="individual", levels=8),
    ],
    ids=["exact", "bound", "phases", "individual", "individual, phases"],
)
def test_what_is_no_estimate_is_the_same_to_the_bit(tmp_path, plan):
    journal = Story(tmp_path / "j", plan, 3)
    journal.go_on(10, 0.0)
    journal.restart(7)
    journal.go_on(STEPS, 0.0)
    method = "rdp" if plan.phases else "tight"
    nearest, cautious, previous = (
        journal.journal.epsilons(method=method, hold=hold) for hold in HOLDS
    )
    assert nearest.kind != "estimate"
    for other in (cautious, previous):
        np.testing.assert_array_equal(other.values, nearest.values)
    assert nearest.cautious is nearest.values
    rows = [next(journal.journal.histories(hold=hold))[0] for hold in HOLDS]
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])


def test_an_estimate_has_two_readings_and_their_tables_both(tmp_path):
    story = Story(tmp_path / "j", plan_of(6), 5)
    story.go_on(STEPS, 0.3)
    found = story.journal.epsilons()
    np.testing.assert_allclose(
        found.cautious, story.journal.epsilons(hold="cautious").values, rtol=1e-6
    )
    assert (found.cautious > found.values).any()
    assert list(found.to_frame().columns) == ["epsilon", "cautious"]
    told = story.journal.epsilons(hold="cautious")
    assert told.cautious is told.values
    assert list(told.to_frame().columns) == ["epsilon"]


def test_a_longer_time_without_records_is_shared_by_both_of_its_ends(tmp_path):
    """The paper's rule charges the first of two norms for all eight steps."""
    plan = plan_of(8)
    journal = Journal.create(tmp_path / "j", plan, margin=EXACT)
    for first, norm in ((0, 0.8), (8, 0.2)):
        journal.record(first, np.full(N, norm))
        journal.charge(first, first + 7)
    for hold, norms, steps in (
        ("nearest", [0.8, 0.2, 0.2], [5, 3, 8]),
        ("cautious", [0.8, 0.8, 0.2, 0.2], [1, 7, 1, 7]),
        ("previous", [0.8, 0.2], [8, 8]),
    ):
        ((found, counts),) = journal.histories(hold=hold)
        held_now = [(z, t) for z, t in zip(found[:, 0], counts, strict=True)]
        assert held_now == list(zip(norms, steps, strict=True))


def test_norms_of_a_refresh_have_the_margin_of_the_steps_before_it(tmp_path):
    """Noise on a coarser grid, earlier: what rounding adds there is charged there too."""
    plan = plan_of(8, ((7, {"noise_multiplier": 1e-3}),))
    alone = plan_of(8, ((7, {"noise_multiplier": 1e-3}), (8, {"noise_multiplier": 1e-4})))
    margin = Margin(relative=0.0)
    with Journal.create(tmp_path / "j", plan, margin=margin) as journal:
        journal.record(0, np.full(N, 0.1))
        journal.charge(0, 6)
        journal.charge(7)
        journal.record(8, np.full(N, 0.1))
        assert journal.norms(8)[0] == 0.1 + margin.room(plan.phase(0))
    rooms = [margin.room(phase) for phase in alone.all_phases]
    assert all(a > b for a, b in pairwise(rooms))
    clipped = plan_of(8, ((8, {"noise_multiplier": 1e-3}),), clipping="individual")
    with Journal.create(tmp_path / "k", clipped, margin=margin) as journal:
        journal.record(0, np.full(N, 0.1))
        journal.charge(0, 7)
        journal.record(8, np.full(N, 0.1))
        assert journal.norms(8)[0] == 0.1 + margin.room(clipped.phase(8))
