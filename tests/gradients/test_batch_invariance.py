"""Whether the check at set-up tells rows that keep their bits from rows that don't."""

import pytest
import torch
from small import cross_entropy
from sum_attacks import Net, sloped
from torch import nn

from epsilons.gradients.batch_invariance import batch_invariant


def _attention():
    return Net(
        lambda m, x: m.attend(x, x, x, need_weights=False)[0].mean(1),
        attend=nn.MultiheadAttention(16, 2, batch_first=True),
    )


def _recurrent():
    return Net(lambda m, x: m.lstm(x)[0][:, -1], lstm=nn.LSTM(8, 16, batch_first=True))


def _convolution(*normalisation):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), *normalisation, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


NETWORKS = {  # widths of whole vectors: see `test_kink_attacks` for odd ones
    "linear": (lambda: nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), (32,)),
    "convolution": (_convolution, (1, 8, 8)),
    "group norm": (lambda: _convolution(nn.GroupNorm(2, 8)), (1, 8, 8)),
    "attention": (_attention, (8, 16)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(32, 4)), (4,)),
    "recurrent": (_recurrent, (5, 8)),
}
SIZES = [16, 80, 1088]


def network_and_data(name, count=200):
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    kind = {"size": (count, *shape)}
    x = torch.randint(16, **kind) if name == "embedding" else torch.randn(**kind)
    return build(), (x, torch.arange(count) % 4)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NETWORKS)
def test_plain_networks_give_a_row_the_same_bits_everywhere(name, size, threads):
    torch.set_num_threads(threads)
    model, batch = network_and_data(name)
    assert batch_invariant(model, cross_entropy, batch, size)


def by_position(m, x):
    """The second half of a batch one last bit larger."""
    scale = torch.ones(len(x), 1)
    scale[len(x) // 2 :] += 2.0**-23
    return m.layer(x) * scale


def by_last_row(m, x):
    """One row alone that is computed in another way."""
    scale = torch.ones(len(x), 1)
    scale[-1] += 2.0**-23
    return m.layer(x) * scale


def by_companions(m, x):
    """A share of the batch's mean, far below every tolerance of other checks."""
    return m.layer(x + 2.0**-22 * x.mean())


DEPENDENT = {f.__name__: f for f in (by_position, by_last_row, by_companions)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_depend_on_the_batch_in_their_last_bits_are_found(name, size):
    torch.manual_seed(0)
    model = Net(DEPENDENT[name], layer=nn.Linear(32, 16))
    batch = (torch.randn(200, 32), torch.arange(200) % 16)
    assert not batch_invariant(model, cross_entropy, batch, size)


def test_what_an_example_adds_is_compared_and_not_only_its_norm():
    # Outputs in another order by position: losses and norms are the same, the gradients are not.
    def forward(m, x):
        turned = x.clone()
        turned[len(x) // 2 :] = turned[len(x) // 2 :].flip(1)
        return m.layer(turned)

    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.weight).sum(1, keepdim=True)

    model = Net(forward, layer=Same())
    x = torch.tensor([1.0, 2.0, 4.0, 8.0]) * torch.ones(64, 1)
    assert not batch_invariant(model, sloped, (x, torch.ones(64, 1)), 32)


def test_a_loss_that_is_random_is_no_reason_to_say_true():
    def loss(model, batch):
        return cross_entropy(model, batch) * torch.rand(len(batch[0]))

    model, batch = network_and_data("linear")
    assert not batch_invariant(model, loss, batch, 16)


def test_dropout_is_left_out():
    model, batch = network_and_data("linear")
    model.insert(1, nn.Dropout(0.5))
    assert batch_invariant(model, cross_entropy, batch, 16)


def test_an_empty_batch_shows_nothing_wrong():
    model, batch = network_and_data("linear")
    assert batch_invariant(model, cross_entropy, [column[:0] for column in batch], 16)


def test_the_check_leaves_model_and_generators_as_they_were():
    model, batch = network_and_data("group norm")
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    batch_invariant(model, cross_entropy, batch, 16)
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None


def test_rows_that_rarely_differ_are_found():
    # With few records in the last rows, losses and norms alone missed a third of such networks.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    if not sigmoid_depends_on_the_row():
        pytest.skip("this machine's kernels give all rows the same bits")
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        batch = (torch.randn(64, 4, generator=generator), torch.arange(64) % 2)
        assert not batch_invariant(model, cross_entropy, batch, 16)


def sigmoid_depends_on_the_row():
    x = torch.randn(16, 3)
    return any(
        not torch.equal(x.sigmoid(), x.roll(shift, 0).sigmoid().roll(-shift, 0))
        for shift in range(16)
    )
