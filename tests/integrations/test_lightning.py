import dataclasses
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")
from opacus import PrivacyEngine  # noqa: E402

from epsilons import Examples, Plan  # noqa: E402
from epsilons.integrations.lightning import IndividualPrivacy, PrivateLoader  # noqa: E402
from epsilons.training import supervised  # noqa: E402

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


def trainer(*callbacks, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return pl.Trainer(
        callbacks=list(callbacks), logger=False, enable_checkpointing=False, accelerator="cpu",
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


class Private(Module):
    """The same on private steps, with a falling learning rate; `stop`: at which step it fails."""

    def __init__(self, interval="step", frequency=1, stop=None):
        super().__init__()
        self.automatic_optimization = False
        self.schedule, self.stop = {"interval": interval, "frequency": frequency}, stop
        self.seen, self.rates = [], []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(4, 3)

    def training_step(self, private_step, index):
        step = private_step(self)
        self.seen.append(step.number)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if step.number == self.stop:
            raise RuntimeError("stop")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, **self.schedule}]


PLAN = Plan(
    n=N, batch_size=10, steps=15, noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-4,
    refresh_every=6, sums="float32",
)  # fmt: skip


def loader(out, seed=1, **options):
    return PrivateLoader(LOSS, data(), PLAN, out=out, seed=seed, **options)


def fit(module, steps, max_epochs=3, **options):
    found = trainer(max_epochs=max_epochs, **options)
    found.fit(module, steps)
    return found


@pytest.mark.parametrize(
    ("schedule", "last"), [(("step", 1), 2**-15), (("step", 4), 2**-3), (("epoch", 1), 2**-2)]
)
def test_a_module_that_was_left_ends_with_the_same_bits(tmp_path, schedule, last):
    whole, mine = Private(*schedule), loader(tmp_path / "whole")
    done = fit(whole, mine)
    assert (whole.seen, done.global_step, done.current_epoch) == ([*range(15)], 15, 3)
    assert whole.rates[-1] == last
    assert mine.run.finished
    assert mine.epsilons().worst_case == PLAN.worst_case()
    for stop in (4, 5):  # within an epoch, and at its end
        out = tmp_path / str(stop)
        with pytest.raises(RuntimeError, match="stop"):
            fit(Private(*schedule, stop=stop), loader(out))
        again = Private(*schedule)
        fit(again, loader(out))
        assert again.seen == [*range(stop, 15)]
        assert again.rates == whole.rates[stop:]
        assert torch.equal(again.net.weight, whole.net.weight)


def test_fitting_again_goes_on_and_a_finished_run_gives_its_weights(tmp_path):
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    module, mine = Private(), loader(tmp_path / "run", state=[average])
    fit(module, mine, max_epochs=1)
    assert not mine.run.finished
    fit(module, mine, max_epochs=-1)
    assert module.seen == [*range(6), *range(5, 15)]  # the last that was shown is shown again
    assert mine.run.finished
    other = Private()
    fit(other, loader(tmp_path / "run", state=[average]))
    assert torch.equal(module.net.weight, other.net.weight)
    assert other.seen == [14]


def test_epochs_that_the_trainer_cuts_short_lose_no_step(tmp_path):
    module, mine = Private(), loader(tmp_path / "run")
    fit(module, mine, max_epochs=2, limit_train_batches=4)
    assert module.seen == [*range(8)]
    mine.finish(module)
    assert mine.run.finished
    assert mine.run.journal.repeated == 0


def test_bfloat16_computes_in_it_and_keeps_float32_weights(tmp_path):
    one, other = Private(), Private()
    fit(one, loader(tmp_path / "one"))
    fit(other, loader(tmp_path / "other"), precision="bf16-mixed")
    assert other.net.weight.dtype == torch.float32
    assert 0 < (one.net.weight - other.net.weight).abs().max() < 0.1


def test_another_loss_on_the_same_run_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        fit(Private(stop=2), loader(tmp_path / "run"))
    other = PrivateLoader(lambda m, b: 2 * LOSS(m, b), data(), PLAN, out=tmp_path / "run", seed=1)
    with pytest.warns(UserWarning, match="was begun with another loss"):
        fit(Private(), other)


class Automatic(Private):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = True


class Forgetful(Private):
    def training_step(self, private_step, index):
        return None


class Two(Private):
    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Automatic, "set self.automatic_optimization = False"),
        (Forgetful, "training_step took no step"),
        (Two, "1 processes with 2 optimizers; expected one of each"),
    ],
)
def test_modules_that_would_not_take_private_steps_are_refused(tmp_path, module, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit(module(), loader(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_what_makes_no_sense_is_refused_at_the_door(tmp_path):
    with pytest.raises(ValueError, match="expected a function"):
        PrivateLoader(None, data(), PLAN, out=tmp_path / "run")


def test_nothing_before_training(tmp_path):
    callback = IndividualPrivacy(LOSS, out=tmp_path / "run", hooks=None, delta=1e-5)
    with pytest.raises(ValueError, match="has not begun"):
        callback.epsilons()


def test_a_loader_of_owners_draws_persons(tmp_path):
    people = Examples(ids=range(N), owners=[f"p{k // 3}" for k in range(N)])
    plan = dataclasses.replace(
        PLAN, n=N // 3, batch_size=5, sample_rate=None, epochs=None, unit="owner",
        max_records_per_owner=3,
    )  # fmt: skip
    steps = PrivateLoader(LOSS, data(), plan, out=tmp_path / "run", seed=1, examples=people)
    fit(Private(), steps)
    assert len(steps.epsilons()) == N // 3
    assert steps.run.plan.per == "person"
