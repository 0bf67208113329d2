"""Every training example has its own ε.

Here are the names that need no torch; `epsilons.training` has the others.
"""

from importlib.metadata import version

from epsilons.accounting.adaptive import AdaptiveClipping
from epsilons.accounting.calibrate import least_noise
from epsilons.accounting.individual import individual_epsilons
from epsilons.accounting.margins import Margin
from epsilons.accounting.plan import Phase, Plan
from epsilons.accounting.promises import Promise
from epsilons.accounting.rdp import rdp_epsilon, sampled_gaussian_rdp
from epsilons.accounting.results import Epsilons
from epsilons.accounting.tight import tight_epsilon
from epsilons.examples import Examples
from epsilons.journal import Journal
from epsilons.runs import Run

__version__ = version("epsilons")
"""The version of this package, as `epsilons --version` prints it."""

__all__ = [
    "AdaptiveClipping",
    "Epsilons",
    "Examples",
    "Journal",
    "Margin",
    "Phase",
    "Plan",
    "Promise",
    "Run",
    "__version__",
    "individual_epsilons",
    "least_noise",
    "rdp_epsilon",
    "sampled_gaussian_rdp",
    "tight_epsilon",
]
