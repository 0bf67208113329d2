"""Precisions, batch dimensions, checkpoints, compiled models, and what can't be traced."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS
from hazards.kit import D, Net, parameter, squared
from oracle import DEVICES, assert_agrees, clipped, distance, looped, norms_of, to_device
from small import cross_entropy, network, pictures
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from epsilons.gradients import UnsupportedLayer, clipped_gradients
from epsilons.models.wide_resnet import StandardisedConv2d


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ["layer_called_twice", "weight_norm", "tied_by_transposition"])
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bfloat16_norms_are_those_of_the_gradients_summed(name, kind, dtype):
    """Float64 can't be the oracle here; that the norm belongs to the sum can be checked exactly."""
    model, loss_fn, batch = HAZARDS[name]()
    batch = batch[:1]
    if kind == "bfloat16":
        model, batch = model.bfloat16(), batch.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        sums, norms = clipped_gradients(model, loss_fn, batch, 1e9, sums=dtype)
    length = sum(g.double().square().sum() for g in sums.values()).sqrt()
    assert all(g.dtype == getattr(torch, dtype) for g in sums.values())
    assert norms.item() == pytest.approx(length.item(), rel=1e-5)


def test_a_weight_derived_in_half_precision_within_the_model():
    """Its gradient is rounded on the way to the parameters, one example's like a sum's."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.linear(x, (self.left @ self.right).float() * 2).float()

    net = Net(forward, left=parameter(D, 4), right=parameter(4, D))
    sums, norms = clipped_gradients(net, squared, torch.randn(1, D), 1e9)
    length = sum(g.double().square().sum() for g in sums.values()).sqrt()
    assert norms.item() == pytest.approx(length.item(), rel=1e-6)
    batch = torch.randn(40, D)
    sums, _ = clipped_gradients(net, squared, batch, 1.0)
    each = [clipped_gradients(net, squared, x[None], 1.0)[0] for x in batch]
    for name, total in sums.items():
        torch.testing.assert_close(total, sum(one[name] for one in each), rtol=1e-4, atol=1e-4)


def test_a_parameter_made_of_a_frozen_one_on_the_way_is_no_data():
    """As peft's DoRA does with GPT-2's transposed weights: it was refused as lost track of."""

    def forward(self, x):
        length = torch.linalg.norm(nn.Parameter(self.frozen.T) + 1, dim=1).detach()
        return x @ self.frozen * (self.scale / length)

    net = Net(forward, frozen=parameter(D, D), scale=parameter(D))
    net.frozen.requires_grad_(False)
    assert_agrees(net, squared, torch.randn(5, D))


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_half_precision_stays_near_the_truth(kind):
    model, (x, y) = network(), pictures()
    truth = looped(model, cross_entropy, (x, y))
    if kind == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        sums, norms = clipped_gradients(model, cross_entropy, (x, y), 1.0)
    torch.testing.assert_close(norms, norms_of(truth), rtol=0.05, atol=0)
    assert distance(sums, clipped(truth, torch.ones(7, dtype=torch.float64))) < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_channels_last_changes_nothing(device):
    model = network().to(device, memory_format=torch.channels_last)
    x, y = to_device(pictures(), device)
    assert_agrees(model, cross_entropy, (x.to(memory_format=torch.channels_last), y))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant, body=None):
        super().__init__()
        self.body, self.head = body or network()[:4], nn.Linear(4 * 36, 3)
        self.reentrant = reentrant

    def forward(self, x):
        hidden = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(hidden.flatten(1))


def test_activation_checkpointing_gives_the_same_gradients():
    assert_agrees(Checkpointed(reentrant=False), cross_entropy, pictures())


def standardised():
    return StandardisedConv2d(1, 4, 3, padding=1)


def weight_normed():
    return parametrizations.weight_norm(nn.Conv2d(1, 4, 3, padding=1))


@pytest.mark.parametrize("derived", [standardised, weight_normed])
def test_derived_weights_within_a_checkpoint_too(derived):
    body = nn.Sequential(derived(), nn.Tanh(), nn.Conv2d(4, 4, 1))
    assert_agrees(Checkpointed(reentrant=False, body=body), cross_entropy, pictures())


PARTS = {
    "gelu": lambda: nn.GELU(),
    "linear": lambda: nn.Linear(2048, 2048),
    "layer norm": lambda: nn.LayerNorm(2048),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (32, 8, 8)), nn.GroupNorm(4, 32)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (8, 16, 16)), nn.Conv2d(8, 8, 3, 1, 1)),
    "max pooling": lambda: nn.Sequential(nn.Unflatten(1, (32, 8, 8)), nn.MaxPool2d(2)),
    "attention": lambda: Mixed(),
}


class Mixed(nn.Module):
    def forward(self, x):
        heads = x.view(-1, 2, 16, 64)
        return F.scaled_dot_product_attention(heads, heads, heads)


class TwiceRecomputed(nn.Module):
    """A checkpoint within another, whose input is computed anew as well."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 2048), part, nn.LazyLinear(3)

    def forward(self, x):
        def inner(hidden):
            return checkpoint(self.part, hidden.sin(), use_reentrant=False)

        hidden = checkpoint(inner, self.first(x), use_reentrant=False)
        return self.last(hidden.flatten(1)).square().sum(1)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_checkpoints_within_checkpoints_give_the_same_gradients(part):
    torch.manual_seed(0)
    model, x = TwiceRecomputed(part()), torch.randn(17, 8)
    model(x)
    assert_agrees(model, lambda model, x: model(x), x)


@pytest.mark.parametrize("hooks", ["none", "identity", "save_on_cpu"])
def test_a_part_may_be_gone_back_through_twice(hooks):
    """By a hook of the model's own: what was saved must still be there."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 2048), nn.Linear(2048, 3)

        def forward(self, x):
            hidden = self.first(x)
            with surrounding():
                active = F.gelu(hidden)
            after = active * 1

            def again(g):
                torch.autograd.grad(active, hidden, 3 * g, retain_graph=True)

            after.register_hook(again) if after.requires_grad else None
            return self.last(after).square().sum(1)

    def surrounding():
        if hooks == "none":
            return nullcontext()
        if hooks == "identity":
            return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        return torch.autograd.graph.save_on_cpu()

    torch.manual_seed(0)
    assert_agrees(Twice(), lambda model, x: model(x), torch.randn(17, 8))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused():
    with pytest.raises(UnsupportedLayer, match="use_reentrant=False"):
        clipped_gradients(Checkpointed(reentrant=True), cross_entropy, pictures(), 1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_runs_as_written():
    model, batch = network(), pictures()
    _, expected = clipped_gradients(model, cross_entropy, batch, 1.0)
    compiled = torch.compile(model)
    sums, norms = clipped_gradients(compiled, cross_entropy, batch, 1.0)
    torch.testing.assert_close(norms, expected)
    assert set(sums) == {name for name, _ in compiled.named_parameters()}


def test_inference_mode_around_the_call_changes_nothing():
    model, batch = network(), pictures()
    _, expected = clipped_gradients(model, cross_entropy, batch, 1.0)
    with torch.inference_mode():
        _, norms = clipped_gradients(model, cross_entropy, batch, 1.0)
    torch.testing.assert_close(norms, expected)


def test_a_parameter_inside_a_function_of_its_own_is_refused():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g * weight, (g * x).sum(0)

    def loss_fn(model, x):
        return model(Product.apply(x, model.bias)).sum(1)

    with pytest.raises(UnsupportedLayer, match="bias: used by an operation"):
        clipped_gradients(nn.Linear(4, 4), loss_fn, torch.randn(3, 4), 1.0)


@pytest.mark.parametrize("place", ["weight", "bias"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 4), (3, 4)),
        (nn.Conv2d(4, 4, 1), (3, 4, 2, 2)),
        (nn.GroupNorm(2, 4), (3, 4, 2, 2)),
        (nn.LayerNorm(4), (3, 2, 4)),
    ],
    ids=["linear", "conv2d", "group_norm", "layer_norm"],
)
def test_a_weight_from_a_function_of_its_own_is_refused(layer, shape, place):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return 2 * weight

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    def loss_fn(model, x):
        doubled = {place: Twice.apply(getattr(model, place))}
        return torch.func.functional_call(model, doubled, (x,)).square().flatten(1).sum(1)

    with pytest.raises(UnsupportedLayer, match=r"custom autograd\.Function"):
        clipped_gradients(layer, loss_fn, torch.randn(shape), 1.0)


@pytest.mark.parametrize("write", ["setitem", "copy_", "out"])
def test_a_parameter_written_into_data_is_refused(write):
    def loss_fn(model, x):
        hidden = x * 1
        if write == "setitem":
            hidden[:, 0] = model.bias[0]
        elif write == "copy_":
            hidden[:, :4].copy_(model.bias)
        else:
            torch.add(x, 1, out=hidden)
            torch.mul(x, model.bias.detach(), out=hidden)
            hidden = hidden.index_add_(1, torch.arange(4), model.bias.expand_as(x))
        return model(hidden).sum(1)

    model, batch = nn.Linear(4, 4), torch.randn(3, 4)
    if write == "out":
        assert_agrees(model, loss_fn, batch)
    else:
        with pytest.raises(UnsupportedLayer, match=r"bias: .* in place"):
            clipped_gradients(model, loss_fn, batch, 1.0)


def test_input_modified_in_place_after_use_is_refused():
    def loss_fn(model, x):
        hidden = x * 1
        out = model(hidden)
        hidden.add_(1)
        return out.square().sum(1)

    with pytest.raises(RuntimeError, match="modified in place"):
        clipped_gradients(nn.Linear(4, 2), loss_fn, torch.randn(3, 4), 1.0)


def test_a_model_that_differentiates_itself_is_refused():
    def loss_fn(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1)

    with pytest.raises(UnsupportedLayer, match="differentiates itself"):
        clipped_gradients(nn.Linear(4, 2), loss_fn, torch.randn(3, 4), 1.0)


def test_what_a_checkpoint_draws_anew_is_both_measured_and_clipped():
    torch.manual_seed(0)

    def forward(self, x):
        return checkpoint(
            lambda x: self.layer(nn.functional.dropout(x, 0.9)),
            x,
            use_reentrant=False,
            preserve_rng_state=False,
        )

    net = Net(forward, layer=nn.Linear(64, 8, bias=False))
    for _ in range(10):
        sums, _ = clipped_gradients(net, lambda net, x: net(x).sum(1), torch.randn(1, 64), 1.0)
        assert sums["layer.weight"].norm() <= 1
