"""unit = "owner" in settings: a CSV file with several rows of one person."""

import csv
import sys

import numpy as np
import pytest

from epsilons import Run, job
from epsilons.cli import main
from epsilons.settings import Settings

MOST = 6
SETTINGS = """
data = "csv"
path = "visits.csv"
target = "ill"
id = "visit"
owner = "patient"
unit = "owner"
max_records_per_owner = 6
classes = ["no", "yes"]
ranges = { age = [0, 100], pressure = [50, 200] }
model = "logistic"
lr = 0.5
noise_multiplier = 1.0
delta = 1e-3
max_grad_norm = 1.0
batch_size = 16
steps = 5
refresh_every = 2
levels = 32
seed = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Visits of 150 patients, and settings for them."""
    where = tmp_path_factory.mktemp("visits")
    rng = np.random.default_rng(4)
    patients = np.repeat(np.arange(150), rng.integers(1, MOST + 1, 150))
    with (where / "visits.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["visit", "patient", "age", "pressure", "ill"])
        for k, who in enumerate(rng.permutation(patients).tolist()):
            age, pressure = rng.integers(20, 90), rng.integers(90, 180)
            ill = ["no", "yes"][int(pressure + rng.normal(0, 20) > 140)]
            rows.writerow([f"v{k}", f"patient-{who}", age, pressure, ill])
    (where / "visits.toml").write_text(SETTINGS)
    return where


@pytest.fixture
def typed(folder, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("MKL_CBWR", "AUTO")
        monkeypatch.setattr(sys, "argv", ["epsilons", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code or 0, " ".join(shown.out.split()), " ".join(shown.err.split())

    return run


def test_a_csv_of_visits_is_trained_and_stated_per_patient(folder, typed):
    code, out, err = typed("train", "visits.toml", "--out", "run")
    assert (code, err.count("Traceback")) == (0, 0), err
    assert "per person (method tight)" in out
    assert "one coin draws a person with up to 6 records" in out
    assert "per record" not in out
    run = Run.open(folder / "run")
    assert run.plan.n == len(run.examples) <= 150
    assert run.test is None or len(run.test) > 0
    code, out, _ = typed("owner", "run", str(run.examples.ids[0]))
    assert code == 0
    assert "worst case per person" in out
    code, _, err = typed("owner", "run", "v1")
    assert (code, "no record of 'v1'" in err) == (2, True)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(folder, typed, monkeypatch):
    monkeypatch.chdir(folder)
    settings = Settings.read("visits.toml")
    monkeypatch.setattr(job, "_carried_out", lambda *_: None)
    job.train(settings, folder / "stopped")
    monkeypatch.undo()
    assert typed("resume", "stopped")[0] == 0
    found = [Run.open(folder / name).epsilons().values for name in ("run", "stopped")]
    assert np.array_equal(*found)


def test_a_median_bound_is_that_of_the_owners_norms(folder, monkeypatch):
    monkeypatch.chdir(folder)
    changes = [
        "max_grad_norm=median", "median_epsilon=0.9", "median_delta=1e-5", "seed=5", "steps=1",
    ]  # fmt: skip
    run = job.train(Settings.read("visits.toml", changes), folder / "median")
    norms = run.journal.norms(0)
    assert len(norms) == run.plan.n
    low, high = np.quantile(norms, [0.25, 0.75])
    assert low < run.plan.max_grad_norm < high


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ('owner = "patient"', 'ignore = ["patient"]', "needs to know whose each record is"),
        ("max_records_per_owner = 6", "", "the most records that anyone may have"),
        ("_per_owner = 6", "_per_owner = 1", "more records than max_records_per_owner=1"),
        ('unit = "owner"', 'unit = "person"', "unit = 'person'"),
    ],
)
def test_settings_that_can_not_be_met_are_refused(
    folder, monkeypatch, tmp_path, before, after, match
):
    monkeypatch.chdir(folder)
    assert before in SETTINGS
    file = tmp_path / "changed.toml"
    file.write_text(SETTINGS.replace(before, after))
    with pytest.raises(ValueError, match=match):
        job.train(Settings.read(file), tmp_path / "run")
    assert not (tmp_path / "run" / "private" / "journal.sqlite").exists()


def test_noise_for_persons_is_planned_without_data(typed):
    code, out, _ = typed(
        "plan", "--n", "1000", "--epsilon", "2", "--batch-size", "100", "--epochs", "2",
        "--delta", "1e-5", "--unit", "owner",
    )  # fmt: skip
    assert code == 0
    assert "ε per person" in out
    assert "gradient norms of all owners" in out
