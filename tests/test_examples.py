import stat

import numpy as np
import pytest

from epsilons import Examples


def test_examples_survive_the_way_through_a_file(tmp_path):
    people = Examples(
        ids=["a", "b"], owners=["x", "x"], groups={"sex": ["F", "M"], "age": [3, 40]},
        losses=[0.5, 1.5], correct=[True, False],
    )  # fmt: skip
    people.save(tmp_path / "e.npz")
    again = Examples.load(tmp_path / "e.npz")
    for name in ("ids", "owners", "losses", "correct"):
        np.testing.assert_array_equal(getattr(again, name), getattr(people, name))
    assert list(again.groups) == ["sex", "age"]
    np.testing.assert_array_equal(again.groups["age"], [3, 40])


def test_file_is_readable_by_its_owner_alone(tmp_path):
    Examples.numbered(3).save(tmp_path / "e.npz")
    assert stat.S_IMODE((tmp_path / "e.npz").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["e.npz"]


def test_missing_parts_stay_missing(tmp_path):
    Examples.numbered(3).save(tmp_path / "e.npz")
    again = Examples.load(tmp_path / "e.npz")
    assert again.owners is again.losses is again.correct is None
    assert again.groups == {}


def test_printing_shows_no_individual():
    shown = repr(Examples(ids=["alice", "bob"], owners=["carol", "dave"], losses=[0.123, 4.5]))
    assert not any(secret in shown for secret in ("alice", "bob", "carol", "dave", "0.123"))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"ids": [1, 1]}, "repeat"),
        ({"ids": [1, 2], "owners": ["x"]}, r"owners has shape \(1,\)"),
        ({"ids": [1, 2], "groups": {"sex": ["F"]}}, r"sex has shape \(1,\)"),
        ({"ids": [[1], [2]]}, "one value per example"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, sentence):
    with pytest.raises(ValueError, match=sentence):
        Examples(**columns)


def test_a_missing_or_damaged_file_is_named(tmp_path):
    file = tmp_path / "examples.npz"
    with pytest.raises(ValueError, match=r"examples\.npz is not there; put it back"):
        Examples.load(file)
    Examples(ids=np.arange(90), groups={"sex": ["F", "M", "F"] * 30}).save(file)
    content, ids = file.read_bytes(), np.arange(90).tobytes()
    for damaged in (content[:-40], content[:200], b"", content.replace(ids, b"!" + ids[1:])):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"examples\.npz is damaged; put it back"):
            Examples.load(file)
