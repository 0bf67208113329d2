import tracemalloc

import pytest

from epsilons.proposal import columns as module
from epsilons.proposal.columns import MOST_VALUES, read_columns


def written(tmp_path, text):
    path = tmp_path / "people.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_kinds_ranges_and_values(tmp_path):
    path = written(tmp_path, "\ufeffname, age ,score\nada,20,0.5\n\n bob ,41,-1e1\nada,,3\n")
    name, age, score = read_columns(path)
    assert (name.name, name.rows, name.numbers, name.differs) == ("name", 3, 0, False)
    assert name.values == ("ada", "bob")
    assert (age.name, age.numeric, age.numbers, age.low, age.high) == ("age", False, 2, 20, 41)
    assert (score.numeric, score.whole, score.low, score.high) == (True, False, -10, 3)
    assert score.differs


def test_values_are_kept_while_they_are_few_and_named_once_enough_rows_have_them(tmp_path):
    rows = [f"{k % MOST_VALUES},{k % (MOST_VALUES + 1)},{'ab'[k == 7]}" for k in range(300)]
    few, many, rare = read_columns(written(tmp_path, "\n".join(["x,y,z", *rows])))
    assert len(few.values) == len(few.frequent_values) == MOST_VALUES
    assert many.values is None
    assert (rare.values, rare.frequent_values) == (("a", "b"), ("a",))


def test_what_comes_in_later_chunks_counts_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 4)
    rows = [f"{k % 9},{k},{'nan' if k == 9 else 1.5 * k}" for k in range(10)]
    repeated, each, broken = read_columns(written(tmp_path, "\n".join(["x,y,z", *rows])))
    assert (repeated.differs, each.differs) == (False, True)
    assert (each.low, each.high, each.whole) == (0, 9, True)
    assert (broken.numeric, broken.whole) == (False, False)


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 100)
    monkeypatch.setattr(module, "_COMPARED", 400)
    row = "".join(f"text {k},{k},{k / 7}\n" for k in range(20_000))
    path = written(tmp_path, "a,b,c\n" + row)
    tracemalloc.start()
    try:
        text, number, _ = read_columns(path)
        assert tracemalloc.get_traced_memory()[1] < 400_000
    finally:
        tracemalloc.stop()
    assert (text.rows, text.values, number.high) == (20_000, None, 19_999)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1: expected a header of different names"),
        ("\n", "line 1: expected a header of different names"),
        ("a,b,a\n1,2,3\n", "line 1: expected a header of different names"),
        ("a,,c\n1,2,3\n", "line 1: expected a header of different names"),
        ("Curie,66,yes\nBohr,77,no\n", "line 1: expected a header, and found a number"),
        ("a;b\n1;2\n", "line 1: expected commas"),
        ("a,b\n", "a header and no rows"),
        ("a,b\n1,2\nCurie\n", "line 3: 1 values under 2 columns"),
        ("a,b\n1,2\nCurie,2,3\n", "line 3: 3 values under 2 columns"),
        ('a,b\n1,"Curie\n', "not a CSV file in UTF-8: unexpected end of data"),
        ('a,b\n1,"Cu"rie\n', "not a CSV file in UTF-8: "),
        (b"a,b\nCurie,\xff\n", "not a CSV file in UTF-8: its bytes are not UTF-8"),
        (bytes(range(256)), "not a CSV file in UTF-8"),
        ("a,b\n" + "1" * 2**20 + ",2", "a line of more than"),
        ("a,b\n" + "1" * 2**18 + ",2", "field larger than field limit"),
    ],
)
def test_what_is_no_table_is_refused_without_a_cell(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        read_columns(written(tmp_path, text))
    assert not any(cell in str(refused.value) for cell in ("Curie", "Bohr", "66", "Cu"))


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ValueError, match="is not there; expected a CSV file"):
            read_columns(path)
