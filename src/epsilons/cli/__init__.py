"""The command line: parse, call one function, print. Results to stdout, talk to stderr.

One file per verb. Verbs by reader: `plan` (nobody's data); `owner` (one person); `publish` and
`report --public` (everyone); the others (the curator).
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version as installed_version
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from epsilons.cli.account import account
from epsilons.cli.attack import attack
from epsilons.cli.audit import audit
from epsilons.cli.compare import compare
from epsilons.cli.demo import demo
from epsilons.cli.dossier import check_statement, dossier
from epsilons.cli.export import export
from epsilons.cli.groups import groups
from epsilons.cli.init import init
from epsilons.cli.owner import owner
from epsilons.cli.plan import plan
from epsilons.cli.publish import publish
from epsilons.cli.report import report
from epsilons.cli.resume import resume
from epsilons.cli.serve import serve
from epsilons.cli.status import status
from epsilons.cli.tokens import issue, revoke, rotate, tokens
from epsilons.cli.total import total
from epsilons.cli.train import train
from epsilons.cli.verify import verify
from epsilons.terminal import speaks

app = typer.Typer(
    help="One ε per training example: individual privacy accounting for DP-SGD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_VERBS = (
    plan, init, train, resume, status, verify, export, account, demo,
    report, groups, attack, audit, compare, owner, publish, total, serve, dossier, check_statement,
)  # fmt: skip
_EXTRA_OF = {
    "torch": "train", "cryptography": "train", "sklearn": "train", "PIL": "train",
    "jinja2": "report", "matplotlib": "report",
}  # fmt: skip


def _stoppable(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb; Ctrl-C is one sentence and exit code 130, SIGTERM the same and 143.

    That is before typer makes something else of it.

    Files are written whole or not at all, and charges outlive the process: all can be asked again.
    """

    @wraps(verb)
    def act(*arguments: Any, **options: Any) -> None:
        try:
            verb(*arguments, **options)
        except KeyboardInterrupt as stopped:
            said = str(stopped) or f"stopped; the same `epsilons {verb.__name__}` starts it again"
            talk = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not speaks())
            talk.print(said, markup=False)
            raise typer.Exit(_exit_code(stopped)) from None

    return act


for verb in _VERBS:
    app.command()(_stoppable(verb))
for of_tokens in (issue, rotate, revoke):
    tokens.command()(_stoppable(of_tokens))
app.add_typer(tokens)


class _Terminated(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated(number)


def _exit_code(stopped: KeyboardInterrupt) -> int:
    return 128 + int(getattr(stopped, "signal", signal.SIGINT))


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _terminate)
    # Before the first product: MKL then gives a row the same bits at every address (docs/sums.md).
    os.environ.setdefault("MKL_CBWR", "AUTO")
    main_of(app)


def main_of(act: Callable[[], object]) -> None:
    """Act; wrong input is one sentence on stderr and exit code 2, Ctrl-C is exit code 130.

    A warning is a sentence on stderr too.
    """
    talk = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: talk.print(f"warning: {message}")
        _act(act, talk)


def _act(act: Callable[[], object], talk: Console) -> None:
    try:
        act()
    except (ValueError, OSError) as error:
        # of several processes one says it: rank 0 or, if that is lost, the others
        if speaks() or 0 in getattr(error, "ranks", ()):
            talk.print(f"error: {error}")
        sys.exit(2)
    except ImportError as error:
        talk.print(f"error: {_what_to_install(error)}")
        sys.exit(2)
    except KeyboardInterrupt as stopped:
        if speaks():
            talk.print(f"{stopped}" if str(stopped) else "stopped")
        sys.exit(_exit_code(stopped))


def _what_to_install(error: ImportError) -> str:
    """A sentence, of ours or made here; the error itself is raised if it is no missing extra."""
    if error.name is None:
        return str(error)
    missing = error.name.partition(".")[0]
    if missing not in _EXTRA_OF:
        raise error
    return f"this needs {missing}: pip install 'epsilons[{_EXTRA_OF[missing]}]'"


def _print_version(asked: bool) -> None:
    if asked:
        print(f"epsilons {installed_version('epsilons')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...
