"""Per-example gradients of any `nn.Module`: their norms, and the sum of clipped ones."""

from epsilons.gradients.model_checks import ModelCheck, check_model, replace_batch_norm
from epsilons.gradients.norms import LossFn, clipped_gradients, gradient_norms
from epsilons.gradients.rules import GradientRule, UnsupportedLayer, norm_rule

__all__ = [
    "GradientRule",
    "LossFn",
    "ModelCheck",
    "UnsupportedLayer",
    "check_model",
    "clipped_gradients",
    "gradient_norms",
    "norm_rule",
    "replace_batch_norm",
]
