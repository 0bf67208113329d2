"""Batch dimensions that are flattened, broadcast or made by constants; gradients that cancel."""

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


@hazard
def conv_several_images_per_example():
    def forward(self, x):
        features = self.norm(self.conv(x.flatten(0, 1)))
        return features.view(x.shape[0], x.shape[1], -1).sum(1)

    net = Net(forward, conv=nn.Conv2d(2, 4, 3, padding=1), norm=nn.GroupNorm(2, 4))
    return net, squared, torch.randn(B, 3, 2, 5, 5)


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
        hidden = torch.tanh(
            self.first(x.transpose(0, 1)) + self.positions[: x.shape[1]].unsqueeze(1)
        )
        return self.second(hidden).transpose(0, 1)

    parts = {"first": nn.Linear(D, 4), "second": nn.Linear(4, 3), "positions": parameter(B, 4)}
    return Net(forward, **parts), squared, torch.randn(B, B, D)


@hazard
def positions_broadcast_over_the_batch():
    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        return torch.tanh(self.words(ids) + self.positions(positions))

    return Net(forward, words=nn.Embedding(V, D), positions=nn.Embedding(T, D)), squared, tokens()


@hazard
def positions_as_many_as_examples():
    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        return torch.tanh(self.words(ids) + self.positions(positions))

    net = Net(forward, words=nn.Embedding(V, D), positions=nn.Embedding(T, D))
    return net, squared, torch.randint(0, V, (T, T))


@hazard
def class_token_expanded_and_concatenated():
    def forward(self, x):
        token = self.token.expand(x.shape[0], -1, -1)
        return self.linear(torch.tanh(torch.cat([token, x], 1) + self.positions))

    parts = {"token": parameter(1, 1, D), "positions": parameter(1, T + 1, D)}
    return Net(forward, linear=nn.Linear(D, 3), **parts), squared, sequences()


@hazard
def learned_queries_through_layers_before_data():
    def forward(self, x):
        queries = self.project(self.norm(self.queries.repeat(x.shape[0], 1, 1)))
        return F.scaled_dot_product_attention(queries, x, x)

    parts = {"queries": parameter(3, D), "norm": nn.LayerNorm(D), "project": nn.Linear(D, D)}
    return Net(forward, **parts), squared, sequences()


@hazard
def relu_in_place():
    layers = nn.Linear(D, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)
    return nn.Sequential(*layers), squared, torch.randn(B, D)


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
def use_that_the_loss_ignores():
    def forward(self, x):
        self.linear(x + 1)
        with torch.no_grad():
            target = self.linear(x - 1)
        return self.linear(x) - target - self.linear(x).detach()

    return Net(forward, linear=nn.Linear(D, 3)), squared, sequences()


@hazard
def cancelling_sequence():
    # Neighbouring positions nearly cancel: a ghost norm in float32 would lose most digits.
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
def relu_in_place_on_a_view():
    # A linear map of sequences returns a view; a hook on it would be lost by what follows.
    layers = nn.Linear(D, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)
    return nn.Sequential(*layers), squared, sequences()


class Doubled(torch.autograd.Function):
    """What no tracer can see: a function with a derivative of its own."""

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
        positions = self.norm(self.linear(rows.outer(rows)))
        grid = torch.ones(B, 4, 5, 5, dtype=x.dtype, device=x.device) * rows.view(B, 1, 1, 1)
        pictures = torch.tanh(self.group_norm(self.conv(grid)).exp()).mean((0, 2, 3))
        return torch.tanh(self.inputs(x) + positions) * pictures.sum()

    return (
        Net(
            forward, linear=nn.Linear(B, D), norm=nn.LayerNorm(D), inputs=nn.Linear(D, D),
            conv=nn.Conv2d(4, 4, 3), group_norm=nn.GroupNorm(2, 4),
        ),
        squared,
        torch.randn(B, B, D),
    )  # fmt: skip


@hazard
def as_many_classes_as_examples():
    def forward(self, x):
        classes = torch.tanh(self.table(torch.arange(B)))
        return torch.einsum("bd,cd->bc", torch.tanh(self.linear(x)), classes)

    def loss(model, batch):
        return torch.logsumexp(model(batch), 1)

    return Net(forward, linear=nn.Linear(D, D), table=nn.Embedding(B, D)), loss, torch.randn(B, D)


@hazard
def copies_in_front_of_the_batch():
    def forward(self, x):
        copies = torch.tanh(self.linear(x)).repeat(B, 1, 1) + x.expand(B, -1, -1)
        return (copies * self.scale).sum(0)

    return (
        Net(forward, linear=nn.Linear(D, D), scale=parameter(B, 1, D)),
        squared,
        torch.randn(B, D),
    )


@hazard
def states_of_a_frozen_lstm():
    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        return self.linear(hidden).movedim(1, 0)

    net = Net(forward, lstm=nn.LSTM(D, 4, num_layers=B, batch_first=True), linear=nn.Linear(4, 3))
    net.lstm.requires_grad_(False)
    return net, squared, sequences()


@hazard
def grouped_pixels_apart_in_memory():
    net = nn.Conv2d(4, 6, 1, groups=2)
    return net, squared, torch.randn(B, 4, 3, 3).to(memory_format=torch.channels_last)


@hazard
def examples_side_by_side_as_channels():
    def forward(self, x):
        n = len(x)
        side_by_side = x.reshape(1, n * T, D)
        seen = F.conv1d(side_by_side, self.filters.repeat(n, 1, 1), groups=n * T)
        grown = F.conv_transpose1d(seen, self.back.repeat(n, 1, 1), groups=n * T)
        normed = F.group_norm(grown, 2 * n, self.scale.repeat(n), self.shift.repeat(n))
        return F.instance_norm(normed, weight=self.own.repeat(n)).reshape(n, T, D)

    parts = {"filters": parameter(T, 1, 3), "back": parameter(T, 1, 3)}
    parts |= {"scale": parameter(T), "shift": parameter(T), "own": parameter(T)}
    return Net(forward, **parts), squared, sequences()


@hazard
def dimensions_of_nothing():
    def forward(self, x):
        h = self.linear(x)
        return torch.cat([h, h.unsqueeze(2)[:, :, :0].flatten(1)], 1)

    return Net(forward, linear=nn.Linear(D, 3)), squared, torch.randn(B, D)


@hazard
def recurrent_layers_over_parts_of_examples():
    def forward(self, x):
        n = len(x)
        words = self.gru(x.view(n * 2, T // 2, D))[0][:, -1]
        lines = x.view(n, 2, T // 2, D).permute(2, 1, 0, 3).reshape(T // 2, 2 * n, D)
        return torch.cat([words.view(n, -1), self.lstm(lines)[0][-1].view(2, n, 4).sum(0)], 1)

    net = Net(forward, gru=nn.GRU(D, 3, batch_first=True), lstm=nn.LSTM(D, 2, bidirectional=True))
    return net, squared, sequences()


def _constants(x, table):
    yield table.to(x)
    yield table.type_as(x)
    yield x.new_ones(B, D)
    yield x.new_tensor([[1.0, 2.0] * (D // 2)] * B)


for number in range(4):

    def typed(number=number):
        def forward(self, x):
            constants = list(_constants(x, torch.linspace(0, 1, B * D).view(B, D)))[number]
            return x * self.linear(constants)

        return Net(forward, linear=nn.Linear(D, D)), squared, torch.randn(B, B, D)

    HAZARDS[f"constant_of_the_type_of_data_{number}"] = typed


@hazard
def outputs_collected_by_assignment():
    def forward(self, x):
        n = len(x)
        rows, columns = torch.zeros(n, B, D, dtype=x.dtype), x.new_zeros(B, n, D)
        h = x.new_zeros(n, D)
        for t in range(B):
            h = torch.tanh(self.linear(x[:, t]) + h)
            rows[:, t] = h
            columns[t, ...] = h
            rows[torch.arange(n), t, 0] = h[:, 1]
        return self.last(rows) + self.last(columns).transpose(0, 1)

    parts = {"linear": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    return Net(forward, **parts), squared, torch.randn(B, B, D)


@hazard
def two_views_side_by_side():
    def forward(self, x):
        views = self.linear(torch.cat([x, x.flip(-1)]))
        n = len(x)
        parts = views[:n], views[n:, :], views.narrow(0, n, n), views.split([n, n])[1]
        return torch.cat([self.last(part) for part in parts], 1)

    parts = {"linear": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    return Net(forward, **parts), squared, torch.randn(B, D)


@hazard
def last_places_of_sequences_by_index():
    def forward(self, batch):
        x, norms = batch
        everyone = torch.arange(len(x))
        h = self.linear(x).transpose(0, 1)
        last = h[norms, everyone], h[norms, everyone, :], x[everyone, norms]
        return torch.cat([self.last(part) for part in (*last, h[:, everyone][0])], 1)

    def loss(model, batch):
        return squared(lambda _: model(batch), None)

    parts = {"linear": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    return Net(forward, **parts), loss, (sequences(), torch.tensor([5, 2, 2, 0, 1]))


@hazard
def examples_several_times_over():
    def forward(self, x):
        several = self.linear(x).repeat_interleave(3, dim=0) * torch.arange(1.0, 1 + D)
        return self.last(several).view(len(x), -1)

    parts = {"linear": nn.Linear(D, D), "last": nn.Linear(D, 3)}
    return Net(forward, **parts), squared, torch.randn(B, D)


@hazard
def filters_of_each_example():
    def forward(self, x):
        n = len(x)
        filters = self.filters(x.mean((2, 3))).view(n * 4, 3, 3, 3)
        seen = F.conv2d(x.reshape(1, n * 3, 9, 9), filters, groups=n)
        return self.last(seen.view(n, 4, 7, 7))

    parts = {"filters": nn.Linear(3, 108), "last": nn.Conv2d(4, 2, 3)}
    return Net(forward, **parts), squared, images()


FRONT = {
    "matmul": lambda x, w: (x @ w.view(B, D, D)).transpose(0, 1),
    "matmul_to_as_many_numbers": lambda x, w: (x[:, :5] @ w.view(-1, 5, 1)[:5]).transpose(0, 1),
    "einsum": lambda x, w: torch.einsum("bd,hd->hbd", x, w.view(-1, D)[:B]).transpose(0, 1),
    "einsum_of_copies": lambda x, w: torch.einsum(
        "ib,jb->bij", x[:, :4].t(), w.view(-1, 1)[:7].repeat(1, len(x))
    ),
    "outer": lambda x, w: torch.einsum("i,b->ib", w.view(-1)[:B], x[:, 0]).t(),
    "maximum": lambda x, w: torch.max(w.view(-1)[:B, None] + 2, x[:, 0]).t(),
    "tensordot": lambda x, w: torch.tensordot(x[:, :B], w.view(-1, B)[:4], ([1], [1])),
    "index_select": lambda x, w: w.view(-1, B)[:4].index_select(1, (x[:, 0] > 0).long()).t(),
    "similarity": lambda x, w: F.cosine_similarity(w.view(-1, 1, D)[:B], x[None], dim=2).t(),
    "convolution": lambda x, w: F.conv1d(w.view(-1, 1, D)[:B], x.view(len(x), 1, D)).movedim(1, 0),
    "stack_of_rows": lambda x, w: torch.vstack([x[:, d] for d in range(B)]).t() * w.view(-1)[:B],
}


for name in FRONT:

    def front(name=name):
        def forward(self, x):
            return FRONT[name](x, self.weight)

        return Net(forward, weight=parameter(B, D, D)), squared, torch.randn(B, D)

    HAZARDS[f"weights_in_front_by_{name}"] = front


@hazard
def places_picked_alike_for_everyone():
    def forward(self, x):
        order = torch.linspace(1, 0, T).sin().repeat(len(x), 1).argsort(1)
        picked = x.gather(1, order[:, :4].unsqueeze(2).repeat(1, 1, D))
        return self.linear(picked) + self.linear(x.take_along_dim(order[:, :4, None], 1))

    return Net(forward, linear=nn.Linear(D, 3)), squared, sequences()
