"""Runs for the pages of this folder: made, not trained."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "analysis"))

from made_runs import make_run


@pytest.fixture(scope="session")
def followed(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("pages") / "followed", follow=60)


@pytest.fixture(scope="session")
def individual(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("pages") / "individual", clipping="individual")


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """A run without noise."""
    return make_run(tmp_path_factory.mktemp("pages") / "bare", clipping="none")
