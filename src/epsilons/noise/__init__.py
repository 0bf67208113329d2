"""Noise and coins: secret random bits, exact Gaussians, sums and noise added as integers."""

from epsilons.noise.grid import Noise, SecureNoise, SeededNoise
from epsilons.noise.keystream import Keystream

__all__ = ["Keystream", "Noise", "SecureNoise", "SeededNoise"]
