"""The paper's networks."""

from epsilons.models.dense import logistic_regression, mlp
from epsilons.models.named import network
from epsilons.models.resnet import ResNet, resnet20
from epsilons.models.tanh_cnn import tanh_cnn
from epsilons.models.wide_resnet import WideResNet, wide_resnet

__all__ = [
    "ResNet",
    "WideResNet",
    "logistic_regression",
    "mlp",
    "network",
    "resnet20",
    "tanh_cnn",
    "wide_resnet",
]
