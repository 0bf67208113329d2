"""From norms to ε: NumPy, SciPy and Numba only."""
