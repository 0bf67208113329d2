"""Formulas on many numbers at once, for compiled loops: vectors that are written like numbers.

As with `rules.tiles`, loops that use it are compiled anew only when their own file changes: after a
change here, `make clean`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils

WORDS = types.Array(types.uint64, 1, "C")
_NUMBER, _WORD, _PLACE = ir.DoubleType(), ir.IntType(64), ir.IntType(32)
_helpers: Any = _cgutils


@dataclass(frozen=True)
class Lanes:
    """A vector of float64, or of unsigned 64-bit words, in the code that a builder writes.

    What it is combined with is another such vector or one Python number, which stands in every
    lane. Operations of float64 are those of IEEE 754, in the order written, none of them fused
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
        return self ^ ((1 << 64) - 1)

    def __neg__(self) -> Lanes:
        return Lanes(self.builder, self.builder.fneg(self.value))

    def fused(self, factor: Any, term: Any) -> Lanes:
        """self·factor + term, rounded once."""
        return self._function("fma", factor, term)

    def root(self) -> Lanes:
        return self._function("sqrt")

    def floor(self) -> Lanes:
        return self._function("floor")

    def reversed(self) -> Lanes:
        """Words whose bytes are in the other order."""
        return self._function("bswap")

    def where(self, word: int, equal: Lanes, other: Lanes) -> Lanes:
        """`equal` in the lanes that hold this word, `other` in those that don't."""
        chosen = self.builder.icmp_unsigned("==", self.value, self._like(word))
        return Lanes(self.builder, self.builder.select(chosen, equal.value, other.value))

    def bits(self) -> Lanes:
        """The words that float64 numbers are made of."""
        return self._as("bitcast", _WORD)

    def from_bits(self) -> Lanes:
        """The float64 numbers that words are made into."""
        return self._as("bitcast", _NUMBER)

    def unsigned(self) -> Lanes:
        """Words as float64, rounded once."""
        return self._as("uitofp", _NUMBER)

    def signed(self) -> Lanes:
        """The same of words that are signed."""
        return self._as("sitofp", _NUMBER)

    def store(self, start: Any) -> None:
        """Write all lanes to an address of numbers or words."""
        target = self.builder.bitcast(start, self.value.type.as_pointer())
        self.builder.store(self.value, target).align = 8

    def _either(self, of_numbers: str, of_words: str, other: Any) -> Lanes:
        return self._made(of_numbers if self.value.type.element == _NUMBER else of_words, other)

    def _made(self, operation: str, other: Any) -> Lanes:
        return Lanes(self.builder, getattr(self.builder, operation)(self.value, self._like(other)))

    def _like(self, other: Any) -> Any:
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.value.type, [other] * self.value.type.count)

    def _as(self, conversion: str, kind: Any) -> Lanes:
        target = ir.VectorType(kind, self.value.type.count)
        return Lanes(self.builder, getattr(self.builder, conversion)(self.value, target))

    def _function(self, name: str, *others: Any) -> Lanes:
        its = self.value.type
        number = "f" if its.element == _NUMBER else "i"
        values = [self.value, *(self._like(other) for other in others)]
        function = f"llvm.{name}.v{its.count}{number}64"
        return Lanes(self.builder, called(self.builder, function, its, values))


def called(builder: Any, function: str, result: Any, values: list[Any]) -> Any:
    """What a function that the compiler knows by name gives for some values."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(_helpers.get_or_insert_function(builder.module, kind, function), values)


def loaded(builder: Any, start: Any, lanes: int) -> Lanes:
    """So many words at an address."""
    kind = ir.VectorType(_WORD, lanes)
    vector = builder.load(builder.bitcast(start, kind.as_pointer()))
    vector.align = 8
    return Lanes(builder, vector)


def spread(builder: Any, number: Any, lanes: int) -> Lanes:
    """One number or word in every lane."""
    kind = ir.VectorType(number.type, lanes)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(_PLACE, 0))
    everywhere = ir.Constant(ir.VectorType(_PLACE, lanes), [0] * lanes)
    return Lanes(builder, builder.shuffle_vector(first, nothing, everywhere))


def counted(builder: Any, words: list[int]) -> Lanes:
    """Words that are known beforehand, one in every lane."""
    return Lanes(builder, ir.Constant(ir.VectorType(_WORD, len(words)), words))


def address(context: Any, builder: Any, array: Any, at: Any) -> Any:
    """Where entry `at` of an array of words lies."""
    proxy = _helpers.create_struct_proxy(WORDS)
    return builder.gep(proxy(context, builder, array).data, [at])
