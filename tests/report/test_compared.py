import os
import stat

from epsilons.report import write_comparison


def test_two_clippings_stand_side_by_side(followed, individual):
    page = write_comparison(followed, individual)
    text = page.read_text(encoding="utf-8")
    assert page.parent == followed.path / "private"
    assert stat.S_IMODE(os.stat(page).st_mode) == 0o600
    for run in (followed, individual):
        assert f"{run.epsilons().quantile(0.5):.3f}" in text
    assert "<td>max</td><td>individual</td>" in text
    assert "rank correlation" in text


def test_a_run_without_noise_is_marked_in_the_comparison(followed, bare):
    text = write_comparison(followed, bare).read_text(encoding="utf-8")
    assert "bare is NOT private" in text
    assert "<td>not private</td>" in text
    assert "Membership inference" in text


def test_runs_of_one_name_are_told_apart(followed):
    text = write_comparison(followed, followed).read_text(encoding="utf-8")
    assert "followed (1) and followed (2)" in text
    assert "Nothing: they differ in data, model or chance." in text
