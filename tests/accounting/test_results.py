import csv
import json
import pickle
import stat
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from epsilons.accounting import Epsilons
from epsilons.accounting.results import small_bound

SECRET = np.array([0.123456, 0.654321, 1.987654])


def some(**changes):
    facts = {
        "values": SECRET,
        "delta": 1e-5,
        "method": "rdp",
        "kind": "estimate",
        "worst_case": 2.0,
    }
    return Epsilons(**{**facts, **changes})


def test_no_text_of_it_shows_a_value():
    eps = some()
    for text in (repr(eps), str(eps), f"{eps}", repr([eps]), repr({"eps": eps})):
        assert "<Epsilons n=3 δ=1e-05 rdp estimate>" in text
        assert not any(str(value)[:5] in text for value in SECRET)


def test_errors_show_no_value():
    with pytest.raises(ValueError, match="shape") as refused:
        some(values=SECRET[None])
    assert "0.123" not in str(refused.value)


def test_values_are_copied_and_cannot_be_changed():
    mine = SECRET.copy()
    eps = some(values=mine)
    mine[0] = 9
    assert eps.values[0] == SECRET[0]
    with pytest.raises(ValueError, match="read-only"):
        eps.values[0] = 0
    with pytest.raises(AttributeError):
        eps.delta = 0.1


def test_pickling_keeps_everything():
    eps = pickle.loads(pickle.dumps(some()))
    assert (eps.values == SECRET).all()
    assert (eps.delta, eps.method, eps.kind, eps.worst_case) == (1e-5, "rdp", "estimate", 2.0)
    assert not eps.values.flags.writeable


def test_quantiles_are_values_rounded_up():
    assert some().quantile(0.5) == SECRET[1]
    assert some().quantile([0.0, 0.6, 1.0]).tolist() == [SECRET[0], SECRET[2], SECRET[2]]
    with pytest.raises(ValueError, match="no examples"):
        some(values=[]).quantile(0.5)


def test_at_worst_case_marks_those_at_the_bound():
    assert some(values=[1.0, 2.0, 2.0 * (1 - 1e-9)]).at_worst_case.tolist() == [False, True, True]
    assert some(values=[1.0, np.inf], worst_case=np.inf).at_worst_case.tolist() == [False, True]


def test_where_everyone_is_at_the_worst_case_the_bound_is_said_to_be_small():
    everyone = some(values=np.full(4, 2.0), worst_case=2.0)
    assert small_bound(everyone).startswith("C is small: ")
    assert small_bound(some(values=np.array([2.0, 1.9]), worst_case=2.0)) is None
    assert small_bound(some(values=np.zeros(2), worst_case=0.0)) is None
    plain = some(values=np.full(2, np.inf), worst_case=np.inf, kind="none")
    assert small_bound(plain) is None


def test_tables_go_by_their_ending_and_others_are_refused(tmp_path):
    """`eps.csv` was parquet inside."""
    odd = some(values=[0.1, np.inf, 1 / 3])
    odd.save(tmp_path / "eps.csv", ids=["a", "b,c", "ü"])
    with (tmp_path / "eps.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], float(row["epsilon"])) for row in rows] == [
        ("a", 0.1), ("b,c", np.inf), ("ü", 1 / 3),
    ]  # fmt: skip
    assert {(row["delta"], row["method"], row["kind"]) for row in rows} == {
        ("1e-05", "rdp", "estimate")
    }
    odd.save(tmp_path / "eps.json", ids=["a", "b", "c"])
    page = json.loads((tmp_path / "eps.json").read_text(encoding="utf-8"))
    assert (page["delta"], page["kind"]) == (1e-5, "estimate")
    assert [row["epsilon"] for row in page["rows"]] == [0.1, None, 1 / 3]
    for name in ("eps.csv", "eps.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    for name in ("eps", "eps.xlsx", "eps.CSV.gz"):
        with pytest.raises(ValueError, match=r"expected one of \.csv, \.parquet, \.json"):
            odd.save(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 2


def test_parquet_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "eps.parquet"
    path.write_bytes(b"older")
    path.chmod(0o644)
    some().save(path, ids=["a", "b", "c"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["eps.parquet"]
    table = pq.read_table(path)
    assert table.column_names == ["id", "epsilon"]
    assert table["epsilon"].to_pylist() == SECRET.tolist()
    assert table.schema.metadata[b"kind"] == b"estimate"
    assert float(table.schema.metadata[b"delta"]) == 1e-5


def test_parquet_refuses_ids_that_do_not_fit_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="2 ids for 3 examples"):
        some().save(tmp_path / "eps.parquet", ids=[1, 2])
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_not_be_written_is_named_as_it_was_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no/eps\.parquet") as error:
        some().save(tmp_path / "no" / "eps.parquet")
    assert "partial" not in str(error.value)


def test_csv_and_parquet_can_be_asked_for_by_name(tmp_path):
    some().to_csv(tmp_path / "named.txt", ids=["a", "b", "c"])
    some().save(tmp_path / "saved.csv", ids=["a", "b", "c"])
    assert (tmp_path / "named.txt").read_bytes() == (tmp_path / "saved.csv").read_bytes()
    some().to_parquet(tmp_path / "named")
    assert pq.read_table(tmp_path / "named")["epsilon"].to_pylist() == SECRET.tolist()
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_frame_has_the_values_and_what_they_mean():
    eps = some()
    frame = eps.to_frame(ids=["a", "b", "c"])
    assert (list(frame.columns), frame["id"].tolist()) == (["id", "epsilon"], ["a", "b", "c"])
    frame.loc[0, "epsilon"] = 99.0  # a copy
    assert eps.values.tolist() == SECRET.tolist()
    again = eps.to_frame()
    assert (list(again.columns), again["epsilon"].tolist()) == (["epsilon"], SECRET.tolist())
    assert again.attrs == {
        "delta": eps.delta, "method": eps.method, "kind": eps.kind, "worst_case": eps.worst_case,
    }  # fmt: skip
    with pytest.raises(ValueError, match="2 ids for 3 examples"):
        eps.to_frame(ids=[1, 2])


def test_a_frame_without_pandas_names_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        some().to_frame()
