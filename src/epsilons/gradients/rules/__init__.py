"""One rule per operation, by family; importing this package registers them all."""

from epsilons.gradients.rules import conv, elementwise, embedding, linear, normalization
from epsilons.gradients.rules.composite import COMPOSITES, REFUSED
from epsilons.gradients.rules.fused import FUSED
from epsilons.gradients.rules.registry import HALF, RULES, Formed, Term, UnsupportedLayer, norm_rule

__all__ = [
    "COMPOSITES",
    "FUSED",
    "HALF",
    "REFUSED",
    "RULES",
    "Formed",
    "Term",
    "UnsupportedLayer",
    "conv",
    "elementwise",
    "embedding",
    "linear",
    "norm_rule",
    "normalization",
]
