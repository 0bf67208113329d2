"""Runs, stores and services for the tests of this folder."""

import os
import secrets
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "release")]

from folders import make_run  # noqa: E402
from served import MARKUP, Service, issued  # noqa: E402

from epsilons import Run  # noqa: E402
from epsilons.release import publish  # noqa: E402
from epsilons.service import (  # noqa: E402
    Keys,
    Limits,
    Store,
    create_app,
    issue,
    refresh,
)

OWNERS = ["household"] * 3 + [MARKUP] + [f"person-{k}" for k in range(1196)]
POSTGRES = "EPSILONS_POSTGRES"


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of 1,200 records, three of them of one owner, with published statistics."""
    path = tmp_path_factory.mktemp("service") / "run"
    make_run(path, n=1200, owners=OWNERS)
    publish(Run.checked(path), epsilon=0.9)
    return Run.checked(path)


@pytest.fixture(params=["sqlite", "postgresql"], scope="module")
def url(request, tmp_path_factory):
    """The URL of an empty database: a file, and one of the server named by EPSILONS_POSTGRES."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('store') / 'store.sqlite'}"
        return
    server = os.environ.get(POSTGRES)
    if server is None:
        pytest.skip(f"{POSTGRES} names no PostgreSQL server")
    name = f"epsilons_{secrets.token_hex(8)}"
    at = sa.engine.make_url(server).set(drivername="postgresql+psycopg")
    admin = sa.create_engine(at, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield at.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture(scope="module")
def store(run, url):
    with Store.of_run(run, url) as opened:
        refresh(run.path, opened)
        yield opened


@pytest.fixture(scope="module")
def keys(run):
    return Keys.of_run(run)


@pytest.fixture(scope="module")
def tokens(store, keys, tmp_path_factory):
    """The token of every owner."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.csv"
    issue(store, keys, file)
    return issued(file)


@pytest.fixture(scope="module")
def client(store, keys, tokens):
    app = create_app(store, keys, limits=Limits(1e9, 1e9))
    with TestClient(app, follow_redirects=False, raise_server_exceptions=False) as found:
        yield found


@pytest.fixture(scope="module")
def live(run, tmp_path_factory):
    """A service of its own process, and the tokens of its owners; its store is a file."""
    folder = tmp_path_factory.mktemp("live")
    where = f"sqlite:///{folder / 'store.sqlite'}"
    with Store.of_run(run, where) as opened:
        refresh(run.path, opened)
        issue(opened, Keys.of_run(run), folder / "tokens.csv")
    with Service(run.path, folder, "--store", where) as service:
        service.tokens = issued(folder / "tokens.csv")
        yield service
