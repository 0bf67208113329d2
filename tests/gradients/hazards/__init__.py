"""Models that per-example gradient code gets wrong: one small module, batch and loss for each."""

from hazards import batches, layers, weights
from hazards.kit import HAZARDS

__all__ = ["HAZARDS", "batches", "layers", "weights"]
