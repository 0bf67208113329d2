"""Runs by compiled passes: as eager ones but for rounding, and never silently something else.

Without torch's compiler, which takes seconds for each graph; that it computes the same is tested
with the passes.
"""

import numpy as np
import pytest
import torch
from trained import LOSS, data, plan, small_model, trained

from epsilons import Run
from epsilons.gradients import compile as compiling
from epsilons.settings import Settings
from epsilons.training import PrivateTraining, loop, norm_passes


@pytest.fixture
def graphs(monkeypatch):
    """The models that had graphs; what is compiled is only traced."""
    models = []
    traced = compiling._traced

    def noted(work, inputs):
        models.append(inputs.model)
        return traced(work, inputs)

    monkeypatch.setattr(compiling, "_traced", noted)
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr(compiling, "say_once", print)
    monkeypatch.setattr(norm_passes, "say_once", print)
    return models


@pytest.mark.parametrize("sums", ["float64", "float32"])
def test_a_compiled_run_has_the_weights_and_norms_of_an_eager_one(tmp_path, graphs, sums):
    eager, weights = trained(tmp_path / "eager", plan(sums=sums), compile=False)
    assert not graphs
    run, its = trained(tmp_path / "compiled", plan(sums=sums), compile=True)
    assert len(graphs) == 2  # of the refreshes and of the steps
    torch.testing.assert_close(its, weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run.journal.norms(8), eager.journal.norms(8), rtol=1e-4)
    assert run.journal.sums_covered == (sums == "float64")


def test_a_short_run_is_not_compiled_of_itself(tmp_path, graphs):
    trained(tmp_path / "run", plan())
    assert not graphs


def test_a_stopped_compiled_run_ends_with_the_same_bits(tmp_path, graphs):
    _, whole = trained(tmp_path / "whole", plan(), compile=True)
    assert graphs
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options = dict(out=tmp_path / "run", seed=5, compile=True)
    for step in PrivateTraining(model, optimizer, LOSS, data(), plan(), **options):
        if step.number == 6:
            break
    for _ in PrivateTraining(model, optimizer, LOSS, data(), plan(), **options):
        pass
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), whole)
    assert Run.open(tmp_path / "run").journal.restarts == 0


@pytest.mark.parametrize("compile", [True, False])
def test_steps_are_replayed_only_if_they_are_compiled_again(tmp_path, graphs, monkeypatch, compile):
    """Two releases with the same noise and different sums would reveal their difference."""

    def begun(compile):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        out = tmp_path / "run"
        return PrivateTraining(model, optimizer, LOSS, data(), plan(), out=out, compile=compile)

    with monkeypatch.context() as killed:
        killed.setattr(loop.Loop, "leave", lambda self, before: None)
        killed.setattr(loop, "CHECKPOINT_SECONDS", 1e9)
        for step in begun(True):
            if step.number == 6:
                break
    assert [step.replayed for step in begun(compile)] == [True] * 7 + [False] * 5
    assert Run.open(tmp_path / "run").journal.restarts == int(not compile)


class Tempered(torch.nn.Module):
    """A layer that reads an attribute of its class, which no graph can know of."""

    warmth = 1.0

    def forward(self, x):
        return x / self.warmth


def test_what_a_graph_took_for_constant_is_looked_at_again_at_refreshes(
    tmp_path, graphs, monkeypatch
):
    model = small_model()
    model.append(Tempered())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training = PrivateTraining(
        model, optimizer, LOSS, data(), plan(), out=tmp_path / "run", seed=5, compile=True
    )
    seen = iter(training)
    assert [next(seen).number for _ in range(3)] == [0, 1, 2]
    monkeypatch.setattr(Tempered, "warmth", 2.0)
    with pytest.raises(ValueError, match="at step 4 compiled passes no longer do what model and"):
        list(seen)


def test_a_random_loss_stays_eager(tmp_path, graphs, capsys):
    _, weights = trained(tmp_path / "eager", plan(), dropout=0.5, compile=False)
    _, its = trained(tmp_path / "run", plan(), dropout=0.5, compile=True)
    assert torch.equal(its, weights)
    assert not graphs
    assert "stay eager: they draw random numbers" in capsys.readouterr().out


def test_exact_norms_stay_eager(tmp_path, graphs, capsys):
    run, _ = trained(tmp_path / "run", plan(refresh_every=1), compile=True)
    assert run.epsilons().kind == "exact"
    assert not graphs
    assert "stay eager: norms are charged" in capsys.readouterr().out


def test_passes_whose_rows_depend_on_the_batch_once_compiled_stay_eager(
    tmp_path, graphs, monkeypatch, capsys
):
    tested = []

    def dependent(model, loss_fn, batch, size, **extent):
        tested.append(size)
        return False

    monkeypatch.setattr(norm_passes, "compiled_batch_invariant", dependent)
    _, weights = trained(tmp_path / "eager", plan(), compile=False)
    run, its = trained(tmp_path / "run", plan(), compile=True)
    assert tested == [32]
    assert torch.equal(its, weights)
    assert run.journal.sums_covered
    assert "depend on the rest of its batch" in capsys.readouterr().out


def test_rows_found_to_depend_on_the_batch_later_are_said_not_to_be_covered(
    tmp_path, graphs, monkeypatch
):
    tested = []

    def dependent(model, loss_fn, batch, size, **extent):
        tested.append(size)
        return len(tested) == 1

    monkeypatch.setattr(norm_passes, "compiled_batch_invariant", dependent)
    run, _ = trained(tmp_path / "run", plan(), compile=True)
    assert len(tested) == 2
    assert not run.journal.sums_covered


def test_settings_say_whether_to_compile():
    given = dict(data="digits", lr=1.0, delta=1e-3, max_grad_norm=1.0, epsilon=3.0, steps=5)
    assert Settings.of(given).compile == "auto"
    assert Settings.of({**given, "compile": True}).compile is True
    with pytest.raises(ValueError, match="compile"):
        Settings.of({**given, "compile": "always"})
