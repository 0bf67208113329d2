"""What a checkpoint holds, and what the body of a loop may change before one is read again."""

import os
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import trained
from torch import nn
from torch.utils.data import Dataset
from trained import LOSS, data, plan, small_model, weights

from epsilons import Margin
from epsilons.training import PrivateTraining, loop, own_part
from epsilons.training.checksum import checksum
from epsilons.training.norm_passes import NormPasses


class Left(Exception):
    pass


class Flaky(Dataset):
    """Examples that a file server may lose for a while."""

    lost = False

    def __len__(self):
        return 60

    def __getitem__(self, k):
        if self.lost:
            raise Left
        return data()[k]


def started(out, the_plan=None, *, seed=5, model=None, optimizer=None, **options):
    model = small_model() if model is None else model
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    train = options.pop("train", None) or data()
    training = PrivateTraining(
        model, optimizer, LOSS, train, the_plan or plan(), out=out, seed=seed, **options
    )
    return training, model, optimizer


def go_through(training, number, act):
    """All steps; at one of them the body acts."""
    for step in training:
        if step.number == number:
            act()


@pytest.mark.parametrize("seed", [5, None])
def test_norms_of_single_examples_survive_a_crash_long_after_the_last_checkpoint(tmp_path, seed):
    """Those of the range that was going on were lost, and ε's came out too low."""
    the_plan = plan(steps=96, refresh_every=48)

    def recorded(out, crash_at):
        source = Flaky()
        training, model, _ = started(out, the_plan, train=source, follow=3, seed=seed)
        try:
            for step in training:
                source.lost = step.number == crash_at
        except Left:
            source.lost = False
        return training.run, weights(model)

    recorded(tmp_path / "run", 40)
    run, found = recorded(tmp_path / "run", None)
    whole, expected = recorded(tmp_path / "whole", None)
    kinds = [
        [(e.kind, e.facts["first"], len(e.facts["counts"])) for e, _, _ in trained.entries(each)
         if e.kind in ("sampled", "followed")]
        for each in (run, whole)
    ]  # fmt: skip
    assert kinds[0] == kinds[1]
    assert run.journal.repeated == 0
    if seed is not None:
        assert torch.equal(found, expected)
        assert trained.entries(run) == trained.entries(whole)


def test_what_was_not_saved_on_leaving_is_replayed_with_its_own_noise(tmp_path):
    """The key was destroyed though no checkpoint was written, and steps were paid for again."""

    def gone_through(leave_at):
        training, model, _ = started(tmp_path / "run", seed=None)
        for step in training:
            with torch.no_grad():
                model[0].weight.mul_(0.9)
            if step.number == leave_at:
                break
        return training.run.journal

    gone_through(8)
    journal = gone_through(None)
    assert (journal.charged(), journal.repeated) == ((12,), 0)


@pytest.mark.parametrize("change", ["in place", "data"])
def test_weights_that_the_body_changed_before_it_was_left_are_not_saved(tmp_path, change):
    """A change through .data moves no version counter; averages swapped in stayed for good."""

    def gone_through(out, leave_at):
        training, model, _ = started(out)
        for step in training:
            kept = model[0].weight.detach().clone()
            if change == "data":
                model[0].weight.data.mul_(0.9)
            else:
                with torch.no_grad():
                    model[0].weight.mul_(0.9)
            if step.number == leave_at:
                break  # in the middle of an evaluation, say
            if step.number % 2:
                model[0].weight.data.copy_(kept)
        return weights(model)

    gone_through(tmp_path / "run", 7)
    found = gone_through(tmp_path / "run", None)
    assert torch.equal(found, gone_through(tmp_path / "whole", None))


@pytest.mark.parametrize("leave", [False, True])
def test_modes_rates_and_schedulers_that_the_body_changes_are_kept(tmp_path, leave, monkeypatch):
    """Frozen dropout, a rate of NumPy's, a scheduler that the body steps too, a group it holds."""
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)

    def gone_through(out, leave_at):
        model = small_model(dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        group = optimizer.param_groups[0]
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9, 15])
        training, *_ = started(out, model=model, optimizer=optimizer, scheduler=scheduler)
        for step in training:
            if step.number == 4:
                model[2].eval()
            if step.number == 5:
                group["lr"] = group["lr"] * np.float64(0.5)
            scheduler.step()
            if step.number == leave_at:
                break
        return weights(model), group["lr"], training

    if leave:
        gone_through(tmp_path / "run", 7)
    found, rate, _ = gone_through(tmp_path / "run", None)
    expected, same, training = gone_through(tmp_path / "whole", None)
    assert rate == same
    assert torch.equal(found, expected)
    assert not training._model[2].training


class Holding:
    """A state of whatever it is given."""

    def __init__(self, content):
        self.content = content

    def state_dict(self):
        return {"content": self.content}

    def load_state_dict(self, state):
        self.content = state["content"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (np.float64(0.5), 0.5),
        ([np.int64(3), (True, None)], [3, (True, None)]),
        (OrderedDict(a=np.float32(2)), OrderedDict(a=2.0)),
        (Counter({3: 1}), Counter({3: 1})),
    ],
)
def test_states_of_plain_values_come_back(tmp_path, content, expected):
    for _ in started(tmp_path / "run", state=[Holding(content)])[0]:
        break
    again = Holding(None)
    next(iter(started(tmp_path / "run", state=[again])[0]))
    assert again.content == expected
    assert type(again.content) is type(expected)


@pytest.mark.parametrize("content", [np.zeros(3), object(), os.sep.join])
def test_a_state_that_can_not_be_read_again_is_refused_before_the_first_step(tmp_path, content):
    training, *_ = started(tmp_path / "run", state=[Holding(content)])
    with pytest.raises(ValueError, match=r"state\[0\] holds a \w+, which a checkpoint can't"):
        list(training)
    assert training.run.journal.steps_charged == 0


def test_what_is_trained_is_fixed_for_a_run(tmp_path):
    """The margin is of the parameters at the start; an unfrozen layer has more."""
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.5)
    training, *_ = started(tmp_path / "unfrozen", model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="before step 4 the loop changed which parameters"):
        go_through(training, 3, lambda: model[0].requires_grad_(True))
    assert training.run.journal.steps_charged == 4
    training, model, optimizer = started(tmp_path / "added")
    more = {"params": [nn.Parameter(torch.zeros(2))]}
    with pytest.raises(ValueError, match="which the optimizer has"):
        go_through(training, 3, lambda: optimizer.add_param_group(more))


@pytest.mark.parametrize(("begun", "given"), [(True, False), (False, True)])
def test_another_scheduler_is_refused(tmp_path, begun, given):
    def gone_through(scheduled):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3) if scheduled else None
        for _ in started(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler)[
            0
        ]:
            break

    gone_through(begun)
    with pytest.raises(ValueError, match=r"begun with scheduler=\w+, and this is \w+; give"):
        gone_through(given)


@pytest.mark.parametrize("size", [None, 8])
def test_norms_of_passes_of_another_shape_are_not_called_exact(tmp_path, monkeypatch, size):
    """A crash between refresh and step, and a smaller micro-batch afterwards."""
    the_plan = plan(refresh_every=1)

    def boom(*arguments, **options):
        raise Left

    training, *_ = started(tmp_path / "run", the_plan)
    with monkeypatch.context() as patch, pytest.raises(Left):
        go_through(training, 3, lambda: patch.setattr(own_part, "clipped_sum", boom))
    training, *_ = started(tmp_path / "run", the_plan, micro_batch=size)
    list(training)
    assert training.run.journal.kind == ("exact" if size is None else "estimate")


def test_memory_that_runs_out_between_refresh_and_step_is_noted(tmp_path, monkeypatch):
    of_some = NormPasses.of_some

    def smaller(self, *arguments):
        self.micro_batch = 8
        return of_some(self, *arguments)

    training, *_ = started(tmp_path / "run", plan(refresh_every=1), follow=5)
    monkeypatch.setattr(NormPasses, "of_some", smaller)
    list(training)
    assert training.run.journal.kind == "estimate"


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
     torch.complex64, torch.complex128],
)  # fmt: skip
def test_a_checksum_sees_one_bit(dtype):
    numbers = torch.ones(3, 4).to(dtype).t()
    before = checksum(numbers)
    assert torch.equal(checksum(numbers.clone()), before)
    numbers[1, 2] = 0
    assert not torch.equal(checksum(numbers), before)
    assert checksum(torch.empty(0, dtype=dtype)) == 0


def test_the_margin_of_a_run_is_that_of_its_parameters_and_noise(tmp_path):
    training, model, _ = started(tmp_path / "run")
    assert training.run.journal.margin == Margin(
        parameters=sum(p.numel() for p in model.parameters())
    )
