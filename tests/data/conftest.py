import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def published():
    """The folder of the public data sets, as their publishers lay them out."""
    folder = os.environ.get("EPSILONS_DATA")
    if not folder:
        pytest.skip("EPSILONS_DATA names no folder with the public data sets")
    return Path(folder)
