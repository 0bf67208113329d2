"""The slow oracles are found beside the tests, whatever the import mode."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# The first call compiles, which takes seconds on a cold cache; a test never times anything.
settings.register_profile("accounting", deadline=None)
settings.load_profile("accounting")
