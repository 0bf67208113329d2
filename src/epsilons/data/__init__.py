"""Readers of data sets: each gives the tensors and the `Examples` that travel with them."""

from epsilons.data.adult import adult
from epsilons.data.cifar10 import cifar10
from epsilons.data.digits import digits
from epsilons.data.mnist import mnist
from epsilons.data.split import Data

__all__ = ["Data", "adult", "cifar10", "digits", "mnist"]
