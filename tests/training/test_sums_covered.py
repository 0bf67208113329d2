"""Where floating-point effects of the sum are covered, and where it is said that they are not."""

import json

import pytest
import torch
from torch import nn
from trained import LOSS, data, plan, small_model, trained
from typer.testing import CliRunner

from epsilons import Journal, Plan, Run
from epsilons.accounting.sums import NOT_COVERED
from epsilons.cli import app
from epsilons.release import owner_statement, statement_text, total
from epsilons.report import write_public_report, write_report
from epsilons.training import fit, inspection, norm_passes, step, steps_are_batch_invariant


class LastRowsDiffer(nn.Module):
    """Rows in the second half of a batch come out one bit higher, once `differs` is set."""

    def __init__(self, differs=True):
        super().__init__()
        self.linear, self.differs = nn.Linear(4, 3), differs

    def forward(self, x):
        later = (torch.arange(len(x)) >= len(x) // 2).unsqueeze(1) & self.differs
        y = self.linear(x)
        return torch.where(later, torch.nextafter(y, torch.tensor(torch.inf)), y)


def run_of(model, out, the_plan, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return fit(model, optimizer, LOSS, data(), the_plan, out=out, seed=3, **options)


def said_about(run):
    """Everything that a run hands out about its guarantee, as text."""
    status = CliRunner().invoke(app, ["status", str(run.path)])
    assert status.exit_code == 0, status.output
    pages = [write_report(run), write_public_report(run.path)]
    return {
        "status": status.output,
        "statement": statement_text(owner_statement(run, "0")),
        "report": pages[0].read_text(encoding="utf-8"),
        "public report": pages[1].read_text(encoding="utf-8"),
    }


def test_a_run_with_float64_sums_on_an_ordinary_model_is_covered(tmp_path):
    run, _ = trained(tmp_path / "run", plan(), dropout=0.5)
    assert run.journal.sums_covered
    assert not [what for what, text in said_about(run).items() if NOT_COVERED in text]
    assert total([run]).parts[0].sums_covered


@pytest.mark.parametrize("why", ["float32 sums", "bits depend on the position"])
def test_a_run_that_is_not_covered_says_so_everywhere(tmp_path, why):
    if why == "float32 sums":
        run = run_of(small_model(), tmp_path / "run", plan(sums="float32"))
    else:
        run = run_of(LastRowsDiffer(), tmp_path / "run", plan())
    assert not run.journal.sums_covered
    assert [what for what, text in said_about(run).items() if NOT_COVERED not in text] == []
    assert not total([run]).parts[0].sums_covered
    Run.checked(run.path)


def test_bits_that_depend_on_the_batch_only_later_are_found_at_a_refresh(tmp_path, monkeypatch):
    seen = []
    tested = inspection.batch_invariant

    def noted(*arguments, **extent):
        seen.append(tested(*arguments, **extent))
        return seen[-1]

    def from_now_on(step):
        step.model.differs = True

    monkeypatch.setattr(inspection, "batch_invariant", noted)
    run = run_of(LastRowsDiffer(False), tmp_path / "run", plan(), on_step=from_now_on)
    assert seen[0]
    assert seen.count(False) == 1, "once it is on record it need not be tested again"
    assert seen[-1] is False
    ledger = json.loads((run.path / "public" / "publications.json").read_text(encoding="utf-8"))
    assert ledger["training"]["sums_covered"] is run.journal.sums_covered is False


def test_a_loss_whose_draws_cannot_be_compared_is_not_covered(tmp_path):
    def noisy(model, batch):
        return LOSS(model, batch) + 0.1 * torch.rand(len(batch[1]))

    assert not steps_are_batch_invariant(small_model(), noisy, data()[:16], plan())
    assert steps_are_batch_invariant(small_model(dropout=0.5), LOSS, data()[:16], plan())


def test_a_journal_of_ones_own_is_covered_only_if_it_was_tested(tmp_path):
    for k, (tested, sums) in enumerate([(False, "float64"), (True, "float32"), (True, "float64")]):
        with Journal.create(tmp_path / str(k), plan(sums=sums), batch_invariant=tested) as journal:
            assert journal.sums_covered is (k == 2)


def test_a_plan_from_before_there_was_a_choice_has_float32_sums():
    fields = plan().to_dict()
    assert Plan.from_dict(fields).sums == "float64"
    del fields["sums"]
    assert Plan.from_dict(fields).sums == "float32"


def test_the_command_for_plans_says_what_float32_sums_leave_out():
    words = ["plan", "--n", "60", "--batch-size", "6", "--epochs", "2", "--epsilon", "3",
             "--delta", "1e-3"]  # fmt: skip
    assert NOT_COVERED not in CliRunner().invoke(app, words).output
    with_float32 = CliRunner().invoke(app, [*words, "--sums", "float32"])
    assert NOT_COVERED in with_float32.output


@pytest.mark.parametrize("micro_batch", [None, 4, 20])
def test_steps_of_an_exact_run_take_passes_of_the_shape_of_their_refresh(
    tmp_path, monkeypatch, micro_batch
):
    """Norms from a pass of another shape could be those of the other side of a kink."""
    sizes = set()
    norms, clipped = norm_passes.gradient_norms, step.clipped_pass

    def of_refresh(*arguments, batch_size, **options):
        sizes.add(batch_size)
        return norms(*arguments, batch_size=batch_size, **options)

    def of_step(*arguments, micro_batch, **options):
        sizes.add(micro_batch)
        return clipped(*arguments, micro_batch=micro_batch, **options)

    monkeypatch.setattr(norm_passes, "gradient_norms", of_refresh)
    monkeypatch.setattr(step, "clipped_pass", of_step)
    exact = plan(refresh_every=1, steps=5)
    run, _ = trained(tmp_path / "run", exact, micro_batch=micro_batch)
    assert run.epsilons().kind == "exact"
    assert sizes == {{None: 32, 4: 4, 20: 16}[micro_batch]}


def test_a_resumed_run_tests_its_bits_again(tmp_path, monkeypatch):
    """Machine, threads or passes may be others than those that were tested."""
    sizes = []
    tested = inspection.batch_invariant

    def noted(model, loss_fn, batch, size, **extent):
        sizes.append(size)
        return size != 4 and tested(model, loss_fn, batch, size, **extent)

    def stop(step):
        if step.number == 5:
            raise OSError("enough")

    monkeypatch.setattr(inspection, "batch_invariant", noted)
    with pytest.raises(OSError, match="enough"):
        trained(tmp_path / "run", plan(refresh_every=100), on_step=stop)
    assert Run.open(tmp_path / "run").journal.sums_covered
    run, _ = trained(tmp_path / "run", plan(refresh_every=100), micro_batch=4, resume=True)
    assert sizes[-1] == 4
    assert not run.journal.sums_covered


def test_batches_whose_shape_depends_on_who_is_in_them_are_not_covered():
    def padded(examples):
        longest = max(len(x) for x, _ in examples)
        x = torch.stack([torch.cat([x, x.new_zeros(longest - len(x))]) for x, _ in examples])
        return x, torch.stack([y for _, y in examples])

    words = [(torch.ones(3 + k % 2), torch.tensor(0)) for k in range(20)]
    model = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3))
    assert not inspection.bits_agree(model, LOSS, words, {8}, collate_fn=padded)
