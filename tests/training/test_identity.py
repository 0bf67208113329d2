"""A record is known by its content, in whatever data set and under whatever id."""

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from epsilons import Examples
from epsilons.training.identity import record_digests, with_digests

X, Y = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 3


class Given(Dataset):
    """Examples by a function of their number."""

    def __init__(self, get):
        self.get = get

    def __len__(self):
        return 50

    def __getitem__(self, k):
        return self.get(k)


def test_a_record_has_one_digest_in_every_data_set_that_gives_it():
    whole = record_digests(TensorDataset(X, Y))
    assert len(set(whole.tolist())) == 50
    for other in (
        Given(lambda k: (X[k], Y[k])),
        Given(lambda k: {"x": X[k].numpy(), "y": Y[k]}),
        TensorDataset(X.transpose(1, 2).contiguous().transpose(1, 2), Y),
    ):
        np.testing.assert_array_equal(record_digests(other), whole)
    np.testing.assert_array_equal(
        record_digests(Subset(TensorDataset(X, Y), [7, 3])), whole[[7, 3]]
    )


def test_another_value_type_shape_or_label_is_another_record():
    whole = record_digests(TensorDataset(X, Y))
    changed = X.clone()
    changed[4, 1, 2] += 1e-6
    assert np.flatnonzero(record_digests(TensorDataset(changed, Y)) != whole).tolist() == [4]
    for other in (
        TensorDataset(X, Y + 1),
        TensorDataset(X, Y.int()),
        TensorDataset(X.transpose(1, 2), Y),
        TensorDataset(X),
        Given(lambda k: (X[k], int(Y[k]))),
    ):
        assert not (record_digests(other) == whole).any()


def test_data_that_is_drawn_anew_has_no_digests():
    assert record_digests(Given(lambda k: X[k] + torch.randn(()))) is None


def test_digests_that_were_given_stay():
    given = Examples(ids=range(50), digests=[f"{k}" for k in range(50)])
    assert with_digests(given, TensorDataset(X, Y)) is given
    assert with_digests(Examples.numbered(50), TensorDataset(X, Y)).digests.dtype == "S32"
