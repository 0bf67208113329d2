"""An Opacus loop that was left: weights and accountant come back from Opacus's own checkpoint."""

import os
import signal

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from epsilons import Run
from epsilons.integrations.opacus import attach
from epsilons.training import supervised

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
]
N = 60
LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


class Loop:
    """A loop with a checkpoint of Opacus's, as after a start of the process."""

    def __init__(self, folder, **options):
        self.checkpoint, self.run = folder / "checkpoint.pt", folder / "run"
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 3)
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        self.engine = PrivacyEngine(accountant="rdp")
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(data, batch_size=10), noise_multiplier=1.5, max_grad_norm=1.0,
            **options,
        )  # fmt: skip

    def attach(self, **options):
        return attach(
            self.model, self.optimizer, self.loader, loss_fn=LOSS, delta=1e-4, out=self.run,
            **{"refresh_every": 2, **options},
        )  # fmt: skip

    def steps(self, count):
        batches = iter(self.loader)
        for _ in range(count):
            x, y = next(batches)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def save(self):
        self.engine.save_checkpoint(
            path=self.checkpoint, module=self.model, optimizer=self.optimizer
        )

    def load(self):
        self.engine.load_checkpoint(
            path=self.checkpoint, module=self.model, optimizer=self.optimizer
        )


def left(folder, *, saved, taken, **options):
    """A loop that fails after `taken` steps, with a checkpoint at `saved`."""
    loop = Loop(folder)

    def train():
        with loop.attach(**options):
            loop.steps(saved)
            loop.save()
            loop.steps(taken - saved)
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        train()
    return loop


@pytest.mark.parametrize("refresh_every", [1, 2])
def test_a_journal_that_is_ahead_charges_the_repeated_steps_again_and_says_so(
    tmp_path, refresh_every
):
    left(tmp_path, saved=2, taken=5, refresh_every=refresh_every)
    once = Run.open(tmp_path / "run").journal.worst_case()
    loop = Loop(tmp_path)
    loop.load()
    with pytest.warns(UserWarning, match="goes on at step 2, where the loop is; it has 5 steps, of "
                      "which the last 3 are charged again"):  # fmt: skip
        attached = loop.attach(refresh_every=refresh_every)
    journal = attached.run.journal
    assert (journal.steps_charged, journal.repeated) == (2, 3)
    assert journal.worst_case() == once
    with attached:
        loop.steps(4)
    assert (journal.steps_charged, journal.repeated) == (6, 3)
    assert journal.charged() == (9,)
    whole = Loop(tmp_path / "whole")
    with whole.attach() as of_nine:
        whole.steps(6)
        whole.steps(3)
    assert journal.worst_case() == of_nine.run.journal.worst_case() > once
    assert (attached.epsilons().values <= journal.worst_case()).all()
    assert loop.engine.accountant.history[0][2] == 6
    assert Run.open(tmp_path / "run").finished


def test_weights_that_are_not_those_of_the_checkpoint_are_measured_again(tmp_path):
    """The norms of the step that was reached before stood, whatever weights came back."""
    left(tmp_path, saved=2, taken=5)
    loop = Loop(tmp_path)
    loop.load()
    with torch.no_grad():
        loop.model._module.weight.zero_()
        loop.model._module.bias.zero_()
    with pytest.warns(UserWarning, match="charged again"):
        attached = loop.attach()
    before = attached.run.journal.norms(2)
    with attached:
        loop.steps(2)
    assert not np.array_equal(attached.run.journal.norms(2), before)


def test_a_journal_at_the_same_step_goes_on_and_says_nothing(tmp_path):
    loop = Loop(tmp_path)
    attached = loop.attach()
    loop.steps(3)
    loop.save()
    attached.leave()
    assert not Run.open(tmp_path / "run").finished
    loop = Loop(tmp_path)
    loop.load()
    with loop.attach() as attached:
        loop.steps(3)
    journal = attached.run.journal
    assert (journal.steps_charged, journal.repeated, journal.restarts) == (6, 0, 0)
    assert journal.refreshes == (0, 2, 4)
    assert attached.epsilons().worst_case == journal.worst_case()


def test_a_journal_that_is_behind_is_refused(tmp_path):
    loop = Loop(tmp_path)
    loop.attach().leave()
    loop.steps(2)  # that no journal knows
    loop.save()
    loop = Loop(tmp_path)
    loop.load()
    with pytest.raises(ValueError, match=r"has taken 2 steps, and .* knows 0: 2 would be missing"):
        loop.attach()
    assert Run.open(tmp_path / "run").journal.steps_charged == 0


def test_without_the_checkpoint_everything_is_charged_again(tmp_path):
    left(tmp_path, saved=2, taken=3)
    with pytest.warns(UserWarning, match="goes on at step 0, .* the last 3 are charged again"):
        Loop(tmp_path).attach().leave()


def test_an_accountant_that_nobody_can_ask_is_refused(tmp_path):
    left(tmp_path, saved=2, taken=3)
    loop = Loop(tmp_path)
    loop.load()
    loop.optimizer.attach_step_hook(lambda _: None)
    with pytest.raises(ValueError, match="how many the loop has taken can't be known"):
        loop.attach()


def test_coins_or_noise_from_elsewhere_than_is_on_record_are_refused(tmp_path):
    """What is said of the guarantee rests on where the run's first process took them from."""
    left(tmp_path, saved=2, taken=3)
    loop = Loop(tmp_path, noise_generator=torch.Generator().manual_seed(2**60))
    loop.load()
    with pytest.raises(ValueError, match=r"was begun with noise and coins from .*Go on as it was"):
        loop.attach()
    again = Loop(tmp_path)
    again.load()
    with pytest.warns(UserWarning, match="charged again"):  # nothing was held by the refusal
        again.attach().leave()


def test_a_finished_run_and_another_plan_are_refused(tmp_path):
    loop = Loop(tmp_path)
    with loop.attach():
        loop.steps(2)
    with pytest.raises(ValueError, match="is finished; there is nothing to resume"):
        Loop(tmp_path).attach()
    left(tmp_path / "other", saved=1, taken=1)
    other = Loop(tmp_path / "other")
    with pytest.raises(ValueError, match="plan refresh_every was 2 and is 3"):
        other.attach(refresh_every=3)


def test_parameters_that_an_opacus_loop_does_not_move_are_named(tmp_path):
    loop = Loop(tmp_path)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    attached = loop.attach()
    loop.steps(6)
    with pytest.warns(UserWarning, match="after 10 steps these trainable parameters are as they"):
        loop.steps(6)
    attached.leave()


def killed(folder):
    """A loop that saves after two steps and is killed in the fourth, once that is charged."""
    loop = Loop(folder)
    attached = loop.attach()
    loop.steps(2)
    loop.save()
    step = loop.optimizer.original_optimizer.step

    def last(*arguments):
        if attached.run.journal.steps_charged == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        step(*arguments)

    loop.optimizer.original_optimizer.step = last
    loop.steps(4)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_kill_9_leaves_a_run_that_undercounts_nothing(tmp_path):
    process = os.fork()
    if not process:
        try:
            killed(tmp_path)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    loop = Loop(tmp_path)
    loop.load()
    with pytest.warns(UserWarning, match="it has 4 steps, of which the last 2 are charged again"):
        attached = loop.attach()
    with attached:
        loop.steps(1)
    assert attached.run.journal.charged() == (5,)
    assert attached.run.journal.verify().sealed
