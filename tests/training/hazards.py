"""Models that per-example gradient code gets wrong: one small module, batch and loss for each."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

B, T, D, V = 5, 6, 8, 11  # examples, sequence length, width, vocabulary


def squared(model, batch):
    """A loss that every output entry takes part in, unequally."""
    out = model(batch)
    weights = torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype, device=out.device)
    return ((out - 0.3).square().flatten(1) * weights).sum(1)


HAZARDS = {}


def hazard(build):
    """Register `build() → (model, loss_fn, batch)` under its name."""
    HAZARDS[build.__name__] = build
    return build


def images(channels=3, size=9):
    return torch.randn(B, channels, size, size)


def sequences():
    return torch.randn(B, T, D)


def tokens():
    ids = torch.randint(0, V, (B, T))
    ids[:, 1] = ids[:, 0]  # repeated within an example
    ids[:, -1] = 0  # padding
    return ids


class Net(nn.Module):
    """A module whose forward pass is given as a function of itself and the input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / 2)


for mode in ("circular", "reflect", "replicate", "zeros"):

    def padded(mode=mode):
        conv = nn.Conv2d(3, 4, 3, padding=2, padding_mode=mode)
        return nn.Sequential(conv, nn.Tanh()), squared, images()

    HAZARDS[f"conv_{mode}_padding"] = padded


@hazard
def conv_groups_dilation_stride():
    layers = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.Conv2d(6, 6, 2, dilation=2)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1]), squared, images(4, 11)


@hazard
def conv_uneven_options():
    conv = nn.Conv2d(3, 4, (2, 3), stride=(3, 1), padding=(0, 2), dilation=(1, 2))
    return conv, squared, images(3, 10)


@hazard
def conv_padding_same():
    return nn.Conv2d(3, 4, 4, padding="same", dilation=2), squared, images()


@hazard
def conv_depthwise():
    return nn.Conv2d(4, 8, 3, groups=4, bias=False), squared, images(4)


@hazard
def conv_one_dimension():
    return nn.Conv1d(D, 4, 3, stride=2, padding=1), squared, torch.randn(B, D, 12)


@hazard
def conv_three_dimensions():
    conv = nn.Conv3d(2, 3, (2, 3, 2), padding=1, stride=(1, 2, 1))
    return conv, squared, torch.randn(B, 2, 4, 5, 4)


@hazard
def conv_pointwise_and_full():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 9)), squared, images()


@hazard
def conv_transposed():
    conv = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    return nn.Sequential(conv, nn.Tanh()), squared, images(4, 5)


@hazard
def conv_transposed_one_dimension():
    return nn.ConvTranspose1d(D, 4, 3, dilation=2), squared, torch.randn(B, D, 7)


@hazard
def conv_several_images_per_example():
    def forward(self, x):
        features = self.norm(self.conv(x.flatten(0, 1)))
        return features.view(x.shape[0], x.shape[1], -1).sum(1)

    net = Net(forward, conv=nn.Conv2d(2, 4, 3, padding=1), norm=nn.GroupNorm(2, 4))
    return net, squared, torch.randn(B, 3, 2, 5, 5)


@hazard
def embedding_with_padding_and_repeats():
    return nn.Sequential(nn.Embedding(V, D, padding_idx=0), nn.Tanh()), squared, tokens()


@hazard
def embedding_bag():
    bag = nn.EmbeddingBag(V, D, mode="mean", padding_idx=0)
    return bag, squared, tokens()


@hazard
def embedding_bag_weighted_sum():
    def forward(self, batch):
        return self.bag(batch["ids"], per_sample_weights=batch["weights"])

    def loss(model, batch):
        return model(batch).square().sum(1)

    net = Net(forward, bag=nn.EmbeddingBag(V, D, mode="sum"))
    return net, loss, {"ids": tokens(), "weights": torch.rand(B, T)}


@hazard
def tied_embedding_and_head():
    def forward(self, ids):
        return F.linear(torch.tanh(self.table(ids)), self.table.weight)

    return Net(forward, table=nn.Embedding(V, D)), squared, tokens()


@hazard
def tied_by_transposition():
    def forward(self, x):
        return torch.tanh(x @ self.weight) @ self.weight.t()

    return Net(forward, weight=parameter(D, D)), squared, sequences()


@hazard
def layer_called_twice():
    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))

    return Net(forward, linear=nn.Linear(D, D)), squared, torch.randn(B, D)


@hazard
def conv_called_twice():
    def forward(self, x):
        return self.conv(torch.tanh(self.conv(x)))

    return Net(forward, conv=nn.Conv2d(3, 3, 3, padding=1)), squared, images()


@hazard
def linear_four_dimensions():
    return nn.Linear(D, 3), squared, torch.randn(B, 2, 3, D)


@hazard
def flattened_batch():
    def forward(self, x):
        hidden = torch.tanh(self.first(x.reshape(-1, D)))
        return self.second(hidden).view(x.shape[0], x.shape[1], 3)

    net = Net(forward, first=nn.Linear(D, 4), second=nn.Linear(4, 3))
    return net, squared, sequences()


@hazard
def time_first_flattened_batch():
    def forward(self, x):
        hidden = self.norm(torch.tanh(self.first(x.transpose(0, 1).flatten(0, 1))))
        return self.second(hidden).view(x.shape[1], -1, 3).permute(1, 0, 2)

    parts = {"first": nn.Linear(D, 4), "second": nn.Linear(4, 3), "norm": nn.LayerNorm(4)}
    return Net(forward, **parts), squared, sequences()


@hazard
def sequence_as_long_as_the_batch():
    def forward(self, x):
        hidden = torch.tanh(self.first(x.transpose(0, 1)) + self.places[: x.shape[1]].unsqueeze(1))
        return self.second(hidden).transpose(0, 1)

    parts = {"first": nn.Linear(D, 4), "second": nn.Linear(4, 3), "places": parameter(B, 4)}
    return Net(forward, **parts), squared, torch.randn(B, B, D)


@hazard
def positions_broadcast_over_the_batch():
    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        return torch.tanh(self.words(ids) + self.places(places))

    return Net(forward, words=nn.Embedding(V, D), places=nn.Embedding(T, D)), squared, tokens()


@hazard
def positions_as_many_as_examples():
    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        return torch.tanh(self.words(ids) + self.places(places))

    net = Net(forward, words=nn.Embedding(V, D), places=nn.Embedding(T, D))
    return net, squared, torch.randint(0, V, (T, T))


@hazard
def class_token_expanded_and_concatenated():
    def forward(self, x):
        token = self.token.expand(x.shape[0], -1, -1)
        return self.linear(torch.tanh(torch.cat([token, x], 1) + self.places))

    parts = {"token": parameter(1, 1, D), "places": parameter(1, T + 1, D)}
    return Net(forward, linear=nn.Linear(D, 3), **parts), squared, sequences()


@hazard
def learned_queries_through_layers_before_data():
    def forward(self, x):
        queries = self.project(self.norm(self.queries.repeat(x.shape[0], 1, 1)))
        return F.scaled_dot_product_attention(queries, x, x)

    parts = {"queries": parameter(3, D), "norm": nn.LayerNorm(D), "project": nn.Linear(D, D)}
    return Net(forward, **parts), squared, sequences()


@hazard
def functional_use_of_a_weight():
    def forward(self, x):
        return F.linear(x, self.linear.weight * 2 + 1) + x @ self.matrix

    return Net(forward, linear=nn.Linear(D, 3), matrix=parameter(D, 3)), squared, sequences()


@hazard
def einsum_over_heads():
    def forward(self, x):
        return torch.einsum("btd,hdk->bhtk", x, self.heads)

    return Net(forward, heads=parameter(2, D, 3)), squared, sequences()


@hazard
def layer_norm_without_bias():
    norms = nn.LayerNorm(D, bias=False), nn.LayerNorm((T, D)), nn.RMSNorm(D)
    return nn.Sequential(*norms), squared, sequences()


@hazard
def group_and_instance_norm():
    layers = nn.GroupNorm(2, 4), nn.Tanh(), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 3)
    return nn.Sequential(*layers), squared, images(4, 6)


@hazard
def group_norm_of_vectors():
    return nn.Sequential(nn.Linear(D, D), nn.GroupNorm(2, D)), squared, torch.randn(B, D)


@hazard
def keyword_calls():
    def forward(self, x):
        hidden = F.linear(input=x, weight=self.weight, bias=self.bias)
        hidden = F.layer_norm(input=hidden, normalized_shape=(4,), weight=self.scale)
        return F.conv1d(input=hidden.mT, weight=self.kernel, padding=1)

    shapes = {"weight": (4, D), "bias": (4,), "scale": (4,), "kernel": (2, 4, 3)}
    return (
        Net(forward, **{n: nn.Parameter(torch.randn(s)) for n, s in shapes.items()}),
        squared,
        sequences(),
    )


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, **options)

    def forward(self, x):
        if not self.attention.batch_first:
            x = x.transpose(0, 1)
        out = self.attention(x, x.flip(-1), x, need_weights=False)[0]
        return out if self.attention.batch_first else out.transpose(0, 1)


@hazard
def multihead_attention():
    return Attention(batch_first=True), squared, sequences()


@hazard
def multihead_attention_time_first():
    return Attention(add_bias_kv=True, add_zero_attn=True), squared, sequences()


@hazard
def multihead_attention_of_different_widths():
    def forward(self, x):
        return self.attention(x, x[..., :4], x[..., :3])[0]

    attention = nn.MultiheadAttention(D, 2, kdim=4, vdim=3, batch_first=True)
    return Net(forward, attention=attention), squared, sequences()


@hazard
def attention_written_with_linears():
    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, D))

    return Net(forward, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D)), squared, sequences()


@hazard
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), squared, sequences()


@hazard
def weight_norm():
    layers = nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 3)
    layers = [parametrizations.weight_norm(m) if hasattr(m, "weight") else m for m in layers]
    return nn.Sequential(*layers), squared, torch.randn(B, D)


@hazard
def spectral_norm():
    net = parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))
    return net.eval(), squared, images()


@hazard
def orthogonal_parametrization():
    return parametrizations.orthogonal(nn.Linear(D, 4)), squared, torch.randn(B, D)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


@hazard
def own_parametrization():
    net = nn.Linear(D, D)
    register_parametrization(net, "weight", Symmetric())
    return net, squared, sequences()


@hazard
def weight_standardisation():
    def forward(self, x):
        w = self.conv.weight
        var, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, self.gain * (w - mean) / (var + 1e-4).sqrt(), self.conv.bias)

    return Net(forward, conv=nn.Conv2d(3, 4, 3), gain=parameter(4, 1, 1, 1)), squared, images()


@hazard
def weight_standardisation_by_batch_norm():
    def forward(self, x):
        w = self.conv.weight
        flat = F.batch_norm(w.reshape(1, 4, -1), None, None, self.gain, training=True)
        return F.conv2d(x, flat.view_as(w), self.conv.bias)

    return Net(forward, conv=nn.Conv2d(3, 4, 3), gain=parameter(4)), squared, images()


@hazard
def frozen_parameters_and_lora():
    def forward(self, x):
        return (
            self.base(x) + self.up(self.down(x)) + F.linear(x, self.base.weight + self.b @ self.a)
        )

    parts = {"down": nn.Linear(D, 2, bias=False), "up": nn.Linear(2, 3, bias=False)}
    net = Net(forward, base=nn.Linear(D, 3), a=parameter(2, D), b=parameter(3, 2), **parts)
    net.base.requires_grad_(False)
    return net, squared, sequences()


@hazard
def bias_only():
    net = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))
    for name, p in net.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return net, squared, sequences()


@hazard
def raw_scale_and_shift():
    def forward(self, x):
        return (self.scale * x + self.shift).pow(self.power) / self.divisor - self.offset

    shapes = {"scale": (D,), "shift": (T, 1), "offset": (), "power": (), "divisor": (D,)}
    parts = {name: nn.Parameter(torch.rand(shape) + 1) for name, shape in shapes.items()}
    return Net(forward, **parts), squared, torch.rand(B, T, D) + 1


@hazard
def raw_parameters_in_place():
    def forward(self, x):
        hidden = self.linear(x)
        hidden += self.shift
        hidden *= self.scale
        return hidden.tanh_()

    parts = {"shift": parameter(4), "scale": parameter(4)}
    return Net(forward, linear=nn.Linear(D, 4), **parts), squared, sequences()


@hazard
def relu_in_place():
    layers = nn.Linear(D, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)
    return nn.Sequential(*layers), squared, torch.randn(B, D)


@hazard
def prelu_and_bilinear():
    def forward(self, x):
        return self.slope(self.pair(x, x.flip(1)))

    return Net(forward, pair=nn.Bilinear(D, D, 4), slope=nn.PReLU(T)), squared, sequences()


@hazard
def dictionary_of_inputs():
    def forward(self, batch):
        hidden = torch.cat([self.image(batch["image"]).flatten(1), self.word(batch["id"])], 1)
        return self.head(torch.tanh(hidden))

    def loss(model, batch):
        return F.cross_entropy(model(batch), batch["label"], reduction="none") * batch["weight"]

    parts = {"image": nn.Conv2d(3, 2, 3), "word": nn.Embedding(V, 4), "head": nn.Linear(22, 3)}
    batch = {"image": images(3, 5), "id": torch.randint(0, V, (B,)), "weight": torch.rand(B) + 1}
    return Net(forward, **parts), loss, batch | {"label": torch.randint(0, 3, (B,))}


@hazard
def lstm_written_as_a_loop():
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4, dtype=x.dtype, device=x.device)
        c = torch.zeros_like(h)
        for t in range(x.shape[1]):
            i, f, o, u = (self.inward(x[:, t]) + self.recurrent(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * u.tanh()
            h = o.sigmoid() * c.tanh()
        return h

    return Net(forward, inward=nn.Linear(D, 16), recurrent=nn.Linear(4, 16)), squared, sequences()


@hazard
def lstm():
    def forward(self, x):
        return self.rnn(x)[0]

    rnn = nn.LSTM(D, 4, num_layers=2, bidirectional=True, batch_first=True)
    return Net(forward, rnn=rnn), squared, sequences()


@hazard
def lstm_with_projection_and_learned_state():
    def forward(self, x):
        states = self.h.expand(-1, x.shape[0], -1), self.c.expand(-1, x.shape[0], -1)
        out, (h, c) = self.rnn(x.transpose(0, 1), states)
        return torch.cat([out[-1], h[0], c[0]], 1)

    parts = {"h": parameter(1, 1, 3), "c": parameter(1, 1, 4)}
    return Net(forward, rnn=nn.LSTM(D, 4, proj_size=3), **parts), squared, sequences()


@hazard
def gru_and_rnn():
    def forward(self, x):
        return self.rnn(self.gru(x)[0])[1].squeeze(0)

    parts = {
        "gru": nn.GRU(D, 4, batch_first=True),
        "rnn": nn.RNN(4, 3, batch_first=True, bias=False),
    }
    return Net(forward, **parts), squared, sequences()


@hazard
def part_of_the_parameters_unused():
    def forward(self, x):
        self.idle(x)
        return self.linear(x)

    parts = {"linear": nn.Linear(D, 3), "idle": nn.Linear(D, 2), "missing": parameter(3)}
    return Net(forward, **parts), squared, sequences()


@hazard
def use_that_the_loss_ignores():
    def forward(self, x):
        self.linear(x + 1)
        with torch.no_grad():
            target = self.linear(x - 1)
        return self.linear(x) - target - self.linear(x).detach()

    return Net(forward, linear=nn.Linear(D, 3)), squared, sequences()


@hazard
def penalty_on_the_weights():
    def loss(model, batch):
        return squared(model, batch) + model.weight.square().sum()

    return nn.Linear(D, 3), loss, torch.randn(B, D)


@hazard
def cancelling_sequence():
    # Neighbouring places nearly cancel: a Gram form in float32 would lose most digits.
    def loss(model, batch):
        signs = torch.ones(32, dtype=batch.dtype, device=batch.device)
        signs[::2] = -1
        return (model(batch).sum(2) * signs).sum(1)

    x = torch.randn(B, 1, 64) + 1e-2 * torch.randn(B, 32, 64)
    return nn.Linear(64, 64), loss, x


@hazard
def cancelling_convolution():
    def loss(model, batch):
        out = model(batch)
        signs = torch.ones(out.shape[2:], dtype=out.dtype, device=out.device)
        signs[:, ::2] = -1
        return (out.sum(1) * signs).sum((1, 2))

    x = torch.randn(B, 16, 1, 1) + 1e-2 * torch.randn(B, 16, 8, 8)
    return nn.Conv2d(16, 16, 3, bias=False), loss, x


@hazard
def batch_norm_in_evaluation_mode():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
    net(images())
    return net.eval(), squared, images()


@hazard
def weight_standardisation_by_layer_norm():
    def forward(self, x):
        flat = F.layer_norm(self.conv.weight.flatten(1), (27,), eps=1e-4)
        scaled = flat * (self.gain * 0.2)
        return F.conv2d(x, scaled.view_as(self.conv.weight), self.conv.bias)

    return Net(forward, conv=nn.Conv2d(3, 4, 3), gain=parameter(4, 1)), squared, images()


@hazard
def relu_in_place_on_a_view():
    # A linear map of sequences returns a view; a hook on it would be lost by what follows.
    layers = nn.Linear(D, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)
    return nn.Sequential(*layers), squared, sequences()


class Doubled(torch.autograd.Function):
    """What no interception can see: a function with a derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


@hazard
def function_with_its_own_derivative():
    def forward(self, x):
        return self.second(x[..., :4] + Doubled.apply(torch.tanh(self.first(x))))

    net = Net(forward, first=nn.Linear(D, 4), second=nn.Linear(4, 3))
    return net, squared, sequences()


@hazard
def constants_as_long_as_the_batch():
    # Weights that meet constants of the batch's size before any data: none of them is per example.
    def forward(self, x):
        mixed = self.matrix @ torch.eye(B, dtype=x.dtype, device=x.device)
        slopes = self.slope.expand(B)
        return F.prelu(F.linear(x, mixed), slopes) + mixed.square().sum()

    return Net(forward, matrix=parameter(B, B), slope=parameter(1)), squared, torch.randn(B, B)


@hazard
def layers_of_constants_as_long_as_the_batch():
    # The same for every example, though there are as many rows as examples.
    def forward(self, x):
        rows = torch.linspace(-1, 1, B, dtype=x.dtype, device=x.device)
        places = self.norm(self.linear(rows.outer(rows)))
        grid = torch.ones(B, 4, 5, 5, dtype=x.dtype, device=x.device) * rows.view(B, 1, 1, 1)
        pictures = torch.tanh(self.group_norm(self.conv(grid)).exp()).mean((0, 2, 3))
        return torch.tanh(self.inputs(x) + places) * pictures.sum()

    return (
        Net(
            forward, linear=nn.Linear(B, D), norm=nn.LayerNorm(D), inputs=nn.Linear(D, D),
            conv=nn.Conv2d(4, 4, 3), group_norm=nn.GroupNorm(2, 4),
        ),
        squared,
        torch.randn(B, B, D),
    )  # fmt: skip
