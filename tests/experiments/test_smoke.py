"""Every experiment's smoke preset: numbers, rows and a picture, with shared trainings."""

import json

import pytest

from experiments.__main__ import main
from experiments.catalogue import EXPERIMENTS
from experiments.conduct import conduct
from experiments.lab import Lab


@pytest.fixture(scope="module")
def lab(made_up, tmp_path_factory):
    return Lab("smoke", made_up, tmp_path_factory.mktemp("experiments"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke(lab, name):
    results = lab.out / "results"
    if lacking := lab.lacking(EXPERIMENTS[name].RUNS):
        pytest.skip(lacking[0])
    conduct(lab, [name], results, results)
    result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    rows = EXPERIMENTS[name].rows(result["numbers"], result["runs"])
    assert rows
    assert all(row.ours and row.scale for row in rows)
    assert (results / f"{name}.png").stat().st_size > 2000


def test_what_is_there_is_not_done_again_and_where_it_is_said(lab, capsys):
    results = lab.out / "results"
    conduct(lab, ["figure1"], results, results)
    stamps = {file: file.stat().st_mtime_ns for file in lab.out.rglob("*") if file.is_file()}
    conduct(lab, ["figure1"], results, results)
    (results / "figure1.json").unlink()
    capsys.readouterr()
    conduct(lab, ["figure1"], results, results)
    said = capsys.readouterr().err
    assert f"numbers in {results}, pictures in {results}, runs in {lab.folder}" in said
    assert f"{results / 'figure1.json'}, {results / 'figure1.png'}" in said
    changed = {f.name for f in stamps if f.stat().st_mtime_ns != stamps[f]}
    assert changed == {"figure1.json", "figure1.png"}


def test_a_recipe_with_two_names_is_trained_once(lab):
    conduct(lab, ["figure1", "table3"], lab.out / "results", lab.out / "results")
    names = {folder.name for folder in (lab.folder / "runs").iterdir()}
    assert "cifar10-1" in names
    assert "cifar10-common-1" not in names


def test_a_run_of_another_recipe_is_refused(lab):
    facts = lab.folder / "runs" / "cifar10-1.json"
    conduct(lab, ["figure1"], lab.out / "results", lab.out / "results")
    before = facts.read_text(encoding="utf-8")
    facts.write_text(before.replace('"epochs": 3', '"epochs": 4'), encoding="utf-8")
    try:
        with pytest.raises(ValueError, match="trained with epochs=4"):
            lab.run("cifar10", 1)
    finally:
        facts.write_text(before, encoding="utf-8")


def test_both_face_tasks_have_balanced_labels_within_each_race(lab):
    for task in ("gender", "age"):
        data = lab.source(f"utkface-{task}")
        x, y = data.train.tensors
        assert x.shape[1:] == (3, 32, 32)
        everyone = [*zip(data.examples.groups["race"], y.tolist(), strict=True)]
        held_out = data.test.tensors[1].tolist()
        everyone += [*zip(data.test_examples.groups["race"], held_out, strict=True)]
        for race in {race for race, _ in everyone}:
            labels = [label for other, label in everyone if other == race]
            assert labels.count(0) == labels.count(1) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["figure9"], "figure9"),
        (["all", "--data", "nowhere"], "nowhere is not a folder"),
        (["adult"], "adult needs --data"),
        (["all", "--preset", "cpu"], "needs --data"),
        (["figure1", "--workers", "0"], "--workers 0"),
    ],
)
def test_wrong_calls_end_with_2_and_say_why(arguments, said, capsys, tmp_path):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_without_its_folder_utkface_is_skipped_and_says_so(capsys, tmp_path):
    lab = Lab("smoke", None, tmp_path)
    conduct(lab, ["utkface"], tmp_path, tmp_path)
    assert "utkface: skipped" in capsys.readouterr().err
    assert not (tmp_path / "utkface.json").exists()
