"""From norms to ε: NumPy, SciPy and Numba only."""

from epsilons.accounting.adaptive import AdaptiveClipping, gradient_multiplier
from epsilons.accounting.calibrate import least_noise
from epsilons.accounting.composition import NOTHING, Releases, composed_epsilon
from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.holding import HOLDS, Hold, held
from epsilons.accounting.individual import epsilons_from_blocks, individual_epsilons
from epsilons.accounting.margins import Margin
from epsilons.accounting.promises import Promise
from epsilons.accounting.rdp import DEFAULT_ORDERS, rdp_epsilon, sampled_gaussian_rdp
from epsilons.accounting.results import Epsilons
from epsilons.accounting.tight import tight_epsilon

__all__ = [
    "DEFAULT_ORDERS",
    "HOLDS",
    "NOTHING",
    "AdaptiveClipping",
    "Epsilons",
    "Hold",
    "Margin",
    "Promise",
    "Releases",
    "clipping_thresholds",
    "composed_epsilon",
    "epsilons_from_blocks",
    "gradient_multiplier",
    "held",
    "individual_epsilons",
    "least_noise",
    "rdp_epsilon",
    "sampled_gaussian_rdp",
    "tight_epsilon",
]
