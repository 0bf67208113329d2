"""Passes as graphs: the same numbers as eager passes, and everything else as it was.

What a graph holds is tested without torch's compiler (`graphs`), which takes seconds for each; one
small model goes through the compiler, and all of them in `make slow`.
"""

import math
import random
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS
from hazards.kit import Net, squared
from oracle import distance
from small import cross_entropy, network, pictures
from sum_attacks import KINDS, charged, moved, pass_of, rounding_attack, sloped
from test_kink_attacks import SHAPES, attacks_by_shape
from torch import nn

from epsilons.gradients import clipped_gradients, gradient_norms
from epsilons.gradients import compile as compiling
from epsilons.gradients.batch_invariance import batch_invariant, compiled_batch_invariant
from epsilons.gradients.norms import batch_norms, clipped_pass, one_pass, trainable
from epsilons.models import mlp, resnet20, tanh_cnn, wide_resnet

SIZE = 8
# Where the batch dimension is found by trying, or a model's shapes depend on its data.
STAY_EAGER = {
    "examples_side_by_side_as_channels",
    "last_places_of_sequences_by_index",
    "operands_apart_in_memory",
    "outputs_collected_by_assignment",
}

VIEWS_THAT_TORCH_REFUSES = {"as_many_classes_as_examples", "einsum_over_heads"}
FEW = {"conv_groups_dilation_stride", "tied_embedding_and_head", "weight_norm"}


def slow_unless_few(name):
    return pytest.param(name, marks=[] if name in FEW | STAY_EAGER else pytest.mark.slow)


@pytest.fixture
def graphs(monkeypatch):
    """Graphs as they are traced, without the compiler."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr(compiling, "say_once", print)


@pytest.fixture(scope="module")
def compiled():
    """A model whose passes of eight examples are compiled, for norms and for float64 sums."""
    torch.manual_seed(0)
    return network()


def is_compiled(model, loss_fn):
    made = compiling._known[model][loss_fn].values()
    return bool(made) and None not in made


def assert_as_eager(model, loss_fn, batch, sums=("float64", "float32")):
    """Norms and clipped sums of compiled passes against those of eager ones."""
    norms = batch_norms(model, loss_fn, batch)
    found = batch_norms(model, loss_fn, batch, compile=True)
    torch.testing.assert_close(found, norms, rtol=1e-6, atol=0)
    for dtype in sums:
        options = dict(bounds=float(norms.median()), sums=dtype)
        expected = clipped_pass(trainable(model), model, loss_fn, batch, **options)
        its = clipped_pass(trainable(model), model, loss_fn, batch, **options, compile=True)
        assert distance(its.sums, {n: s.double() for n, s in expected.sums.items()}) <= 1e-6
        torch.testing.assert_close(its.norms, norms, rtol=1e-6, atol=0)
        torch.testing.assert_close(its.losses, expected.losses, rtol=1e-5, atol=1e-4)


def test_a_compiled_model_has_the_norms_and_sums_of_eager_passes(compiled):
    torch.manual_seed(1)
    assert_as_eager(compiled, cross_entropy, pictures(SIZE), sums=["float64"])
    assert is_compiled(compiled, cross_entropy)


def test_a_graph_takes_the_weights_and_the_batch_of_the_moment(compiled):
    torch.manual_seed(2)
    with torch.no_grad():
        for p in compiled.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    assert_as_eager(compiled, cross_entropy, pictures(SIZE), sums=["float64"])


def test_compiled_rows_have_the_same_bits_everywhere(compiled):
    torch.manual_seed(3)
    assert compiled_batch_invariant(compiled, cross_entropy, pictures(40), SIZE)


def test_an_example_that_is_not_finite_changes_nobody_elses_bits(compiled):
    torch.manual_seed(4)
    x, y = pictures(SIZE)
    one, norms = clipped_gradients(compiled, cross_entropy, (x[:-1], y[:-1]), 0.5, micro_batch=SIZE)
    x[-1, 0, 0, 0] = math.inf
    options = dict(micro_batch=SIZE, compile=True)
    without, its = clipped_gradients(compiled, cross_entropy, (x[:-1], y[:-1]), 0.5, **options)
    with_it, found = clipped_gradients(compiled, cross_entropy, (x, y), 0.5, **options)
    assert torch.equal(found[:-1], its)
    assert not found[-1].isfinite()
    torch.testing.assert_close(found[:-1], norms, rtol=1e-6, atol=0)
    for name, total in with_it.items():
        assert torch.equal(total, without[name])
        torch.testing.assert_close(total, one[name], rtol=1e-5, atol=1e-7)


def test_an_example_that_cancels_changes_nobody_elses_bits(graphs):
    """It is done again by the eager pass; were its whole batch, it could switch others' ReLUs."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    x, slope = torch.randn(SIZE, 4, 256), torch.randn(SIZE, 4, 256)
    x[-1], slope[-1] = torch.randn(256), 1e4 * torch.randn(4, 256)
    slope[-1] += 1 - slope[-1].mean(0)
    eager, norms = clipped_gradients(model, sloped, (x, slope), 0.5)
    assert_cancels(model, (x, slope))
    found, same = clipped_gradients(model, sloped, (x, slope), 0.5, compile=True)
    torch.testing.assert_close(same, norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["weight"], eager["weight"], rtol=1e-5, atol=1e-7)
    rest, extra = (x[:-1], slope[:-1]), (x[-1:], slope[-1:])
    apart = moved(model, sloped, rest, extra, micro_batch=SIZE, compile=True)
    assert apart <= charged(SIZE)


def assert_cancels(model, batch):
    inputs = compiling.Inputs("float64", trainable(model), model, sloped, batch, torch.ones(SIZE))
    graph = compiling._checked(one_pass, inputs)
    assert graph(inputs).norms.isnan().tolist() == [False] * (SIZE - 1) + [True]


@pytest.mark.parametrize("name", [slow_unless_few(name) for name in HAZARDS])
def test_graphs_of_hazards_have_the_norms_and_sums_of_eager_passes(name, graphs, capsys):
    torch.manual_seed(0)
    model, loss_fn, batch = HAZARDS[name]()
    assert_as_eager(model, loss_fn, batch, sums=["float64"])
    assert ("stay eager" in capsys.readouterr().out) == (name in STAY_EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HAZARDS if name not in STAY_EAGER])
def test_compiled_hazards_have_the_norms_and_sums_of_eager_passes(name):
    torch.manual_seed(0)
    model, loss_fn, batch = HAZARDS[name]()
    assert_as_eager(model, loss_fn, batch)
    assert is_compiled(model, loss_fn) != (name in VIEWS_THAT_TORCH_REFUSES)


def test_half_precision_stays_eager_though_the_first_batch_be_exact(graphs, capsys):
    """Of zeros all agree; later norms came out 0.4 % lower than the eager ones."""
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    batch_norms(model, squared, torch.zeros(5, 4, dtype=torch.bfloat16), compile=True)
    with torch.autocast("cpu", torch.bfloat16):
        batch_norms(nn.Linear(4, 1), squared, torch.zeros(5, 4), compile=True)
    assert capsys.readouterr().out.count("rounds less often in bfloat16") == 2


class Counting(nn.Module):
    """A model that keeps something from pass to pass."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 3), kept
        self.register_buffer("passes", torch.zeros(()))
        self.calls, self.random = 0, np.random.default_rng(0)

    def forward(self, x):
        if self.kept == "buffer":
            self.passes += 1
        elif self.kept == "attribute":
            self.calls += 1
        elif self.kept == "draws":
            x = x * self.random.uniform()
        elif self.kept == "data":
            x = x * 2 if x.sum() > 0 else x
        elif self.kept == "input":
            x.add_(1)
        return self.linear(F.dropout(x, 0.5) if self.kept == "dropout" else x)


@pytest.mark.parametrize("kept", ["buffer", "attribute", "draws", "data", "input", "dropout"])
def test_what_a_graph_would_get_wrong_stays_eager(kept, graphs, capsys):
    torch.manual_seed(0)
    model, x = Counting(kept), torch.randn(5, 8)
    torch.manual_seed(1)
    expected = [batch_norms(model, squared, x.clone()) for _ in range(2)]
    torch.manual_seed(0)
    model = Counting(kept)
    torch.manual_seed(1)
    if kept == "draws":  # a pass to compare with drew too
        assert not batch_norms(model, squared, x, compile=True).equal(expected[0])
    else:
        for norms in expected:
            assert torch.equal(batch_norms(model, squared, x.clone(), compile=True), norms)
    assert "stay eager" in capsys.readouterr().out


def test_a_change_of_the_model_or_its_loss_makes_another_graph(graphs):
    torch.manual_seed(0)
    model = Net(lambda m, x: m.scale * m.linear(x), linear=nn.Linear(8, 3), scale=2.0)
    x = torch.randn(5, 8)
    assert_as_eager(model, squared, x)
    model.scale = 3.0
    assert_as_eager(model, squared, x)
    model.linear.bias.requires_grad_(False)
    assert_as_eager(model, squared, x)
    model.linear = nn.Linear(8, 4)
    assert_as_eager(model, squared, x)

    criterion = nn.CrossEntropyLoss(reduction="none")

    def loss_fn(model, x):
        return criterion(model(x), torch.zeros(5, dtype=torch.long))

    assert_as_eager(model, loss_fn, x)
    criterion.label_smoothing = 0.5
    assert_as_eager(model, loss_fn, x)
    criterion = partial(F.cross_entropy, reduction="none")
    assert_as_eager(model, loss_fn, x)
    criterion = partial(F.cross_entropy, reduction="none", label_smoothing=0.5)
    assert_as_eager(model, loss_fn, x)
    assert is_compiled(model, squared)
    assert is_compiled(model, loss_fn)


SCALE = 2.0


def scaled(model, x):
    return SCALE * squared(model, x)


def test_a_change_of_a_global_of_the_loss_makes_another_graph(graphs, monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3), torch.randn(5, 8)
    assert_as_eager(model, scaled, x)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert_as_eager(model, scaled, x)
    assert is_compiled(model, scaled)


class Held:
    """An object that a model or a loss reads a number of."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def loss(self, model, x):
        return self.scale * squared(model, x)

    __call__ = loss


class Scale(float, Enum):
    SMALL, LARGE = 1.0, 2.0


class Scaled(nn.Module):
    """A layer with whatever scales it."""

    def __init__(self, held):
        super().__init__()
        self.linear, self.tanh, self.held = nn.Linear(8, 3), nn.Tanh(), held

    def forward(self, x):
        return self.tanh(self.linear(x)) * self.scale()

    def scale(self):
        return self.held.scale if isinstance(self.held, Held) else self.held[0]


def helper(model, x):
    return SCALE * squared(model, x)


def by_helper(model, x):
    return helper(model, x)


def halved(module, inputs, outputs):
    return (inputs[0] * 0.5,)


def loss_by_default(scale):
    return lambda model, x, scales=scale: scales[0] * squared(model, x)


def changes():
    """A model and its loss, and a change of them that a graph can't see."""
    model, array, weight = Scaled([1.0]), np.ones(1), torch.ones(3)
    yield "list", model, squared, partial(model.held.__setitem__, 0, 2.0)
    model = Scaled([np.float32(1)])
    yield "NumPy number", model, squared, partial(model.held.__setitem__, 0, np.float32(2))
    model = Scaled([Scale.SMALL])
    yield "enumeration", model, squared, partial(model.held.__setitem__, 0, Scale.LARGE)
    model = Scaled({0: 1.0})
    yield "dictionary", model, squared, partial(model.held.__setitem__, 0, 2.0)
    model = Scaled(torch.ones(1))
    yield "tensor in place", model, squared, partial(model.held.mul_, 2)
    model = Scaled(Held())
    yield "configuration", model, squared, partial(setattr, model.held, "scale", 2.0)
    model = Scaled([1.0])
    yield "backward hook", model, squared, partial(model.tanh.register_full_backward_hook, halved)
    held, model = Held(), Scaled([1.0])
    yield "bound method", model, held.loss, partial(setattr, held, "scale", 2.0)
    held = Held()
    yield "callable", model, held, partial(setattr, held, "scale", 2.0)
    yield "helper's global", model, by_helper, partial(globals().__setitem__, "SCALE", 3.0)
    loss_fn = loss_by_default(array)
    yield "array", model, loss_fn, partial(array.__setitem__, 0, 2.0)
    criterion = nn.CrossEntropyLoss(weight=weight, reduction="none")

    def loss_fn(model, x):
        return criterion(model(x), torch.arange(5) % 3)

    yield "buffer of the criterion", model, loss_fn, partial(weight.mul_, 2)


@pytest.mark.parametrize("name", [name for name, *_ in changes()])
def test_a_change_that_python_code_reads_makes_another_graph(name, graphs, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    torch.manual_seed(0)
    model, loss_fn, change = next(rest for known, *rest in changes() if known == name)
    x = torch.randn(5, 8)
    before = batch_norms(model, loss_fn, x, compile=True)
    assert is_compiled(model, getattr(loss_fn, "__self__", loss_fn))
    change()
    expected = batch_norms(model, loss_fn, x)
    assert not torch.allclose(expected, before, rtol=1e-2)
    found = batch_norms(model, loss_fn, x, compile=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("own", [np.random.default_rng, random.Random, torch.Generator])
def test_draws_by_a_generator_of_the_models_own_stay_eager_though_they_rarely_count(own, graphs):
    class Rare(Scaled):
        def scale(self):
            torch_own = isinstance(self.held, torch.Generator)
            draw = torch.rand((), generator=self.held).item() if torch_own else self.held.random()
            return 2.0 if draw < 0.1 else 1.0

    model, x = Rare(own()), torch.randn(5, 8)
    if own is not torch.Generator:
        model.held = own(3)
    found = {tuple(batch_norms(model, squared, x, compile=True).tolist()) for _ in range(60)}
    assert len(found) == 2
    assert set(compiling._known[model][squared].values()) == {None}


def test_what_a_model_keeps_of_a_pass_is_never_a_tensor_without_numbers(graphs, capsys):
    model, kept = nn.Linear(8, 3), []
    model.register_forward_hook(lambda module, inputs, outputs: kept.append(outputs))
    batch_norms(model, squared, torch.randn(5, 8), compile=True)
    assert "attributes change from pass to pass" in capsys.readouterr().out
    assert not any(map(compiling.is_traced, kept))


@dataclass
class Unhashable:
    scale: float = 1.0

    def __call__(self, model, x):
        return self.scale * squared(model, x)


def test_a_loss_that_is_no_key_stays_eager(graphs, capsys):
    model, x = nn.Linear(8, 3), torch.randn(5, 8)
    expected = batch_norms(model, Unhashable(), x)
    assert torch.equal(batch_norms(model, Unhashable(), x, compile=True), expected)
    assert "can't be told (unhashable type" in capsys.readouterr().out


def test_an_interrupted_compilation_begins_anew(graphs, monkeypatch):
    model, x = nn.Linear(8, 3), torch.randn(5, 8)

    def interrupted(graph, **_):
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed:
        pressed.setattr(torch, "compile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch_norms(model, squared, x, compile=True)
    batch_norms(model, squared, x, compile=True)
    assert is_compiled(model, squared)


def test_norms_that_are_finite_where_eager_ones_are_not_differ():
    def passed(*norms):
        return compiling.Clipped({}, torch.tensor(norms), torch.zeros(len(norms)))

    assert compiling._differ(passed(1.0, 1.0), passed(math.inf, math.nan))
    assert not compiling._differ(passed(math.nan, 1.0), passed(2.0, 1.0))


def test_a_loss_that_wants_more_than_one_example_is_never_given_one():
    def loss_fn(model, x):
        return model(x).squeeze()[:, 0].square()

    gradient_norms(nn.Linear(8, 3), loss_fn, torch.randn(400, 8), batch_size=2)


def test_a_tensor_that_is_in_a_batch_twice_may_be_two_the_next_time(graphs):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(5, 8)

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(1)

    assert_as_eager(model, loss_fn, (x, x))
    assert_as_eager(model, loss_fn, (x, torch.randn(5, 8)))


def test_a_model_that_always_has_another_shape_stays_eager_in_the_end(graphs, capsys):
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    for length in range(compiling._MOST + 2):
        x = torch.randn(5, length + 1, 8)
        expected = batch_norms(model, squared, x)
        found = batch_norms(model, squared, x, compile=True)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert "shapes or states had a graph" in capsys.readouterr().out
    assert len(compiling._known[model][squared]) == compiling._MOST


def test_a_model_without_a_compiler_at_hand_stays_eager(monkeypatch, capsys):
    def broken(graph, **_):
        raise RuntimeError("no compiler\nat hand")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiling, "say_once", print)
    model, x = nn.Linear(8, 3), torch.randn(5, 8)
    expected = batch_norms(model, squared, x)
    assert torch.equal(batch_norms(model, squared, x, compile=True), expected)
    said = capsys.readouterr().out
    assert said == "passes of Linear stay eager: they can't be compiled (no compiler at hand)\n"


def test_graphs_go_when_their_model_goes(graphs):
    model = nn.Linear(8, 3)
    batch_norms(model, squared, torch.randn(5, 8), compile=True)
    before = len(compiling._known)
    del model
    assert len(compiling._known) == before - 1


def test_only_what_takes_long_is_compiled_of_itself(graphs, monkeypatch, capsys):
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3), torch.randn(400, 8)
    expected = gradient_norms(model, squared, x, batch_size=2)
    assert model not in compiling._known
    monkeypatch.setattr(compiling, "_SECONDS", 1e-6)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name)
    found = gradient_norms(model, squared, x, batch_size=2)
    assert is_compiled(model, squared)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert "compiling the passes of Linear" in capsys.readouterr().out


def test_a_wrong_word_is_refused():
    for call in (
        lambda: gradient_norms(
            nn.Linear(8, 3), squared, torch.zeros(5, 8), batch_size=5, compile=1
        ),
        lambda: clipped_gradients(nn.Linear(8, 3), squared, torch.zeros(5, 8), 1.0, compile="yes"),
    ):
        with pytest.raises(ValueError, match="expected 'auto', True or False"):
            call()


NETWORKS = {  # as benchmarks/norms.py measures them, smaller
    "mlp": (lambda: mlp(784, 10), (1, 28, 28), 32),
    "tanh cnn": (tanh_cnn, (1, 28, 28), 16),
    "resnet20": (lambda: resnet20(channels=1), (1, 12, 12), 8),
    "wide resnet": (wide_resnet, (3, 8, 8), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_networks_have_the_norms_and_sums_of_eager_passes(name):
    """In float64, where no ReLU is so near its kink that another rounding switches it."""
    build, shape, count = NETWORKS[name]
    torch.manual_seed(0)
    model = build().double()
    batch = torch.randn(count, *shape, dtype=torch.float64), torch.randint(0, 10, (count,))
    assert_as_eager(model, cross_entropy, batch, sums=["float64"])
    assert is_compiled(model, cross_entropy)


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_rows_of_networks_have_the_same_bits_where_eager_ones_have(name, threads):
    build, shape, _ = NETWORKS[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, shape = build(), (1, 28, 28) if name == "resnet20" else shape
    batch = torch.randn(40, *shape), torch.randint(0, 10, (40,))
    if not batch_invariant(model, cross_entropy, batch, 80, probes=4):
        pytest.skip("this machine's kernels give rows other bits")
    assert compiled_batch_invariant(model, cross_entropy, batch, 80, probes=4)
    assert is_compiled(model, cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize("digits", [23, 52])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bfloat16"])
def test_rounding_moves_a_compiled_float64_sum_by_no_more_than_is_charged(kind, digits):
    model, batch, extra = rounding_attack(kind, 1024, digits)
    apart = moved(model, sloped, batch, extra, micro_batch=pass_of(1024), compile=True)
    assert apart <= charged(1024)
    assert is_compiled(model, sloped)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_one_example_more_switches_nobody_elses_relus_in_compiled_passes(name):
    for count, (model, batch, extra) in attacks_by_shape(name):
        apart = moved(model, sloped, batch, extra, micro_batch=pass_of(count), compile=True)
        assert apart <= charged(count)
        assert is_compiled(model, sloped)
