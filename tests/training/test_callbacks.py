import os
import signal
import stat

import pytest
import torch
import trained

from epsilons.training import Callbacks, Ema, Interrupted, TensorBoard


def averaged(weights, decay):
    """The average by its definition, one step at a time."""
    total = weights[0]
    for t, now in enumerate(weights[1:], start=1):
        kept = min(decay, t / (t + 9))
        total = kept * total + (1 - kept) * now
    return total


def test_ema_is_the_average_of_the_weights_by_its_definition(tmp_path):
    model = trained.small_model()
    ema = Ema(model, decay=0.5)
    seen = [trained.weights(model)]
    trained.trained(
        tmp_path / "run", trained.plan(),
        on_step=Callbacks(ema, lambda step: seen.append(trained.weights(step.model))),
    )  # fmt: skip
    ema.apply(model)
    torch.testing.assert_close(trained.weights(model), averaged(seen, 0.5))


def test_ema_survives_an_interruption(tmp_path):
    def press(step):
        if step.number == 5:
            os.kill(os.getpid(), signal.SIGINT)

    model = trained.small_model()
    whole, first, second = (Ema(model) for _ in range(3))
    trained.trained(tmp_path / "whole", trained.plan(), on_step=Callbacks(whole))
    with pytest.raises(Interrupted):
        trained.trained(tmp_path / "run", trained.plan(), on_step=Callbacks(first, press))
    trained.trained(
        tmp_path / "run", trained.plan(), on_step=Callbacks(second, lambda step: None), resume=True
    )
    results = []
    for ema in (whole, second):
        ema.apply(model)
        results.append(trained.weights(model))
    assert torch.equal(*results)


def test_tensorboard_events_are_written_in_private(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = trained.trained(tmp_path / "run", trained.plan(), on_step=TensorBoard(every=4))
    folder = run.path / "private" / "tensorboard"
    files = list(folder.iterdir())
    assert files
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    events = EventAccumulator(str(folder)).Reload()
    worst = events.Scalars("worst_case")  # of what is charged: up to the next refresh
    assert [event.step for event in worst] == [0, 4, 8]
    assert worst[-1].value == pytest.approx(trained.plan().worst_case(steps=12), rel=1e-6)
    assert len(events.Scalars("loss")) == len(events.Scalars("lr")) == 3


def test_a_decay_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="decay=1"):
        Ema(trained.small_model(), decay=1.0)
