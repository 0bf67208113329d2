"""Individual accounting inside an Opacus loop: one line after `make_private`.

Rate, noise and bound are read from what Opacus does and compared again at every step, norms at
every refresh; a set-up for which the accounting would be false is refused with its reason. What
can't be seen from the optimizer is in docs/guides/opacus.md. Opacus's accountant goes on as before.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.gradients.norms import LossFn
from epsilons.integrations.accounted import Accounted
from epsilons.integrations.opacus_parts import (
    accountant_of,
    are_among,
    check_bounds,
    check_labels,
    check_parameters,
    check_rate,
    clipped_by,
    collate_fn,
    dp_optimizer,
    grad_sample_hooks,
    poisson_sampler,
    randomness_of,
    steps_taken,
    without_hooks,
)
from epsilons.training.distributed import expect_one_process

_REFRESHES_PER_EPOCH = 3  # the paper's
# between Opacus's norms, in the precision of its gradients, and ours
_NORM_TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.01}
_FINE_TOLERANCE = 1e-3
_DRAWN = (
    "It gives some of them differently each time it is asked (augmentation), so that no norm here "
    "is that of a step: augment before training, or train with epsilons.training.fit, which "
    "records the norms of its steps."
)


def attach(
    model: GradSampleHooks | nn.Module,
    optimizer: Any,
    data_loader: DataLoader[Any],
    *,
    loss_fn: LossFn,
    out: str | os.PathLike[str],
    delta: float,
    dataset: Dataset[Any] | None = None,
    examples: Examples | None = None,
    refresh_every: int | None = None,
    batch_size: int = 256,
) -> AttachedToOpacus:
    """Add individual accounting to what `PrivacyEngine.make_private` returned.

    `model`: the wrapped model, or the hooks object of `wrap_model=False`. `loss_fn(model, batch)`
    gives one loss per example; the loop's own loss is its mean (or sum). `delta` of the guarantee
    is yours to choose, well below 1/n. `dataset` is the loader's, or the same examples in the same
    order; some labels are compared. Every `refresh_every` steps (default: a third of an epoch) the
    norms of all examples are computed, `batch_size` at a time.
    Where Opacus takes noise and coins from is recorded, and said with the guarantee. The run folder
    `out` is complete after `.close()`. To be called once, after `make_private` and any step hook of
    your own, which is called as before, and before the first step. Or after a restart, once
    weights, optimizer and Opacus's accountant are restored (`PrivacyEngine.load_checkpoint`): the
    run at `out` goes on at the step that the accountant is at, and steps that it has beyond are
    charged again, with a warning. One that has fewer steps is refused.

    Works with hooks, functorch and ghost modes and with `BatchMemoryManager`. Refused: batches that
    are not Poisson samples, per-layer and adaptive clipping, distributed training, a rate that
    differs between loader and accountant, steps taken before, and rate, noise or bound that change
    during training. `optimizer` and `data_loader`: the other two that `make_private` returned.
    `examples`: names of the examples (ids, owners, groups); by default 0 to n − 1.
    """
    hooks = grad_sample_hooks(model)
    optimizer = dp_optimizer(optimizer)
    expect_one_process(
        "attach",
        "Train with PrivateTraining under torchrun: under one seed, the ranks of Opacus draw the "
        "same local coins, and skip empty batches",
    )
    sampler = poisson_sampler(data_loader)
    data = data_loader.dataset if dataset is None else dataset
    n = len(data)  # type: ignore[arg-type]
    if n != sampler.num_samples:
        raise ValueError(
            f"the data set has {n} examples and the loader draws from {sampler.num_samples}; "
            "they must be the same, in the same order"
        )
    if dataset is not None and dataset is not data_loader.dataset:
        check_labels(dataset, data_loader.dataset)
    taken = _taken_unattached(optimizer)
    check_rate(sampler, data_loader, optimizer)
    check_parameters(hooks, optimizer)
    check_bounds(hooks, optimizer)
    plan = Plan(
        n=n,
        sample_rate=float(sampler.sample_rate),
        noise_multiplier=float(optimizer.noise_multiplier),
        max_grad_norm=float(optimizer.max_grad_norm),
        delta=delta,
        refresh_every=max(1, round(1 / (_REFRESHES_PER_EPOCH * sampler.sample_rate)))
        if refresh_every is None
        else refresh_every,
        sums="float32",  # as Opacus adds gradients up
    )
    return AttachedToOpacus(
        hooks, optimizer, sampler, loss_fn, data, plan, out=out, taken=taken, examples=examples,
        batch_size=batch_size, collate_fn=collate_fn(data_loader),
        randomness=randomness_of(optimizer, sampler),
    )  # fmt: skip


class AttachedToOpacus(Accounted):
    """The accounting of an Opacus loop; see `attach`.

    `.close()` lets the optimizer go; its next step, if there is one, warns that the run has ended.
    `hooks`, `optimizer`, `sampler`, `loss_fn`, `dataset`, `plan` and `options` are what `attach`
    found. `.run`: the run folder.
    """

    def __init__(
        self,
        hooks: GradSampleHooks,
        optimizer: DPOptimizer,
        sampler: UniformWithReplacementSampler,
        loss_fn: LossFn,
        dataset: Dataset[Any],
        plan: Plan,
        **options: Any,
    ) -> None:
        super().__init__(
            hooks._module,
            optimizer,
            loss_fn,
            dataset,
            plan,
            without_hooks=lambda: without_hooks(hooks),
            **options,
        )
        self._hooks, self._optimizer, self._sampler = hooks, optimizer, sampler
        self._before = optimizer.step_hook
        self._accountant = accountant_of(self._before)
        self._false = False
        optimizer.attach_step_hook(self._on_step)

    @property
    def closed(self) -> bool:
        """Whether the run was ended by `close`."""
        return self._closed

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every example for the steps taken so far, in data set order.

        `delta`: by default that of `attach`. ValueError if steps were taken that the journal
        doesn't know.
        """
        if not self._closed:
            self._expect_whole()
        return super().epsilons(delta)

    def close(self) -> None:
        """End the run: its weights are saved, its journal is sealed. Again: nothing happens.

        ValueError if steps were taken that the journal doesn't know.
        """
        if not self._closed:
            self._expect_whole()
            super().close()

    def leave(self) -> None:
        """Let the run go as it is, to be gone on with later, and the optimizer as it was before."""
        super().leave()
        self.let_go()

    def let_go(self) -> None:
        """Give the optimizer back the hook that it had before accounting was attached."""
        if self._optimizer.step_hook == self._on_step:
            self._optimizer.attach_step_hook(self._before)

    def _on_step(self, optimizer: DPOptimizer) -> None:
        """Called by Opacus when the gradient is noisy and the weights have not changed yet."""
        if self._closed:
            warnings.warn(
                f"the run at {self.run.path} ended with close(); this step of the optimizer and "
                "those to come are not in its ε",
                stacklevel=4,
            )
            self.let_go()
        else:
            self._expect_whole()
            self._check_unchanged(optimizer)
            self.before_step(on_norms=self._compare)
        if self._before is not None:
            self._before(optimizer)

    def _compare(self, norms: NDArray[np.float64]) -> None:
        if "loss" in self.run.journal.random:
            return  # a refresh and a step draw differently; the values are called an estimate
        theirs = clipped_by(self._hooks, self._optimizer)
        tolerance = _NORM_TOLERANCE.get(theirs.dtype, _FINE_TOLERANCE)
        if not are_among(theirs.double().cpu().numpy(), norms, tolerance):
            self._false = True
            drawn = "data" in self.run.journal.random
            raise ValueError(
                f"step {self.run.journal.steps_charged}: the gradient norms that Opacus clipped by "
                "are not those of loss_fn on this data set. Is loss_fn the loss of the loop, one "
                "value per example? Does the loop's reduction match loss_reduction? Does the data "
                "set give the same examples as the loader? "
                + (_DRAWN if drawn else "Does it augment them, at random, each time?")
            )

    def _expect_whole(self) -> None:
        """A `ValueError` if steps were taken that the journal does not know, or knows wrongly."""
        charged = self.run.journal.steps_charged
        if self._false:
            raise ValueError(
                f"the norms of Opacus stopped being those of loss_fn by step {charged}, so that "
                "the journal may be false before it; the run is not sealed"
            )
        taken = 0 if self._accountant is None else steps_taken(self._accountant)
        if self._optimizer.step_hook != self._on_step or taken > charged:
            raise ValueError(
                f"the optimizer's step hook was replaced after accounting was attached: {charged} "
                f"steps are in the journal, and Opacus's accountant knows {taken}. Attach step "
                "hooks of your own before accounting, which calls them; this run is not sealed"
            )

    def _check_unchanged(self, optimizer: DPOptimizer) -> None:
        plan = self.run.plan
        check_bounds(self._hooks, optimizer)
        read = (
            (optimizer, "noise_multiplier"),
            (optimizer, "max_grad_norm"),
            (self._sampler, "sample_rate"),
        )
        for owner, name in read:
            now, then = float(getattr(owner, name)), getattr(plan, name)
            if now != then:
                raise ValueError(
                    f"{name} is {now} at step {self.run.journal.steps_charged} and was {then} when "
                    "accounting was attached; schedules of noise, bound or rate are not accounted "
                    "here"
                )
        if optimizer.accumulated_iterations != 1:
            raise ValueError(
                f"{optimizer.accumulated_iterations} batches were accumulated for one step, so "
                "that the rate is not the loader's; use BatchMemoryManager"
            )


def _taken_unattached(optimizer: DPOptimizer) -> int | None:
    """The steps that Opacus's accountant knows, unless other accounting is attached."""
    other = getattr(optimizer.step_hook, "__self__", None)
    if isinstance(other, AttachedToOpacus):
        if not other.closed:
            raise ValueError(
                f"accounting is attached to this optimizer already, for {other.run.path}; "
                "one run at a time: close() ends it, leave() lets it be gone on with"
            )
        other.let_go()
    accountant = accountant_of(optimizer.step_hook)
    return None if accountant is None else steps_taken(accountant)
