"""From data to noisy steps: the PyTorch half."""

from epsilons.training.callbacks import Ema, TensorBoard, Together
from epsilons.training.checks import ModelCheck, check_model, replace_batch_norm
from epsilons.training.evaluation import correct_class
from epsilons.training.fit import fit
from epsilons.training.interrupt import Interrupted
from epsilons.training.keystream import Keystream
from epsilons.training.loop import Step
from epsilons.training.noise import SecureNoise, SeededNoise
from epsilons.training.norms import clipped_gradients, gradient_norms, supervised
from epsilons.training.rules import Term, UnsupportedLayer, norm_rule
from epsilons.training.sampling import PoissonLoader
from epsilons.training.step import charged_norms, private_step

__all__ = [
    "Ema",
    "Interrupted",
    "Keystream",
    "ModelCheck",
    "PoissonLoader",
    "SecureNoise",
    "SeededNoise",
    "Step",
    "TensorBoard",
    "Term",
    "Together",
    "UnsupportedLayer",
    "charged_norms",
    "check_model",
    "clipped_gradients",
    "correct_class",
    "fit",
    "gradient_norms",
    "norm_rule",
    "private_step",
    "replace_batch_norm",
    "supervised",
]
