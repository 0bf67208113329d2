"""The journal of some examples, priced under other circumstances than those of the run.

Another length, another clip bound, fewer refreshes: along the models that were observed. A run
under those circumstances would have seen other models, so what comes back is an indication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.composition import composed_epsilons
from epsilons.accounting.holding import Hold
from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.journal import Journal


@dataclass(frozen=True, eq=False, repr=False)
class Replay:
    """Norms of m examples, for how many steps each holds, and the constants of each row."""

    plan: Plan
    chosen: NDArray[np.int64]  # (m,) positions in the data set
    norms: NDArray[np.float64]  # (rows, m)
    steps: NDArray[np.int64]  # (rows, m)
    sample_rate: NDArray[np.float64]  # (rows,)
    noise_std: NDArray[np.float64]  # (rows,)
    bound: NDArray[np.float64]  # (rows,)

    @property
    def length(self) -> int:
        """Steps that every example pays for."""
        return int(self.steps[:, 0].sum())

    def epsilons(self, method: Method = METHODS[0]) -> Epsilons:
        """ε of the m examples, the plan's clip bound included."""
        filtered = self.plan.clipping == "filtered"  # its rows are bounds, which lie on levels
        most = tuple(np.sum(self.steps, axis=0).max(initial=0) for _ in self.plan.all_phases)
        return composed_epsilons(
            [(self.norms, self.steps)],
            sample_rate=self.sample_rate,
            noise_std=self.noise_std,
            max_grad_norm=self.bound,
            beside=np.zeros(len(self.bound)),
            delta=self.plan.delta,
            method=method,
            levels=self.plan.levels,
            rounding="up" if filtered else self.plan.rounding,
            clipping="max" if filtered else self.plan.clipping,
            releases=self.plan.releases,
            most=lambda d: self.plan.worst_case(
                method, steps=most, delta=d, releases=self.plan.releases.gaussian
            ),
        )

    def with_bound(self, factor: float) -> Replay:
        """The same norms under a clip bound `factor` times as large, the noise growing with it.

        Only ratios of norms, noise and bound count, so it is the norms that shrink.
        """
        return replace(self, norms=self.norms / factor)


def priced_together(replays: Sequence[Replay], method: Method = METHODS[0]) -> list[Epsilons]:
    """ε's of each replay; of one plan in one go, since a table of prices is what takes time."""
    constants = {
        values
        for r in replays
        for values in zip(
            r.sample_rate.tolist(), r.noise_std.tolist(), r.bound.tolist(), strict=True
        )
    }
    if len(constants) != 1:
        return [replay.epsilons(method) for replay in replays]
    rows = max(len(replay.norms) for replay in replays)
    longest = next(replay for replay in replays if len(replay.norms) == rows)
    together = replace(
        longest,
        norms=np.concatenate([_padded(replay.norms, rows) for replay in replays], axis=1),
        steps=np.concatenate([_padded(replay.steps, rows) for replay in replays], axis=1),
    ).epsilons(method)
    ends = np.cumsum([replay.norms.shape[1] for replay in replays])
    parts = np.split(together.values, ends)[:-1]
    return [replace(together, values=values, cautious=values) for values in parts]


def _padded(table: NDArray[Any], rows: int) -> NDArray[Any]:
    """The table with further rows of zeros: norms that hold for no step."""
    return np.pad(table, ((0, rows - len(table)), (0, 0)))


def random_examples(n: int, most: int, seed: int) -> NDArray[np.int64]:
    """Positions of at most `most` of n examples, ascending."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, most, replace=False))


def replayed(
    journal: Journal,
    chosen: NDArray[np.int64],
    *,
    sampled: bool = True,
    hold: Hold = "nearest",
) -> Replay:
    """A replay of the chosen examples (ascending indices) from the journal.

    `hold`: see `Journal.epsilons`. `sampled`: with the norms of drawn examples between refreshes;
    without them where the run has phases, since then a row must tell which phase it is of.
    """
    plan = journal.plan
    several = len(plan.all_phases) > 1
    if several and journal.restarts:
        raise ValueError("a run with phases that was restarted can't be replayed")
    norms, steps = [], []
    with_sampled = sampled and not several
    for block, counts in journal.histories(sampled=with_sampled, only=chosen, hold=hold):
        norms.append(block)
        steps.append(np.broadcast_to(counts if counts.ndim == 2 else counts[:, None], block.shape))
    all_steps = np.concatenate(steps, axis=1)
    starts = np.cumsum(all_steps[:, 0]) - all_steps[:, 0] if several else np.zeros(len(all_steps))
    every = from_norms(plan, chosen, np.concatenate(norms, axis=1), all_steps, starts)
    if not plan.budgets:
        return every
    own = every.bound[:, None] * journal.shares(chosen)
    return replace(every, norms=np.fmin(every.norms, own))  # NaN: the bound


def from_norms(
    plan: Plan,
    chosen: NDArray[np.int64],
    norms: NDArray[np.float64],
    steps: NDArray[np.int64],
    starts: NDArray[np.integer] | NDArray[np.floating],
) -> Replay:
    """A replay whose rows (rows, m) begin at the given steps of the plan."""
    if plan.adaptive is not None:
        raise ValueError("a run whose clip bound adapts can't be replayed otherwise")
    phases = [plan.phase(int(start)) for start in starts]
    return Replay(
        plan=plan,
        chosen=chosen,
        norms=norms,
        steps=steps,
        sample_rate=np.array([phase.sample_rate for phase in phases]),
        noise_std=np.array([phase.noise_std for phase in phases]),
        bound=np.array([phase.max_grad_norm for phase in phases]),
    )
