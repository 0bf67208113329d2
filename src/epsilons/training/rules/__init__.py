"""One rule per operation, by family; importing this package registers them all."""

from epsilons.training.rules import conv, elementwise, embedding, linear, normalisation
from epsilons.training.rules.composite import COMPOSITES, REFUSED
from epsilons.training.rules.fused import FUSED
from epsilons.training.rules.registry import HALF, RULES, Formed, Term, UnsupportedLayer, norm_rule

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
    "normalisation",
]
