import csv
import tomllib
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epsilons import job
from epsilons.proposal import propose
from epsilons.proposal.proposed import _round_range
from epsilons.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:.*none of the categories")

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1, max_size=8)
CELLS = st.sampled_from(
    [
        st.floats(-1e6, 1e6).map(str),
        st.integers(-3, 200).map(str),
        st.sampled_from(["", "yes", 'n"o', "a,b", "tab\there", "\x7f", "\\u", "é", "1"]),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4),
    ]
)


@st.composite
def tables(draw):
    """Names and rows of a table with a column of measurements and one of two classes."""
    n = draw(st.integers(24, 60))
    names = draw(st.lists(NAMES.map(str.strip), min_size=2, max_size=6, unique=True))
    columns = [[str(k * k % 31) for k in range(n)], [("b", "ä")[k % 2] for k in range(n)]]
    for _ in names[2:]:
        columns.append(draw(st.lists(draw(CELLS), min_size=n, max_size=n)))
    measured = ("measured", [str(k / 7) for k in range(n)])  # always something to predict from
    return draw(st.permutations([measured, *zip(names, columns, strict=True)]))


def write(path, table):
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([name for name, _ in table])
        rows.writerows(zip(*(cells for _, cells in table), strict=True))
    return path


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(table=tables().filter(lambda t: not any(is_number(name) or not name for name, _ in t)))
def test_whatever_is_proposed_is_read_back_and_loads(tmp_path, table):
    file = write(tmp_path / "made up.csv", table)
    out = tmp_path / "settings.toml"
    out.unlink(missing_ok=True)
    proposal = propose(file, out=out)
    proposal.write(out)
    found = Settings.read(out)
    data = job.load(found, tmp_path)
    n = len(table[0][1])
    assert len(data.train) == proposal.plan.n == n - round(n * 0.2)
    assert found.plan(len(data.train)) == proposal.plan
    assert found.delta < 1 / n
    x = data.train.tensors[0]
    assert x.shape[1] > 0
    assert 0 <= x.min() <= x.max() <= 1
    known = {*(found.ranges or {}), *(found.categories or {}), *found.ignore, found.target}
    assert known | {found.id, found.owner} >= {name for name, _ in table}


CLINIC = [
    ("patient", [f"p{k}" for k in range(200)]),
    ("age", [str(20 + k * 7 % 61) for k in range(200)]),
    ("smokes", ["yes" if k * 7 % 3 else "no" for k in range(200)]),
    ("returned", ["yes" if k * 7 % 61 > 30 else "no" for k in range(200)]),
]


FEW = [
    ("x y", [str(k / 7) for k in range(24)]),
    ("customer", [f"c{k // 2}" for k in range(24)]),
    ("class", [str(k % 3) for k in range(24)]),
]


def test_few_rows_train_as_proposed(tmp_path):
    file, out = write(tmp_path / "table.csv", FEW), tmp_path / "settings.toml"
    propose(file, out=out).write(out)
    run = job.train(Settings.read(out, ["epochs=1"]), tmp_path / "run")
    assert run.finished
    assert 0 < run.journal.worst_case() <= Settings.read(out).epsilon


def test_the_size_decides_batch_epochs_delta_and_epsilon(tmp_path):
    found = []
    for n in (100, 12_500, 125_000):
        classes = [str(k % 2) for k in range(n)]
        file = write(tmp_path / f"{n}.csv", [("x", [str(k % 7) for k in range(n)]), ("y", classes)])
        text = propose(file, out=tmp_path / "settings.toml").text
        found.append(Settings.of(tomllib.loads(text)))
    assert [(s.batch_size, s.epochs, s.delta, s.epsilon) for s in found] == [
        (32, 20, 1e-3, 4.0),
        (512, 20, 1e-5, 2.0),
        (1024, 10, 1e-6, 1.0),
    ]


def test_nothing_rare_and_no_extreme_is_written(tmp_path):
    """The settings stand in the public half of a run: one person's cell must not be in them."""
    ages = ["17.03", "93.71", *["50"] * 198]
    towns = ["Atlantis", *["Ulm", "Bonn"] * 99, "Ulm"]
    file = write(tmp_path / "t.csv", [("age", ages), ("town", towns), *CLINIC[2:]])
    text = propose(file, out=tmp_path / "settings.toml").text
    assert "ranges.age = [0, 100]" in text
    assert 'categories.town = ["Bonn", "Ulm"]  # without those of fewer than 5 rows' in text
    assert not any(cell in text for cell in ("17.03", "93.71", "Atlantis"))


def test_data_that_were_looked_at_are_said_to_be_until_the_line_is_deleted(tmp_path):
    file, out = write(tmp_path / "t.csv", CLINIC), tmp_path / "settings.toml"
    propose(file, out=out).write(out)
    text = out.read_text(encoding="utf-8")
    assert text.index("# CHECK") < text.index("learn_encoding = true") < text.index("ranges.age")
    assert Settings.read(out).learn_encoding
    out.write_text(text.replace("learn_encoding = true\n", ""), encoding="utf-8")
    assert len(job.load(Settings.read(out), tmp_path).train) == 160


@given(low=st.floats(-1e9, 1e9), span=st.floats(1e-6, 1e9))
def test_round_ranges_hold_what_they_are_made_from(low, span):
    high = low + span
    if high > low:
        least, most = map(Decimal, _round_range(low, high))
        slack = Decimal(max(abs(low), abs(high))) * Decimal(2) ** -52  # a float in print
        assert least - slack <= Decimal(low) < Decimal(high) <= most + slack
        assert most - least <= 3 * (Decimal(high) - Decimal(low)) + 2 * slack


def test_a_file_that_is_there_stays_as_it_is(tmp_path):
    file, out = write(tmp_path / "t.csv", CLINIC), tmp_path / "settings.toml"
    proposal = propose(file, out=out)
    out.write_text("mine")
    for act in (lambda: propose(file, out=out), lambda: proposal.write(out)):
        with pytest.raises(ValueError, match=r"settings\.toml is there already"):
            act()
    assert out.read_text() == "mine"


@pytest.mark.parametrize("name", ["a$HOME.csv", "~/a.csv"])
def test_paths_that_settings_would_expand_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="rename the file"):
        propose(name, out=tmp_path / "settings.toml")
