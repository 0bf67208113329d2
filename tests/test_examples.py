import numpy as np
import pytest

from epsilons import Examples
from epsilons.examples import packed, unpacked


def test_examples_survive_the_way_through_bytes():
    people = Examples(
        ids=["a", "b"], owners=["x", "x"], groups={"sex": ["F", "M"], "age": [3, 40]},
        losses=[0.5, 1.5], correct=[True, False], digests=[b"1", b"2"],
    )  # fmt: skip
    again = unpacked(packed(people))
    for name in ("ids", "owners", "losses", "correct", "digests"):
        np.testing.assert_array_equal(getattr(again, name), getattr(people, name))
    assert list(again.groups) == ["sex", "age"]
    np.testing.assert_array_equal(again.groups["age"], [3, 40])


def test_missing_parts_stay_missing():
    again = unpacked(packed(Examples.numbered(3), ids=False), ids=[7, 8, 9])
    assert again.owners is again.losses is again.correct is again.digests is None
    assert again.groups == {}
    assert again.ids.tolist() == [7, 8, 9]


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


def test_damaged_bytes_are_refused():
    content = packed(Examples(ids=np.arange(90), groups={"sex": ["F", "M", "F"] * 30}))
    for damaged in (content[:-40], content[: len(content) // 2], b"", b"text"):
        with pytest.raises(ValueError, match="columns of the examples are damaged"):
            unpacked(damaged)
    for place in range(len(content)):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        try:
            again = unpacked(changed)
        except ValueError:
            continue  # else the byte says nothing about a column
        assert again.ids.tolist() == list(range(90))
        assert again.groups["sex"].tolist() == ["F", "M", "F"] * 30
