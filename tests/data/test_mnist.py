import gzip
import struct

import numpy as np
import pytest

from epsilons.data import mnist
from epsilons.data.mnist import read_idx


def idx(array):
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_small(folder, images=6, labels=6, largest=5):
    for part in ("train", "t10k"):
        pixels = np.arange(images * 28 * 28).reshape(images, 28, 28) % 256
        classes = np.minimum(np.arange(labels), largest)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(classes))


def test_idx_files_are_read_compressed_or_not(tmp_path):
    write_small(tmp_path)
    data = mnist(tmp_path, verified=False)
    x, y = data.train.tensors
    assert x.shape == (6, 1, 28, 28)
    assert float(x[0, 0, 3, 5]) == pytest.approx((3 * 28 + 5) / 255)
    assert y.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.examples.groups["class"].tolist() == list("012345")
    assert len(data.checksums) == 4


def test_a_missing_file_says_where_to_get_it_and_its_checksum(tmp_path):
    with pytest.raises(ValueError, match=r"train-images.*not there.*https://.*f68b3c2dcbeaaa9f"):
        mnist(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        mnist(tmp_path / "nowhere")


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path):
    write_small(tmp_path)
    with pytest.raises(ValueError, match=r"damaged or incomplete.*f68b3c2dcbeaaa9f.*again"):
        mnist(tmp_path)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (dict(labels=5), r"images \(6, 28, 28\) with labels \(5,\)"),
        (dict(images=12, labels=12, largest=11), "labels .* up to 11"),
    ],
)
def test_labels_that_do_not_go_with_the_images_are_refused(tmp_path, shape, sentence):
    write_small(tmp_path, **shape)
    with pytest.raises(ValueError, match=sentence):
        mnist(tmp_path, verified=False)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not an idx file"),
        (b"GIF89a", "not an idx file"),
        (idx(np.zeros((2, 3)))[:-1], "17 bytes, and its header says 18"),
        (idx(np.zeros((2, 3))) + b"x", "19 bytes, and its header says 18"),
        (bytes([0, 0, 8, 3, 0, 0]), "incomplete"),
    ],
)
def test_what_is_no_idx_file_says_so(content, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_idx(content, "file")


def test_a_truncated_gzip_file_says_so(tmp_path):
    write_small(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        mnist(tmp_path, verified=False)


@pytest.mark.data
def test_the_published_files_give_the_known_digits(published):
    data = mnist(published)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert data.train.tensors[1][:5].tolist() == [5, 0, 4, 1, 9]
    # the mean pixel that everyone normalises by
    assert float(data.train.tensors[0].mean()) == pytest.approx(0.1307, abs=1e-4)


@pytest.mark.data
def test_a_file_under_another_files_name_is_recognised(published, tmp_path):
    labels = (published / "MNIST/raw/t10k-labels-idx1-ubyte.gz").read_bytes()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(labels)
    with pytest.raises(ValueError, match=r"is t10k-labels-idx1-ubyte\.gz under another name"):
        mnist(tmp_path)
