"""DP-SGD training: Poisson batches, private steps, runs and checkpoints."""

from typing import NoReturn

from epsilons.gradients.norms import LossFn
from epsilons.training.callbacks import Callbacks, Ema, TensorBoard
from epsilons.training.evaluation import correct_class
from epsilons.training.fit import fit
from epsilons.training.inspection import steps_are_batch_invariant
from epsilons.training.interrupt import Interrupted
from epsilons.training.losses import supervised
from epsilons.training.private_training import PrivateTraining
from epsilons.training.sampling import PoissonLoader
from epsilons.training.step import private_step
from epsilons.training.taken import Step

__all__ = [
    "Callbacks",
    "Ema",
    "Interrupted",
    "LossFn",
    "PoissonLoader",
    "PrivateTraining",
    "Step",
    "TensorBoard",
    "correct_class",
    "fit",
    "private_step",
    "steps_are_batch_invariant",
    "supervised",
]

_GRADIENTS = (
    "ModelCheck UnsupportedLayer check_model clipped_gradients gradient_norms norm_rule "
    "replace_batch_norm"
)
_MOVED = {
    **{name: f"epsilons.gradients.{name}" for name in _GRADIENTS.split()},
    **{name: f"epsilons.noise.{name}" for name in ("Keystream", "SecureNoise", "SeededNoise")},
    "Term": "epsilons.gradients.GradientRule",
    "Together": "epsilons.training.Callbacks",
}


def __getattr__(name: str) -> NoReturn:
    if name in _MOVED:
        raise ImportError(f"epsilons.training.{name} has moved: import {_MOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
