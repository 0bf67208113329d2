"""What is refused before training, and what the canary finds."""

import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS
from torch import nn

from epsilons.gradients import (
    GradientRule,
    UnsupportedLayer,
    check_model,
    clipped_gradients,
    norm_rule,
    replace_batch_norm,
)
from epsilons.gradients.rules import RULES
from epsilons.training import supervised

cross_entropy = supervised(nn.CrossEntropyLoss(reduction="none"))


def pictures(count=8):
    return torch.randn(count, 3, 6, 6), torch.randint(0, 4, (count,))


def network(*middle):
    return nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.Flatten(), nn.Linear(128, 4))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_a_good_model_passes_and_its_loss_is_not_random():
    checked = check_model(network(nn.GroupNorm(2, 8)), cross_entropy, pictures())
    assert checked.random_loss is False
    assert check_model(network()).random_loss is None


def test_dropout_passes_and_makes_the_loss_random():
    checked = check_model(network(nn.Dropout(0.5)), cross_entropy, pictures())
    assert checked.random_loss is True


def test_noise_that_is_not_dropout_passes_and_makes_the_loss_random():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    assert check_model(network(Noise()), cross_entropy, pictures()).random_loss is True


@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU])
def test_dropout_inside_attention_and_recurrent_layers_passes(rnn):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
            self.rnn = rnn(8, 8, num_layers=2, dropout=0.3, batch_first=True)

        def forward(self, x):
            return self.rnn(self.attention(x, x, x)[0])[0]

    loss_fn = HAZARDS["lstm"]()[1]
    assert check_model(Both(), loss_fn, torch.randn(4, 5, 8)).random_loss is True


def test_every_problem_is_named_with_its_path_and_remedy():
    model = network(
        nn.BatchNorm2d(8),
        nn.Sequential(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
    )
    with pytest.raises(UnsupportedLayer) as caught:
        check_model(model)
    first, second = str(caught.value).splitlines()
    assert first.startswith("1: BatchNorm2d")
    assert "replace_batch_norm" in first
    assert second.startswith("2.0: InstanceNorm2d")
    assert "track_running_stats=False" in second


def test_batch_norm_is_also_refused_on_the_way():
    with pytest.raises(UnsupportedLayer, match="GroupNorm"):
        clipped_gradients(network(nn.BatchNorm2d(8)), cross_entropy, pictures(), 1.0)


def test_batch_norm_is_replaced_in_one_call():
    old = nn.BatchNorm2d(8)
    nn.init.uniform_(old.weight)
    model = nn.Sequential(network(old), nn.BatchNorm1d(4))
    assert replace_batch_norm(model) is model
    assert isinstance(model[0][1], nn.GroupNorm)
    assert model[0][1].weight is old.weight
    check_model(model, cross_entropy, pictures())


class Centred(nn.Module):
    """Subtracts the mean over the batch: forwards only, or backwards as well."""

    def __init__(self, *, detach):
        super().__init__()
        self.detach = detach

    def forward(self, x):
        mean = x.mean(0)
        return x - (mean.detach() if self.detach else mean)


@pytest.mark.parametrize("detach", [True, False])
def test_the_canary_finds_a_layer_that_mixes_examples(detach):
    with pytest.raises(UnsupportedLayer, match="mixes examples"):
        check_model(network(Centred(detach=detach)), cross_entropy, pictures())


def test_the_canary_finds_state_that_changes_from_call_to_call():
    class Stateful(nn.Module):
        scale = 1.0

        def forward(self, x):
            self.scale *= 1.5
            return x * self.scale

    with pytest.raises(UnsupportedLayer, match="keeps state"):
        check_model(network(Stateful()), cross_entropy, pictures())


def test_a_running_mean_that_the_loss_does_not_use_is_found():
    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
            return x

    with pytest.raises(UnsupportedLayer, match=r"1\.mean: the model keeps something of its data"):
        check_model(network(Watching()), cross_entropy, pictures())


def test_the_canary_finds_examples_along_another_dimension():
    def loss_fn(model, x):
        return model(x.t()).square().sum(0)

    with pytest.raises(UnsupportedLayer):
        check_model(nn.Linear(3, 3), loss_fn, torch.randn(3, 5))


@pytest.fixture
def _rules_restored():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


class Own(GradientRule):
    """A rule for F.linear that is right but for a factor."""

    def __init__(self, data, factor):
        super().__init__(data)
        self.factor = factor

    def gradients(self, g):
        rows = torch.einsum("b...p,b...d->bpd", g, self.data)
        return self.factor * rows


@pytest.mark.usefixtures("_rules_restored")
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.01, False)])
def test_a_rule_of_ones_own_is_used_and_the_canary_finds_it_wrong(factor, right):
    @norm_rule(F.linear)
    def linear(input, weight, bias=None):
        yield weight, Own(input, factor)

    batch = torch.randn(4, 5)
    model = nn.Linear(5, 2, bias=False)
    _, norms = clipped_gradients(model, lambda m, x: m(x).sum(1), batch, 1.0)
    torch.testing.assert_close(norms, factor * (2 * batch.double().square().sum(1)).sqrt())
    if right:
        check_model(model, lambda m, x: m(x).sum(1), batch)
    else:
        with pytest.raises(UnsupportedLayer, match="norm_rule is wrong"):
            check_model(model, lambda m, x: m(x).sum(1), batch)


def test_an_operation_that_returns_several_tensors_is_refused_by_name():
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return torch.lerp(x, x, self.shift).sum(1) + torch.aminmax(x * self.shift, dim=1)[0]

    check_model(Sorted(), lambda m, x: m(x), torch.randn(4, 5))

    class Split(Sorted):
        def forward(self, x):
            return (
                torch.frexp(x)[0].sum(1)
                + torch.stack(torch.meshgrid(self.shift, x[0], indexing="ij")).sum()
            )

    with pytest.raises(UnsupportedLayer, match="shift: meshgrid"):
        clipped_gradients(Split(), lambda m, x: m(x), torch.randn(4, 5), 1.0)


def test_a_model_that_fails_on_one_example_is_named_as_such():
    def loss_fn(model, batch):
        x, _ = batch
        if len(x) == 1:
            raise RuntimeError("too few")
        return model(x).sum(1)

    with pytest.raises(UnsupportedLayer, match="batch of one example: too few"):
        check_model(network(), loss_fn, pictures())


def half_precision(model, batch):
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(x), y, reduction="none").float()


class Rounding(nn.Module):
    """As far off for one example as bfloat16 kernels are for batches of another size."""

    def forward(self, x):
        return x * (1 + 2**-8 * (len(x) == 1))


def test_autocast_within_the_loss_is_compared_as_coarsely_as_it_rounds():
    model, batch = network(Rounding()), pictures()
    check_model(model, half_precision, batch)
    with pytest.raises(UnsupportedLayer, match="are not those of its examples"):
        check_model(model, cross_entropy, batch)


def test_the_encoder_of_torch_in_evaluation_mode_under_autocast():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(40, 4)).eval()
    check_model(model, half_precision, (torch.randn(3, 5, 8), torch.randint(0, 4, (3,))))


@pytest.mark.parametrize("call", [check_model, lambda *a: clipped_gradients(*a, 1.0)])
def test_packed_sequences_are_refused_with_the_remedy(call):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, [4] * len(x), batch_first=True)
            return self.rnn(packed)[1][0][0]

    with pytest.raises(UnsupportedLayer, match="padded batch"):
        call(Packed(), lambda m, x: m(x).sum(1), torch.randn(3, 5, 4))


def test_checking_leaves_generators_and_model_alone():
    model = network(nn.Dropout(0.5))
    before = torch.get_rng_state(), {n: t.clone() for n, t in model.state_dict().items()}
    check_model(model, cross_entropy, pictures())
    torch.manual_seed(0)
    pictures()
    after = torch.get_rng_state(), model.state_dict()
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
