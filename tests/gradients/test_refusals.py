"""What can't be followed is refused with the way out, and never measured wrongly."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hazards.kit import B, D, Net, parameter, squared
from small import cross_entropy, network, pictures
from torch import nn

from epsilons import Plan
from epsilons.gradients import (
    UnsupportedLayer,
    check_model,
    clipped_gradients,
    gradient_norms,
    norm_rule,
)
from epsilons.gradients.norms import batch_norms
from epsilons.gradients.rules import RULES, Materialized
from epsilons.noise import SecureNoise
from epsilons.training import fit, private_step

LENGTHS = torch.tensor([1, 2, 3, 6, 4])


def reordered(there, back):
    """A layer on examples in another order, which is undone afterwards."""

    def forward(self, x):
        return self.last(back(torch.tanh(self.first(there(x)))))

    return Net(forward, first=nn.Linear(D, D), last=nn.Linear(D, 3))


REORDERED = {
    "index": (lambda x: x[LENGTHS.argsort()], lambda h: h[LENGTHS.argsort().argsort()]),
    "list": (lambda x: x[[4, 3, 2, 1, 0]], lambda h: h[[4, 3, 2, 1, 0]]),
    "array": (lambda x: x[np.arange(B)[::-1].copy()], lambda h: h[np.arange(B)[::-1].copy()]),
    "index_select": (
        lambda x: x.index_select(0, LENGTHS.argsort()),
        lambda h: torch.index_select(h, 0, LENGTHS.argsort().argsort()),
    ),
    "flip": (lambda x: x.flip(0), lambda h: torch.flip(h, dims=(0,))),
    "flipud": (torch.flipud, torch.flipud),
    "roll": (lambda x: x.roll(1, 0), lambda h: torch.roll(h, -1, dims=0)),
    "sort": (lambda x: x.sort(0).values, lambda h: h),
}


@pytest.mark.parametrize("name", REORDERED)
def test_examples_in_another_order(name):
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(reordered(*REORDERED[name]), squared, torch.randn(B, D))


def test_an_index_that_names_every_example_in_order_is_fine():
    model = reordered(lambda x: x[torch.arange(B), :], lambda h: h[torch.arange(B)])
    x = torch.randn(B, D)
    plain = reordered(lambda x: x, lambda h: h)
    plain.load_state_dict(model.state_dict())
    expected = batch_norms(plain, squared, x)
    torch.testing.assert_close(batch_norms(model, squared, x), expected, rtol=1e-6, atol=0)


UNALIGNED = {
    "slice": lambda h: h[1 : B + 1],
    "narrow": lambda h: h.narrow(0, 1, B),
    "split": lambda h: h.split([1, B, B - 1])[1],
    "tensor_split": lambda h: h.tensor_split([1, B + 1])[1],
    "repeat_interleave": lambda h: h[:B].repeat_interleave(torch.tensor([0, 2, 1, 1, 1]), 0),
    "assignment": lambda h: _assigned(h),
}


def _assigned(h):
    out = torch.zeros(B, D)
    out[[4, 3, 2, 1, 0]] = h[:B]
    return out


@pytest.mark.parametrize("name", UNALIGNED)
def test_parts_that_begin_with_another_example(name):
    def forward(self, x):
        return self.last(UNALIGNED[name](torch.cat([self.first(x), x])))

    net = Net(forward, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(net, squared, torch.randn(B, D))


@pytest.mark.parametrize("wrong", [lambda x, h: (x, 0, h), lambda x, h: (x, slice(1, B + 1), h)])
def test_examples_assigned_to_another_dimension(wrong):
    def forward(self, x):
        target = x.new_zeros(B + 1, B, D)
        target[:, 0] = 1.0
        _, index, value = wrong(target, self.first(x))
        target[index] = value
        target[:B, 1] = value
        return self.last(target[:B])

    net = Net(forward, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(net, squared, torch.randn(B, D))


def test_complex_parameters():
    def forward(self, x):
        return torch.view_as_real(x * self.spectrum)

    spectrum = nn.Parameter(torch.randn(D, dtype=torch.complex64))
    with pytest.raises(ValueError, match="spectrum: complex parameters"):
        batch_norms(Net(forward, spectrum=spectrum), squared, torch.randn(B, D))


def test_weights_concatenated_with_the_examples():
    def forward(self, x):
        both = torch.cat([torch.tanh(self.linear(x)), self.table(torch.arange(B))])
        return self.linear(both)[: len(x)]

    net = Net(forward, linear=nn.Linear(D, D), table=nn.Embedding(B, D))
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(net, squared, torch.randn(B, D))


PICKED = {
    "mask": lambda h, mask: h[mask],
    "where": lambda h, mask: h[torch.where(mask)],
    "nonzero": lambda h, mask: h[mask.nonzero(as_tuple=True)],
    "masked_select": lambda h, mask: h.masked_select(mask.unsqueeze(2)).view(-1, D),
}


@pytest.mark.parametrize("name", PICKED)
def test_as_many_positions_picked_as_there_are_examples(name):
    mask = torch.zeros(B, 6, dtype=torch.bool)
    mask[0, :3] = mask[3, 1:3] = True

    def forward(self, batch):
        x, mask = batch
        return self.linear(PICKED[name](x, mask))

    def loss_fn(model, batch):
        return model(batch).square().sum(1)

    net = Net(forward, linear=nn.Linear(D, 3))
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(net, loss_fn, (torch.randn(B, 6, D), mask))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_as_many_frozen_layers_as_examples_and_positions(kind):
    def forward(self, x):
        states = self.recurrent(x)[1]
        return self.linear(states[0] if isinstance(states, tuple) else states).movedim(1, 0)

    recurrent = kind(D, 4, num_layers=B, batch_first=True).requires_grad_(False)
    net = Net(forward, recurrent=recurrent, linear=nn.Linear(4, 3))
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(net, squared, torch.randn(B, B, D))


IN_PLACE = {
    "method": lambda self: self.weight.clone().mul_(30),
    "operator": lambda self: _operator(self.weight * 2, self.scale),
    "part": lambda self: _part(self.weight * 2, self.scale),
    "view": lambda self: _view(self.weight * 2, self.scale),
}


def _operator(weight, scale):
    weight *= scale
    return weight


def _part(weight, scale):
    weight[0] = scale
    return weight


def _view(weight, scale):
    weight.diagonal().add_(scale)
    return weight


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_weight_changed_in_place(name):
    def forward(self, x):
        return F.linear(x, IN_PLACE[name](self))

    net = Net(forward, weight=parameter(D, D), scale=parameter(D))
    with pytest.raises(UnsupportedLayer, match="in place"):
        batch_norms(net, squared, torch.randn(B, D))


def test_a_weight_changed_in_place_without_gradients_is_fine():
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return F.linear(x, self.weight)

    assert batch_norms(Net(forward, weight=parameter(3, D)), squared, torch.randn(B, D)).all()


def test_a_hook_on_a_parameter():
    net = nn.Linear(D, 3)
    net.weight.register_hook(lambda g: 0.1 * g)
    with pytest.raises(UnsupportedLayer, match="weight: a hook"):
        batch_norms(net, squared, torch.randn(B, D))


def test_dropout_in_attention_to_a_parameter():
    def forward(self, x):
        keys = torch.stack([self.keys] * len(x))
        return F.scaled_dot_product_attention(x, keys, keys, dropout_p=0.5)

    with pytest.raises(UnsupportedLayer, match="dropout_p=0"):
        batch_norms(Net(forward, keys=parameter(4, D)), squared, torch.randn(B, 6, D))


def test_data_modified_after_an_operation_without_a_rule():
    def forward(self, x):
        x = x * 1
        out = torch.einsum("bd,dk->bk", x, self.weight)
        x.zero_()
        return out

    with pytest.raises(RuntimeError, match="modified in place"):
        batch_norms(Net(forward, weight=parameter(D, 3)), squared, torch.randn(B, D))


def test_an_input_modified_in_place_by_a_model_that_must_run_twice():
    def forward(self, x):
        x.mul_(2)
        return torch.einsum("bd,cd->bc", self.linear(x), self.table(torch.arange(B)))

    net = Net(forward, linear=nn.Linear(D, D), table=nn.Embedding(B, D))
    with pytest.raises(RuntimeError, match="second time"):
        batch_norms(net, squared, torch.randn(B, D))


def test_one_bad_example_leaves_the_others_alone_where_the_whole_batch_is_called():
    def forward(self, x):
        return self.linear(x * torch.cat([self.scale] * len(x)))

    torch.manual_seed(0)
    net, x = Net(forward, linear=nn.Linear(D, 3), scale=parameter(1, D)), torch.randn(B, D)
    clean = batch_norms(net, squared, x)
    x[1, 0] = torch.nan
    dirty = batch_norms(net, squared, x)
    assert dirty[1].isnan()
    others = [0, 2, 3, 4]
    torch.testing.assert_close(dirty[others], clean[others], rtol=1e-6, atol=0)


def test_nobody_is_left_where_every_bound_is_zero():
    def forward(self, x):
        return torch.einsum("bd,dk->bk", x, self.weight) * torch.cat([self.scale] * len(x))

    net = Net(forward, weight=parameter(D, 200), scale=parameter(1, 200))
    sums, norms = clipped_gradients(net, squared, torch.randn(B, D), 0.0)
    assert norms.all()
    assert not any(total.any() for total in sums.values())


def test_micro_batches_of_nobody():
    with pytest.raises(ValueError, match="micro_batch=0"):
        clipped_gradients(network(), cross_entropy, pictures(), 1.0, micro_batch=0)


WITHOUT_GRADIENTS = {
    "sparse data": (lambda self, x: self.linear(x.to_sparse()), "linear.weight.* from linear"),
    "vmap": (
        lambda self, x: torch.linalg.solve(self.matrix, x[..., None])[..., 0],
        "matrix.* from linalg_solve",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_an_operation_without_per_example_gradients(name):
    forward, expected = WITHOUT_GRADIENTS[name]
    net = Net(forward, linear=nn.Linear(D, D), matrix=parameter(D, D))
    with pytest.raises(UnsupportedLayer, match=expected) as raised:
        batch_norms(net, squared, torch.randn(B, D))
    assert "norm_rule" in str(raised.value)
    assert raised.value.__cause__ is not None


def test_memory_that_runs_out_is_no_fault_of_the_operation():
    def exhausted(*_):
        raise torch.OutOfMemoryError

    @norm_rule(torch.Tensor.logaddexp)
    def rule(input, other):
        rule = Materialized()
        rule.square_norms = rule.gradients = exhausted
        yield other, rule

    try:
        net = Net(lambda self, x: x.logaddexp(self.weight), weight=parameter(D))
        with pytest.raises(torch.OutOfMemoryError):
            batch_norms(net, squared, torch.randn(B, D))
    finally:
        del RULES[torch.Tensor.logaddexp]


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Tagged(nn.Parameter):
    """A parameter with an attribute more, which operations take for a parameter."""


class Foreign(torch.Tensor):
    """A tensor subclass of someone's own."""


def doors(model, batch, out, loss_fn=cross_entropy):
    """Every way in which a model gets to its per-example gradients."""
    plan = Plan(n=7, batch_size=4, steps=2, noise_multiplier=1, max_grad_norm=1, delta=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(*batch)
    return {
        "gradient_norms": lambda: gradient_norms(model, loss_fn, batch, batch_size=7),
        "clipped_gradients": lambda: clipped_gradients(model, loss_fn, batch, 1.0),
        "private_step": lambda: private_step(
            model, optimizer, loss_fn, batch, plan, noise=SecureNoise()
        ),
        "check_model": lambda: check_model(model, loss_fn),
        "fit": lambda: fit(model, optimizer, loss_fn, data, plan, out=out),
    }


def test_sharded_parameters_are_refused_by_name(one_process, tmp_path):
    """FSDP2's DTensor has rules of its own: gradient_norms gave 0 for everyone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(network(), mesh=init_device_mesh("cpu", (1,)))
    for go_in in doors(model, pictures(), tmp_path / "run").values():
        with pytest.raises(UnsupportedLayer, match=r"0.weight \(DTensor\).*5.bias \(DTensor\)"):
            go_in()
    assert not (tmp_path / "run").exists()


def test_a_parameter_of_a_foreign_class_is_refused_by_name(tmp_path):
    model = network()
    model[5].weight = nn.Parameter(model[5].weight.detach().as_subclass(Foreign))
    for go_in in doors(model, pictures(), tmp_path / "run").values():
        with pytest.raises(UnsupportedLayer, match=r"^5.weight \(Foreign\): "):
            go_in()


def test_a_parameter_with_an_attribute_more_is_as_good_as_any():
    model, batch = network(), pictures()
    expected = gradient_norms(model, cross_entropy, batch, batch_size=7)
    model[5].weight = Tagged(model[5].weight.detach())
    np.testing.assert_array_equal(
        gradient_norms(model, cross_entropy, batch, batch_size=7), expected
    )


CRITERIA = [
    nn.CrossEntropyLoss(reduction="none"),
    F.cross_entropy,
    functools.partial(F.cross_entropy, reduction="none"),
]


@pytest.mark.parametrize("criterion", CRITERIA, ids=["module", "function", "partial"])
def test_a_criterion_in_the_place_of_a_loss_function_is_one_sentence(criterion, tmp_path):
    for go_in in doors(network(), pictures(), tmp_path / "run", criterion).values():
        with pytest.raises(ValueError, match=r"^loss_fn is the criterion .*: supervised\("):
            go_in()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.ones(2, 4), "y": torch.zeros(2)}, "a dict with 'x', 'y'"),
        (torch.ones(2, 4), r"one tensor of shape \(2, 4\)"),
        ((torch.ones(2, 4), torch.zeros(2), torch.zeros(2)), "a tuple of 3"),
    ],
)
def test_supervised_says_which_batches_it_takes(batch, said):
    with pytest.raises(ValueError, match=rf"takes batches \(x, y\), and this one is {said}\."):
        gradient_norms(nn.Linear(4, 3), cross_entropy, batch, batch_size=2)


def test_a_step_without_noise_to_add_is_refused():
    model, plan = network(), Plan(n=7, batch_size=4, steps=2, noise_multiplier=1, max_grad_norm=1,
                                  delta=1e-3)  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"noise=None adds none; expected SecureNoise\(\)"):
        private_step(model, optimizer, cross_entropy, pictures(), plan, noise=None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Checkpointed(nn.Module):
    """Dropout and layers after it, computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.middle = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.3), nn.Linear(D, D), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x):
        h = torch.utils.checkpoint.checkpoint(
            self.middle, self.first(x), use_reentrant=self.reentrant
        )
        return self.last(h)


def test_checkpointed_layers_pass_the_check_or_are_named_by_it():
    batch = torch.randn(B, D), torch.zeros(B, dtype=torch.long)
    assert check_model(Checkpointed(reentrant=False), cross_entropy, batch).random_loss
    with pytest.raises(UnsupportedLayer, match="use_reentrant=False"):
        check_model(Checkpointed(reentrant=True), cross_entropy, batch)
