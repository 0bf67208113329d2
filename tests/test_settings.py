import pytest

from epsilons.settings import Settings

SMALL = """
data = "digits"
lr = 1.0
noise_multiplier = 1.5
delta = 1e-4
max_grad_norm = 1.0
batch_size = 100
epochs = 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    return path


def test_a_flat_file_becomes_a_plan(file):
    plan = Settings.read(file).plan(n=1000)
    assert (plan.n, plan.steps, plan.noise_multiplier, plan.delta) == (1000, 20, 1.5, 1e-4)


def test_a_file_that_says_nothing_of_refreshes_has_the_plans_default(file):
    assert len(Settings.read(file).plan(n=1000).refresh_steps) == 1
    none = Settings.read(file, ["refreshes_per_epoch=0"])
    assert none.plan(n=1000).refresh_steps == ()


def test_changes_win_over_the_file_and_are_read_as_toml(file):
    settings = Settings.read(
        file, ["lr=0.25", "hidden=[8, 4]", "model=mlp", 'ranges={age = [0, 90]}', "owner = clinic"]
    )  # fmt: skip
    assert settings.lr == 0.25
    assert settings.hidden == (8, 4)
    assert settings.model == "mlp"
    assert settings.ranges == {"age": (0.0, 90.0)}
    assert settings.owner == "clinic"


def test_a_target_epsilon_calibrates_the_noise(file):
    file.write_text(SMALL.replace("noise_multiplier = 1.5", "epsilon = 3.0"))
    plan = Settings.read(file).plan(n=1000)
    assert 2.9 < plan.worst_case() <= 3.0


def test_phases_are_tables(file):
    file.write_text(SMALL + "[[phase]]\nfirst_step = 10\nnoise_multiplier = 2.0\n")
    plan = Settings.read(file).plan(n=1000)
    assert plan.phases == ((10, {"noise_multiplier": 2.0}),)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["batchsize=3"], "'batchsize' is not a setting; did you mean 'batch_size'?"),
        (["learning_encodings=true"], "did you mean 'learn_encoding'?"),
        (["learning_rate=0.1"], "did you mean 'lr'?"),
        (["target_epsilon=3"], "did you mean 'epsilon'?"),
        (["qqq=1"], "expected one of data, path"),
        (["delta=2"], "delta = 2: input should be less than 1"),
        (["lr=fast"], "lr = 'fast': input should be a valid number"),
        (["optimizer=sdg"], "optimizer = 'sdg': input should be 'sgd', 'adam' or 'adamw'"),
        (["epsilon=2"], "give epsilon (the worst case to meet) or noise_multiplier"),
        (["phase=[{first_step=0}]"], "phase.0.first_step = 0"),
        (["lr"], "'lr' is not key=value"),
        (["lr=inf"], "lr = inf: input should be a finite number"),
        (["lr=1", "lr=2"], "lr is given twice: 1 and 2"),
        (["noise_multiplier=true"], "noise_multiplier = True: input should be a valid number"),
        (['noise_multiplier="4"'], "noise_multiplier = '4': input should be a valid number"),
        (["take=true"], "take = True: input should be a valid number"),
        (["seed=-1"], "seed = -1: input should be greater than or equal to 0"),
        (["epochs=0"], "epochs = 0: input should be greater than 0"),
        (["max_grad_norm=0"], "max_grad_norm = 0: expected a number > 0, 'median' or 'adaptive'"),
        (
            ["max_grad_norm=mean"],
            "max_grad_norm = 'mean': expected a number > 0, 'median' or 'adaptive'",
        ),
        (["phase=[{first_step=2, noise_multiplier=true}]"], "phase.0.noise_multiplier = True"),
    ],
)
def test_wrong_settings_are_one_sentence(file, changes, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the sentence is compared below
        Settings.read(file, changes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_key_is_named(file):
    file.write_text(SMALL.replace("lr = 1.0\n", ""))
    with pytest.raises(ValueError, match=r"run\.toml: lr is missing"):
        Settings.read(file)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml is not there"):
        Settings.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(ValueError, match=r"bad\.toml is not a TOML file.*line 1"):
        Settings.read(tmp_path / "bad.toml")


def test_a_median_and_whole_numbers_written_as_fractions_are_taken(file):
    settings = Settings.read(file, ["max_grad_norm=median", "take=100.0"])
    assert (settings.max_grad_norm, settings.take) == ("median", 100)


def test_less_than_a_step_is_refused(file):
    with pytest.raises(ValueError, match=r"epochs=0.05 is not one step .* expected at least 0\.1$"):
        Settings.read(file, ["epochs=0.05"]).plan(n=1000)
