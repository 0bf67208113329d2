import os
import pickle

import numpy as np
import pytest
import torch

from epsilons.data import cifar10

NAMES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


def batch(k, n=3):
    images = np.random.default_rng(k).integers(0, 256, (n, 3072), dtype=np.uint8)
    return images, (np.arange(n) + k) % 10


def write_binary(folder):
    for k, name in enumerate(NAMES):
        images, labels = batch(k)
        records = np.concatenate([labels[:, None].astype(np.uint8), images], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_pickles(folder, protocol=2):
    for k, name in enumerate(NAMES):
        images, labels = batch(k)
        content = {"data": images, "labels": labels.tolist(), "batch_label": name}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))


@pytest.mark.parametrize("protocol", [2, 4])
def test_binary_and_pickled_batches_are_the_same_data(tmp_path, protocol):
    for name, write in (("bin", write_binary), ("py", lambda f: write_pickles(f, protocol))):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    binary, pickled = (cifar10(tmp_path / name, verified=False) for name in ("bin", "py"))
    for one, other in zip(binary.train.tensors, pickled.train.tensors, strict=True):
        assert torch.equal(one, other)
    assert len(binary.train) == 15
    assert binary.examples.groups["class"][:2].tolist() == ["airplane", "automobile"]


def test_pixels_are_planes_of_rows_from_minus_one_to_one(tmp_path):
    write_binary(tmp_path)
    image = cifar10(tmp_path, verified=False).train.tensors[0][0]
    expected = batch(0)[0][0].reshape(3, 32, 32) / 127.5 - 1
    np.testing.assert_allclose(image.numpy(), expected, atol=1e-6)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_a_pickle_that_names_a_function_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pickles(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({"data": Trap(), "labels": []}))
    with pytest.raises(ValueError, match=r"data_batch_3 is not a batch.*mkdir, which is no data"):
        cifar10(tmp_path, verified=False)
    assert not (tmp_path / "trapped").exists()


def test_an_unverified_pickle_is_not_opened_at_all(tmp_path):
    write_pickles(tmp_path)
    with pytest.raises(ValueError, match=r"data_batch_1 is damaged or incomplete.*c99cafc15224"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (pickle.dumps({"data": batch(0)[0], "labels": [1]}), r"with 1 labels; expected bytes \(1"),
        (pickle.dumps({"labels": [1]}), "not a batch of CIFAR-10: 'data'"),
        (pickle.dumps({"data": batch(0)[0], "labels": [1, 2, 10]}), "labels up to 10"),
        (pickle.dumps([1, 2]), "not a batch"),
        (pickle.dumps({"data": batch(0)[0], "labels": [1, 2, 3]})[:-50], "not a batch"),
        (b"", "not a batch"),
    ],
)
def test_a_wrong_pickle_says_what_is_wrong(tmp_path, content, sentence):
    write_pickles(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        cifar10(tmp_path, verified=False)


def test_a_truncated_binary_batch_says_so(tmp_path):
    write_binary(tmp_path)
    file = tmp_path / "test_batch.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"test_batch\.bin is incomplete"):
        cifar10(tmp_path, verified=False)


def test_a_missing_batch_says_where_to_get_it(tmp_path):
    write_binary(tmp_path)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(ValueError, match=r"data_batch_4\.bin is not there.*kriz.*ae636b3ba5c6"):
        cifar10(tmp_path, verified=False)


@pytest.mark.data
def test_the_published_batches_give_the_known_photographs(published):
    data = cifar10(published)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert data.examples.groups["class"][:3].tolist() == ["frog", "truck", "truck"]
    assert (np.unique(data.examples.groups["class"], return_counts=True)[1] == 5000).all()
    # the means by channel that everyone normalises by
    means = (data.train.tensors[0].mean((0, 2, 3)) + 1) / 2
    np.testing.assert_allclose(means.numpy(), [0.4914, 0.4822, 0.4465], atol=1e-4)
