import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epsilons import individual_epsilons
from epsilons.measured import account, read_norms

SETTING = dict(sample_rate=0.01, noise_std=1.2, max_grad_norm=1.0, delta=1e-5, method="rdp")
NORMS = np.random.default_rng(0).uniform(0, 1.2, size=(3, 50))
STEPS = [100, 200, 300]


def write(path, norms=NORMS):
    if path.suffix == ".npy":
        np.save(path, norms)
    elif path.suffix == ".npz":
        np.savez(path, norms=norms, steps=STEPS, ids=[f"p{i}" for i in range(50)])
    else:
        columns = {"id": [f"p{i}" for i in range(50)]}
        columns |= {f"refresh {k}": row for k, row in enumerate(norms)}
        pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".parquet"])
def test_every_format_gives_the_same_epsilons(tmp_path, suffix):
    found = account(read_norms(write(tmp_path / f"norms{suffix}")), STEPS, **SETTING)
    direct = individual_epsilons(NORMS, STEPS, **SETTING)
    np.testing.assert_array_equal(found.values, direct.values)


def test_one_row_needs_no_second_dimension(tmp_path):
    found = account(read_norms(write(tmp_path / "norms.npy", NORMS[0])), 100, **SETTING)
    direct = individual_epsilons(NORMS[:1], [100], **SETTING)
    np.testing.assert_array_equal(found.values, direct.values)


def test_steps_and_ids_of_the_file_are_used(tmp_path):
    measured = read_norms(write(tmp_path / "norms.npz"))
    direct = individual_epsilons(NORMS, STEPS, **SETTING)
    np.testing.assert_array_equal(account(measured, None, **SETTING).values, direct.values)
    assert measured.ids[3] == "p3"


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "epsilons", "account", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


OPTIONS = ["--sample-rate", "0.01", "--noise-std", "1.2", "--max-grad-norm", "1", "--delta", "1e-5"]


def test_command_writes_every_epsilon_with_its_id(tmp_path):
    source = write(tmp_path / "norms.parquet")
    shown = command(source, "--steps", "100,200,300", "--method", "rdp", *OPTIONS)
    assert shown.returncode == 0, shown.stderr
    assert "worst case" in shown.stdout
    assert "steps           600 in all, for 3 rows of norms" in shown.stdout
    table = pq.read_table(tmp_path / "norms.epsilons.parquet")
    direct = individual_epsilons(NORMS, STEPS, **SETTING)
    np.testing.assert_array_equal(table["epsilon"].to_numpy(), direct.values)
    assert table["id"].to_pylist()[:2] == ["p0", "p1"]
    assert table.schema.metadata[b"kind"] == b"estimate"


@pytest.mark.parametrize(
    ("name", "content", "options", "sentence"),
    [
        ("norms.csv", b"1,2", ["--steps", "1"], "expected .npy, .npz, .parquet"),
        ("norms.npy", b"nonsense", ["--steps", "1"], "not a .npy array"),
        ("norms.npz", b"nonsense", ["--steps", "1"], "not a .npz file"),
        ("norms.npy", b"", ["--steps", "1"], "not a .npy array"),
        ("norms.parquet", b"nonsense", ["--steps", "1"], "not a parquet file"),
        ("norms.npy", NORMS, [], "for how many training steps did each row of norms hold?"),
        ("norms.npy", NORMS, ["--steps", "1", "--out", "eps.xlsx"], "expected one of .csv, .par"),
        ("norms.npy", NORMS, ["--steps", "1,2"], "expected 1 or 3"),
        ("norms.npy", NORMS, ["--steps", "many"], "is not a number"),
        ("norms.npy", NORMS, ["--steps", "-5"], "steps"),
        ("norms.npy", -NORMS, ["--steps", "5"], "negative"),
        ("norms.npy", np.zeros((2, 2), dtype=complex), ["--steps", "5"], "complex128"),
        ("norms.npy", NORMS, ["--steps", "5", "--method", "magic"], "magic"),
        ("norms.npy", NORMS, ["--steps", "5", "--clipping", "magic"], "magic"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(tmp_path, name, content, options, sentence):
    source = tmp_path / name
    if isinstance(content, bytes):
        source.write_bytes(content)
    else:
        np.save(source, content)
    shown = command(source, *options, *OPTIONS)
    assert shown.returncode == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_half_a_file_is_refused_by_name(tmp_path):
    source = write(tmp_path / "norms.npz")
    source.write_bytes(source.read_bytes()[:900])
    with pytest.raises(ValueError, match=r"norms\.npz is not a \.npz file"):
        read_norms(source)
