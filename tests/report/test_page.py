import os
import re
import stat

import numpy as np
import pytest
from made_runs import make_run

from epsilons import Examples, Plan, Run
from epsilons.accounting.printed import epsilon_text
from epsilons.release import persons
from epsilons.report import write_report
from epsilons.report.findings import findings
from epsilons.report.page import render_report


@pytest.fixture(scope="module")
def page(followed):
    return write_report(followed).read_text(encoding="utf-8")


def test_first_screen_answers_how_private_for_whom_and_how_sure(page, followed):
    eps = followed.epsilons()
    first = page[: page.index("<nav")]
    assert f"ε ≤ {eps.worst_case:.3f}" in first
    assert f"half of the records have ε ≤ {epsilon_text(eps.quantile(0.5))}" in first
    assert "Estimates:" in first
    assert "Checked on 60 examples" in first
    assert "For the curator’s eyes" in first
    assert first.index("For the curator’s eyes") < first.index("half of the records have ε")


def test_first_card_says_per_record_and_per_person(page, followed):
    """It once said "ε ≤ 2.000 ... for everyone" of a household with 17.63."""
    card = page[page.index("How private?") : page.index("For whom?")]
    found = persons(followed, followed.epsilons())
    assert "per record" in card
    assert "392 owners have 1 to 6 records" in card
    assert f"Together, 6 have ε ≤ {epsilon_text(found.worst_case)}" in card
    assert "no meaningful guarantee" in card
    assert f"the worst ≤ {epsilon_text(found.quantile(1.0))}" in card
    assert "for everyone" not in card


def test_first_screen_and_body_say_the_same_of_the_gap(page):
    first, body = page.split("<nav", 1)
    (said,) = re.findall(r"The worst served, .*?\)\.", first)
    assert "95\u00a0% interval" in said
    assert said in body


def test_the_median_over_training_says_whose_it_is(page):
    assert "and the median of 400 examples" in page
    assert "from refreshed norms alone; the median of everyone" in page


def test_every_figure_comes_with_a_finding_in_numbers(page):
    figures = re.findall(r"<figure.*?</figure>", page, flags=re.DOTALL)
    assert len(figures) == 11
    for figure in figures:
        finding = re.search(r"<figcaption>.*?<p>(.*?)</p>", figure, flags=re.DOTALL).group(1)
        label = re.search(r'aria-label="(.*?)"', figure, flags=re.DOTALL).group(1)
        assert re.search(r"\d", finding)
        assert finding in label


def test_page_is_private_and_asks_the_network_for_nothing(page, followed):
    assert stat.S_IMODE(os.stat(followed.report_file).st_mode) == 0o600
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import|<script""", page)
    assert "default-src 'none'" in page


def test_links_and_ids_of_the_page_fit(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


def test_groups_and_their_intersections_are_told(page):
    assert "Mean ε and test accuracy by class" in page
    assert "Mean ε and test accuracy by sex" in page
    assert "cat × F" in page


def test_names_from_the_data_are_text_and_never_markup(tmp_path):
    evil = np.where(np.arange(60) % 2 == 0, "<script>alert(1)</script>", "b & c")
    run = make_run(tmp_path / "run", n=60, columns={"<b>g": evil})
    text = write_report(run).read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<b>g" not in text


def test_a_run_without_noise_is_loudly_not_private(bare):
    text = write_report(bare).read_text(encoding="utf-8")
    assert "This model is NOT private" in text
    assert "inf" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).replace(
        "infer", ""
    )
    assert "What an attack finds" in text
    assert "Groups by class" in text


def test_exact_values_need_no_section_on_estimates(individual):
    text = write_report(individual).read_text(encoding="utf-8")
    assert "Exact: the values follow" in text
    assert "How good the estimates are" not in text


def test_what_is_not_there_is_said_and_no_error(tmp_path):
    plan = Plan(n=50, batch_size=10, steps=20, noise_multiplier=2.0, max_grad_norm=1.0, delta=1e-5)
    run = Run.create(tmp_path / "run", plan, Examples.numbered(50))
    run.journal.charge(0, 9)
    text = render_report(findings(run))
    assert "Not shown:" in text
    assert "give fit a test set" in text
    assert "10 of 20 planned" in text
    first = text[: text.index("<nav")]
    assert "guarantee is against whoever can’t compute the noise" in first
    assert "which was not recorded" in first


def test_a_run_that_has_not_begun_has_no_report(tmp_path):
    run = make_run(tmp_path / "run", n=20, taken=0)
    with pytest.raises(ValueError, match="no step yet"):
        write_report(run)


def test_steps_that_were_taken_twice_are_in_the_worst_case(tmp_path):
    run = make_run(tmp_path / "run", n=40, taken=20)
    run.journal.restart(10)
    run.journal.charge(10, 19)
    found = findings(run)
    assert found.epsilons.worst_case > 1.05 * run.plan.worst_case(steps=20)
    last = found.course.worst_case[found.epsilons.method][-1]
    assert last == pytest.approx(found.epsilons.worst_case, rel=1e-6)
    text = render_report(found)
    assert "10 more were repeated after a restart and are paid again" in text
    assert "guarantee of the run, after 20 of 40 planned steps, for every record" in text


def test_sixty_thousand_examples_fit_into_three_megabytes(tmp_path):
    run = make_run(tmp_path / "run", n=60_000, tested=10_000, levels=16, steps=30)
    assert write_report(run).stat().st_size <= 3_000_000
