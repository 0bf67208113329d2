"""Layers of every kind that has a rule, in their unusual settings."""

import torch
import torch.nn.functional as F
from torch import nn

from hazards.kit import (
    HAZARDS,
    B,
    D,
    Net,
    T,
    V,
    hazard,
    images,
    parameter,
    sequences,
    squared,
    tokens,
)

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
def conv_many_channels():
    layers = nn.Conv2d(40, 9, 3, stride=2, padding=1), nn.Conv2d(9, 32, (1, 3), padding=(2, 0))
    return nn.Sequential(layers[0], nn.Tanh(), layers[1]), squared, images(40, 12)


@hazard
def conv_called_twice_with_bias():
    def forward(self, x):
        return self.conv(torch.tanh(self.conv(x)))

    return Net(forward, conv=nn.Conv2d(3, 3, 3, padding=1)), squared, images()


for frozen in ("weight", "bias"):

    def partly_frozen(frozen=frozen):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3))
        for layer in (net[0], net[2]):
            getattr(layer, frozen).requires_grad_(False)
        return net, squared, images()

    HAZARDS[f"conv_frozen_{frozen}"] = partly_frozen


@hazard
def conv_around_pooling_that_says_where():
    def forward(self, x):
        x, indices = F.max_pool2d(torch.relu_(self.first(x)), 2, return_indices=True)
        return self.second(F.max_unpool2d(F.avg_pool2d(x, 1), indices, 2))

    return Net(forward, first=nn.Conv2d(3, 4, 2), second=nn.Conv2d(4, 3, 3)), squared, images()


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
def linear_four_dimensions():
    return nn.Linear(D, 3), squared, torch.randn(B, 2, 3, D)


@hazard
def linear_by_one_vector():
    def forward(self, x):
        return F.linear(x, self.weight)

    return Net(forward, weight=parameter(D)), squared, sequences()


@hazard
def layer_norm_without_bias():
    norms = nn.LayerNorm(D, bias=False), nn.LayerNorm((T, D)), nn.RMSNorm(D)
    return nn.Sequential(*norms), squared, sequences()


@hazard
def group_and_instance_norm():
    layers = nn.GroupNorm(2, 4), nn.Tanh(), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 3)
    return nn.Sequential(*layers), squared, images(4, 6)


@hazard
def group_norm_of_one_channel():
    norm = nn.GroupNorm(1, 1)
    nn.init.constant_(norm.weight, 2.0)
    return nn.Sequential(nn.Conv2d(2, 1, 3), norm, nn.Tanh()), squared, torch.randn(B, 2, 6, 5)


@hazard
def group_norm_of_vectors():
    return nn.Sequential(nn.Linear(D, D), nn.GroupNorm(2, D)), squared, torch.randn(B, D)


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
def attention_to_a_parameter():
    def forward(self, x):
        keys = torch.stack([self.keys] * len(x))
        return F.scaled_dot_product_attention(x, keys, keys, None, 0.0, False)

    return Net(forward, keys=parameter(4, D)), squared, sequences()


@hazard
def prelu_and_bilinear():
    def forward(self, x):
        return self.slope(self.pair(x, x.flip(1)))

    return Net(forward, pair=nn.Bilinear(D, D, 4), slope=nn.PReLU(T)), squared, sequences()


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
def batch_norm_in_evaluation_mode():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
    net(images())
    return net.eval(), squared, images()
