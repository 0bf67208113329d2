"""From data to noisy steps: the PyTorch half."""

from epsilons.training.checks import ModelCheck, check_model, replace_batch_norm
from epsilons.training.norms import clipped_gradients, gradient_norms, supervised
from epsilons.training.rules import Term, UnsupportedLayer, norm_rule

__all__ = [
    "ModelCheck",
    "Term",
    "UnsupportedLayer",
    "check_model",
    "clipped_gradients",
    "gradient_norms",
    "norm_rule",
    "replace_batch_norm",
    "supervised",
]
