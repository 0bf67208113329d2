import numpy as np
import pytest
from matplotlib.figure import Figure

from epsilons import Epsilons
from epsilons.analysis import (
    epsilon_course,
    estimate_error,
    figures,
    group_summary,
    loss_relation,
    loss_threshold_attack,
    norm_course,
    other_clip_bounds,
)
from epsilons.analysis.figures.examples import DOTS


def drawn(draw, *data):
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, *data)
    figure.canvas.draw()
    return axes


def words(axes):
    return " ".join(text.get_text() for text in axes.findobj(lambda o: hasattr(o, "get_text")))


def epsilons(n):
    values = np.random.default_rng(0).random(n) * 3
    return Epsilons(values=values, delta=1e-5, method="rdp", kind="exact", worst_case=3.0)


def test_bars_of_the_histogram_count_everyone():
    axes = drawn(figures.epsilon_histogram, epsilons(700))
    assert sum(bar.get_height() for bar in axes.patches) == 700
    assert {"30 %", "50 %", "70 %"} <= {text.get_text() for text in axes.texts}
    assert "worst case 3.00" in words(axes)


def test_groups_stand_in_order_with_their_accuracy(followed):
    summary = group_summary(followed.epsilons(), followed.examples, followed.test, "class")
    axes = drawn(figures.group_bars, summary)
    assert [label.get_text() for label in axes.get_yticklabels()] == [r.group for r in summary]
    assert [bar.get_width() for bar in axes.patches] == [r.mean_epsilon for r in summary]
    (diamonds,) = axes.figure.axes[1].lines
    assert diamonds.get_xdata() == pytest.approx([100 * r.test_accuracy for r in summary])


def test_many_examples_are_drawn_as_a_density_of_all():
    few, many = (
        drawn(figures.loss_scatter, loss_relation(epsilons(n), np.linspace(0.01, 2, n)))
        for n in (DOTS, DOTS + 1)
    )
    assert len(few.lines[0].get_xdata()) == DOTS
    assert not few.collections
    assert sum(len(shade.get_paths()) for shade in many.collections) > 100


def test_attack_figure_shows_every_model_and_group(followed):
    attack = loss_threshold_attack(followed.examples, followed.test, "class")
    axes = drawn(figures.attack_success, {"mine": attack, "yours": attack}, ["cat", "bee", "ant"])
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["cat", "bee", "ant", "everyone"]
    assert {"mine", "yours"} <= set(words(axes).split())


def test_every_other_figure_names_its_axes(followed):
    course, bounds = epsilon_course(followed, moments=4), other_clip_bounds(followed, "class")
    for draw, data in (
        (figures.course_of_norms, (norm_course(followed, "class"),)),
        (figures.course_of_epsilons, (course,)),
        (figures.course_of_worst_case, (course,)),
        (figures.estimate_scatter, (estimate_error(followed),)),
        (figures.bound_histograms, (bounds,)),
        (figures.bound_groups, (bounds,)),
        (figures.published_intervals, ([("half", 1.0, 0.9, 1.1)], 3.0)),
    ):
        axes = drawn(draw, *data)
        assert axes.get_xlabel()
        assert axes.get_ylabel() or axes.get_yticklabels() or draw is figures.bound_histograms
