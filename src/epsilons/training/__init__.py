"""From data to noisy steps: the PyTorch half."""

from epsilons.training.norms import clipped_gradients, gradient_norms, supervised
from epsilons.training.rules import Term, UnsupportedLayer, norm_rule

__all__ = [
    "Term",
    "UnsupportedLayer",
    "clipped_gradients",
    "gradient_norms",
    "norm_rule",
    "supervised",
]
