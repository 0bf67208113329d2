from types import SimpleNamespace

from epsilons.training.progress import training_bar


def test_the_line_that_stays_has_no_private_figures(monkeypatch, capsys):
    """Loss and accuracy of the last step once stayed above the line that says "private"."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    journal = SimpleNamespace(worst_case=lambda until: 0.1 * until)
    with training_bar(journal, 20) as show:
        show(19, 0.345, 0.912, 1.0)
        show(20, 0.345, None, 1.0)
    stays = capsys.readouterr().err.rpartition("training")[2]
    assert "ε so far 2.00" in stays
    assert not any(word in stays for word in ("loss", "accuracy", "0.345", "91.2"))
