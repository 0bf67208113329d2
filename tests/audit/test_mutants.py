"""Every known fault, put into the library, is found; right code raises no alarm."""

import mutants
import pytest
from loops import RIGHT

from epsilons.audit import together
from epsilons.gradients.model_checks import MixedExamples


def test_the_library_as_it_is_raises_no_alarm(tmp_path):
    found = mutants.canaries(tmp_path)
    assert together(mutants.drawn(found)) == "kept"
    assert together(mutants.priced(found)) == "kept"
    assert together(mutants.played(tmp_path)) == "kept"
    assert together(mutants.keyed(tmp_path)) == "kept"
    assert together(mutants.copied(tmp_path)) == "kept"


@pytest.mark.parametrize("name", mutants.DRAWS)
def test_wrong_noise_and_coins_are_found(name, tmp_path):
    with mutants.DRAWS[name]():
        assert together(mutants.drawn(mutants.canaries(tmp_path))) == "contradicted"


@pytest.mark.parametrize("name", mutants.NEIGHBOURS)
def test_wrong_steps_are_found_by_neighbours(name, tmp_path):
    with mutants.NEIGHBOURS[name]():
        assert together(mutants.played(tmp_path)) == "contradicted"


@pytest.mark.parametrize("name", mutants.REFUSED)
def test_wrong_clipping_is_refused_before_the_first_step(name, tmp_path):
    """Neighbours find the same faults in a loop of one's own: see test_neighbours."""
    with mutants.REFUSED[name](), pytest.raises(MixedExamples):
        mutants.played(tmp_path)


@pytest.mark.parametrize("name", mutants.PRICES)
def test_wrong_prices_are_found(name, tmp_path):
    with mutants.PRICES[name]():
        assert together(mutants.priced(mutants.canaries(tmp_path))) == "contradicted"


@pytest.mark.parametrize("name", mutants.KEYS)
def test_noise_used_twice_is_found(name, tmp_path):
    change, look = mutants.KEYS[name]
    with change():
        assert together(look(tmp_path)) == "contradicted"


def test_float32_sums_are_found_under_their_attack():
    assert together(mutants.sums_attack("float64")) == "kept"
    assert together(mutants.sums_attack("float32")) == "contradicted"


def test_passes_of_the_batch_s_shape_are_found_under_their_attack():
    found = mutants.shape_attack("float32")
    if found is None:
        pytest.skip("passes of two shapes have the same bits here")
    assert together(found) == "contradicted"
    assert together(mutants.shape_attack("float64")) == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noise × 0.5", "rate × 1.25", "thresholds not enforced"])
def test_planted_examples_find_the_large_faults_alone(name, tmp_path):
    with {**mutants.DRAWS, **mutants.PRICES}[name]():
        assert together(mutants.bounded(mutants.canaries(tmp_path))) == "contradicted"


def test_there_are_right_loops_to_compare_with():
    assert len(RIGHT) >= 7
