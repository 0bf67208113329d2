"""What PrivateTraining and fit are given is refused in a sentence, before anything is written."""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from trained import LOSS, data, plan, small_model, trained

from epsilons import Run
from epsilons.training import Ema, PrivateTraining


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())

    def __len__(self):
        return 60


def training_of(out, **options):
    model = options.pop("model", None) or small_model()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(small_parameters(model), lr=0.5)
    given = {"loss_fn": LOSS, "train": data(), "plan": plan(), **options}
    return PrivateTraining(model, optimizer, out=out, **given)


def small_parameters(model):
    return list(model.parameters()) or [nn.Parameter(torch.zeros(2))]


def lazy_model():
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))


WRONG = {
    "state is one object": (dict(state=Ema(small_model())), "state is Ema; expected a list"),
    "state is None": (dict(state=None), "state is NoneType; expected a list"),
    "state has a class": (dict(state=[Ema]), "state has the class Ema"),
    "follow is no whole number": (dict(follow=2.5), "follow=2.5 must be a whole number"),
    "follow is text": (dict(follow="3"), "follow='3' must be a whole number"),
    "follow is negative": (dict(follow=-1), "follow=-1 must be a whole number"),
    "iterable data": (dict(train=Stream()), "train is Stream; expected a map-style"),
    "loader": (dict(train=DataLoader(data())), "train is DataLoader; .* loader.dataset"),
    "no collate_fn": (dict(collate_fn=None), "collate_fn is NoneType; expected a function"),
    "optimizer class": (dict(optimizer=torch.optim.SGD), "optimizer is the class SGD"),
    "scheduler class": (
        dict(scheduler=torch.optim.lr_scheduler.StepLR), "scheduler is the class StepLR",
    ),
    "other optimizer's scheduler": (
        dict(
            scheduler=torch.optim.lr_scheduler.StepLR(
                torch.optim.SGD(small_model().parameters(), lr=0.1), 3
            )
        ),
        "scheduler is of another optimizer",
    ),
    "plan as dict": (dict(plan=plan().to_dict()), "plan is dict; .* Plan.from_dict"),
    "names as list": (dict(examples=list(range(60))), "examples is list; .* Examples"),
    "lazy model": (dict(model=lazy_model()), r"lazy parameters .*0\.weight"),
    "no parameters": (dict(model=nn.Tanh()), "Tanh, has no parameters"),
    "negative limit": (dict(max_epsilon=-1.0), "max_epsilon=-1.0; expected a number > 0"),
    "NaN as limit": (dict(max_epsilon=float("nan")), "max_epsilon=nan; expected a number > 0"),
    "text as limit": (dict(max_epsilon="1"), "max_epsilon='1'; expected a number > 0"),
    "limit below a step": (dict(max_epsilon=1e-3), "max_epsilon=0.001 allows no step"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_of_another_kind_is_refused_before_anything_is_written(tmp_path, what):
    options, sentence = WRONG[what]
    with pytest.raises((TypeError, ValueError), match=sentence):
        training_of(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_held_out_data_without_indices_are_refused(tmp_path):
    with pytest.raises(TypeError, match="test is Stream; expected a map-style"):
        trained(tmp_path / "run", plan(), test=Stream())
    assert not (tmp_path / "run").exists()


def test_a_limit_that_allows_just_one_step_is_kept(tmp_path):
    training = training_of(tmp_path / "run", seed=5, max_epsilon=plan().worst_case(steps=1))
    assert [step.number for step in training] == [0]


def in_a_thread(call):
    """What `call` raises in another thread."""
    raised = []

    def work():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return raised


def test_another_thread_is_told_to_leave_the_training_alone(tmp_path):
    training = training_of(tmp_path / "run", seed=5)
    for call in (lambda: list(training), training.epsilons, training.finish):
        (error,) = in_a_thread(call)
        assert "was begun in another process or thread" in str(error)
    for step in training:
        (error,) = in_a_thread(training.epsilons)
        assert "was begun in another process or thread" in str(error)
        assert not in_a_thread(lambda: Run.open(tmp_path / "run").epsilons())
        if step.number == 1:
            break


def test_a_relative_folder_is_where_it_was_when_the_body_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for step in training_of("run", seed=None):
        if step.number == 3:
            monkeypatch.chdir(tmp_path / "elsewhere")
        if step.number == 6:
            break
    monkeypatch.chdir(tmp_path)
    training = training_of("run", seed=None)
    assert [step.number for step in training] == list(range(6, 12))
    assert training.run.journal.charged() == (12,)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_step_shows_no_loss_and_a_loop_no_norms(tmp_path):
    training = training_of(tmp_path / "run", seed=5, follow=3)
    for step in training:
        assert np.isfinite(step.loss)
        assert "loss=" not in repr(step)
        assert "norms" not in repr(training._loop)
        if step.number == 1:
            break
