"""A budget or a public ledger that was deleted, changed or put back from earlier is refused."""

import json
import shutil
import sqlite3
import subprocess
import sys

import pytest
from folders import make_run

from epsilons import Run
from epsilons.journal.chain import Chain
from epsilons.release import (
    Budget,
    Limit,
    OverBudget,
    owner_statement,
    publish,
    renew_ledger,
    verify_ledger,
)
from epsilons.release import ledger as ledger_module
from epsilons.release.budget import Spent

LIMIT = Limit(2.0, 1e-5)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A run with two publications, and beside it the folder as it was after the first."""
    folder = tmp_path_factory.mktemp("published")
    run = make_run(folder / "run", n=3000)
    publish(run, epsilon=0.9, quantiles=(), limit=LIMIT)
    shutil.copytree(run.path, folder / "before")
    publish(run, epsilon=0.8, quantiles=(), limit=LIMIT)
    run.journal.close()
    return folder


@pytest.fixture
def path(published, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "_LOOKS", 1)
    monkeypatch.setattr(ledger_module, "_PAUSE", 0)
    shutil.copytree(published / "run", tmp_path / "run")
    return tmp_path / "run"


def refused(path, sentence):
    """Nothing that rests on the budget is handed out, and the public half stays as it is."""
    before = {file.name: file.read_bytes() for file in (path / "public").iterdir()}
    for act in (
        lambda run: owner_statement(run, "id-00007"),
        lambda run: publish(run, epsilon=0.1, quantiles=()),
        renew_ledger,
        verify_ledger,
    ):
        with pytest.raises(ValueError, match=sentence) as found:
            act(Run.checked(path))
        assert not isinstance(found.value, OverBudget)
    assert before == {file.name: file.read_bytes() for file in (path / "public").iterdir()}


def ledger(path, change):
    """Edits publications.json."""
    file = path / "public" / "publications.json"
    page = json.loads(file.read_text(encoding="utf-8"))
    change(page)
    file.write_text(json.dumps(page, indent=2), encoding="utf-8")


def test_an_untouched_budget_is_no_alarm(path):
    verify_ledger(Run.checked(path))
    assert owner_statement(Run.checked(path), "id-00007").releases == 2
    assert len(json.loads((path / "public" / "publications.json").read_text())["publications"]) == 2


@pytest.mark.parametrize("also", [(), ("budget_anchor.json",), ("publications.json",)])
def test_a_budget_that_is_gone_is_not_begun_anew(path, also):
    """Deleting it reset the budget, and lowered the owner's number from 1.440 to 1.075."""
    (path / "private" / "budget.sqlite").unlink()
    for name in also:
        (path / "public" / name).unlink()
    refused(path, r"budget\.sqlite is gone")


@pytest.mark.parametrize("put_back", [
    ("private/budget.sqlite",),
    ("private/budget.sqlite", "public/budget_anchor.json"),
    ("private/budget.sqlite", "public/publications.json"),
])  # fmt: skip
def test_a_budget_of_an_earlier_time_is_refused(published, path, put_back):
    for name in put_back:
        shutil.copy(published / "before" / name, path / name)
    refused(path, r"is not the journal that|differ in publication 2")


@pytest.mark.parametrize("change", [
    "DELETE FROM entry WHERE number >= 4",
    "DELETE FROM entry WHERE number = 2",
    """UPDATE entry SET facts = replace(facts, '"units": ', '"units": 0') WHERE kind = 'charge'""",
    """UPDATE entry SET facts = replace(facts, '2.0', '9.0') WHERE kind = 'open'""",
])  # fmt: skip
def test_a_changed_budget_is_refused(path, change):
    with sqlite3.connect(path / "private" / "budget.sqlite") as budget:
        assert budget.execute(change).rowcount
    budget.close()
    refused(path, r"is not a budget that can be trusted: .* (was changed|is missing|anchors)")


def test_a_damaged_or_older_budget_is_refused_by_a_sentence(path):
    file = path / "private" / "budget.sqlite"
    file.write_bytes(b"text" * 1000)
    refused(path, "is not a budget that can be trusted: file is not a database")
    file.unlink()
    with sqlite3.connect(file) as budget:
        budget.execute("CREATE TABLE release (number INTEGER PRIMARY KEY)")
    budget.close()
    refused(path, r"an earlier version made it.*use that version")


@pytest.mark.parametrize("change", [
    lambda page: page["publications"][0].update(epsilon=0.01),
    lambda page: page["publications"][1]["answer"]["everyone"]["mean"].update(value=0.0),
    lambda page: page["publications"][0]["question"].update(epsilon=0.01),
    lambda page: page["publications"].pop(0),
    lambda page: page["publications"].append({**page["publications"][1], "number": 3}),
])  # fmt: skip
def test_an_edited_publication_is_refused(path, change):
    ledger(path, change)
    refused(path, "differ in publication")


@pytest.mark.parametrize("change", [
    lambda page: page["total"].update(epsilon=0.9 * page["total"]["epsilon"]),
    lambda page: page["training"].update(epsilon=0.1),
    lambda page: page["releases"].update(epsilon=0.1),
    lambda page: page["limit"].update(epsilon=9.0),
    lambda page: page.update(questions=1),
    lambda page: page.update(questions=9, total={**page["total"], "epsilon": 0.1}),
    lambda page: (page["publications"].pop(), page.update(questions=1, answered=1)),
    lambda page: page.pop("total"),
])  # fmt: skip
def test_an_edited_total_is_found_by_verify(path, change):
    ledger(path, change)
    with pytest.raises(ValueError, match=r"publications\.json is not what was written"):
        verify_ledger(Run.checked(path))
    renew_ledger(Run.checked(path))
    verify_ledger(Run.checked(path))


def test_a_ledger_or_checksum_put_back_edited_or_deleted_is_found_by_verify(published, path):
    public, before = path / "public", published / "before" / "public"
    ours = {name: (public / name).read_bytes() for name in ("publications.json", "checksums.json")}
    for name, content in ours.items():
        for other in ((before / name).read_bytes(), content.replace(b"a", b"b"), b"", None):
            (public / name).unlink()
            if other is not None:
                (public / name).write_bytes(other)
            with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                verify_ledger(Run.checked(path))
        (public / name).write_bytes(content)
    verify_ledger(Run.checked(path))


@pytest.mark.parametrize("place", ["charge", "answer", "ledger", "note"])
def test_a_crash_between_any_two_writes_is_no_alarm(path, monkeypatch, place):
    run, insert = Run.checked(path), Chain.insert

    def dies(chain, kind, *rest):
        if kind == place:
            insert(chain, kind, *rest) if place != "ledger" else None
            raise ZeroDivisionError
        return insert(chain, kind, *rest)

    with monkeypatch.context() as patched:
        if place == "note":
            patched.setattr(Budget, "_publish", lambda budget: 1 / 0)
        else:
            patched.setattr(Chain, "insert", dies)
        with pytest.raises(ZeroDivisionError):
            publish(run, epsilon=0.3, quantiles=())
    verify_ledger(Run.checked(path))
    assert owner_statement(Run.checked(path), "id-00007").releases in (2, 3)
    publish(Run.checked(path), epsilon=0.3, quantiles=())
    verify_ledger(Run.checked(path))
    assert Spent.of_run(path).questions == 3


ASKING = """
import sys
from epsilons import Run
from epsilons.release import publish
for k in range(int(sys.argv[2])):
    publish(Run.checked(sys.argv[1]), epsilon=0.02 + 1e-4 * k, quantiles=())
"""


def test_readers_beside_one_that_publishes_never_alarm(path, monkeypatch):
    monkeypatch.undo()
    process = subprocess.Popen(
        [sys.executable, "-c", ASKING, str(path), "3"], stderr=subprocess.PIPE
    )
    seen = []
    while process.poll() is None:
        run = Run.checked(path)
        verify_ledger(run)
        seen.append(owner_statement(run, "id-00007").releases)
    assert process.returncode == 0, process.stderr.read().decode()
    process.stderr.close()
    assert seen == sorted(seen)
    assert Spent.of_run(path).questions == 5


def test_a_budget_begun_by_several_at_once_is_one(tmp_path):
    (tmp_path / "private").mkdir()
    code = "import sys; from epsilons.release.budget import *; b = Budget.of_run(sys.argv[1]);" \
        "b.ask({'q': int(sys.argv[2])}, Cost.of(0.05, 1e-5, 3), dict)"  # fmt: skip
    crowd = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(k)]) for k in range(2)
    ]
    assert [process.wait() for process in crowd] == [0] * 2
    assert Spent.of_run(tmp_path).questions == 2
