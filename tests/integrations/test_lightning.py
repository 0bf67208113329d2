import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")
from opacus import PrivacyEngine  # noqa: E402

from epsilons import Plan  # noqa: E402
from epsilons.accounting.sums import (  # noqa: E402
    NORM_ERROR,
    rounding_charge,
    sum_remainder,
)
from epsilons.gradients import gradient_norms  # noqa: E402
from epsilons.integrations.lightning import IndividualPrivacy  # noqa: E402
from epsilons.noise import SeededNoise  # noqa: E402
from epsilons.training import PoissonLoader, private_step, supervised  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N = 60
LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 3)


class Module(pl.LightningModule):
    """As Lightning's users write it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.private_optimizer = None

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return self.private_optimizer


class ManualModule(Module):
    """The same with `private_step`."""

    def __init__(self, plan):
        super().__init__()
        self.automatic_optimization = False
        self.plan, self.noise = plan, SeededNoise(1)

    def training_step(self, batch, index):
        private_step(self, self.optimizers(), LOSS, batch[1], self.plan, noise=self.noise)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(callback, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return pl.Trainer(
        callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def test_a_model_under_opacus(tmp_path):
    module, engine = Module(), PrivacyEngine(accountant="rdp")
    hooks, module.private_optimizer, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), max_grad_norm=1.0,
        data_loader=DataLoader(data(), batch_size=10), noise_multiplier=1.5, wrap_model=False,
    )  # fmt: skip
    callback = IndividualPrivacy(
        LOSS, out=tmp_path / "run", hooks=hooks, delta=1e-5, refresh_every=3
    )
    trainer(callback, max_epochs=2).fit(module, loader)
    assert callback.accounted.run.journal.refreshes == (0, 3, 6, 9)
    assert engine.accountant.history == [(1.5, 1 / 6, 12)]
    assert callback.epsilons().values.shape == (N,)
    assert callback.accounted.run.finished


def test_a_model_with_private_step(tmp_path):
    plan = Plan(
        n=N, batch_size=10, steps=9, noise_multiplier=1.0, max_grad_norm=2.0, delta=1e-4,
        refresh_every=4,
    )  # fmt: skip
    module = ManualModule(plan)
    first = gradient_norms(module, LOSS, data(), batch_size=N)
    callback = IndividualPrivacy(LOSS, out=tmp_path / "run", plan=plan, dataset=data())
    trainer(callback, max_epochs=1).fit(module, PoissonLoader(data(), plan))
    journal = callback.accounted.run.journal
    assert (journal.steps_charged, journal.refreshes) == (9, (0, 4, 8))
    np.testing.assert_allclose(journal.norms(0), first * (1 + NORM_ERROR), rtol=1e-5)


class PhasedModule(ManualModule):
    """The same for any plan."""

    def training_step(self, batch, index):
        (callback,) = (c for c in self.trainer.callbacks if isinstance(c, IndividualPrivacy))
        bounds = callback.accounted.run.journal.bounds(index, batch[0])
        phase = self.plan.phase(index)
        private_step(
            self, self.optimizers(), LOSS, batch[1], phase, noise=self.noise, bounds=bounds
        )


@pytest.mark.parametrize("clipping", ["max", "individual"])
def test_norms_have_room_for_the_noise_of_their_phase(tmp_path, clipping):
    plan = Plan(
        n=N, batch_size=10, steps=9, noise_multiplier=1.0, max_grad_norm=2.0, delta=1e-4,
        refresh_every=4, phases=((4, {"noise_multiplier": 1e5}),), clipping=clipping,
    )  # fmt: skip
    module = PhasedModule(plan)
    flat = TensorDataset(torch.zeros(N, 4), data().tensors[1])
    callback = IndividualPrivacy(
        lambda m, b: 0 * LOSS(m, b), out=tmp_path / "run", plan=plan, dataset=flat
    )
    trainer(callback, max_epochs=1).fit(module, PoissonLoader(flat, plan))
    journal = callback.accounted.run.journal
    remainder = sum_remainder(plan.max_batch, 2.0)
    assert journal.norms(0) == pytest.approx(rounding_charge(2.0, 15) + remainder)
    assert journal.norms(8) == pytest.approx(rounding_charge(2e5, 15) + remainder)
    assert journal.sums_covered


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(), "give hooks .* or plan"),
        (dict(hooks=1, plan=2), "give hooks .* or plan"),
        (dict(plan=2), "give the dataset"),
        (dict(hooks=1), "give delta"),
        (dict(plan=2, dataset=data(), delta=1e-3), "delta: with a plan"),
    ],
)
def test_unclear_wishes_are_refused(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        IndividualPrivacy(LOSS, out=tmp_path / "run", **options)


def test_a_loader_that_is_not_of_the_plan_is_refused(tmp_path):
    plan = Plan(n=N, batch_size=10, steps=9, noise_multiplier=1.0, max_grad_norm=2.0, delta=1e-4)
    callback = IndividualPrivacy(LOSS, out=tmp_path / "run", plan=plan, dataset=data())
    with pytest.raises(ValueError, match="the train loader is a DataLoader; with a plan"):
        trainer(callback, max_epochs=1).fit(ManualModule(plan), DataLoader(data(), batch_size=10))
    with pytest.raises(ValueError, match="has not begun"):
        callback.epsilons()
