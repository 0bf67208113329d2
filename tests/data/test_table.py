import numpy as np
import pytest

from epsilons.data import csv

# KNOWN has one category too few, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*none of the categories")

ROWS = """name,age,town,smokes,clinic
ada,20,Ulm,no,A
bob,40,Bonn,yes,A
cyd,60,Ulm,no,B
dan,80,Köln,yes,B
"""
KNOWN = dict(
    target="smokes", id="name", owner="clinic", groups=["town"], classes=["no", "yes"],
    ranges={"age": (0, 100)}, categories={"town": ["Ulm", "Bonn"]}, test_share=0.0,
)  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(ROWS, encoding="utf-8")
    return path


def test_numbers_are_scaled_by_range_and_texts_by_category(file):
    x, y = csv(file, **KNOWN).train.tensors
    expected = [[0.2, 1, 0], [0.4, 0, 1], [0.6, 1, 0], [0.8, 0, 0]]
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)
    assert y.tolist() == [0, 1, 0, 1]


def test_rows_without_a_listed_category_are_counted_in_a_warning(file):
    """A spelling that was not listed was all zeros, without a word."""
    said = "column town: 1 of 4 rows, the first in line 5, have none of the categories Ulm, Bonn"
    with pytest.warns(UserWarning, match=said) as warned:
        csv(file, **KNOWN)
    assert "Köln" not in str(warned[0].message)
    assert warned[0].filename == __file__


def test_names_owners_and_groups_travel_and_are_no_inputs(file):
    data = csv(file, **KNOWN)
    assert data.examples.ids.tolist() == ["ada", "bob", "cyd", "dan"]
    assert data.examples.owners.tolist() == ["A", "A", "B", "B"]
    assert data.examples.groups["town"].tolist() == ["Ulm", "Bonn", "Ulm", "Köln"]
    assert data.test is None


def test_values_outside_their_range_are_cut_off(file):
    x, _ = csv(file, **{**KNOWN, "ranges": {"age": (30, 50)}}).train.tensors
    np.testing.assert_allclose(x[:, 0].numpy(), [0, 0.5, 1, 1])


def test_encodings_come_from_the_data_only_if_asked_for(file):
    with pytest.raises(ValueError, match=r"columns age, town and classes have\?.*learn_encoding"):
        csv(file, target="smokes", id="name", owner="clinic")
    data = csv(file, target="smokes", id="name", owner="clinic", learn_encoding=True, test_share=0)
    np.testing.assert_allclose(data.train.tensors[0][:, 0].numpy(), [0, 1 / 3, 2 / 3, 1], rtol=1e-6)
    assert data.train.tensors[0].shape == (4, 1 + 3)
    assert data.classes == ("no", "yes")


def test_a_share_is_held_out_by_seed(file):
    data = csv(file, **{**KNOWN, "test_share": 0.5})
    assert len(data.train) == len(data.test) == 2
    assert set(data.examples.ids) | set(data.test_examples.ids) == {"ada", "bob", "cyd", "dan"}


def test_a_test_file_is_encoded_like_the_training_file(file, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("name,age,town,smokes,clinic\neve,10,Bonn,yes,C\n")
    data = csv(file, test_file=other, **KNOWN)
    np.testing.assert_allclose(data.test.tensors[0].numpy(), [[0.1, 0, 1]], rtol=1e-6)
    assert sorted(data.checksums) == ["other.csv", "people.csv"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(target="smoke"), "no column 'smoke'; it has name, age"),
        (dict(classes=["yes"]), "line 2, column smokes: expected one of the classes yes"),
        (dict(ranges={"age": (5, 5)}), "expected lowest < highest"),
        (dict(ranges={"age": (0, 1), "town": (0, 1)}), "line 2, column town: expected a number"),
        (dict(id="clinic", owner=None, ignore=["name"]),
         r"people\.csv, line 3, column clinic: the same id as in line 2; every row"),
        (dict(ignore=["age", "town"]), "no column left"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_file_are_refused(file, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        csv(file, **{**KNOWN, **changes})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "expected a header"),
        ("name,age,town,smokes,clinic\n", "no rows"),
        ("name,age,town,smokes,name\n", "header of different names"),
        (ROWS + "eve,20\n", "line 6: 2 values under 5 columns"),
        (ROWS + 'eve,"20,Ulm,no,B\n', "not a CSV file"),
        (ROWS.encode("utf-8").replace("ö".encode(), b"\xf6"), "not a CSV file in UTF-8"),
    ],
)
def test_a_damaged_file_says_where(file, content, sentence):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=sentence):
        csv(file, **KNOWN)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.csv is not there"):
        csv(tmp_path / "none.csv", target="x")


def test_a_test_file_with_other_columns_is_refused(file, tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns than"):
        csv(file, test_file=tmp_path / "other.csv", **KNOWN)


@pytest.mark.parametrize(
    "content",
    [
        ROWS + '\n"eve\nnoor",SECRET,Ulm,no,B\n',
        ROWS + "\neve,SECRET,Ulm,no,B\n",
        ROWS + "\neve,20,Ulm,SECRET,B\n",
        "SECRET,20,SECRET,no,A\n" + ROWS,
    ],
)
def test_a_message_names_the_line_and_never_the_cell(file, content):
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"line [178]") as error:
        csv(file, **KNOWN)
    assert "SECRET" not in str(error.value)
