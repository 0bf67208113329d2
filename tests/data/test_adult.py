import numpy as np
import pytest

from epsilons.data import adult

LINE = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, "
    "Male, 2174, 0, 40, United-States, <=50K"
)
OTHER = (
    "90, ?, 1, Preschool, 1, Divorced, ?, Wife, Black, Female, 0, 0, 99, ?, >50K."
)  # fmt: skip


def write_small(folder, *lines):
    (folder / "adult.data").write_text("\n".join(lines) + "\n\n")
    (folder / "adult.test").write_text(f"|1x3 Cross validator\n{OTHER}\n\n")


def test_numbers_are_scaled_and_categories_one_hot(tmp_path):
    write_small(tmp_path, LINE)
    data = adult(tmp_path, verified=False)
    x, y = data.train.tensors
    expected = [39 / 90, 13 / 16, 40 / 99, np.log1p(2174) / np.log1p(99_999), 0]
    np.testing.assert_allclose(x[0, :5].numpy(), expected, rtol=1e-6)
    assert x[0, 5:].sum() == 8
    assert set(x[0, 5:].tolist()) == {0.0, 1.0}
    assert y.tolist() == [0]


def test_groups_travel_and_the_held_out_dots_are_dropped(tmp_path):
    write_small(tmp_path, LINE)
    test = adult(tmp_path, verified=False).test_examples
    found = {name: column.tolist() for name, column in test.groups.items()}
    assert found == {"race": ["Black"], "sex": ["Female"], "class": [">50K"]}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (LINE.rsplit(",", 1)[0], "line 2: 14 values; expected 15"),
        (LINE.replace("White", "Green"), "column race: a value is none of White"),
        (LINE.replace("39", "old"), "column age: a value is not a number"),
        (LINE.replace("2174", "-1"), "column capital-gain: a value is negative"),
        (LINE.replace("<=50K", "yes"), "column income: a value is none of"),
    ],
)
def test_a_line_that_is_not_of_the_format_says_where(tmp_path, line, sentence):
    write_small(tmp_path, LINE, line)
    with pytest.raises(ValueError, match=sentence):
        adult(tmp_path, verified=False)


def test_a_changed_file_is_refused(tmp_path):
    write_small(tmp_path, LINE)
    with pytest.raises(ValueError, match=r"adult\.data is damaged.*5d7c39d7b880.*uci"):
        adult(tmp_path)


def test_no_lines_are_said(tmp_path):
    write_small(tmp_path)
    with pytest.raises(ValueError, match="no lines of data"):
        adult(tmp_path, verified=False)


@pytest.mark.data
def test_the_published_files_give_the_known_people(published):
    data = adult(published)
    assert (len(data.train), len(data.test)) == (32_561, 16_281)
    assert int(data.train.tensors[1].sum()) == 7841
    assert int((data.examples.groups["sex"] == "Female").sum()) == 10_771
    assert float(data.train.tensors[0].max()) <= 1
