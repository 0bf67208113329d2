"""Checks at the door of the accountant: the value, what was expected, the way out."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def probability(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """`value` as float64, or a `ValueError` unless every entry lies in [0, 1]."""
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array >= 0) & (array <= 1))
    if wrong.any():
        raise ValueError(
            f"{name}={float(array[wrong].flat[0])} is not a probability; expected [0, 1]. "
            "Did you pass a batch size? Use batch_size / n."
        )
    return array


def open_unit(name: str, value: float) -> float:
    """`value` as a float strictly between 0 and 1 (a δ), or a `ValueError`."""
    number = float(value)
    if not 0 < number < 1:
        raise ValueError(f"{name}={number} must lie strictly between 0 and 1, e.g. 1e-5.")
    return number


def non_negative(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """`value` as float64 ≥ 0, ∞ allowed, or a `ValueError`."""
    array = np.asarray(value, dtype=np.float64)
    wrong = ~(array >= 0)
    if wrong.any():
        raise ValueError(f"{name}={float(array[wrong].flat[0])} must be a number ≥ 0.")
    return array


def positive(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """`value` as finite float64 > 0, or a `ValueError`."""
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array > 0) & np.isfinite(array))
    if wrong.any():
        raise ValueError(f"{name}={float(array[wrong].flat[0])} must be a finite number > 0.")
    return array


def clip_bound(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """`value` as float64 in [1e-300, 1e300], or a `ValueError`.

    Levels are fractions and multiples of it, which would end as 0 (free of charge) or ∞.
    """
    array = np.asarray(value, dtype=np.float64)
    wrong = ~((array >= 1e-300) & (array <= 1e300))
    if wrong.any():
        raise ValueError(
            f"{name}={float(array[wrong].flat[0])} must be a finite number > 0, "
            "from 1e-300 to 1e300."
        )
    return array


def orders_above_one(orders: ArrayLike) -> NDArray[np.float64]:
    """Rényi orders as float64, or a `ValueError` unless all are finite and > 1."""
    array = np.asarray(orders, dtype=np.float64)
    wrong = ~((array > 1) & np.isfinite(array))
    if wrong.any():
        raise ValueError(f"order {float(array[wrong].flat[0])} must be finite and above 1.")
    return array


def counts(name: str, value: ArrayLike) -> NDArray[np.int64]:
    """Numbers of steps as int64, or a `ValueError` unless all are whole and ≥ 0."""
    array = np.asarray(value)
    if array.dtype.kind == "f" and bool(np.all(array == np.rint(array))):
        array = array.astype(np.int64)
    if array.dtype.kind == "b" or (array.size == 0 and array.dtype.kind == "f"):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers of steps, not {array.dtype}.")
    if array.size and (int(array.min()) < 0 or int(array.max()) > 2**31):
        bad = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise ValueError(f"{name} contains {bad}; a row stands for 0 to 2³¹ steps.")
    return array.astype(np.int64)


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """A `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {choices}.")


def whole(name: str, value: int, least: int) -> int:
    """`value` as an int ≥ `least`, or a `ValueError`."""
    number = isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value)
    if isinstance(value, bool) or not number or math.floor(value) != value or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number ≥ {least}.")
    return int(value)
