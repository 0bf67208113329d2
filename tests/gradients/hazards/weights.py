"""Weights tied, reused, derived, frozen, unused, or taken without their layer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from hazards.kit import B, D, Net, T, V, hazard, images, parameter, sequences, squared, tokens


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
def functional_use_of_a_weight():
    def forward(self, x):
        return F.linear(x, self.linear.weight * 2 + 1) + x @ self.matrix

    return Net(forward, linear=nn.Linear(D, 3), matrix=parameter(D, 3)), squared, sequences()


@hazard
def weights_used_alone_and_then_as_a_product():
    def forward(self, x):
        apart = torch.tanh(x @ self.left) @ self.right
        return apart + x @ (self.left @ self.right) + torch.tanh(x @ self.left) @ self.right

    return Net(forward, left=parameter(D, 4), right=parameter(4, 3)), squared, sequences()


@hazard
def einsum_over_heads():
    def forward(self, x):
        return torch.einsum("btd,hdk->bhtk", x, self.heads)

    return Net(forward, heads=parameter(2, D, 3)), squared, sequences()


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
def operands_apart_in_memory():
    def forward(self, x):
        scale, shift = self.columns.unbind(1)
        x = F.group_norm(x.transpose(2, 3), 2, scale, shift)
        x = F.conv2d(x.transpose(2, 3), self.filters[..., ::2], shift)
        x = F.layer_norm(x.transpose(1, 3), (4,), scale, shift)
        return F.linear(x.tanh().transpose(1, 3), self.matrix.T)

    net = Net(
        forward, columns=parameter(4, 2), filters=parameter(4, 4, 3, 6), matrix=parameter(4, 2)
    )
    return net, squared, torch.randn(B, 4, 6, 6)


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
def part_of_the_parameters_unused():
    def forward(self, x):
        self.idle(x)
        return self.linear(x)

    parts = {"linear": nn.Linear(D, 3), "idle": nn.Linear(D, 2), "missing": parameter(3)}
    return Net(forward, **parts), squared, sequences()


@hazard
def penalty_on_the_weights():
    def loss(model, batch):
        return squared(model, batch) + model.weight.square().sum()

    return nn.Linear(D, 3), loss, torch.randn(B, D)


@hazard
def weight_standardisation_by_layer_norm():
    def forward(self, x):
        flat = F.layer_norm(self.conv.weight.flatten(1), (27,), eps=1e-4)
        scaled = flat * (self.gain * 0.2)
        return F.conv2d(x, scaled.view_as(self.conv.weight), self.conv.bias)

    return Net(forward, conv=nn.Conv2d(3, 4, 3), gain=parameter(4, 1)), squared, images()


@hazard
def one_bias_for_all_outputs():
    def forward(self, x):
        wide = F.linear(x, self.weight, self.shift)
        return torch.tanh(F.linear(torch.tanh(wide.sum(1)), self.last, self.shift2)) + wide.mean(1)

    return (
        Net(forward, weight=parameter(4 * D, D), shift=parameter(1), last=parameter(4 * D, 4 * D),
            shift2=parameter(1)),
        squared,
        sequences(),
    )  # fmt: skip


@hazard
def standardised_map_of_sequences():
    def forward(self, x):
        return F.linear(x, F.layer_norm(self.linear.weight, (D,)), self.linear.bias)

    return Net(forward, linear=nn.Linear(D, 7)), squared, sequences()


@hazard
def one_gradient_for_several_parameters():
    def forward(self, x):
        whole = self.left + self.right.T + torch.cat([self.upper, self.lower]) + self.level.sum()
        return F.linear(x, whole)

    shapes = {"left": (7, D), "right": (D, 7), "upper": (3, D), "lower": (4, D), "level": (2,)}
    parts = {name: parameter(*shape) for name, shape in shapes.items()}
    return Net(forward, **parts), squared, sequences()


@hazard
def standardised_use_that_the_loss_ignores():
    def forward(self, x):
        F.linear(x, F.layer_norm(self.weight, (D,)))
        return F.linear(x, 2 * self.weight)

    return Net(forward, weight=parameter(7, D)), squared, sequences()


@hazard
def standardised_transposed_convolution():
    def forward(self, x):
        rows = F.layer_norm(self.weight.flatten(1), (64 * 9,))
        return F.conv_transpose2d(x, rows.view(self.weight.shape), padding=1)

    return Net(forward, weight=parameter(64, 64, 3, 3)), squared, torch.randn(B, 64, 3, 3)


@hazard
def complex_spectrum():
    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.scale * torch.view_as_complex(self.filters)
        return torch.fft.irfft(torch.tanh(spectrum.real) + 1j * spectrum.imag)

    return Net(forward, scale=parameter(5), filters=parameter(5, 2)), squared, sequences()
