"""The Opacus loop as its users write it, with one line added."""

import json
import warnings

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from epsilons import Journal, Margin, Plan, Run, individual_epsilons
from epsilons.gradients import gradient_norms
from epsilons.integrations.opacus import attach
from epsilons.integrations.opacus_parts import randomness_of
from epsilons.randomness import Randomness
from epsilons.release import owner_statement, statement_text
from epsilons.training import supervised
from epsilons.training.identity import record_digests

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
]
N, BATCH, SIGMA, BOUND = 120, 20, 1.2, 4.0
LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))
# Opacus ends its series at e^−30, which leaves it up to 1e-10 below the divergence.
CUT_SHORT = 1e-9
MODES = ["hooks", "functorch", "ghost"]


def data(n=N):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.randn(n, 1, 6, 6, generator=generator)
    x[:, 0, 0, :3] += 2 * nn.functional.one_hot(y, 3)
    return TensorDataset(x, y)


def network(dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(48, 3)
        )


def private(mode="hooks", model=None, dataset=None, accountant="rdp", **options):
    """Engine, model, optimizer, criterion and loader as make_private gives them."""
    model = network() if model is None else model
    engine = PrivacyEngine(accountant=accountant)
    criterion = nn.CrossEntropyLoss()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data() if dataset is None else dataset, batch_size=BATCH),
        criterion=criterion,
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        grad_sample_mode=mode,
        **options,
    )
    if mode == "ghost":
        return engine, *made
    return engine, made[0], made[1], criterion, made[2]


def loop(model, optimizer, criterion, loader, epochs=2, each_step=lambda: None):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            each_step()
            optimizer.step()


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


@pytest.mark.parametrize("mode", MODES)
def test_epsilons_are_those_of_our_own_loop_on_the_same_norms(tmp_path, mode):
    _, model, optimizer, criterion, loader = private(mode)
    with attach(
        model, optimizer, loader, loss_fn=LOSS, dataset=data(), delta=1e-5, out=tmp_path / "run",
        refresh_every=1,
    ) as attached:  # fmt: skip
        norms = []

        def note():
            twin = network()
            twin.load_state_dict(model._module.state_dict())
            norms.append(gradient_norms(twin, LOSS, data(), batch_size=N))

        loop(model, optimizer, criterion, loader, epochs=1, each_step=note)
        found = attached.epsilons()
    plan = Plan(
        n=N, sample_rate=1 / 6, steps=6, noise_multiplier=SIGMA, max_grad_norm=BOUND, delta=1e-5,
        refresh_every=1,
    )  # fmt: skip
    with Journal.create(tmp_path / "ours.sqlite", plan, margin=Margin(parameters=None)) as ours:
        for step, row in enumerate(norms):
            ours.record(step, row)
            ours.charge(step)
        expected = ours.epsilons()
    # equal norms but for rounding; one may be certified between levels, the other rounded up to one
    np.testing.assert_allclose(found.values, expected.values, rtol=2e-3)
    assert np.median(np.abs(found.values / expected.values - 1)) < 1e-5
    assert found.kind == "exact"
    assert len(np.unique(found.values)) > N // 2


@pytest.mark.parametrize("mode", MODES)
def test_worst_case_under_rdp_is_at_most_opacus_own(tmp_path, mode):
    engine, model, optimizer, criterion, loader = private(mode)
    with attach(
        model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run"
    ) as attached:
        file = attached.run.path / "public" / "publications.json"
        before = json.loads(file.read_text(encoding="utf-8"))
        loop(model, optimizer, criterion, loader)
    after = json.loads(file.read_text(encoding="utf-8"))
    # nobody knows how long the loop will be: no ε of 0 is stated
    assert (before["total"]["epsilon"], before["publications"]) == (None, [])
    assert after["total"]["epsilon"] == attached.run.journal.worst_case()
    worst = attached.run.epsilons(method="rdp").worst_case
    theirs = engine.get_epsilon(1e-5)
    assert 0.998 * theirs <= worst <= theirs * (1 + CUT_SHORT)
    assert engine.accountant.history == [(SIGMA, 1 / 6, 12)]
    assert attached.run.journal.steps_charged == 12


@pytest.mark.parametrize(
    ("sample_rate", "noise", "steps"),
    [
        (1024 / 60_000, 2.50631, 5859),
        (4096 / 50_000, 3.32622, 3662),
        (0.01, 1.0, 3000),
        (0.01, 0.6, 300),
        (1 / 30, 1.5, 300),
        (1 / 6, 5.0, 30),
        (0.5, 5.0, 3000),
    ],
)
def test_worst_case_under_rdp_is_at_most_that_of_opacus_accountant(sample_rate, noise, steps):
    accountant = RDPAccountant()
    accountant.history = [(noise, sample_rate, steps)]
    theirs = accountant.get_epsilon(1e-5)
    plan = Plan(
        n=1000, sample_rate=sample_rate, steps=steps, noise_multiplier=noise, max_grad_norm=1.0,
        delta=1e-5,
    )  # fmt: skip
    assert 0.998 * theirs <= plan.worst_case("rdp") <= theirs * (1 + CUT_SHORT)


def test_accounting_changes_no_weight(tmp_path):
    weights = []
    for attached in (False, True):
        torch.manual_seed(5)
        _, model, optimizer, criterion, loader = private()
        if attached:
            attach(
                model,
                optimizer,
                loader,
                loss_fn=LOSS,
                delta=1e-5,
                out=tmp_path / "run",
                refresh_every=1,
            )
        loop(model, optimizer, criterion, loader)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("early", [True, False])
def test_physical_batches_are_one_step(tmp_path, mode, early):
    _, model, optimizer, criterion, loader = private(mode)
    manager = BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=7, optimizer=optimizer
    )  # fmt: skip
    with manager as small:
        given = loader if early else small
        attached = attach(model, optimizer, given, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
        loop(model, optimizer, criterion, small, epochs=1)
    assert attached.run.journal.steps_charged == 6


def test_models_that_are_not_wrapped(tmp_path):
    model = network()
    _, hooks, optimizer, criterion, loader = private(model=model, wrap_model=False)
    with attach(
        hooks, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run"
    ) as attached:
        loop(model, optimizer, criterion, loader)
    assert attached.run.journal.steps_charged == 12
    hooks.cleanup()


def test_the_run_folder_is_complete_and_the_optimizer_let_go(tmp_path):
    _, model, optimizer, criterion, loader = private()
    before = optimizer.step_hook
    with attach(
        model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run"
    ) as attached:
        loop(model, optimizer, criterion, loader)
    attached.let_go()
    assert optimizer.step_hook is before
    run = Run.open(tmp_path / "run")
    assert run.finished
    assert run.journal.verify().sealed
    assert run.journal.refreshes == (0, 2, 4, 6, 8, 10)
    np.testing.assert_array_equal(run.examples.digests, record_digests(loader.dataset))


def test_opacus_norms_above_the_bound_cost_the_worst_case(tmp_path):
    _, model, optimizer, criterion, loader = private()
    with attach(
        model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run", refresh_every=1
    ) as attached:
        loop(model, optimizer, criterion, loader, epochs=1)
    journal = attached.run.journal
    norms = np.stack([journal.norms(step) for step in range(6)])
    expected = individual_epsilons(
        norms, np.ones(6, dtype=int), sample_rate=1 / 6, noise_std=SIGMA * BOUND,
        max_grad_norm=BOUND, delta=1e-5,
    )  # fmt: skip
    found = attached.epsilons()
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-6)
    assert ((norms >= BOUND).all(0) <= found.at_worst_case).all()


def test_dropout_is_an_estimate(tmp_path):
    _, model, optimizer, criterion, loader = private(model=network(dropout=0.3))
    with attach(
        model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run", refresh_every=1
    ) as attached:
        loop(model, optimizer, criterion, loader, epochs=1)
    assert attached.epsilons().kind == "estimate"


def test_delta_is_the_callers(tmp_path):
    """It was 1e-5 in silence, whatever n was."""
    _, model, optimizer, _, loader = private()
    with pytest.raises(TypeError, match="delta"):
        attach(model, optimizer, loader, loss_fn=LOSS, out=tmp_path / "run")
    with attach(
        model, optimizer, loader, loss_fn=LOSS, delta=1e-3, out=tmp_path / "run"
    ) as attached:
        assert attached.run.plan.delta == attached.epsilons().delta == 1e-3


@pytest.mark.parametrize(
    ("seed", "options", "expected"),
    [
        (0, {}, Randomness("torch seeded", "torch seeded")),
        (2**60 + 1, {}, Randomness("torch", "torch")),  # as if nobody had seeded
        (2**60 + 1, {"noise_generator": torch.Generator().manual_seed(1)},
         Randomness("torch seeded", "torch")),
    ],
)  # fmt: skip
def test_where_noise_and_coins_come_from_is_recorded_and_said(tmp_path, seed, options, expected):
    """A run after torch.manual_seed(0) was stated as "nobody … above 5.71 %"."""
    torch.manual_seed(seed)
    _, model, optimizer, _, loader = private(**options)
    with attach(
        model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run"
    ) as attached:
        assert attached.run.journal.randomness == expected
    said = statement_text(owner_statement(Run.open(tmp_path / "run"), "3"))
    assert "nobody" not in said
    assert f"nothing here holds: this run has {expected}" in said


def test_secure_mode_is_the_operating_systems_generator():
    """torchcsprng is not installed here: its parts, as Opacus sets them."""
    _, _, optimizer, _, loader = private()
    optimizer.secure_mode = True
    optimizer.generator = loader.batch_sampler.generator = torch.Generator()
    assert randomness_of(optimizer, loader.batch_sampler).secret
    loader.batch_sampler.generator = None  # a loader that was made elsewhere
    assert randomness_of(optimizer, loader.batch_sampler) == Randomness("system", "torch seeded")


def refused(sentence, tmp_path, model, optimizer, loader, **options):
    before = optimizer.step_hook if isinstance(optimizer, DPOptimizer) else None
    with pytest.raises(ValueError, match=sentence):
        attach(
            model,
            optimizer,
            loader,
            **{"loss_fn": LOSS, "delta": 1e-5, "out": tmp_path / "run", **options},
        )
    assert not (tmp_path / "run").exists()
    assert getattr(optimizer, "step_hook", None) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"refresh_every": 0}, "refresh_every=0; expected a whole number of steps ≥ 1"),
        ({"batch_size": 0}, "batch_size=0; expected a number of examples ≥ 1"),
        ({"batch_size": -1}, "batch_size=-1; expected a number"),
        ({"loss_fn": None}, "loss_fn=None; expected a function"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_the_door(tmp_path, options, sentence):
    _, model, optimizer, _, loader = private()
    refused(sentence, tmp_path, model, optimizer, loader, **options)


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
def test_steps_that_were_taken_before_are_refused(tmp_path, accountant):
    """They were left out: five epochs before attaching, one after, reported as one."""
    _, model, optimizer, criterion, loader = private(accountant=accountant)
    loop(model, optimizer, criterion, loader, epochs=1)
    refused("has taken 6 steps already", tmp_path, model, optimizer, loader)


def test_attaching_twice_is_refused(tmp_path):
    _, model, optimizer, criterion, loader = private()
    with attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "first"):
        refused("attached to this optimizer already", tmp_path, model, optimizer, loader)
        loop(model, optimizer, criterion, loader, epochs=1)
    with pytest.raises(ValueError, match="has taken 6 steps already"):
        attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "second")


def test_training_on_after_the_end_warns_once(tmp_path):
    engine, model, optimizer, criterion, loader = private()
    before = optimizer.step_hook
    with attach(
        model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run"
    ) as attached:
        loop(model, optimizer, criterion, loader, epochs=1)
    with pytest.warns(UserWarning, match=r"ended with close\(\); this step") as warned:
        loop(model, optimizer, criterion, loader, epochs=1)
    assert sum("ended with close" in str(w.message) for w in warned) == 1
    assert optimizer.step_hook is before
    assert engine.accountant.history == [(SIGMA, 1 / 6, 12)]
    assert attached.run.journal.verify().steps == 6


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_step_hook_that_was_replaced_is_noticed_and_nothing_sealed(tmp_path, again, late):
    """Its steps were missing: the run was sealed with none, and a worst case of 0."""
    engine, model, optimizer, criterion, loader = private()
    attached = attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    ours = optimizer.step_hook
    if late:
        loop(model, optimizer, criterion, loader, epochs=1)
    optimizer.attach_step_hook(engine.accountant.get_optimizer_hook_fn(sample_rate=1 / 6))
    loop(model, optimizer, criterion, loader, epochs=1)
    if again:
        optimizer.attach_step_hook(ours)
    for act in (attached.epsilons, attached.close):
        with pytest.raises(ValueError, match="step hook was replaced"):
            act()
    assert not Run.open(tmp_path / "run").finished


def test_a_wrapped_step_hook_stops_the_loop(tmp_path):
    _, model, optimizer, criterion, loader = private()
    attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    ours = optimizer.step_hook
    optimizer.attach_step_hook(lambda o: ours(o))
    with pytest.raises(ValueError, match="Attach step hooks of your own before accounting"):
        loop(model, optimizer, criterion, loader, epochs=1)


def test_a_step_hook_of_ones_own_is_called_as_before(tmp_path):
    _, model, optimizer, criterion, loader = private()
    seen = []
    optimizer.attach_step_hook(seen.append)
    with attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run"):
        loop(model, optimizer, criterion, loader, epochs=1)
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (
            lambda: DataLoader(data(), batch_size=20, shuffle=True),
            "by BatchSampler, not by Poisson",
        ),
        (
            lambda: DataLoader(
                data(), sampler=torch.utils.data.WeightedRandomSampler([1.0] * N, N), batch_size=20
            ),
            "not by Poisson sampling",
        ),
        (
            lambda: DataLoader(data(), batch_sampler=[[0, 1], [2, 3]]),
            "by list, not by Poisson sampling",
        ),
    ],
)
def test_batches_that_are_no_poisson_samples_are_refused(tmp_path, loader, sentence):
    _, model, optimizer, _, _ = private(poisson_sampling=False)
    refused(sentence, tmp_path, model, optimizer, loader())


def test_a_rate_that_is_not_the_loaders_is_refused(tmp_path):
    _, model, optimizer, _, _ = private()
    other = DPDataLoader(data(), sample_rate=0.5)
    refused("charges for a rate of 0.1666.*draws each example with 0.5", tmp_path, model,
            optimizer, other)  # fmt: skip


def test_opacus_own_rounding_of_the_number_of_batches_is_no_other_rate(tmp_path):
    many = data(93 * BATCH)  # int(1 / (1 / 93)) is 92
    _, model, optimizer, _, loader = private(dataset=many)
    assert len(loader) == 92
    attached = attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    assert attached.run.plan.sample_rate == pytest.approx(1 / 93)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(clipping="per_layer", max_grad_norm=[0.1] * 4), "DPPerLayerOptimizer"),
        (
            dict(clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
                 max_clipbound=1.0, min_clipbound=0.1, unclipped_num_std=2.0),
            "AdaClipDPOptimizer",
        ),
    ],
)  # fmt: skip
def test_other_clippings_are_refused(tmp_path, options, sentence):
    model = network()
    engine = PrivacyEngine(accountant="rdp")
    options = {"max_grad_norm": BOUND, "noise_multiplier": SIGMA, **options}
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH), **options,
    )  # fmt: skip
    refused(f"the optimizer is a {sentence}", tmp_path, model, optimizer, loader)


def test_a_model_or_optimizer_without_opacus_is_refused(tmp_path):
    _, model, optimizer, _, loader = private()
    refused("model is a Sequential; expected the first", tmp_path, model._module, optimizer, loader)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    refused("the optimizer is a SGD", tmp_path, model, plain, loader)


def test_another_data_set_is_refused(tmp_path):
    _, model, optimizer, _, loader = private()
    refused("has 60 examples and the loader draws from 120", tmp_path, model, optimizer, loader,
            dataset=data(60))  # fmt: skip


class Rows(torch.utils.data.Dataset):
    """Examples as dictionaries, pictures changed a little: an augmentation."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = data()[self.order[i]]
        return {"x": x + 0.1 * torch.rand(()), "y": int(y), "id": str(self.order[i])}


def row_loss(model, batch):
    return LOSS(model, (batch["x"], batch["y"]))


def test_the_same_examples_in_another_order_are_refused(tmp_path):
    """Everyone got someone else's ε."""
    order = torch.randperm(N).tolist()
    shuffled = TensorDataset(*(t[order] for t in data().tensors))
    _, model, optimizer, _, loader = private()
    refused("has another label than the loader's", tmp_path, model, optimizer, loader,
            dataset=shuffled)  # fmt: skip
    _, model, optimizer, _, loader = private(dataset=Rows(range(N)))
    refused("has another label than the loader's", tmp_path, model, optimizer, loader,
            dataset=Rows(order), loss_fn=row_loss)  # fmt: skip


def test_labels_are_compared_and_pictures_may_differ(tmp_path):
    _, model, optimizer, _, loader = private(dataset=Rows(range(N)))
    attach(
        model,
        optimizer,
        loader,
        dataset=Rows(range(N)),
        loss_fn=row_loss,
        delta=1e-5,
        out=tmp_path / "run",
    )


def test_augmentation_is_refused_by_name(tmp_path):
    rows = Rows(range(N))
    _, model, optimizer, criterion, loader = private(dataset=rows)
    attached = attach(model, optimizer, loader, loss_fn=row_loss, delta=1e-5, out=tmp_path / "run")
    assert attached.run.journal.random == ("data",)
    batches = ((batch["x"], batch["y"]) for batch in loader)
    with pytest.raises(ValueError, match=r"differently each time it is asked \(augmentation\)"):
        loop(model, optimizer, criterion, batches)


def test_parameters_that_clipping_does_not_count_are_refused(tmp_path):
    model = network()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model[4].parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=BATCH), noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
    )  # fmt: skip
    refused("does not hold the model's trainable parameters", tmp_path, model, optimizer, loader)


def test_a_gradient_left_on_a_frozen_layer_is_refused(tmp_path):
    """Loops that clear gradients after the step applied it once, without noise."""
    model = network()
    LOSS(model, data().tensors).mean().backward()
    model[0].requires_grad_(False)
    _, model, optimizer, _, loader = private(model=model)
    refused(r"have a gradient \(0\.weight; 0\.bias\)", tmp_path, model, optimizer, loader)
    optimizer.zero_grad()
    attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")


def test_ghost_clipping_to_another_bound_than_the_noise_is_refused(tmp_path):
    _, model, optimizer, _, loader = private("ghost")
    model.max_grad_norm = 2.0
    refused("clips to 2.0 and the optimizer's noise is for 4.0", tmp_path, model, optimizer, loader)


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm"])
def test_noise_or_bound_that_change_stop_the_loop_before_the_step(tmp_path, name):
    _, model, optimizer, criterion, loader = private()
    attached = attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    loop(model, optimizer, criterion, loader, epochs=1)
    setattr(optimizer, name, 0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"{name} is 0.5 at step 6 and was"):
        loop(model, optimizer, criterion, loader, epochs=1)
    assert attached.run.journal.steps_charged == 6
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_rate_that_changes_stops_the_loop_before_the_step(tmp_path):
    _, model, optimizer, criterion, loader = private()
    attached = attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    loop(model, optimizer, criterion, loader, epochs=1)
    loader.batch_sampler.sample_rate = 0.5
    with pytest.raises(ValueError, match=r"sample_rate is 0\.5 at step 6 and was"):
        loop(model, optimizer, criterion, loader, epochs=1)
    assert attached.run.journal.steps_charged == 6


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_loss_that_changes_later_is_found_and_nothing_sealed(tmp_path, mode):
    """It was compared at the first step alone, and the values were called exact."""
    _, model, optimizer, criterion, loader = private(mode)
    factor = [1.0]
    attached = attach(
        model, optimizer, loader, loss_fn=lambda m, b: factor[0] * LOSS(m, b),
        delta=1e-5, out=tmp_path / "run", refresh_every=1,
    )  # fmt: skip

    def changing():
        with attached:
            loop(model, optimizer, criterion, loader, epochs=1)
            factor[0] = 1.3
            loop(model, optimizer, criterion, loader, epochs=1)

    with pytest.raises(ValueError, match="step 6: the gradient norms that Opacus clipped by"):
        changing()
    assert attached.run.journal.steps_charged == 6
    assert attached.run.journal.refreshes == (0, 1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="may be false before it"):
        attached.close()
    assert not Run.open(tmp_path / "run").finished


@pytest.mark.parametrize("strange", [[], [0], [0, 60]])
def test_a_loss_is_compared_whoever_else_has_no_finite_gradient(tmp_path, strange):
    """One gradient that is no number switched the comparison off."""
    some = data()
    some.tensors[0][strange] = torch.nan
    _, model, optimizer, criterion, loader = private(dataset=some)
    attach(
        model,
        optimizer,
        loader,
        loss_fn=lambda m, b: 3 * LOSS(m, b),
        delta=1e-5,
        out=tmp_path / "run",
    )
    with pytest.raises(ValueError, match="are not those of loss_fn"):
        loop(model, optimizer, criterion, loader)


def test_a_loss_is_compared_after_an_empty_batch(tmp_path):
    _, model, optimizer, criterion, loader = private()
    attach(
        model, optimizer, loader, loss_fn=lambda m, b: 3 * LOSS(m, b), delta=1e-5,
        out=tmp_path / "run", refresh_every=1,
    )  # fmt: skip
    empty = [t[:0] for t in data().tensors]
    model.forbid_grad_accumulation()
    optimizer.zero_grad()
    model(empty[0]).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"step 1: .* are not those of loss_fn"):
        loop(model, optimizer, criterion, loader)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_loss_that_is_not_the_loops_is_found_at_the_first_step(tmp_path, mode):
    _, model, optimizer, criterion, loader = private(mode)
    attach(
        model,
        optimizer,
        loader,
        loss_fn=lambda m, b: 3 * LOSS(m, b),
        delta=1e-5,
        out=tmp_path / "run",
    )
    with pytest.raises(ValueError, match="are not those of loss_fn"):
        loop(model, optimizer, criterion, loader)


def test_a_summed_loss_under_mean_reduction_is_found(tmp_path):
    _, model, optimizer, _, loader = private()
    attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    with pytest.raises(ValueError, match="Does the loop's reduction match"):
        loop(model, optimizer, nn.CrossEntropyLoss(reduction="sum"), loader)


def test_a_summed_loss_under_sum_reduction_is_fine(tmp_path):
    _, model, optimizer, _, loader = private(loss_reduction="sum")
    attached = attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    loop(model, optimizer, nn.CrossEntropyLoss(reduction="sum"), loader, epochs=1)
    assert attached.run.journal.steps_charged == 6


def test_accumulated_batches_are_refused(tmp_path):
    _, model, optimizer, criterion, loader = private()
    model.allow_grad_accumulation()
    attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run")
    (x, y), (x2, y2) = list(loader)[:2]
    criterion(model(x), y).backward()
    criterion(model(x2), y2).backward()
    with pytest.raises(ValueError, match="2 batches were accumulated"):
        optimizer.step()


def test_users_own_hooks_stay_registered_in_order(tmp_path):
    model = network()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("mine"))
    _, model, optimizer, criterion, loader = private(model=model)
    model._module[0].register_forward_hook(lambda *_: seen.append("mine, later"))
    hooks = [list(m._forward_hooks) for m in model._module.modules()]
    with attach(model, optimizer, loader, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run"):
        loop(model, optimizer, criterion, loader, epochs=1)
    assert [list(m._forward_hooks) for m in model._module.modules()] == hooks
    assert seen


def test_empty_batches_are_steps(tmp_path):
    _, model, optimizer, criterion, _ = private(poisson_sampling=False)
    optimizer.attach_step_hook(None)
    rare = DPDataLoader(data(), sample_rate=1e-6)
    rare.batch_sampler.steps = 3
    model.forbid_grad_accumulation()
    attached = attach(
        model, optimizer, rare, loss_fn=LOSS, delta=1e-5, out=tmp_path / "run", refresh_every=1
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop(model, optimizer, lambda out, y: criterion(out, y).nan_to_num(), rare, epochs=1)
    assert attached.run.journal.steps_charged == 3
    assert isinstance(optimizer, DPOptimizer)
