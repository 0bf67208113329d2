"""Runs for the pages of this folder: made, not trained."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "analysis"))

from made_runs import make_run


@pytest.fixture(scope="session")
def followed(tmp_path_factory):
    """Of 400 records 6 are of one household, and 4 of another."""
    owners = ["H6"] * 6 + ["H4"] * 4 + [f"single-{k}" for k in range(390)]
    return make_run(tmp_path_factory.mktemp("pages") / "followed", follow=60, owners=owners)


@pytest.fixture(scope="session")
def individual(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("pages") / "individual", clipping="individual")


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """A run without noise."""
    return make_run(tmp_path_factory.mktemp("pages") / "bare", clipping="none")
