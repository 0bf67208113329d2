import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from epsilons import Examples
from epsilons.analysis import loss_threshold_attack
from epsilons.analysis.attack import best_threshold

LOSSES = st.lists(st.integers(0, 8).map(float), min_size=1, max_size=12)


def examples(losses, labels=None):
    groups = {} if labels is None else {"g": labels}
    return Examples(ids=np.arange(len(losses)), losses=np.asarray(losses, float), groups=groups)


def balanced(members, others, threshold):
    return ((members < threshold).mean() + (others >= threshold).mean()) / 2


@given(members=LOSSES, others=LOSSES)
def test_no_threshold_beats_the_best_one(members, others):
    members, others = np.array(members), np.array(others)
    found = balanced(members, others, best_threshold(members, others))
    tried = [balanced(members, others, t) for t in np.arange(-0.5, 10, 0.5)]
    assert found == pytest.approx(max(tried))


def test_separate_losses_are_told_apart_always():
    found = loss_threshold_attack(examples(np.zeros(50)), examples(np.ones(60)))
    assert (found.everyone.success, found.everyone.true_positives) == (1.0, 1.0)
    assert found.everyone.interval.low > 0.9


def test_normal_losses_give_the_closed_forms():
    # members N(0, 1), others N(d, 1): best threshold d/2, success Φ(d/2);
    # at 1 % false positives the threshold is d + Φ⁻¹(0.01)
    rng, d = np.random.default_rng(5), 1.0
    found = loss_threshold_attack(
        examples(rng.normal(0, 1, 20_000)), examples(rng.normal(d, 1, 20_000)), splits=4
    ).everyone
    assert found.success == pytest.approx(norm.cdf(d / 2), abs=0.01)
    assert found.true_positives == pytest.approx(norm.cdf(d + norm.ppf(0.01)), abs=0.012)
    assert found.interval.low < norm.cdf(d / 2) < found.interval.high


def test_without_a_difference_it_is_guessing():
    # Wilson's 95 % interval misses ½ by chance; over 200 attacks more than 10 % would be rare
    rng = np.random.default_rng(6)
    misses = 0
    for _ in range(200):
        one = loss_threshold_attack(
            examples(rng.random(100)), examples(rng.random(60)), splits=3
        ).everyone
        misses += not one.interval.low <= 0.5 <= one.interval.high
    assert misses <= 20


def test_groups_are_attacked_apart():
    labels = np.repeat(["easy", "hard"], 50)
    members = np.concatenate([np.ones(50), np.zeros(50)])
    found = loss_threshold_attack(examples(members, labels), examples(np.ones(100), labels), "g")
    assert found.of("hard").success == 1.0
    assert found.of("easy").success < 0.6
    assert found.of("hard").n == 50


def test_members_are_as_many_as_non_members():
    found = loss_threshold_attack(examples(np.arange(500)), examples(np.arange(70)))
    assert found.everyone.n == 70


def test_losses_that_are_no_numbers_look_like_non_members():
    found = loss_threshold_attack(examples(np.zeros(40)), examples(np.full(40, np.nan)))
    assert found.everyone.success == 1.0


def test_the_same_seed_gives_the_same_attack():
    pair = examples(np.random.default_rng(1).random(90)), examples(np.linspace(0, 2, 80))
    assert loss_threshold_attack(*pair, seed=3) == loss_threshold_attack(*pair, seed=3)


def test_few_are_flagged_and_none_refused():
    assert loss_threshold_attack(examples([0.0] * 9), examples([1.0] * 9)).everyone.small
    with pytest.raises(ValueError, match="can't be split"):
        loss_threshold_attack(examples([0.0]), examples([1.0]))
    with pytest.raises(ValueError, match="give fit a test set"):
        loss_threshold_attack(examples([0.0]), None)
