"""The transform of `epsilons.noise.gaussian` in Python's own floats: what it must equal.

Python rounds every operation once, as IEEE 754 says, and fuses or reorders none.
"""

import math
import struct

import numpy as np

_ATANH = [2.0 / (2 * k + 1) for k in range(10, 0, -1)]
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(8, 0, -1)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8, 0, -1)]
_ALL = 2**64 - 1


def gaussian_units(words, scale):
    """Cosines, then sines, of words of which the first half gives radii, the second angles."""
    pairs = len(words) // 2
    radii = [float(scale) * math.sqrt(squared_radius(int(word))) for word in words[:pairs]]
    directions = [direction(int(word)) for word in words[pairs:]]
    each = [[nearest(r, d[k]) for r, d in zip(radii, directions, strict=True)] for k in (0, 1)]
    return np.array(each[0] + each[1], dtype=np.int64)


def squared_radius(word):
    u = (float(word) + 0.5) * 2.0**-64
    (bits,) = struct.unpack("<q", struct.pack("<d", u))
    (root_half,) = struct.unpack("<q", struct.pack("<d", math.sqrt(0.5)))
    k = (bits - root_half) >> 52
    (one_plus_f,) = struct.unpack("<d", struct.pack("<q", bits - (k << 52)))
    f = -((float(word ^ _ALL) + 0.5) * 2.0**-64) if k == 0 else one_plus_f - 1.0
    s = f / (f + 2.0)
    log = s * (s * s) * _horner(_ATANH, s * s) + s * 2.0
    return float(k) * (-2.0 * math.log(2.0)) + log * -2.0


def direction(word):
    within = (word << 2) & _ALL
    angle = (float(within - 2**64 if within >> 63 else within) + 0.5) * (2.0**-65 * math.pi)
    square = angle * angle
    cosine = _horner(_COS, square) * square + 1.0
    sine = angle * square * _horner(_SIN, square) + angle
    odd, half = (word >> 62) & 1, word >> 63
    across, up = (sine, cosine) if odd else (cosine, sine)
    return (-across if half ^ odd else across), (-up if half else up)


def nearest(radius, ratio):
    high, its_high = (x * (2.0**27 + 1) - (x * (2.0**27 + 1) - x) for x in (radius, ratio))
    product = high * its_high
    rest = high * (ratio - its_high) + (radius - high) * ratio
    whole = math.floor(product)
    return whole + math.floor((product - whole) + rest + 0.5)


def _horner(coefficients, x):
    total = coefficients[0]
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
