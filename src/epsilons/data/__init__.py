"""Readers of data sets: each gives the tensors and the `Examples` that travel with them."""

from epsilons.data.adult import adult
from epsilons.data.arrays import npz
from epsilons.data.cifar10 import cifar10
from epsilons.data.digits import digits
from epsilons.data.mnist import mnist
from epsilons.data.pictures import image_folder, utkface
from epsilons.data.split import Data, fewer
from epsilons.data.table import csv

__all__ = [
    "Data",
    "adult",
    "cifar10",
    "csv",
    "digits",
    "fewer",
    "image_folder",
    "mnist",
    "npz",
    "utkface",
]
