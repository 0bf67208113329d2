"""Store: statements and hashes of tokens, in SQLite or PostgreSQL.

A store belongs to one run. Every change is one transaction: readers see the state before it or
after it, and a process that is killed leaves the one before.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import sqlalchemy as sa

from epsilons.journal.run_entries import opening
from epsilons.runs import Run

FILE = "service.sqlite"
_AT_ONCE = 500  # rows per statement of SQL
CONNECTIONS = 8  # kept open at a time
_SECONDS = 10  # a question to the database that takes longer is given up

_METADATA = sa.MetaData()
_ABOUT = sa.Table(
    "epsilons_about",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("run", sa.String(64), nullable=False),  # whose store this is
    sa.Column("basis", sa.String(64)),  # the state of the run that the statements are of
    sa.Column("public", sa.Text),
)
_STATEMENT = sa.Table(
    "epsilons_statement",
    _METADATA,
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)
_TOKEN = sa.Table(
    "epsilons_token",
    _METADATA,
    sa.Column("digest", sa.LargeBinary(32), primary_key=True),
    sa.Column("owner", sa.Text, nullable=False, index=True),
    sa.Column("issued", sa.BigInteger, nullable=False),  # seconds since 1970
    sa.Column("expires", sa.BigInteger, nullable=False),
    sa.Column("revoked", sa.BigInteger),
)
_VALID = (
    sa.select(_TOKEN.c.digest, _STATEMENT.c.body)
    .join(_STATEMENT, _STATEMENT.c.owner == _TOKEN.c.owner)
    .where(
        _TOKEN.c.digest == sa.bindparam("asked"),
        _TOKEN.c.revoked.is_(None),
        _TOKEN.c.expires > sa.bindparam("now"),
    )
)


class TokenRow(NamedTuple):
    """A token as it is stored: its keyed hash, its owner, and from when to when it holds."""

    digest: bytes
    owner: str
    issued: int
    expires: int


class Store:
    """The statements and the hashes of tokens of one run; what it holds is private.

    `url`: of a database that SQLAlchemy knows, `sqlite:///FILE` or `postgresql://…`. `run_id`:
    whose store it is; ValueError if the database is another run's, OSError if it can't be reached.
    A context manager, which closes it.
    """

    def __init__(self, url: str, run_id: str) -> None:
        try:
            self._engine = _engine(url)
            _METADATA.create_all(self._engine)
            with self._engine.begin() as connection:
                known = connection.scalar(sa.select(_ABOUT.c.run))
                if known is None:
                    connection.execute(_ABOUT.insert().values(id=1, run=run_id))
        except sa.exc.ArgumentError as error:
            raise ValueError(
                "the store's URL can't be read; expected sqlite:///FILE or "
                "postgresql://USER:PASSWORD@HOST/DATABASE"
            ) from error
        except sa.exc.SQLAlchemyError as error:
            # not its message: it may repeat the URL with its password
            raise OSError(
                f"the store can't be opened ({type(error).__name__}): is the database there, "
                "and are host, name and password right?"
            ) from None
        if known is not None and known != run_id:
            self.close()
            raise ValueError(
                "the store belongs to another run; give a database of its own to every run"
            )

    @classmethod
    def of_run(cls, run: Run, url: str | None = None) -> Self:
        """The store of `run`: at `url`, by default a file in its private half, of mode 0600."""
        if url is None:
            url = f"sqlite:///{(run.private / FILE).resolve()}"
        return cls(url, _run_id(run))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def basis(self) -> str | None:
        """The state of the run that the statements are of; None if there are none."""
        with self._engine.connect() as connection:
            found: str | None = connection.scalar(sa.select(_ABOUT.c.basis))
            return found

    def public(self) -> str | None:
        """What everyone may know, as JSON, of the same moment as the statements."""
        with self._engine.connect() as connection:
            found: str | None = connection.scalar(sa.select(_ABOUT.c.public))
            return found

    def replace_statements(
        self, basis: str, public: str, statements: Iterable[tuple[str, str]]
    ) -> None:
        """Put `statements`, pairs of owner and JSON, in the place of all that were there.

        `basis`, `public`: as they are read back.
        """
        rows = ({"owner": owner, "body": body} for owner, body in statements)
        with self._engine.begin() as connection:
            connection.execute(_STATEMENT.delete())
            while some := list(islice(rows, _AT_ONCE)):
                connection.execute(_STATEMENT.insert(), some)
            connection.execute(_ABOUT.update().values(basis=basis, public=public))

    def owners(self) -> list[str]:
        """Everyone who has a statement, sorted."""
        with self._engine.connect() as connection:
            return sorted(connection.scalars(sa.select(_STATEMENT.c.owner)))

    def statement(self, digest: bytes, now: int) -> tuple[bytes, str] | None:
        """Hash and statement of the token with this `digest`, if it is valid at `now`.

        A token that is unknown, revoked or expired is the same to the caller: no row.
        """
        with self._engine.connect() as connection:
            row = connection.execute(_VALID, {"asked": digest, "now": now}).first()
        return None if row is None else (bytes(row[0]), row[1])

    def holders(self, now: int) -> set[str]:
        """The owners who have a token that is valid at `now`."""
        asked = sa.select(_TOKEN.c.owner).where(_TOKEN.c.revoked.is_(None), _TOKEN.c.expires > now)
        with self._engine.connect() as connection:
            return set(connection.scalars(asked))

    def change_tokens(
        self, now: int, revoked: Iterable[str] | None = (), added: Sequence[TokenRow] = ()
    ) -> int:
        """Revoke at `now` all tokens of the owners `revoked`, then store those `added`.

        None: of everyone. How many valid ones were revoked comes back.
        """
        count = 0
        asked = (
            _TOKEN.update()
            .where(_TOKEN.c.revoked.is_(None), _TOKEN.c.expires > now)
            .values(revoked=now)
        )
        with self._engine.begin() as connection:
            if revoked is None:
                count = connection.execute(asked).rowcount
            else:
                owners = iter(revoked)
                while some := list(islice(owners, _AT_ONCE)):
                    count += connection.execute(asked.where(_TOKEN.c.owner.in_(some))).rowcount
            rows = iter(added)
            while new := [row._asdict() for row in islice(rows, _AT_ONCE)]:
                connection.execute(_TOKEN.insert(), new)
        return count


def _run_id(run: Run) -> str:
    """What tells a run from others: a hash of its journal's salt, which is secret."""
    salt = str(opening(run.journal).facts["salt"])
    return hashlib.sha256(f"epsilons service of {salt}".encode()).hexdigest()


def _engine(text: str) -> sa.Engine:
    url = sa.engine.make_url(text)
    if url.drivername.startswith("postgres"):
        return sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            hide_parameters=True,  # errors would show owners and statements
            pool_pre_ping=True,
            pool_size=CONNECTIONS,
            connect_args={
                "connect_timeout": _SECONDS,
                "options": f"-c statement_timeout={1000 * _SECONDS}",
            },
        )
    if url.drivername != "sqlite" or not url.database:
        raise sa.exc.ArgumentError(f"{url.drivername} is not supported")
    # made here, so that it is never readable by others; its logs inherit the mode
    os.close(os.open(Path(url.database), os.O_RDWR | os.O_CREAT, 0o600))
    engine = sa.create_engine(
        url, hide_parameters=True, pool_size=CONNECTIONS, connect_args={"timeout": _SECONDS}
    )
    sa.event.listen(engine, "connect", _prepare)
    return engine


def _prepare(connection: Any, record: object) -> None:
    """Readers don't wait for a writer, and what is committed is on disk."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cache_size = -512")  # KiB, of each connection
