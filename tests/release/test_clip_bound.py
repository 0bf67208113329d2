import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from epsilons.release import Budget, release_median_norm
from epsilons.release.clip_bound import LARGEST


@pytest.mark.parametrize("scale", [1e-4, 1.0, 37.0, 1e4])
def test_the_median_is_found_whatever_the_scale_of_the_norms(scale):
    norms = scale * np.random.default_rng(2).lognormal(0, 0.4, 20_000)
    found = release_median_norm(norms)
    assert found.value == pytest.approx(np.median(norms), rel=0.02)
    assert found.low <= found.value <= found.high


def test_norms_that_are_no_numbers_count_as_large():
    norms = np.r_[np.ones(3000), np.full(3000, np.nan), np.full(3000, np.inf)]
    assert release_median_norm(norms, epsilon=1.0).value > LARGEST / 2


def test_the_cost_is_what_was_asked_for_and_enters_the_budget_once(tmp_path):
    norms = np.random.default_rng(2).lognormal(0, 0.4, 5000)
    bound = release_median_norm(norms, epsilon=0.5)
    assert (bound.cost.epsilon, bound.cost.delta) == (0.5, 1e-5)
    with Budget(tmp_path / "b") as budget:
        bound.charge(budget)
        bound.charge(budget)
        assert budget.spent.units == bound.cost.units
        assert budget.spent.questions == 1
        assert budget.entries()[0].answer["value"] == bound.value
        with pytest.raises(ValueError, match="another clip bound"):
            release_median_norm(norms, epsilon=0.5).charge(budget)


def test_with_a_budget_it_is_charged_first_and_stays_the_same(tmp_path):
    norms = np.random.default_rng(2).lognormal(0, 0.4, 5000)
    with Budget(tmp_path / "b") as budget:
        first = release_median_norm(norms, epsilon=0.5, budget=budget)
        assert release_median_norm(norms, epsilon=0.5, budget=budget) == first
        assert budget.spent.units == first.cost.units


def test_too_few_norms_are_refused():
    with pytest.raises(ValueError, match="too few"):
        release_median_norm(np.ones(100))
    with pytest.raises(ValueError, match="shape"):
        release_median_norm(np.ones((10, 10)))


@pytest.mark.data
@pytest.mark.skipif("EPSILONS_DATA" not in os.environ, reason="needs EPSILONS_DATA")
def test_the_median_of_real_initial_norms_is_within_two_percent():
    """MNIST, all 60,000, at (0.1, 1e-5); the error is about 0.1 %."""
    torch = pytest.importorskip("torch")
    from epsilons.gradients import gradient_norms
    from epsilons.training import supervised

    raw = Path(os.environ["EPSILONS_DATA"]) / "MNIST" / "raw"
    images = np.frombuffer(gzip.decompress((raw / "train-images-idx3-ubyte.gz").read_bytes())[16:],
                           dtype=np.uint8)  # fmt: skip
    labels = np.frombuffer(gzip.decompress((raw / "train-labels-idx1-ubyte.gz").read_bytes())[8:],
                           dtype=np.uint8)  # fmt: skip
    data = torch.utils.data.TensorDataset(
        torch.tensor(images.reshape(-1, 784), dtype=torch.float32) / 255,
        torch.tensor(labels.astype(np.int64)),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(784, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)
        )
    loss = supervised(torch.nn.CrossEntropyLoss(reduction="none"))
    norms = gradient_norms(model, loss, data, batch_size=1000)
    found = release_median_norm(norms)
    print(f"median {np.median(norms):.4f}, released {found}")
    assert len(norms) == 60_000
    assert found.value == pytest.approx(np.median(norms), rel=0.02)
