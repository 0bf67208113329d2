"""Calibration, power and alarms on right code, as tables: `make audit`.

`python tests/audit/figures.py [fits] [audits] [runs]`: how many fits are calibrated on, how many
audits of right code are made, how many runs of 40,000 canaries each line of the power table has.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from loops import LOSS, data, network
from scipy.stats import kstest

from epsilons import Plan
from epsilons.accounting import tight_epsilon
from epsilons.audit import audit, lower_bounds
from epsilons.audit.bounds import ScaledClaim, _planned_guesses, exact_p_value
from epsilons.audit.fresh import Stratum, canary_run, strata

WORST_CASES = (0.5, 1.0, 2.0, 4.0, 8.0)
SHARES = (1.0, 0.75, 0.5, 0.25)


def plan_of(epsilon, steps=100, **changes):
    constants = dict(n=1000, sample_rate=0.1, steps=steps, max_grad_norm=1.0, delta=1e-5,
                     clipping="individual", refresh_every=steps)  # fmt: skip
    return Plan.for_epsilon(epsilon, **{**constants, **changes})


def calibration(fits):
    """p-values of the exact bound on right fits: one for each stratum."""
    plan = plan_of(4.0, steps=60, refresh_every=10)
    groups = strata(plan, 4_000)
    found, claims = [], {}
    for seed in range(fits):
        with tempfile.TemporaryDirectory() as folder:
            run = canary_run(plan, groups, Path(folder) / "run", seed=seed)
        for name, scores in run.scores.items():
            if name not in claims:
                claim = ScaledClaim(run.histories[name], plan.delta)
                claims[name] = claim, _planned_guesses(claim, len(scores))
            claim, r = claims[name]
            sure = np.argsort(-np.abs(scores), kind="stable")[:r]
            wrong = int(((scores[sure] > 0) != run.members[name][sure]).sum())
            found.append(exact_p_value(claim.curve(0), len(scores), r, wrong))
    p = np.array(found)
    print(f"exact bound, p-values of {fits} right fits, {p.size} strata:", flush=True)
    print(f"  below 5 %: {np.mean(p < 0.05):.1%}; below 1 %: {np.mean(p < 0.01):.1%}; "
          f"least {p.min():.4f}; too small as a whole with p = "
          f"{kstest(p, 'uniform', alternative='greater').pvalue:.3f}", flush=True)  # fmt: skip


def power(runs):
    """Lower bounds beside claims, of 20 strata: five worst cases at four norms."""
    print("worst case  z/C  claim  counts  family  exact   one run: Steinke  f-DP  exact")
    near = {"counts": [], "family": [], "exact": []}
    for epsilon in WORST_CASES:
        plan = plan_of(epsilon)
        groups = [
            Stratum(f"{share:g}", 10_000, np.full(100, share * (4.0 if share == 1 else 1.0)),
                    np.full(100, share))
            for share in SHARES
        ]  # fmt: skip
        kept = []
        for seed in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                kept.append(canary_run(plan, groups, Path(folder) / "run", seed=seed))
        for share in SHARES:
            name = f"{share:g}"
            history = kept[0].histories[name]
            claim = ScaledClaim(history, plan.delta)
            stated = tight_epsilon(1 / history.ratios, history.sample_rates, history.steps, 1e-5)
            pooled = [np.concatenate([getattr(run, part)[name] for run in kept])
                      for part in ("scores", "members")]  # fmt: skip
            many = lower_bounds(*pooled, history, plan.delta, claim=claim, dependent=False)
            one = lower_bounds(kept[0].scores[name], kept[0].members[name], history, plan.delta,
                               claim=claim)  # fmt: skip
            for bound, values in near.items():
                values.append(getattr(many, bound) / stated)
            print(f"{epsilon:10g} {share:4g} {stated:6.3f} {many.counts:7.2f} {many.family:7.2f} "
                  f"{many.exact:6.2f} {one.steinke:17.2f} {one.fdp:5.2f} {one.exact:6.2f}",
                  flush=True)  # fmt: skip
    for bound, values in near.items():
        v = np.array(values)
        print(f"{bound}: ≥ 0.8 of the claim in {int((v >= 0.8).sum())} of {v.size} strata, "
              f"from {v.min():.2f} to {v.max():.2f} ({runs} runs)", flush=True)  # fmt: skip


def alarms(audits):
    """Audits of right code."""

    def build():
        model = network()
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    plan = Plan(n=40, sample_rate=0.2, steps=12, noise_multiplier=0.8, max_grad_norm=1.0,
                delta=1e-4, clipping="individual", refresh_every=4)  # fmt: skip
    outcomes, began = [], time.monotonic()
    for seed in range(audits):
        outcomes.append(audit(build, LOSS, data(), plan, 0.1, canaries=4_000, seed=1000 * seed))
    names = [found.outcome for found in outcomes]
    print(f"{audits} audits of right code: " + ", ".join(
        f"{names.count(each)} {each}" for each in ("kept", "inconclusive", "contradicted")
    ) + f" ({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip
    for found in outcomes:
        if found.outcome == "contradicted":
            print(found.reasons)


if __name__ == "__main__":
    torch.set_num_threads(1)
    fits, audits, runs = [int(x) for x in (sys.argv[1:] + [100, 50, 10][len(sys.argv) - 1 :])]
    if fits:
        calibration(fits)
    if audits:
        alarms(audits)
    if runs:
        power(runs)
