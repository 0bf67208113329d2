"""Every training example has its own ε.

Here are the names that need no torch; `epsilons.training` has the others.
"""

from .accounting.calibrate import least_noise
from .accounting.individual import individual_epsilons
from .accounting.plan import Plan
from .accounting.rdp import rdp_epsilon, sampled_gaussian_rdp
from .accounting.results import Epsilons
from .examples import Examples
from .journal import Journal
from .runs import Run

__all__ = [
    "Epsilons",
    "Examples",
    "Journal",
    "Plan",
    "Run",
    "individual_epsilons",
    "least_noise",
    "rdp_epsilon",
    "sampled_gaussian_rdp",
]
