import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from epsilons import Plan
from epsilons.training import PoissonLoader


def loader(n=40, rate=0.3, steps=4000, seed=0, dataset=None):
    plan = Plan(n=n, sample_rate=rate, steps=steps, noise_multiplier=1, max_grad_norm=1, delta=1e-5)
    data = TensorDataset(torch.arange(n)) if dataset is None else dataset
    return PoissonLoader(data, plan, generator=torch.Generator().manual_seed(seed))


def inclusions(**options):
    """(steps, n) of 0 and 1."""
    chosen = loader(**options)
    rows = np.zeros((len(chosen), options.get("n", 40)))
    for row, (indices, _) in zip(rows, chosen, strict=True):
        row[indices.numpy()] = 1
    return rows


def test_each_example_is_drawn_at_the_plans_rate():
    # 40 binomial means; a right sampler exceeds five standard errors once in 40,000 seeds
    rows = inclusions()
    error = np.sqrt(0.3 * 0.7 / len(rows))
    assert np.abs(rows.mean(axis=0) - 0.3).max() < 5 * error


def test_each_pair_is_drawn_at_the_square_of_the_rate():
    # 780 pairs; a right sampler exceeds 5.5 standard errors once in 30,000 seeds
    rows = inclusions()
    together = (rows.T @ rows / len(rows))[np.triu_indices(40, 1)]
    error = np.sqrt(0.09 * 0.91 / len(rows))
    assert np.abs(together - 0.09).max() < 5.5 * error


def test_draws_of_one_example_are_independent_over_steps():
    # 40 lag-one frequencies, as above
    rows = inclusions()
    twice = (rows[1:] * rows[:-1]).mean(axis=0)
    assert np.abs(twice - 0.09).max() < 5 * np.sqrt(0.09 * 0.91 / len(rows))


def test_batch_sizes_vary_as_a_binomial():
    sizes = inclusions().sum(axis=1)
    assert sizes.var() == pytest.approx(40 * 0.3 * 0.7, rel=0.15)


def test_an_empty_draw_is_a_step_without_a_batch():
    drawn = list(loader(n=2, rate=0.1, steps=200))
    assert len(drawn) == 200
    empty = [batch for indices, batch in drawn if len(indices) == 0]
    assert len(empty) > 100
    assert all(batch is None for batch in empty)


def test_batches_hold_the_examples_they_name():
    for indices, batch in loader(steps=20):
        torch.testing.assert_close(batch[0], indices)


def test_any_map_style_data_set_is_collated():
    class Squares(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return {"square": torch.tensor(i**2)}

    for indices, batch in loader(steps=5, dataset=Squares()):
        torch.testing.assert_close(batch["square"], indices**2)


def test_rate_one_draws_everything():
    assert (inclusions(rate=1.0, steps=3) == 1).all()


def test_same_seed_draws_the_same():
    np.testing.assert_array_equal(inclusions(steps=50), inclusions(steps=50))
    assert (inclusions(steps=50) != inclusions(steps=50, seed=1)).any()


def test_a_data_set_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 39 examples; the plan says n=40"):
        loader(dataset=TensorDataset(torch.arange(39)))
