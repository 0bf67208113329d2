"""Readers of data sets: each gives the tensors and the `Examples` that travel with them."""

from .digits import digits
from .split import Data

__all__ = ["Data", "digits"]
