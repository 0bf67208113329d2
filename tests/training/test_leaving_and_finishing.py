"""finish() seals what was trained; what is left, and by whom, never misleads about a run."""

import gc
import os
import random
import stat
import sys
import warnings

import numpy as np
import pytest
import torch
from test_private_training import drawn, seed_all, started
from torch import nn
from torch.utils.data import Dataset
from trained import LOSS, data, plan, small_model, weights

from epsilons import Run
from epsilons.files import alone_in
from epsilons.training import Ema, run_folder
from epsilons.training.evaluation import correct_class, outcomes


def left_at(training, number, body=lambda step: None):
    for step in training:
        body(step)
        if step.number == number:
            break


def shrink(step):
    """Change the weights in place, so that no checkpoint can be of before the body."""
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.mul_(0.9)


def saved(run):
    content = torch.load(run.model_file, weights_only=True)
    return torch.cat([part.flatten() for part in content.values()])


@pytest.mark.parametrize("seed", [5, None])
def test_finishing_after_the_loop_was_left_seals_the_weights_in_memory(tmp_path, seed):
    training, model = started(tmp_path / "run", seed=seed)
    left_at(training, 6, shrink)
    before = weights(model)
    training.finish()
    assert torch.equal(weights(model), before)
    run = Run.checked(tmp_path / "run")
    assert torch.equal(saved(run), before)
    assert run.finished
    assert run.journal.verify().sealed
    assert run.journal.steps_charged >= 7
    assert not list(run.private.glob("key-*"))


class Flaky(Dataset):
    """A data set on a server that can go away."""

    gone = False

    def __len__(self):
        return 60

    def __getitem__(self, k):
        if self.gone:
            raise OSError("the server is gone")
        return data()[k]


def test_finishing_after_an_error_inside_a_step_is_refused_until_it_is_iterated_on(tmp_path):
    flaky = Flaky()
    training, model = started(tmp_path / "run", train=flaky)

    def leave(step):
        flaky.gone = step.number == 6

    with pytest.raises(OSError, match="the server is gone"):
        left_at(training, 11, leave)
    flaky.gone = False
    with pytest.raises(ValueError, match=r"inside a step.* Iterate on, then finish\(\)"):
        training.finish()
    assert not training.run.finished
    left_at(training, 8)
    before = weights(model)
    training.finish()
    assert torch.equal(saved(Run.checked(tmp_path / "run")), before)


def test_finishing_what_another_loop_went_on_with_is_refused(tmp_path):
    training, _ = started(tmp_path / "run", plan(refresh_every=None))
    left_at(training, 3)
    left_at(started(tmp_path / "run", plan(refresh_every=None))[0], 5)
    with pytest.raises(ValueError, match="another loop went on with it"):
        training.finish()


def test_finishing_again_where_the_last_evaluation_failed_ends_the_run(tmp_path, monkeypatch):
    training, model = started(tmp_path / "run")
    left_at(training, 6)
    with monkeypatch.context() as patch:
        patch.setattr(type(training), "_before_sealing", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            training.finish()
    before = weights(model)
    training.finish()
    assert torch.equal(saved(Run.checked(tmp_path / "run")), before)


def averaged(out):
    model = small_model()
    average = Ema(model, decay=0.5)
    training, _ = started(out, state=[average])
    return training, average


def test_a_finished_folder_gives_the_objects_of_state_their_final_state(tmp_path):
    training, average = averaged(tmp_path / "run")
    for step in training:
        average(step)
    file = tmp_path / "run" / "private" / "state.pt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again, restored = averaged(tmp_path / "run")
    assert list(again) == []
    expected = average.state_dict()["average"]
    for name, tensor in restored.state_dict()["average"].items():
        assert torch.equal(tensor, expected[name])
    assert list(started(tmp_path / "run")[0]) == []  # the weights alone
    more, _ = started(tmp_path / "run", state=[Ema(small_model()), Ema(small_model())])
    with pytest.raises(ValueError, match="keeps the state of 1 objects, and state has 2"):
        list(more)
    file.unlink()
    with pytest.raises(ValueError, match="no final state of the objects in state"):
        list(averaged(tmp_path / "run")[0])


class Best:
    """The best number so far, as NumPy gives it."""

    value = 0.0

    def state_dict(self):
        return {"value": np.float64(self.value)}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_the_final_state_holds_what_checkpoints_can(tmp_path):
    best, again = Best(), Best()
    for step in started(tmp_path / "run", state=[best])[0]:
        best.value = step.number
    assert list(started(tmp_path / "run", state=[again])[0]) == []
    assert again.value == 11


class Stopped(Exception):
    pass


def stop(*arguments):
    raise Stopped


def half_ended(out, seed, monkeypatch):
    """Weights of a run that was stopped after its journal was sealed, with its checkpoint there."""
    training, model = started(out, seed=seed)

    def finish(step):
        if step.number == 6:
            patch.setattr(run_folder, "renew_ledger", stop)
            training.finish()

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        left_at(training, 11, finish)
    assert not training.run.finished
    return training, weights(model)


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("way", ["iterated", "finished", "the same object"])
def test_a_run_stopped_after_its_seal_is_ended_by_the_same_call(tmp_path, monkeypatch, seed, way):
    same, expected = half_ended(tmp_path / "run", seed, monkeypatch)
    training, model = started(tmp_path / "run", seed=seed)
    if way == "iterated":
        assert list(training) == []
        assert torch.equal(weights(model), expected)
    else:
        (same if way == "the same object" else training).finish()
    run = Run.checked(tmp_path / "run")
    assert run.finished
    assert run.journal.verify().sealed
    assert torch.equal(saved(run), expected)
    assert not [f.name for f in run.private.iterdir() if f.name.startswith(("rel", "check", "key"))]


def test_weights_that_are_gone_come_from_the_checkpoint_or_are_asked_for(tmp_path, monkeypatch):
    _, expected = half_ended(tmp_path / "run", 5, monkeypatch)
    model_file = tmp_path / "run" / "private" / "model.pt"
    model_file.unlink()
    training, model = started(tmp_path / "run")
    assert list(training) == []
    assert torch.equal(weights(model), expected)
    model_file.unlink()
    with pytest.raises(ValueError, match="finished, and its weights are gone"):
        list(started(tmp_path / "run")[0])


def test_evaluation_leaves_modes_and_generators_as_they_were():
    class Augmented(Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, k):
            x, y = data()[k]
            return x + torch.rand(()) + random.random() + float(np.random.rand()), y  # noqa: NPY002

    model = nn.Sequential(small_model(dropout=0.5), nn.Dropout(0.5), nn.Identity())
    model[1].eval()
    modes = [module.training for module in model.modules()]
    seed_all(3)
    expected = drawn()
    seed_all(3)
    found = outcomes(model, LOSS, correct_class, Augmented(), torch.device("cpu"), at_a_time=25)
    assert drawn() == expected
    assert [module.training for module in model.modules()] == modes
    again = outcomes(model, LOSS, correct_class, Augmented(), torch.device("cpu"), at_a_time=25)
    assert np.array_equal(found[0], again[0])


def in_a_child(work):
    """Do `work` in a forked process; its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, of which it uses none
        child = os.fork()
    if not child:
        try:
            work()
        except SystemExit:
            gc.collect()
            os._exit(0)
        except BaseException:
            os._exit(1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state_of(folder):
    """Its files; those of SQLite by name, since closing them would drop the locks on them."""
    files = [file for file in folder.iterdir() if "sqlite" not in file.name]
    return sorted(os.listdir(folder)), {file.name: file.read_bytes() for file in files}


def test_a_forked_child_that_leaves_the_body_takes_nothing_from_its_parent(tmp_path, monkeypatch):
    training, _ = started(tmp_path / "run", seed=None)
    private = tmp_path / "run" / "private"
    steps = iter(training)
    for _ in range(6):
        next(steps)
    before = state_of(private)
    assert [name for name in before[0] if name.startswith("key-")]

    def leave():
        steps.close()  # as its frame does when the child unwinds
        training.run.journal.close()  # as the interpreter does in the end
        sys.exit()

    assert in_a_child(leave) == 0
    assert in_a_child(lambda: next(steps)) == 1
    assert in_a_child(training.finish) == 1
    assert state_of(private) == before
    assert [step.number for step in steps] == list(range(6, 12))
    assert (training.run.journal.charged(), training.run.journal.repeated) == ((12,), 0)


def test_who_holds_a_folder_is_said_rightly(tmp_path):
    def attempt():
        with alone_in(tmp_path):
            pass

    def told_of_another():
        with pytest.raises(ValueError, match="in use by another process"):
            attempt()
        sys.exit()

    with alone_in(tmp_path):
        with pytest.raises(ValueError, match="in use by this process"):
            attempt()
        assert in_a_child(told_of_another) == 0
    attempt()
