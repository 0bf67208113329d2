"""Readers of data sets: each gives the tensors and the `Examples` that travel with them."""

from epsilons.data.digits import digits
from epsilons.data.split import Data

__all__ = ["Data", "digits"]
