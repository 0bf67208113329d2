"""The whole walk: data to ε per example, on real images."""

import re

import numpy as np
import pytest

from epsilons import job
from epsilons.report import write_report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return job.demo(tmp_path_factory.mktemp("demo") / "run")


def test_demo_meets_its_target_and_predicts_well(run):
    assert 3.9 < run.plan.worst_case() <= 4.0
    assert run.plan.delta == 1e-4
    assert len(run.test) == 360
    assert run.test.correct.mean() >= 0.92


def test_every_digit_gets_an_epsilon_of_its_own(run):
    found = run.epsilons()
    assert found.values.shape == (1437,)
    assert found.kind == "estimate"
    assert ((found.values > 0) & (found.values <= found.worst_case)).all()
    assert len(np.unique(found.values)) > 1000


def test_examples_with_higher_loss_pay_more(run):
    # the paper's Fig. 5: Pearson(ε, log loss) > 0.9 on its data
    losses = np.log(run.examples.losses)
    assert np.corrcoef(run.epsilons().values, losses)[0, 1] > 0.7


def test_report_is_one_file_that_needs_no_network(run):
    page = write_report(run).read_text(encoding="utf-8")
    assert f"{run.epsilons().worst_case:.3f}" in page
    assert "<svg" in page
    assert not re.search(r"""(src|href)=["'](?!#)|url\(http|@import""", page)
