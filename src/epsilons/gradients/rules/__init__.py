"""One rule per operation, by family; importing this package registers them all."""

from epsilons.gradients.rules import conv, elementwise, embedding, linear, normalization
from epsilons.gradients.rules.composite import COMPOSITES, REFUSED
from epsilons.gradients.rules.fused import FUSED
from epsilons.gradients.rules.registry import (
    LOW_PRECISION,
    RULES,
    GradientRule,
    Materialized,
    UnsupportedLayer,
    norm_rule,
)

__all__ = [
    "COMPOSITES",
    "FUSED",
    "LOW_PRECISION",
    "REFUSED",
    "RULES",
    "GradientRule",
    "Materialized",
    "UnsupportedLayer",
    "conv",
    "elementwise",
    "embedding",
    "linear",
    "norm_rule",
    "normalization",
]
