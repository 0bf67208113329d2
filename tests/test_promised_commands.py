"""Budgets as typed: settings, CSV column, `plan`, `train`, `status`, `verify`, `owner`."""

import re

import numpy as np
import pytest

from epsilons import Run
from epsilons.cli import main
from epsilons.job import load
from epsilons.settings import Settings

CONFIG = """
data = "csv"
path = "people.csv"
target = "income"
classes = ["poor", "rich"]
id = "name"
budget = "choice"
budgets = {low = 1, high = 4}
ranges = {age = [0, 100], hours = [0, 100]}
lr = 1.0
delta = 1e-4
max_grad_norm = 1.0
batch_size = 40
steps = 8
refresh_every = 4
levels = 32
seed = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("promised")
    rng = np.random.default_rng(0)
    lines = ["name,age,hours,choice,income"]
    for k in range(150):
        age, hours = rng.integers(17, 90), rng.integers(1, 80)
        rich = "rich" if age + hours > 100 else "poor"
        lines.append(f"r{k},{age},{hours},{['low', 'high'][k % 2]},{rich}")
    (place / "people.csv").write_text("\n".join(lines) + "\n")
    (place / "run.toml").write_text(CONFIG)
    return place


@pytest.fixture
def typed(folder, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["epsilons", *arguments])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_column_says_who_has_which_budget_and_is_no_input(folder):
    settings = Settings.read(folder / "run.toml")
    data = load(settings, folder)
    assert data.train[0][0].shape == (2,)
    assert set(data.examples.budgets) == {1.0, 4.0}
    assert data.examples.groups == {}
    assert data.test_examples.groups == {}
    plan = settings.plan(len(data.examples))
    assert plan.budgets == (1.0, 4.0)
    assert 3.99 < plan.worst_case() <= 4.0
    kept = load(Settings.read(folder / "run.toml", ['groups=["choice"]']), folder)
    assert set(kept.examples.groups) == {"choice"}


def test_a_column_of_another_data_set_is_one_of_its_groups():
    settings = Settings.of(
        {
            "data": "digits", "lr": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "batch_size": 100,
            "steps": 2, "take": 200, "budget": "class",
            "budgets": {str(digit): 1 + digit % 2 for digit in range(10)},
        }
    )  # fmt: skip
    data = load(settings, None)
    expected = 1 + data.examples.groups["class"].astype(int) % 2
    np.testing.assert_array_equal(data.examples.budgets, expected)
    assert settings.plan(200).budgets == (1.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["epsilon=3.0"], "with budgets the largest of them is the worst case"),
        (["budgets={low = 0, high = 4}"], "no budget|> 0"),
        (['budgets="low"'], "budgets"),
        (["pace=2"], "pace = 2"),
        (["slack=0"], "slack = 0"),
        (["order=8"], "order=8.0; expected none with clipping='max'"),
        (["budgets={low = 1}", 'budget="choice"'], "a record has no label of budgets"),
        (["budget=income_"], "no column"),
    ],
)
def test_wrong_budgets_are_one_sentence(typed, changes, sentence):
    code, out, err = typed("train", "run.toml", "--out", "wrong", *changes)
    assert code == 2, (out, err)
    assert re.search(sentence, err.replace("\n", " ")), err
    assert "Traceback" not in err


def test_budgets_need_a_column_and_columns_need_budgets():
    small = {"data": "digits", "lr": 1.0, "delta": 1e-4, "max_grad_norm": 1.0, "batch_size": 9,
             "steps": 2}  # fmt: skip
    with pytest.raises(ValueError, match=r"budget is missing.*low, high"):
        Settings.of({**small, "budgets": {"low": 1, "high": 4}})
    for key, value in (("budget", "class"), ("reserve_epsilon", 0.1)):
        with pytest.raises(ValueError, match=f"{key} goes with budgets"):
            Settings.of({**small, "epsilon": 2.0, key: value})
    assert Settings.of({**small, "budgets": {"all": 2}}).plan(100).budgets == (2.0,)


@pytest.mark.parametrize("clipping", ["max", "filtered"])
def test_a_run_is_trained_told_and_verified(folder, typed, clipping):
    out = f"run-{clipping}"
    code, shown, err = typed("train", "run.toml", "--out", out, f"clipping={clipping}")
    assert code == 0, err
    assert shown.index("promised        ε = 1.000") < shown.index("private         the figures")
    code, shown, _ = typed("status", out)
    public = shown.partition("private   ")[0]
    assert public.count("promised        ε = ") == 2
    assert not re.search(r"\bout\b|left out|dropped|excluded", shown)
    assert typed("verify", out)[0] == 0
    run = Run.open(folder / out)
    name = run.examples.ids[int(np.argmin(run.examples.budgets))]
    code, shown, _ = typed("owner", out, str(name))
    assert "Promised before training, whatever your record contains: ε = 1.000" in shown


def test_plan_prints_shares_or_orders(typed):
    asked = ["plan", "--n", "60000", "--batch-size", "1024", "--epochs", "20", "--delta", "1e-5",
             "--budget", "1", "--budget", "4"]  # fmt: skip
    code, shown, _ = typed(*asked)
    assert code == 0
    assert "0.4040 of the clip bound" in shown
    code, shown, _ = typed(*asked, "--clipping", "filtered", "--reserve", "0.1")
    assert "Rényi order 17.08" in shown
    for wrong in (asked[:-4], [*asked, "--epsilon", "2"], [*asked, "--clipping", "none"]):
        code, _, err = typed(*wrong)
        assert code == 2
        assert "--" in err
