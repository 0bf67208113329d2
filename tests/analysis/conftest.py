"""Lets the tests of this folder import what makes their runs by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_runs import make_run


@pytest.fixture(scope="session")
def followed(tmp_path_factory):
    """A run of 400 examples in which 60 were followed at every step."""
    return make_run(tmp_path_factory.mktemp("made") / "followed", follow=60)


@pytest.fixture(scope="session")
def individual(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made") / "individual", clipping="individual")
