"""`epsilons plan`: noise for a worst case, before there is any data."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from epsilons.accounting.individual import METHODS
from epsilons.accounting.plan import Plan, Unit
from epsilons.accounting.printed import epsilon_text, percent_text
from epsilons.accounting.sums import NOT_COVERED, Sums
from epsilons.cli.show import kept_by, warn_of_delta
from epsilons.release import reserved

RESERVE_DELTA = 1e-5


def plan(
    n: Annotated[int, typer.Option(help="Number of training examples, or of their owners.")],
    batch_size: Annotated[int, typer.Option(help="Expected batch size.")],
    epochs: Annotated[float, typer.Option(help="Passes over the data.")],
    delta: Annotated[float, typer.Option(help="δ of the guarantee.")],
    epsilon: Annotated[float | None, typer.Option(help="Worst-case ε to meet.")] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(help="An ε that people may choose; repeat it for others. Not with --epsilon."),
    ] = None,
    clipping: Annotated[
        str, typer.Option(help="How budgets are kept: max (shares of the bound) or filtered.")
    ] = "max",
    reserve: Annotated[
        float | None, typer.Option(help="ε at δ = 1e-5 set aside for publications, with budgets.")
    ] = None,
    sums: Annotated[Sums, typer.Option(help="Sums over examples: float64 or float32.")] = "float64",
    unit: Annotated[
        Unit, typer.Option(help="What n and the batch size count: record or owner.")
    ] = "record",
) -> None:
    """The least noise that meets a worst-case ε, and what it gives (needs nobody's data).

    With --budget: what each budget is promised, and to what share of the clip bound its gradients
    are clipped, or by which Rényi order its steps are paid for.
    """
    if (epsilon is None) == (not budget):
        raise ValueError("give --epsilon, or --budget once for each ε that people may choose")
    constants = {
        "n": n, "batch_size": batch_size, "epochs": epochs, "max_grad_norm": 1.0, "delta": delta,
        "sums": sums,
    }  # fmt: skip
    if budget:
        _print_promises(budget, clipping, reserve, constants)
        return
    if clipping != "max" or reserve is not None:
        raise ValueError("--clipping and --reserve go with --budget")
    assert epsilon is not None
    table = Table("calibrated with", "noise multiplier", *(f"ε by {m}" for m in METHODS))
    found = None
    for method in METHODS:
        found = Plan.for_epsilon(
            epsilon,
            method=method,
            **constants,
        )
        _expect_steps(found)
        worst = (epsilon_text(found.worst_case(m)) for m in METHODS)
        table.add_row(method, f"{found.noise_multiplier:.5f}", *worst)
    assert found is not None
    warn_of_delta(delta, n)
    console = Console(highlight=False)
    console.print(
        f"sampling rate {found.sample_rate:.6g}, {found.steps} steps, δ = {delta:g}, "
        f"ε per {'person' if unit == 'owner' else 'record'}"
    )
    console.print(table)
    times = len(found.refresh_steps)
    console.print(
        f"gradient norms of all {'owners' if unit == 'owner' else 'examples'} are refreshed "
        f"{times} time{'' if times == 1 else 's'} "
        f"unless said otherwise (refreshes_per_epoch), which takes at most "
        f"{percent_text(found.refresh_share, 0)} of the run's time",
        soft_wrap=True,
    )
    if found.sums == "float32":
        console.print(f"with float32 sums, {NOT_COVERED}", soft_wrap=True)


def _expect_steps(plan: Plan) -> None:
    if not plan.steps:
        raise ValueError(
            f"--epochs {plan.epochs:g} is not one step of --batch-size {plan.batch_size:g} among "
            f"--n {plan.n}; expected at least {plan.sample_rate:g}"
        )


def _print_promises(
    budgets: list[float], clipping: str, reserve: float | None, constants: dict[str, Any]
) -> None:
    """What each budget is promised by the plan with the least noise for the largest."""
    if clipping not in ("max", "filtered"):
        raise ValueError(f"--clipping {clipping!r}; expected max or filtered")
    if clipping == "filtered":
        constants = {**constants, "clipping": clipping, "refresh_every": 1}
    if reserve is not None:
        beside = reserved(reserve, RESERVE_DELTA)
        constants = {**constants, "reserve_mu": beside.mu, "reserve_distance": beside.distance}
    plan = Plan.for_budgets(tuple(budgets), **constants)
    _expect_steps(plan)
    warn_of_delta(plan.delta, plan.n)
    console = Console(highlight=False)
    console.print(
        f"sampling rate {plan.sample_rate:.6g}, {plan.steps} steps, δ = {plan.delta:g}, "
        f"noise multiplier {plan.noise_multiplier:.5f}, ε per record"
    )
    table = Table("budget", "promised ε", "kept by", "worst case")
    for promise in plan.promises:
        table.add_row(
            f"{promise.budget:g}",
            epsilon_text(promise.epsilon),
            kept_by(promise),
            epsilon_text(plan.worst_case()),
        )
    console.print(table)
    console.print(
        "everyone is promised the ε of their own budget before training, whatever budgets others "
        "have; who has which is private",
        soft_wrap=True,
    )
