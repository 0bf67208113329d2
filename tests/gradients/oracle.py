"""The slow truth: one example at a time, by autograd, in float64."""

import copy

import torch

from epsilons.gradients.norms import (
    batch_norms,
    clipped_gradients,
    example_count,
    examples,
    trainable,
)

TOLERANCE = 1e-5
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def in_float64(tree):
    if isinstance(tree, torch.Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: in_float64(branch) for key, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(in_float64(branch) for branch in tree)
    return tree


def to_device(tree, device):
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: to_device(branch, device) for key, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(to_device(branch, device) for branch in tree)
    return tree


def looped(model, loss_fn, batch):
    """Every example's gradient by parameter, {name: (B, *shape)} in float64."""
    model, batch = copy.deepcopy(model).double(), in_float64(batch)
    parameters = trainable(model)
    rows = {name: [] for name in parameters}
    for i in range(example_count(batch)):
        loss = loss_fn(model, examples(batch, slice(i, i + 1))).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, p), gradient in zip(parameters.items(), found, strict=True):
            rows[name].append(torch.zeros_like(p) if gradient is None else gradient)
    return {name: torch.stack(each) for name, each in rows.items()}


def norms_of(gradients):
    return (
        torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients.values()])
        .sum(0)
        .sqrt()
    )


def clipped(gradients, bounds):
    factors = (bounds / (norms_of(gradients) * (1 + 1e-4))).clamp(max=1)
    return {name: torch.tensordot(factors, g, dims=1) for name, g in gradients.items()}


def distance(found, expected):
    """Relative distance of two dictionaries of tensors, taken as one vector."""
    apart = sum((found[n].double() - e).square().sum() for n, e in expected.items())
    return (apart / sum(e.square().sum() for e in expected.values())).sqrt().item()


def assert_agrees(model, loss_fn, batch, tolerance=TOLERANCE):
    """Norms, with the clipped sums and alone, in the model's own type, against the loop."""
    gradients = looped(model, loss_fn, batch)
    norms = norms_of(gradients)
    assert norms.min() > 0, "a vanishing gradient would prove nothing"
    bounds = norms * torch.linspace(0.3, 1.5, len(norms), dtype=torch.float64, device=norms.device)
    for dtype in ("float64", "float32"):
        sums, found = clipped_gradients(model, loss_fn, batch, bounds, sums=dtype)
        torch.testing.assert_close(found, norms, rtol=tolerance, atol=0)
        assert distance(sums, clipped(gradients, bounds)) <= tolerance
    alone = batch_norms(model, loss_fn, batch)
    torch.testing.assert_close(alone, norms, rtol=tolerance, atol=0)
