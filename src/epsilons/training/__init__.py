"""From data to noisy steps: the PyTorch half."""

from .evaluation import correct_class
from .fit import Step, fit
from .noise import SeededNoise
from .norms import clipped_gradients, gradient_norms, supervised
from .sampling import PoissonLoader
from .step import private_step

__all__ = [
    "PoissonLoader",
    "SeededNoise",
    "Step",
    "clipped_gradients",
    "correct_class",
    "fit",
    "gradient_norms",
    "private_step",
    "supervised",
]
