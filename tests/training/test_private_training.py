"""A loop over private steps: the same as `fit`, however it is left and gone on with."""

import errno
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
import trained
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from trained import LOSS, data, plan, small_model, weights

from epsilons import Run
from epsilons.training import Ema, Interrupted, PrivateTraining, fit, loop, supervised


def started(out, the_plan=None, *, seed=5, dropout=0.0, **options):
    """A training and the model that it trains."""
    model = small_model(dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    the_plan = plan() if the_plan is None else the_plan
    train, loss_fn = options.pop("train", None) or data(), options.pop("loss_fn", LOSS)
    training = PrivateTraining(
        model, optimizer, loss_fn, train, the_plan, out=out, seed=seed, **options
    )
    return training, model


def carried_out(out, the_plan=None, **options):
    training, model = started(out, the_plan, **options)
    for _ in training:
        pass
    return training.run, weights(model)


@pytest.mark.parametrize("clipping", ["max", "individual"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_it_is_fit_to_the_bit(tmp_path, clipping, dropout):
    the_plan = plan(clipping=clipping, phases=((6, {"noise_multiplier": 2.0, "batch_size": 30}),))
    run, found = carried_out(tmp_path / "loop", the_plan, dropout=dropout, follow=3)
    other, expected = trained.trained(tmp_path / "fit", the_plan, dropout=dropout, follow=3)
    assert torch.equal(found, expected)
    assert trained.entries(run) == trained.entries(other)
    assert run.finished
    assert run.journal.verify().sealed


def test_steps_are_shown_one_by_one_after_they_were_charged(tmp_path):
    training, model = started(tmp_path / "run")
    seen = []
    for step in training:
        assert step.run.journal.steps_charged > step.number
        assert step.worst_case == step.run.journal.worst_case()
        assert step.model is model
        assert not step.replayed
        assert np.isfinite(step.loss)
        seen.append(step.number)
    assert seen == list(range(12))
    assert training.epsilons().values.shape == (60,)


class Left(Exception):
    pass


def leave_by_break(step):
    return True


def leave_by_exception(step):
    raise Left


def leave_by_ctrl_c(step):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)  # another thread may get the signal, and this one hear of it a little later


def followed_by(training, body):
    """Go through the steps until `body` says stop; what it raises is swallowed."""
    try:
        for step in training:
            if body(step):
                break
    except (Left, KeyboardInterrupt):
        pass


class Body:
    """A loop's body that averages weights, changes the learning rate and draws."""

    def __init__(self, optimizer, ema, leave_at, leave, numbers):
        self.optimizer, self.ema = optimizer, ema
        self.leave_at, self.leave, self.numbers = leave_at, leave, numbers

    def __call__(self, step):
        self.numbers.append((step.number, step.replayed))
        self.optimizer.param_groups[0]["lr"] *= 0.9
        torch.rand(3)
        if self.leave_at and step.number == self.leave_at[0]:
            self.leave_at.pop(0)
            return self.leave(step)
        return self.ema(step)


def averaged(out, leave_at, leave, *, seed=5):
    """A run whose body averages weights and changes the learning rate, left at some steps."""
    numbers = []
    while True:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        ema = Ema(model, decay=0.5)
        training = PrivateTraining(
            model, optimizer, LOSS, data(), plan(), out=out, seed=seed, state=[ema]
        )
        followed_by(training, Body(optimizer, ema, leave_at, leave, numbers))
        if training.run.finished:
            return training.run, weights(model), ema, optimizer, numbers


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_ctrl_c])
def test_however_the_body_is_left_the_same_call_ends_with_the_same_bits(tmp_path, leave):
    run, found, ema, optimizer, numbers = averaged(tmp_path / "run", [0, 5, 6, 11], leave)
    whole, expected, other, same, _ = averaged(tmp_path / "whole", [], leave)
    assert torch.equal(found, expected)
    assert trained.entries(run) == trained.entries(whole)
    assert optimizer.param_groups[0]["lr"] == same.param_groups[0]["lr"]
    for name, average in ema.state_dict()["average"].items():
        assert torch.equal(average, other.state_dict()["average"][name])
    # the step at which it was left is shown again, and none is lost
    again = [number for number, replayed in numbers if replayed]
    assert again == [0, 5, 6, 11]
    assert sorted({number for number, _ in numbers}) == list(range(12))
    assert len(numbers) == 12 + 4


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_ctrl_c])
def test_a_secret_run_that_was_left_charges_every_step_once(tmp_path, leave):
    run, *_ = averaged(tmp_path / "run", [0, 5, 6, 11], leave, seed=None)
    assert (run.journal.charged(), run.journal.repeated) == ((12,), 0)
    assert Run.checked(run.path)
    assert not list(run.private.glob("key-*"))


def test_the_same_object_goes_on_where_its_loop_was_left(tmp_path):
    training, model = started(tmp_path / "run")
    seen = []
    for step in training:
        seen.append(step.number)
        if step.number == 4:
            break
    seen += [step.number for step in training]
    assert seen == [0, 1, 2, 3, 4, 4, *range(5, 12)]
    assert torch.equal(weights(model), carried_out(tmp_path / "whole")[1])


def child(out, seed):
    """A run with a slow body in a process of its own; it says what it saw."""
    torch.set_num_threads(1)
    loop.CHECKPOINT_SECONDS = 0.05
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    model = small_model(dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ema = Ema(model)
    training = PrivateTraining(
        model, optimizer, LOSS, data(), plan(**trained.LONG), out=out, seed=seed, state=[ema]
    )
    for step in training:
        ema(step)
        digest = hash(weights(model).numpy().tobytes())
        os.write(log, f"{step.number} {int(step.replayed)} {digest}\n".encode())
    ema.apply(model)
    torch.save(model.state_dict(), f"{out}.averaged")


@pytest.mark.parametrize("seed", [5, None])
def test_kill_9_inside_the_body_resumes_to_the_same_bits(tmp_path, seed, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trained", "test_private_training"])
    clock, out = random.Random(3), tmp_path / "run"
    kills = int(os.environ.get("EPSILONS_KILLS", "20")) // 4
    while True:
        process = context.Process(target=child, args=(out, seed))
        process.start()
        process.join(clock.uniform(0.2, 1.2) if kills else None)
        if process.exitcode is not None:
            assert process.exitcode == 0
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills -= 1
    run = Run.checked(out)
    assert (sum(run.journal.charged()), run.journal.repeated) == (150, 0)
    released = {}
    for line in (tmp_path / "run.log").read_text().splitlines():
        number, _, digest = line.split()
        assert released.setdefault(number, digest) == digest  # a step has one result
    assert sorted(map(int, released)) == list(range(150))
    if seed is not None:
        threads = torch.get_num_threads()
        child(tmp_path / "whole", seed)
        torch.set_num_threads(threads)
        assert trained.entries(run) == trained.entries(Run.open(tmp_path / "whole"))
        found, expected = (
            torch.load(tmp_path / f"{name}.averaged", weights_only=True)
            for name in ("run", "whole")
        )
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ctrl_c_within_a_step_stops_after_it(tmp_path, monkeypatch):
    taken = loop.taken_step
    training, _ = started(tmp_path / "run")

    def pressed(*arguments, **options):
        if training.run.journal.steps_charged >= 5:
            os.kill(os.getpid(), signal.SIGINT)
        return taken(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "taken_step", pressed)
        with pytest.raises(Interrupted, match="can be resumed"):
            for _ in training:
                pass
    _, found = carried_out(tmp_path / "run")
    assert torch.equal(found, carried_out(tmp_path / "whole")[1])


def test_a_finished_folder_yields_no_steps_and_gives_its_weights(tmp_path):
    _, expected = carried_out(tmp_path / "run")
    training, model = started(tmp_path / "run")
    assert list(training) == []
    assert torch.equal(weights(model), expected)
    training.finish()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(the_plan=plan(noise_multiplier=2.0)), "noise_multiplier was 1.0 and is 2.0"),
        (dict(train=data(seed=3)), "data set was"),
        (dict(seed=6), "seed=6, and .* begun with seed=5"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_another_run_is_refused_with_the_difference(
    tmp_path, changes, sentence, finished
):
    training, _ = started(tmp_path / "run")
    followed_by(training, lambda step: step.number == 6 and not finished)
    before = trained.entries(Run.open(tmp_path / "run"))
    with pytest.raises(ValueError, match=sentence):
        started(tmp_path / "run", **changes)
    assert trained.entries(Run.open(tmp_path / "run")) == before


@pytest.mark.parametrize("inside", [True, False])
def test_finishing_early_seals_the_run_and_destroys_its_keys(tmp_path, inside):
    training, model = started(tmp_path / "run", seed=None)
    for step in training:
        if step.number == 6:
            if inside:
                training.finish()
            break
    training.finish()
    training.finish()
    run = Run.checked(tmp_path / "run")
    assert run.finished
    assert run.journal.verify().sealed
    assert 7 <= run.journal.steps_charged < 12
    assert not list(run.private.glob("key-*"))
    saved = torch.load(run.model_file, weights_only=True)
    assert torch.equal(torch.cat([p.flatten() for p in saved.values()]), weights(model))
    assert list(started(tmp_path / "run", seed=None)[0]) == []


def drawn():
    """A number from each of the generators that users have."""
    return torch.rand(2).tolist(), np.random.rand(), random.random()  # noqa: NPY002


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def test_draws_of_the_body_and_of_the_library_do_not_disturb_each_other(tmp_path):
    quiet, model = started(tmp_path / "quiet", dropout=0.5)
    noisy, other = started(tmp_path / "noisy", dropout=0.5)
    seed_all(3)
    expected = [drawn() for _ in range(12)]
    seed_all(3)
    assert [drawn() for _ in noisy] == expected
    for _ in quiet:
        pass
    assert torch.equal(weights(model), weights(other))


class Augmented(Dataset):
    """Examples with random parts, from all three generators."""

    def __len__(self):
        return 60

    def __getitem__(self, k):
        x, y = data()[k]
        two, one, other = drawn()
        return {"x": x + 0.1 * (two[0] + one + other), "y": int(y)}


def dict_loss(model, batch):
    return LOSS(model, (batch["x"], batch["y"]))


@pytest.mark.parametrize("workers", [0, 2])
def test_other_processes_fetch_the_same_batches(tmp_path, workers):
    options = dict(train=Augmented(), loss_fn=dict_loss, num_workers=workers)
    training, _ = started(tmp_path / "run", **options)
    followed_by(training, lambda step: step.number == 5)
    run, found = carried_out(tmp_path / "run", **options)
    _, expected = carried_out(tmp_path / "whole", train=Augmented(), loss_fn=dict_loss)
    assert torch.equal(found, expected)
    assert run.epsilons().kind == "estimate"


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.01),
    ],
)
def test_any_optimizer_and_schedule_go_on_to_the_same_bits(tmp_path, make):
    def run(out, leave):
        model = small_model()
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        slow = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        training = PrivateTraining(
            model, optimizer, LOSS, data(), plan(), out=out, seed=5, scheduler=schedule,
            state=[slow],
        )  # fmt: skip
        for step in training:
            if leave and step.number == 5:
                break
            slow.step()
        return weights(model), slow.last_epoch

    run(tmp_path / "run", True)
    found, count = run(tmp_path / "run", False)
    expected, same = run(tmp_path / "whole", False)
    assert torch.equal(found, expected)
    assert count == same == 12


def test_bfloat16_models_and_autocast_are_trained(tmp_path):
    def half(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return LOSS(model, batch)

    run, found = carried_out(tmp_path / "autocast", loss_fn=half)
    assert not torch.equal(found, carried_out(tmp_path / "float32")[1])
    assert run.epsilons().values.shape == (60,)
    model = small_model().bfloat16()
    x, y = data().tensors
    for _ in PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.5), LOSS,
        TensorDataset(x.bfloat16(), y), plan(), out=tmp_path / "bfloat16", seed=5,
    ):  # fmt: skip
        pass
    assert weights(model).isfinite().all()


def test_data_larger_than_memory_are_read_by_example(tmp_path):
    x, y = data().tensors
    mapped = np.memmap(tmp_path / "x.bin", dtype="<f4", mode="w+", shape=tuple(x.shape))
    mapped[:] = x.numpy()

    class Mapped(Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, k):
            return torch.from_numpy(np.array(mapped[k])), y[k]

    _, found = carried_out(tmp_path / "mapped", train=Mapped())
    assert torch.equal(found, carried_out(tmp_path / "tensors")[1])


def smaller_machine(limit, failed):
    """A loss for which more than `limit` examples at a time don't fit into memory."""

    def loss_fn(model, batch):
        if torch.is_grad_enabled() and len(batch[0]) > limit:
            failed.append(len(batch[0]))
            raise torch.OutOfMemoryError("no room for 1 GiB")
        return LOSS(model, batch)

    return loss_fn


def test_out_of_memory_halves_the_passes_and_the_checkpoint_remembers(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
    failed = []
    training, _ = started(tmp_path / "run", plan(sums="float32"))
    training._unit = training._unit._replace(loss_fn=smaller_machine(12, failed))
    with pytest.warns(RuntimeWarning, match="out of memory at step 0: passes take at most 10 exam"):
        followed_by(training, lambda step: step.number == 3)
    assert failed
    failed.clear()
    again, _ = started(tmp_path / "run", plan(sums="float32"))
    again._unit = again._unit._replace(loss_fn=smaller_machine(12, failed))
    for _ in again:
        pass
    assert not failed
    assert (again.run.journal.charged(), again.run.journal.repeated) == ((12,), 0)


@pytest.mark.parametrize("sums", ["float32", "float64"])
def test_out_of_memory_in_the_checks_before_training_halves_the_passes_too(tmp_path, sums):
    failed = []
    with pytest.warns(RuntimeWarning, match="in the checks before training: passes take at most"):
        training, _ = started(
            tmp_path / "run", plan(sums=sums), loss_fn=smaller_machine(12, failed)
        )
    failed.clear()
    for _ in training:
        pass
    assert not failed
    assert training.run.journal.sums_covered == (sums == "float64")


def test_memory_that_never_suffices_is_an_error_and_nothing_is_lost(tmp_path):
    training, _ = started(tmp_path / "run", plan(sums="float32"))
    training._unit = training._unit._replace(loss_fn=smaller_machine(0, []))
    with (
        pytest.warns(RuntimeWarning, match="out of memory at step 0"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        list(training)
    run, _ = carried_out(tmp_path / "run", plan(sums="float32"))
    assert run.finished


def test_a_full_disk_in_the_loop_is_one_sentence(tmp_path, monkeypatch):
    training, _ = started(tmp_path / "run")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_up(step):
        if step.number == 3:
            patch.setattr(loop.State, "save", full)
            patch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Make room, and go on"):
        followed_by(training, fill_up)
    run, _ = carried_out(tmp_path / "run")
    assert (run.journal.charged(), run.journal.repeated) == ((12,), 0)


def test_parameters_that_never_move_are_named(tmp_path):
    """An adapter whose learning rate is 0: clipping counted it, and nothing said so."""
    model = small_model()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters()}], lr=0.5
    )
    training = PrivateTraining(model, optimizer, LOSS, data(), plan(), out=tmp_path / "run", seed=5)
    with pytest.warns(UserWarning, match=r"after 10 steps .* as they were: 0\.weight, 0\.bias"):
        list(training)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(state=[object()]), "state has object; expected objects with state_dict"),
        (dict(micro_batch=0), "micro_batch"),
        (dict(seed=-1), "seed"),
        (dict(num_workers=-1), "num_workers"),
        (dict(follow=61), "at most the 60 examples"),
        (dict(the_plan=plan(steps=None, refresh_every=3)), "steps or epochs"),
        (dict(train=data(50)), "has 50 examples"),
        (dict(device="cuda:77"), "can't be used here"),
        (dict(loss_fn=nn.CrossEntropyLoss()), "loss_fn is the criterion"),
        (dict(loss_fn=supervised(nn.CrossEntropyLoss())), "one loss per example"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_door(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        started(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_other_objects_in_state_are_refused(tmp_path):
    training, _ = started(tmp_path / "run", state=[Ema(small_model())])
    followed_by(training, lambda step: step.number == 3)
    training, _ = started(tmp_path / "run")
    with pytest.raises(ValueError, match="keeps the state of 1 objects, and state has 0"):
        list(training)


def test_a_loop_inside_its_own_loop_is_refused(tmp_path):
    training, _ = started(tmp_path / "run")
    for _ in training:
        with pytest.raises(ValueError, match="is being trained by this object"):
            next(iter(training))
        other, _ = started(tmp_path / "run")
        with pytest.raises(ValueError, match="in use by this process"):
            next(iter(other))
        break


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS])
def test_optimizers_that_evaluate_the_loss_several_times_are_refused(tmp_path, optimizer):
    model = small_model()
    with pytest.raises(ValueError, match="evaluates the loss several times a step"):
        PrivateTraining(
            model, optimizer(model.parameters()), LOSS, data(), plan(), out=tmp_path / "run"
        )


def test_a_scheduler_that_needs_a_value_is_refused(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="needs a measured value"):
        PrivateTraining(
            model, optimizer, LOSS, data(), plan(), out=tmp_path / "run", scheduler=plateau
        )


def test_max_epsilon_ends_the_loop_in_time(tmp_path):
    limit = plan().worst_case(steps=7) + 1e-6
    run, _ = carried_out(tmp_path / "run", max_epsilon=limit)
    assert run.journal.steps_charged == 7
    assert run.finished
    assert run.epsilons().worst_case <= limit


def test_a_body_that_changes_weights_is_replayed_with_them(tmp_path):
    def run(out, leave):
        training, model = started(out)
        for step in training:
            with torch.no_grad():
                model[0].bias.clamp_(-0.01, 0.01)
            if leave and step.number == 6:
                break
        return weights(model)

    run(tmp_path / "run", True)
    assert torch.equal(run(tmp_path / "run", False), run(tmp_path / "whole", False))


def test_nothing_is_left_on_the_users_objects(tmp_path):
    training, model = started(tmp_path / "run")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    generator = torch.get_rng_state()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for step in training:
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
        if step.number == 3:
            break
    assert torch.equal(torch.get_rng_state(), generator)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert not module._forward_hooks


def test_fit_takes_a_folder_only_to_resume_it(tmp_path):
    training, model = started(tmp_path / "run")
    followed_by(training, lambda step: step.number == 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(ValueError, match="is not empty"):
        fit(model, optimizer, LOSS, data(), plan(), out=tmp_path / "run", seed=5)
