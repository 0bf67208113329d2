import numpy as np
import pytest
import torch

from epsilons.data import npz

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.array([0, 1, 2, 0, 1, 2])


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_arrays_with_names_owners_and_groups(tmp_path):
    file = saved(
        tmp_path / "a.npz", x=X, y=Y, x_test=X[:2], y_test=Y[:2], ids=list("abcdef"),
        ids_test=list("gh"), owners=[1, 1, 2, 2, 3, 3], site=list("nnnsss"), site_test=list("ns"),
        classes=["low", "mid", "high"],
    )  # fmt: skip
    data = npz(file)
    assert torch.equal(data.train.tensors[0], torch.from_numpy(X))
    assert data.train.tensors[1].tolist() == Y.tolist()
    assert data.examples.groups["site"].tolist() == list("nnnsss")
    assert data.test_examples.ids.tolist() == ["g", "h"]
    assert data.classes == ("low", "mid", "high")


def test_bytes_are_scaled_and_a_share_is_held_out(tmp_path):
    data = npz(saved(tmp_path / "a.npz", x=np.full((10, 2), 255, np.uint8), y=np.arange(10) % 2))
    assert (len(data.train), len(data.test)) == (8, 2)
    assert float(data.train.tensors[0].max()) == 1
    assert data.classes == ("0", "1")


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (dict(x=X), "expected x and y"),
        (dict(x=X, y=Y[:3]), "expected x .* and whole numbers y"),
        (dict(x=X, y=Y * 0.5), "whole numbers"),
        (dict(x=X, y=Y - 1), "a negative label"),
        (dict(x=X, y=Y, classes=["a", "b"]), "labels up to 2 and 2 classes"),
        (dict(x=X, y=Y, x_test=X), "expected x .* and whole numbers y"),
        (dict(x=np.where(X == 5, np.nan, X), y=Y), "values in x that are not finite"),
        (dict(x=X, y=Y, ids=[1, 1, 2, 3, 4, 5]), "repeat"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, arrays, sentence):
    with pytest.raises(ValueError, match=sentence):
        npz(saved(tmp_path / "a.npz", **arrays))


def test_what_is_no_npz_file_says_so(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\3\4 and then nothing")
    with pytest.raises(ValueError, match=r"not an \.npz file"):
        npz(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="is not there"):
        npz(tmp_path / "b.npz")


def test_pickled_objects_are_refused(tmp_path):
    file = saved(tmp_path / "a.npz", x=X, y=np.array([{}] * 6, dtype=object))
    with pytest.raises(ValueError, match="plain arrays"):
        npz(file)
