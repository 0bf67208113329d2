"""`epsilons tokens`: who may see a statement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from epsilons.cli.serve import STORE
from epsilons.runs import Run

if TYPE_CHECKING:
    from epsilons.service import Keys, Store

_RUN = typer.Argument(help="Folder of the run.")
_OUT = typer.Option(help="New CSV file: owner, token, end. The only place where tokens are shown.")
_OWNER = typer.Option("--owner", help="Only this owner's; may be repeated.")
_DAYS = typer.Option(help="How long the tokens hold.")

tokens = typer.Typer(
    name="tokens",
    help="Give owners tokens for their statements, and take them back (see epsilons serve).",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def issue(
    run: Annotated[Path, _RUN],
    out: Annotated[Path, _OUT],
    owner: Annotated[list[str] | None, _OWNER] = None,
    days: Annotated[float, _DAYS] = 90.0,
    store: Annotated[str | None, STORE] = None,
) -> None:
    """Give a token to every owner who has none that holds."""
    from epsilons.service import issue as give

    with _opened(run, store) as (keys, opened):
        done = give(opened, keys, out, owners=owner or (), days=days)
    _say(f"{out}: {done.issued} tokens, valid until {done.expire} (private: mode 0600)")


def rotate(
    run: Annotated[Path, _RUN],
    out: Annotated[Path, _OUT],
    owner: Annotated[list[str] | None, _OWNER] = None,
    days: Annotated[float, _DAYS] = 90.0,
    store: Annotated[str | None, STORE] = None,
) -> None:
    """Revoke everyone's tokens, or one owner's, and give new ones."""
    from epsilons.service import rotate as renew

    with _opened(run, store) as (keys, opened):
        done = renew(opened, keys, out, owners=owner or (), days=days)
    _say(
        f"{out}: {done.issued} tokens, valid until {done.expire} (private: mode 0600); "
        f"{done.revoked} revoked"
    )


def revoke(
    run: Annotated[Path, _RUN],
    owner: Annotated[list[str] | None, _OWNER] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Everyone's tokens.")] = False,
    store: Annotated[str | None, STORE] = None,
) -> None:
    """Revoke tokens; a running service sees it at its next request."""
    from epsilons.service import revoke as take_back

    if bool(owner) == everyone:
        raise ValueError("say whose tokens are revoked: --owner ID, or --all")
    with _opened(run, store) as (_, opened):
        done = take_back(opened, owners=None if everyone else owner)
    _say(f"{done.revoked} tokens revoked")


@contextmanager
def _opened(run: Path, url: str | None) -> Iterator[tuple[Keys, Store]]:
    """Keys and store of the run, with statements that are up to date."""
    from epsilons.service import Keys, Store, refresh

    opened = Run.checked(run)
    with Store.of_run(opened, url) as store:
        refresh(run, store)
        yield Keys.of_run(opened), store


def _say(text: str) -> None:
    Console(highlight=False).print(text, soft_wrap=True)
