"""Formulas on many numbers at once, for the noise's loops: vectors that are written like numbers.

Loops that use it are compiled anew only when their own file changes: after a change here,
`make clean`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils

WORDS = types.Array(types.uint64, 1, "C")
WORD, DOUBLE, SINGLE = ir.IntType(64), ir.DoubleType(), ir.FloatType()
_INTEGERS = {DOUBLE: WORD, SINGLE: ir.IntType(32)}  # of as many bits
_FLOATS = {integer: number for number, integer in _INTEGERS.items()}
_PLACE = ir.IntType(32)
_helpers: Any = _cgutils


@dataclass(frozen=True)
class Lanes:
    """A vector of floats, of unsigned integers or of truths, in the code that a builder writes.

    What it is combined with is another such vector or one Python number, which stands in every
    lane. Operations of floats are those of IEEE 754, in the order written, none of them fused
    unless `fused` is asked for.
    """

    builder: Any
    value: Any

    def __add__(self, other: Any) -> Lanes:
        return self._either("fadd", "add", other)

    def __sub__(self, other: Any) -> Lanes:
        return self._either("fsub", "sub", other)

    def __mul__(self, other: Any) -> Lanes:
        return self._made("fmul", other)

    def __truediv__(self, other: Any) -> Lanes:
        return self._made("fdiv", other)

    def __and__(self, other: Any) -> Lanes:
        return self._made("and_", other)

    def __or__(self, other: Any) -> Lanes:
        return self._made("or_", other)

    def __xor__(self, other: Any) -> Lanes:
        return self._made("xor", other)

    def __lshift__(self, other: Any) -> Lanes:
        return self._made("shl", other)

    def __rshift__(self, other: Any) -> Lanes:
        return self._made("lshr", other)

    def __invert__(self) -> Lanes:
        return self ^ -1

    def __neg__(self) -> Lanes:
        return Lanes(self.builder, self.builder.fneg(self.value))

    def fused(self, factor: Any, term: Any) -> Lanes:
        """self·factor + term, rounded once."""
        return self._function("fma", factor, term)

    def polynomial(self, coefficients: Sequence[float]) -> Lanes:
        """Coefficients from the highest power down, by Horner's rule, each step rounded once."""
        highest, following, *rest = coefficients
        total = self.fused(highest, following)
        for coefficient in rest:
            total = total.fused(self, coefficient)
        return total

    def root(self) -> Lanes:
        return self._function("sqrt")

    def floor(self) -> Lanes:
        return self._function("floor")

    def reversed(self) -> Lanes:
        """Words whose bytes are in the other order."""
        return self._function("bswap")

    def equals(self, word: int) -> Lanes:
        """Where integers are this one."""
        return Lanes(self.builder, self.builder.icmp_unsigned("==", self.value, self.like(word)))

    def choose(self, here: Any, elsewhere: Lanes) -> Lanes:
        """By truths: `here` where they hold, `elsewhere` in the other lanes."""
        values = elsewhere.like(here), elsewhere.value
        return Lanes(self.builder, self.builder.select(self.value, *values))

    def bits(self) -> Lanes:
        """The integers that floats are made of."""
        return self._as("bitcast", _INTEGERS[self.value.type.element])

    def from_bits(self) -> Lanes:
        """The floats that integers are made into."""
        return self._as("bitcast", _FLOATS[self.value.type.element])

    def unsigned(self) -> Lanes:
        """Integers as floats, rounded once."""
        return self._as("uitofp", _FLOATS[self.value.type.element])

    def signed(self) -> Lanes:
        """The same of integers that are signed."""
        return self._as("sitofp", _FLOATS[self.value.type.element])

    def store(self, start: Any) -> None:
        """Write all lanes to an address."""
        target = self.builder.bitcast(start, self.value.type.as_pointer())
        self.builder.store(self.value, target).align = _bytes(self.value.type.element)

    def like(self, other: Any) -> Any:
        """The value of another vector, or of one number in every lane."""
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.value.type, [other] * self.value.type.count)

    def _either(self, of_floats: str, of_integers: str, other: Any) -> Lanes:
        return self._made(of_floats if self.value.type.element in _INTEGERS else of_integers, other)

    def _made(self, operation: str, other: Any) -> Lanes:
        return Lanes(self.builder, getattr(self.builder, operation)(self.value, self.like(other)))

    def _as(self, conversion: str, kind: Any) -> Lanes:
        target = ir.VectorType(kind, self.value.type.count)
        return Lanes(self.builder, getattr(self.builder, conversion)(self.value, target))

    def _function(self, name: str, *others: Any) -> Lanes:
        its = self.value.type
        letter = "f" if its.element in _INTEGERS else "i"
        values = [self.value, *(self.like(other) for other in others)]
        function = f"llvm.{name}.v{its.count}{letter}{8 * _bytes(its.element)}"
        return Lanes(self.builder, called(self.builder, function, its, values))


def called(
    builder: Any, function: str, result: Any, values: list[Any], flags: tuple[str, ...] = ()
) -> Any:
    """What a function that the compiler knows by name gives for some values."""
    kind = ir.FunctionType(result, [value.type for value in values])
    known = _helpers.get_or_insert_function(builder.module, kind, function)
    return builder.call(known, values, fastmath=flags)


def loaded(builder: Any, start: Any, lanes: int) -> Lanes:
    """So many numbers at an address."""
    kind = ir.VectorType(start.type.pointee, lanes)
    vector = builder.load(builder.bitcast(start, kind.as_pointer()))
    vector.align = _bytes(kind.element)
    return Lanes(builder, vector)


def spread(builder: Any, number: Any, lanes: int) -> Lanes:
    """One number in every lane."""
    kind = ir.VectorType(number.type, lanes)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(_PLACE, 0))
    everywhere = ir.Constant(ir.VectorType(_PLACE, lanes), [0] * lanes)
    return Lanes(builder, builder.shuffle_vector(first, nothing, everywhere))


def counted(builder: Any, words: list[int]) -> Lanes:
    """Words that are known beforehand, one in every lane."""
    return Lanes(builder, ir.Constant(ir.VectorType(WORD, len(words)), words))


def address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Where entry `at` of an array of some kind lies."""
    proxy = _helpers.create_struct_proxy(kind)
    return builder.gep(proxy(context, builder, array).data, [at])


def _bytes(kind: Any) -> int:
    return 4 if kind in (SINGLE, _INTEGERS[SINGLE]) else 8
