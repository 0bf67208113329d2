import pytest

from epsilons.proposal.columns import Column
from epsilons.proposal.roles import roles_of

N = 60


def column(name, cells):
    made = Column(name)
    made.add([str(cell) for cell in cells])
    return made


def cycle(*values):
    return [values[k % len(values)] for k in range(N)]


ROW = column("row", range(1, N + 1))
NAME = column("name", [f"p{k}" for k in range(N)])
PATIENT = column("patient_id", [f"p{k // 2}" for k in range(N)])
AGE = column("age", [20 + k * 7 % 50 for k in range(N)])
WARD = column("ward", cycle("A", "B", "C"))
SMOKES = column("smokes", cycle("no", "yes"))


def names(columns):
    return [c.name for c in columns]


def test_a_clinic():
    found = roles_of([ROW, PATIENT, WARD, AGE, SMOKES])
    assert (found.target, found.id, found.owner) == (SMOKES, ROW, PATIENT)
    assert names(found.inputs) == ["ward", "age"]
    assert names(found.groups) == ["ward", "smokes"]
    assert found.ignored == ()


def test_the_target_is_what_is_said_or_called_so_or_comes_last():
    label = column("churn_label", cycle(0, 1))
    assert roles_of([label, AGE, SMOKES, WARD]).target is label
    assert roles_of([AGE, SMOKES, WARD]).target is WARD
    assert roles_of([AGE, SMOKES, WARD], "smokes").target is SMOKES
    assert roles_of([SMOKES, WARD, AGE]).target is WARD


def test_an_id_differs_in_every_row_and_is_no_measurement():
    height = column("height", [150 + 0.37 * k for k in range(N)])
    assert roles_of([height, SMOKES]).id is None
    assert roles_of([NAME, AGE, SMOKES]).id is NAME
    by_name = column("customerNo", [17 * k for k in range(N)])
    assert roles_of([NAME, by_name, AGE, SMOKES]).id is by_name
    essay = column("essay", [f"{k}" * 50 for k in range(N)])
    assert roles_of([essay, AGE, SMOKES]).id is None


def test_whole_numbers_that_happen_to_differ_are_a_measurement():
    income = column("income", [1000 + 37 * k for k in range(N)])
    found = roles_of([income, SMOKES])
    assert (found.id, names(found.inputs)) == (None, ["income"])


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (cycle("x"), "the same in every row"),
        ([f"{k % 55} cats" for k in range(N)], "more than 50 different values"),
        (cycle(*(k for k in range(20)), ""), "numbers, but none in 2 rows"),
        (["a" * 101, *["b" * 101] * (N - 1)], "long ones"),
        (cycle(*(f"{k} cats" for k in range(20))), "no value that 5 rows have"),
        ([*range(2, N + 2)], "names rows"),
    ],
)
def test_columns_that_can_be_no_input_are_ignored_with_a_reason(cells, reason):
    found = roles_of([ROW, column("thing", cells), AGE, SMOKES])
    ((ignored, said),) = found.ignored
    assert ignored.name == "thing"
    assert reason in said


def test_groups_are_values_that_several_rows_have():
    rare = column("rare", ["x", *["y"] * (N - 1)])
    assert names(roles_of([rare, WARD, AGE, SMOKES]).groups) == ["ward", "smokes"]


@pytest.mark.parametrize(
    ("columns", "target", "sentence"),
    [
        ([ROW, NAME], None, "no column has 2 to 20 different values"),
        ([AGE, SMOKES], "smoke", "no column is called 'smoke'; did you mean 'smokes'"),
        ([AGE, SMOKES], "zzzzz", "no column is called 'zzzzz'; it has age, smokes"),
        ([NAME, SMOKES], "name", "'name' has more than 50 different values; expected 2 to 50"),
        ([column("c", cycle("x")), SMOKES], "c", "'c' has one value; expected 2 to 50"),
        ([SMOKES, ROW], None, "nothing is left to predict 'smokes' from"),
    ],
)
def test_what_can_not_be_predicted_is_refused(columns, target, sentence):
    with pytest.raises(ValueError, match=sentence):
        roles_of(columns, target)
