import numpy as np
import pytest
from scipy.stats import linregress, pearsonr, spearmanr

from epsilons import Epsilons
from epsilons.analysis import loss_relation


def epsilons(values, worst=9.0, kind="exact"):
    return Epsilons(
        values=np.asarray(values, float), delta=1e-5, method="rdp", kind=kind, worst_case=worst
    )


def test_a_logarithmic_law_is_found_exactly():
    loss = np.geomspace(1e-4, 10, 50)
    found = loss_relation(epsilons(5 + 0.4 * np.log(loss)), loss)
    assert (found.slope, found.intercept) == pytest.approx((0.4, 5.0))
    assert (found.pearson, found.spearman, found.pearson_below_worst) == pytest.approx((1, 1, 1))
    assert found.predicted([1.0, np.e]) == pytest.approx([5.0, 5.4])


def test_coefficients_are_scipys():
    rng = np.random.default_rng(4)
    loss = rng.lognormal(size=500)
    eps = np.minimum(2 + np.log(loss) + rng.normal(size=500) + 3, 6.0).clip(0)
    found = loss_relation(epsilons(eps, 6.0), loss)
    line, below = linregress(np.log(loss), eps), eps < 6.0
    assert (found.slope, found.intercept) == pytest.approx((line.slope, line.intercept))
    assert found.pearson == pytest.approx(pearsonr(np.log(loss), eps).statistic)
    assert found.spearman == pytest.approx(spearmanr(loss, eps).statistic)
    expected = pearsonr(np.log(loss[below]), eps[below]).statistic
    assert found.pearson_below_worst == pytest.approx(expected)
    assert found.pearson_below_worst != pytest.approx(found.pearson)


def test_losses_without_a_logarithm_are_left_out_and_counted():
    found = loss_relation(epsilons([1, 2, 3, 4, 5]), [0.0, 1.0, np.e, np.nan, np.inf])
    assert (found.n, found.left_out, found.slope) == (2, 3, pytest.approx(1.0))


def test_equal_losses_determine_no_line():
    found = loss_relation(epsilons([1, 2, 3]), [0.5, 0.5, 0.5])
    assert (found.slope, found.pearson, found.spearman) == (None, None, None)
    with pytest.raises(ValueError, match="no fitted line"):
        found.predicted([1.0])


def test_values_stay_out_of_the_repr():
    assert "epsilons=" not in repr(loss_relation(epsilons([1, 2]), [1.0, 2.0]))


@pytest.mark.parametrize(
    ("eps", "losses", "reason"),
    [
        (epsilons([np.inf], np.inf, "none"), [1.0], "not private"),
        (epsilons([1.0]), None, "no final losses"),
        (epsilons([1.0]), [1.0, 2.0], "1 examples"),
    ],
)
def test_what_has_no_relation_is_refused(eps, losses, reason):
    with pytest.raises(ValueError, match=reason):
        loss_relation(eps, losses)
