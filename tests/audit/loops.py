"""Loops of one's own for the neighbour check: right ones, and ones with a fault each."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from epsilons import Plan
from epsilons.gradients import clipped_gradients
from epsilons.noise import Keystream
from epsilons.training import PoissonLoader, private_step, supervised

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))
N, STEPS, BOUND = 40, 7, 0.5


def data(seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 6, generator=generator) * 2, torch.arange(n) % 3)


def plan(**changes):
    constants = dict(n=N, batch_size=8, steps=STEPS, noise_multiplier=1.0, max_grad_norm=BOUND,
                     delta=1e-3, refreshes_per_epoch=0)  # fmt: skip
    return Plan(**{**constants, **changes})


def network(*extra):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 3))


def loop(make=lambda: network(), optimizer=None, schedule=None, micro_batch=None, step=private_step,
         before=lambda train, model, optimizer: None, each=lambda *given: None, ends=None,
         constants=None):  # fmt: skip
    """`play` of a loop whose parts may be replaced by wrong ones."""

    def play(train, *, sampling, noise, watch):
        model = make()
        opt = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.5)))(model.parameters())
        scheduler = schedule(opt) if schedule else None
        train = before(train, model, opt) or train
        the_plan = plan() if constants is None else constants
        for number, (indices, batch) in enumerate(
            PoissonLoader(train, the_plan, generator=sampling)
        ):
            options = {} if micro_batch is None else {"micro_batch": micro_batch}
            taken = step(model, opt, LOSS, batch, the_plan, noise=noise, **options)
            each(model, opt, batch, indices, taken)
            if scheduler:
                scheduler.step()
            watch(model, opt)
            if ends and ends(number, batch, taken):
                break

    return play


def released(model, optimizer, sums, noise, std, divisor):
    noisy = noise.added_to(sums, std, divisor)
    for name, parameter in model.named_parameters():
        parameter.grad = noisy[name].to(parameter)
    optimizer.step()


def clipped(model, batch, bound=BOUND):
    if batch is None:
        return {
            name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()
        }
    return clipped_gradients(model, LOSS, batch, bound, micro_batch=8)[0]


def summed(model, batch, reduce=torch.sum):
    """The gradients of a batch's loss, as plain training has them."""
    losses = LOSS(model, batch)
    model.zero_grad()
    reduce(losses).backward()
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def per_example(model, batch, names=None, norm_of=None):
    """The sum of gradients clipped by the norm of some of the parameters."""
    total = clipped(model, None)
    for k in range(len(batch[1])):
        one = summed(model, [part[k : k + 1] for part in batch])
        norm = sum(float(g.square().sum()) for n, g in one.items() if names is None or n in names)
        factor = min(1.0, BOUND / max(norm**0.5 * 1.0001, 1e-12))
        for name in total:
            total[name] += one[name] * (factor if norm_of is None else norm_of(norm**0.5))
    return total


class LessBatchMean(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


def with_running_statistics():
    return network(nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten())


def one_by_one(model, optimizer, loss_fn, batch, the_plan, *, noise):
    sums = clipped(model, None) if batch is None else per_example(model, batch)
    released(model, optimizer, sums, noise, the_plan.noise_std, the_plan.batch_size)


def clipped_loss_by_loss(model, optimizer, loss_fn, batch, the_plan, *, noise):
    """Each loss's own gradient is clipped, but the losses depend on the whole batch."""
    sums = clipped(model, None)
    for loss in [] if batch is None else LOSS(model, batch):
        one = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        norm = sum(float(g.square().sum()) for g in one) ** 0.5
        for total, g in zip(sums.values(), one, strict=True):
            total += g.double() * min(1.0, BOUND / max(norm * 1.0001, 1e-12))
    released(model, optimizer, sums, noise, the_plan.noise_std, the_plan.batch_size)


def unclipped(model, optimizer, loss_fn, batch, the_plan, *, noise):
    sums = clipped(model, None) if batch is None else summed(model, batch)
    released(model, optimizer, sums, noise, the_plan.noise_std, the_plan.batch_size)


def clipped_as_a_whole(model, optimizer, loss_fn, batch, the_plan, *, noise):
    sums = clipped(model, None) if batch is None else summed(model, batch)
    norm = sum(float(g.square().sum()) for g in sums.values()) ** 0.5
    sums = {name: g * min(1.0, BOUND / max(norm, 1e-12)) for name, g in sums.items()}
    released(model, optimizer, sums, noise, the_plan.noise_std, the_plan.batch_size)


def layer_missing(model, optimizer, loss_fn, batch, the_plan, *, noise):
    names = {"2.weight", "2.bias"}
    sums = clipped(model, None) if batch is None else per_example(model, batch, names)
    released(model, optimizer, sums, noise, the_plan.noise_std, the_plan.batch_size)


def overflow_not_clipped(model, optimizer, loss_fn, batch, the_plan, *, noise):
    def factor(norm):
        return 1.0 if norm > 1e6 else min(1.0, BOUND / max(norm * 1.0001, 1e-12))

    sums = clipped(model, None) if batch is None else per_example(model, batch, norm_of=factor)
    released(model, optimizer, sums, noise, the_plan.noise_std, the_plan.batch_size)


def divided_by_drawn(model, optimizer, loss_fn, batch, the_plan, *, noise):
    drawn = 1 if batch is None else len(batch[1])
    released(model, optimizer, clipped(model, batch), noise, the_plan.noise_std, drawn)


def loss_over_batch(model, optimizer, loss_fn, batch, the_plan, *, noise):
    drawn = 1 if batch is None else len(batch[1])
    sums = {name: g / drawn for name, g in clipped(model, batch).items()}
    released(model, optimizer, sums, noise, the_plan.noise_std / drawn, 1.0)


def noise_by_batch(model, optimizer, loss_fn, batch, the_plan, *, noise):
    drawn = 1 if batch is None else len(batch[1])
    released(model, optimizer, clipped(model, batch), noise, the_plan.noise_std / drawn**0.5,
             the_plan.batch_size)  # fmt: skip


def empty_skipped(model, optimizer, loss_fn, batch, the_plan, *, noise):
    if batch is not None:
        private_step(model, optimizer, loss_fn, batch, the_plan, noise=noise)


def rate_by_norms(model, optimizer, batch, indices, norms):
    if batch is not None:
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + float(norms.mean()))


def buffer_of_the_data(model, optimizer, batch, indices, norms):
    if batch is not None:
        model.seen += batch[0].sum()


def with_buffer():
    model = network()
    model.register_buffer("seen", torch.zeros(()))
    return model


def centred(train, model, optimizer):
    x, y = train.tensors
    return TensorDataset(x - x.mean(dim=0), y)


def weights_of_the_data(train, model, optimizer):
    with torch.no_grad():
        model[0].bias += train.tensors[0].mean()


def shuffled(play):
    """The same loop with batches of a shuffled data set in place of coins."""

    def played(train, *, sampling, noise, watch):
        class Shuffled(Keystream):
            def __init__(self):
                super().__init__(bytes(32), b"sampling")
                self.step = 0

            def fill(self, words):
                order = torch.randperm(N, generator=torch.Generator().manual_seed(self.step // 5))
                words[:] = 2**64 - 1
                words[order[8 * (self.step % 5) : 8 * (self.step % 5) + 8].numpy()] = 0
                self.step += 1
                return words

        play(train, sampling=Shuffled(), noise=noise, watch=watch)

    return played


def two_by_one_coin(play):
    def played(train, *, sampling, noise, watch):
        class Paired(Keystream):
            def __init__(self):
                super().__init__(bytes(32), b"sampling")

            def fill(self, words):
                half = sampling.words(len(words) // 2)
                words[:] = half.repeat(2)
                return words

        play(train, sampling=Paired(), noise=noise, watch=watch)

    return played


RIGHT = {
    "SGD": loop(),
    "Adam": loop(optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
    "momentum": loop(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "schedule": loop(schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)),
    "micro-batches": loop(micro_batch=8),
    "dropout off": loop(lambda: network(nn.Dropout(0.5)).eval()),
    "BatchNorm in eval": loop(lambda: network(nn.BatchNorm1d(8)).eval()),
}

WRONG = {
    "no clipping": loop(step=unclipped),
    "batch clipped as a whole": loop(step=clipped_as_a_whole),
    "layer missing from the norm": loop(step=layer_missing),
    "overflowed norm not clipped": loop(lambda: nn.Linear(6, 3), step=overflow_not_clipped),
    "divided by the drawn batch": loop(step=divided_by_drawn),
    "loss divided by the batch": loop(step=loss_over_batch),
    "noise by the drawn batch": loop(step=noise_by_batch),
    "empty batch skipped": loop(step=empty_skipped),
    "learning rate by norms": loop(each=rate_by_norms),
    "BatchNorm": loop(with_running_statistics, step=one_by_one),
    "batch mean": loop(lambda: network(LessBatchMean()), step=clipped_loss_by_loss),
    "buffer of the data": loop(with_buffer, each=buffer_of_the_data),
    "early stop by the data": loop(
        ends=lambda k, batch, norms: batch is not None and k > 3 and float(norms.mean()) < 1e3
        and len(batch[1]) % 2 == 0
    ),
    "data centred by their mean": loop(before=centred),
    "weights begun from the data": loop(before=weights_of_the_data),
    "shuffled batches": shuffled(loop()),
    "one coin for two examples": two_by_one_coin(loop()),
}  # fmt: skip
