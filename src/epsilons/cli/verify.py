"""`epsilons verify`: has anyone changed a run's journal, or what is published of it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epsilons.journal.run_entries import opening
from epsilons.release import verify_ledger
from epsilons.runs import Run


def verify(run: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> None:
    """Check the journal's chain, anchor and seal, and price it anew (for the curator).

    The public plan is compared with it, the budget's chain with its anchor, and the ledger of
    publications with the budget. What was changed is exit code 2 and a sentence that says where.
    """
    opened = Run.open(run)
    found = opened.verify()
    verify_ledger(opened)
    how = "and the seal hold" if found.sealed else "hold; not sealed, since the run has not ended"
    older = "not covered: examples.npz and test.npz, since an earlier version made this run"
    not_covered = [older] if opening(opened.journal).format == 1 else []
    Console(highlight=False).print(
        f"OK: {found.entries} entries, {found.steps} steps; chain, anchor, public plan {how}",
        *not_covered,
        sep="\n",
        soft_wrap=True,
    )
