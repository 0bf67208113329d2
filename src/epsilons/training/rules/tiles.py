"""Tiles of sums of products for compiled loops, in host memory: vectors that stay in registers.

Compilers don't keep a dozen vectors of sums in registers by themselves, so the innermost loops are
given to them as vectors. What is compiled of a loop is kept as long as the loop's own file is as
it was: after a change here, `make clean`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
VECTORS = 2
ROWS, COLUMNS = 6, VECTORS * LANES  # of a tile: as many sums as there are registers
FLOATS = types.Array(types.float32, 1, "C")
WHOLES = types.Array(types.int64, 1, "C")
_FUSED = ("contract",)  # a product and the sum it goes into may be rounded once

_FLOAT, _WHOLE, _PLACE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
ZERO = ir.Constant(_VECTOR, [0.0] * LANES)

_intrinsic: Any = intrinsic  # numba itself gives the first argument
_number = types.int64


@_intrinsic
def tile(
    typing: Any,
    left: Any,
    at: Any,
    row: Any,
    step: Any,
    right: Any,
    begin: Any,
    pitch: Any,
    count: Any,
    out: Any,
    to: Any,
    stride: Any,
) -> Any:
    """out[to + r·stride + c] = Σ_t left[at + r·row + t·step] · right[begin + t·pitch + c].

    For a tile of rows and columns, over `count` ≥ 1 places t. The sum of its squares comes back.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, at, row, step, right, begin, pitch, count, out, to, stride = args
        x = address(context, builder, FLOATS, left, at)
        rows = [builder.gep(x, [builder.mul(row, whole(r))]) for r in range(ROWS)]
        y = address(context, builder, FLOATS, right, begin)
        target = address(context, builder, FLOATS, out, to)

        def number(t: Any, r: int) -> Any:
            return builder.load(moved(builder, rows[r], t, step))

        def seen(t: Any) -> list[Any]:
            return [load(builder, moved(builder, y, t, pitch, v * LANES)) for v in range(VECTORS)]

        squares = ZERO
        for r, sums in enumerate(accumulated(builder, count, ROWS, VECTORS, number, seen)):
            for v, value in enumerate(sums):
                store(builder, value, moved(builder, target, whole(r), stride, v * LANES))
                square = builder.fmul(value, value, flags=_FUSED)
                squares = builder.fadd(squares, square, flags=_FUSED)
        return _across(builder, squares)

    signature = types.float32(
        FLOATS, _number, _number, _number, FLOATS, _number, _number, _number, FLOATS, _number,
        _number,
    )  # fmt: skip
    return signature, generate


@_intrinsic
def turn(typing: Any, rows: Any, start: Any, step: Any, columns: Any, to: Any, stride: Any) -> Any:
    """columns[to + c·stride + r] = rows[start + r·step + c] for a square of lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, start, step, columns, to, stride = args
        x = address(context, builder, FLOATS, rows, start)
        y = address(context, builder, FLOATS, columns, to)
        lanes = [whole(lane) for lane in range(LANES)]
        square = [load(builder, moved(builder, x, r, step)) for r in lanes]
        for c, column in zip(lanes, _turned(builder, square), strict=True):
            store(builder, column, moved(builder, y, c, stride))
        return context.get_dummy_value()

    return types.void(FLOATS, _number, _number, FLOATS, _number, _number), generate


@_intrinsic
def copy(typing: Any, x: Any, start: Any, to: Any, at: Any) -> Any:
    """One vector from x[start:] to to[at:]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = load(builder, address(context, builder, FLOATS, *args[:2]))
        store(builder, value, address(context, builder, FLOATS, *args[2:]))
        return context.get_dummy_value()

    return types.void(FLOATS, _number, FLOATS, _number), generate


def accumulated(
    builder: Any,
    count: Any,
    rows: int,
    vectors: int,
    left: Callable[[Any, int], Any],
    right: Callable[[Any], list[Any]],
) -> list[list[Any]]:
    """Σ_t left(t, r)·right(t)[v] over `count` ≥ 1 places t: vectors of sums by r and v.

    `left` gives a number, `right` the vectors of a place.
    """
    before, loop = builder.block, builder.append_basic_block("places")
    after = builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    t = builder.phi(_WHOLE)
    sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
    seen = right(t)
    totals = []
    for r, row in enumerate(sums):
        factor = _spread(builder, left(t, r))
        products = [builder.fmul(factor, vector, flags=_FUSED) for vector in seen]
        pairs = zip(row, products, strict=True)
        totals.append([builder.fadd(s, product, flags=_FUSED) for s, product in pairs])
    for row, total in zip(sums, totals, strict=True):
        for s, value in zip(row, total, strict=True):
            s.add_incoming(ZERO, before)
            s.add_incoming(value, loop)
    following = builder.add(t, whole(1))
    t.add_incoming(whole(0), before)
    t.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

    builder.position_at_end(after)
    return totals


def whole(value: int) -> Any:
    return ir.Constant(_WHOLE, value)


def address(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Where entry `at` of an array lies."""
    proxy = cgutils.create_struct_proxy(kind)  # type: ignore[no-untyped-call]
    return builder.gep(proxy(context, builder, array).data, [at])


def moved(builder: Any, start: Any, count: Any, step: Any, rest: int = 0) -> Any:
    """The address of entry count·step + rest from an address on."""
    return builder.gep(start, [builder.add(builder.mul(count, step), whole(rest))])


def load(builder: Any, start: Any) -> Any:
    vector = builder.load(builder.bitcast(start, _VECTOR.as_pointer()))
    vector.align = 4
    return vector


def store(builder: Any, vector: Any, start: Any) -> None:
    builder.store(vector, builder.bitcast(start, _VECTOR.as_pointer())).align = 4


def _across(builder: Any, vector: Any) -> Any:
    """The sum of a vector's numbers."""
    total = builder.extract_element(vector, ir.Constant(_PLACE, 0))
    for lane in range(1, LANES):
        number = builder.extract_element(vector, ir.Constant(_PLACE, lane))
        total = builder.fadd(total, number, flags=("reassoc",))
    return total


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square of lanes, given by its rows."""
    for width in (1, 2, 4):  # blocks of so many lanes change places with those of the next rows
        pairs = [(r, r + width) for r in range(LANES) if not r & width]
        mixed = list(rows)
        for upper, lower in pairs:
            ours = [c if not c & width else c - width + LANES for c in range(LANES)]
            theirs = [c + width if not c & width else c + LANES for c in range(LANES)]
            for row, lanes in ((upper, ours), (lower, theirs)):
                order = ir.Constant(ir.VectorType(_PLACE, LANES), lanes)
                mixed[row] = builder.shuffle_vector(rows[upper], rows[lower], order)
        rows = mixed
    return rows


def _spread(builder: Any, number: Any) -> Any:
    """A vector of the same number."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    vector = builder.insert_element(nothing, number, ir.Constant(_PLACE, 0))
    everywhere = ir.Constant(ir.VectorType(_PLACE, LANES), [0] * LANES)
    return builder.shuffle_vector(vector, nothing, everywhere)
