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
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from epsilons.training.compiled import FEATURES
from epsilons.training.lanes import SINGLES, address
from epsilons.training.lanes import spread as spread_over

WIDE = "avx512f" in FEATURES  # 32 registers of 16 numbers, or 16 of 8

LANES = 16 if WIDE else 8
ROWS, VECTORS = (4, 4) if WIDE else (6, 2)  # of a tile: sums, and registers for what they read
COLUMNS = VECTORS * LANES
HIGH = 6  # rows of one whose rows are read where they are
TALL, BROAD = 11 if WIDE else 6, 2 * LANES  # of a tile of matrices that are in the cache
PAIRS = 4, LANES // 4  # of a square of products: as many sums as lanes
SIDE = 8  # of a square that is turned
_LINE = 16  # numbers that memory brings at once
FLOATS = SINGLES
WHOLES = types.Array(types.int64, 1, "C")
_FUSED = ("contract",)  # a product and the sum it goes into may be rounded once

_FLOAT, _WHOLE, _PLACE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR, _SHORT = ir.VectorType(_FLOAT, LANES), ir.VectorType(_FLOAT, SIDE)
ZERO = ir.Constant(_VECTOR, [0.0] * LANES)

_intrinsic: Any = intrinsic  # numba itself gives the first argument
_helpers: Any = _cgutils
_number = types.int64


@_intrinsic
def tile(
    typing: Any,
    left: Any,
    at: Any,
    step: Any,
    right: Any,
    begin: Any,
    count: Any,
    out: Any,
    to: Any,
    stride: Any,
    squares: Any,
) -> Any:
    """out[to + r·stride + c] = Σ_t left[at + t·step + r] · right[begin + t·COLUMNS + c].

    For a tile of rows and columns, over `count` ≥ 1 places t. The squares are added to
    squares[:LANES], each to one of them.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, at, step, right, begin, count, out, to, stride, squares = args
        x = address(context, builder, FLOATS, left, at)
        y = address(context, builder, FLOATS, right, begin)
        target = address(context, builder, FLOATS, out, to)

        def number(t: Any, r: int) -> Any:
            return spread(builder, builder.load(moved(builder, x, t, step, r)))

        def seen(t: Any) -> list[Any]:
            pitch = whole(COLUMNS)
            return [load(builder, moved(builder, y, t, pitch, v * LANES)) for v in range(VECTORS)]

        _expect_stores(builder, target, ROWS, stride)
        added = address(context, builder, FLOATS, squares, whole(0))
        chains = [load(builder, added), *[ZERO] * 3]  # several, not to wait for one another
        for r, sums in enumerate(accumulated(builder, count, ROWS, VECTORS, number, seen)):
            for v, value in enumerate(sums):
                store(builder, value, moved(builder, target, whole(r), stride, v * LANES))
                square = builder.fmul(value, value, flags=_FUSED)
                chain = (r * VECTORS + v) % len(chains)
                chains[chain] = builder.fadd(chains[chain], square, flags=_FUSED)
        pairs = [builder.fadd(*pair) for pair in (chains[:2], chains[2:])]
        store(builder, builder.fadd(*pairs), added)
        return context.get_dummy_value()

    signature = types.void(
        FLOATS, _number, _number, FLOATS, _number, _number, FLOATS, _number, _number, FLOATS
    )
    return signature, generate


@_intrinsic
def matrix(
    typing: Any,
    left: Any,
    at: Any,
    step: Any,
    pitch: Any,
    right: Any,
    begin: Any,
    count: Any,
    out: Any,
    to: Any,
    stride: Any,
) -> Any:
    """out[to + r·stride + c] = Σ_t left[at + t·step + r·pitch] · right[begin + t·BROAD + c].

    For TALL rows and BROAD columns, over `count` ≥ 1 places t.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, at, step, pitch, right, begin, count, out, to, stride = args
        x = address(context, builder, FLOATS, left, at)
        y = address(context, builder, FLOATS, right, begin)
        target = address(context, builder, FLOATS, out, to)
        rows = [moved(builder, x, whole(r), pitch) for r in range(TALL)]

        def number(t: Any, r: int) -> Any:
            return spread(builder, builder.load(moved(builder, rows[r], t, step)))

        def seen(t: Any) -> list[Any]:
            pitch = whole(BROAD)
            return [load(builder, moved(builder, y, t, pitch, v)) for v in range(0, BROAD, LANES)]

        for r, sums in enumerate(accumulated(builder, count, TALL, BROAD // LANES, number, seen)):
            for v, value in enumerate(sums):
                store(builder, value, moved(builder, target, whole(r), stride, v * LANES))
        return context.get_dummy_value()

    signature = types.void(
        FLOATS, _number, _number, _number, FLOATS, _number, _number, FLOATS, _number, _number
    )
    return signature, generate


@_intrinsic
def affine(
    typing: Any,
    left: Any,
    at: Any,
    pitch: Any,
    right: Any,
    begin: Any,
    count: Any,
    base: Any,
    column: Any,
    out: Any,
    to: Any,
    stride: Any,
) -> Any:
    """out[to + r·stride + c] = base[column + c] + Σ_t left[at + r·pitch + t] · right_tc.

    For HIGH rows and COLUMNS columns, over `count` ≥ 1 places t, a multiple of four; right_tc is at
    begin + t·COLUMNS + c. The base is added last: products that are small against it would be lost
    one by one.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, at, pitch, right, begin, count, base, column, out, to, stride = args
        x = address(context, builder, FLOATS, left, at)
        y = address(context, builder, FLOATS, right, begin)
        b = address(context, builder, FLOATS, base, column)
        target = address(context, builder, FLOATS, out, to)
        rows = [moved(builder, x, whole(r), pitch) for r in range(HIGH)]
        vectors = range(0, COLUMNS, LANES)

        def number(t: Any, r: int) -> Any:
            return spread(builder, builder.load(builder.gep(rows[r], [t])))

        def seen(t: Any) -> list[Any]:
            return [load(builder, moved(builder, y, t, whole(COLUMNS), v)) for v in vectors]

        _expect_stores(builder, target, HIGH, stride)
        found = accumulated(builder, count, HIGH, VECTORS, number, seen, at_once=4)
        offsets = [load(builder, builder.gep(b, [whole(v)])) for v in vectors]
        for r, sums in enumerate(found):
            for v, value, offset in zip(vectors, sums, offsets, strict=True):
                place = moved(builder, target, whole(r), stride, v)
                store(builder, builder.fadd(value, offset), place)
        return context.get_dummy_value()

    n = _number
    return types.void(FLOATS, n, n, FLOATS, n, n, FLOATS, n, FLOATS, n, n), generate


@_intrinsic
def turn(typing: Any, rows: Any, start: Any, step: Any, columns: Any, to: Any, stride: Any) -> Any:
    """columns[to + c·stride + r] = rows[start + r·step + c] for a square."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, start, step, columns, to, stride = args
        x = address(context, builder, FLOATS, rows, start)
        y = address(context, builder, FLOATS, columns, to)
        places = [whole(place) for place in range(SIDE)]
        square = [load(builder, moved(builder, x, r, step), _SHORT) for r in places]
        for c, column in zip(places, _turned(builder, square), strict=True):
            store(builder, column, moved(builder, y, c, stride))
        return context.get_dummy_value()

    return types.void(FLOATS, _number, _number, FLOATS, _number, _number), generate


@_intrinsic
def products(
    typing: Any, x: Any, first: Any, second: Any, pitch: Any, count: Any, found: Any
) -> Any:
    """found[r·PAIRS[1] + c] = Σ_k x[first + r·pitch + k] · x[second + c·pitch + k].

    For r < PAIRS[0], over `count` ≥ 1 numbers k, a multiple of the lanes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, first, second, pitch, count, found = args
        rows, columns = (
            [
                moved(builder, address(context, builder, FLOATS, x, begin), whole(r), pitch)
                for r in range(number)
            ]
            for begin, number in zip((first, second), PAIRS, strict=True)
        )

        def number(k: Any, r: int) -> Any:
            return load(builder, moved(builder, rows[r], k, whole(LANES)))

        def seen(k: Any) -> list[Any]:
            return [load(builder, moved(builder, y, k, whole(LANES))) for y in columns]

        steps = builder.udiv(count, whole(LANES))
        sums = accumulated(builder, steps, *PAIRS, number, seen)
        total = _sums_of(builder, [s for row in sums for s in row])
        store(builder, total, address(context, builder, FLOATS, found, whole(0)))
        return context.get_dummy_value()

    return types.void(FLOATS, _number, _number, _number, _number, FLOATS), generate


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
    at_once: int = 1,
) -> list[list[Any]]:
    """Σ_t left(t, r)·right(t)[v] over `count` ≥ 1 places t: vectors of sums by r and v.

    `left` gives a vector (see `spread`), `right` those of a place. The loop takes `at_once` places
    in a row, of which `count` is a multiple.
    """
    before, loop = builder.block, builder.append_basic_block("places")
    after = builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    t = builder.phi(_WHOLE)
    sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
    totals = list(sums)
    for place in range(at_once):
        here = builder.add(t, whole(place))
        seen = right(here)
        for r, row in enumerate(totals):
            factor = left(here, r)
            terms = [builder.fmul(factor, vector, flags=_FUSED) for vector in seen]
            pairs = zip(row, terms, strict=True)
            totals[r] = [builder.fadd(s, term, flags=_FUSED) for s, term in pairs]
    for row, total in zip(sums, totals, strict=True):
        for s, value in zip(row, total, strict=True):
            s.add_incoming(ZERO, before)
            s.add_incoming(value, loop)
    following = builder.add(t, whole(at_once))
    t.add_incoming(whole(0), before)
    t.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

    builder.position_at_end(after)
    return totals


def whole(value: int) -> Any:
    return ir.Constant(_WHOLE, value)


def moved(builder: Any, start: Any, count: Any, step: Any, rest: int = 0) -> Any:
    """The address of entry count·step + rest from an address on."""
    return builder.gep(start, [builder.add(builder.mul(count, step), whole(rest))])


def load(builder: Any, start: Any, kind: Any = _VECTOR) -> Any:
    vector = builder.load(builder.bitcast(start, kind.as_pointer()))
    vector.align = 4
    return vector


def store(builder: Any, vector: Any, start: Any) -> None:
    builder.store(vector, builder.bitcast(start, vector.type.as_pointer())).align = 4


def _expect_stores(builder: Any, target: Any, rows: int, stride: Any) -> None:
    """Have the memory of a tile brought near, to be written some time later."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _PLACE, _PLACE, _PLACE])
    prefetch = _helpers.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    write, near, data = (ir.Constant(_PLACE, option) for option in (1, 3, 1))
    for r in range(rows):
        for c in range(0, COLUMNS, _LINE):
            line = builder.bitcast(moved(builder, target, whole(r), stride, c), byte)
            builder.call(prefetch, [line, write, near, data])


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square, given by its rows."""
    for width in (1, 2, 4):  # blocks of so many columns change places with those of the next rows
        mixed = list(rows)
        for upper in (r for r in range(SIDE) if not r & width):
            pair = rows[upper], rows[upper + width]
            mixed[upper], mixed[upper + width] = _exchanged(builder, *pair, width)
        rows = mixed
    return rows


def _exchanged(builder: Any, upper: Any, lower: Any, width: int) -> tuple[Any, Any]:
    """Two vectors whose blocks of `width` lanes, every other one, have changed places."""
    count = upper.type.count
    ours = [c if not c & width else c - width + count for c in range(count)]
    theirs = [c + width if not c & width else c + count for c in range(count)]
    orders = [ir.Constant(ir.VectorType(_PLACE, count), lanes) for lanes in (ours, theirs)]
    first, second = (builder.shuffle_vector(upper, lower, order) for order in orders)
    return first, second


def _sums_of(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of as many vectors as there are lanes, as one vector."""
    width = 1
    while width < LANES:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*_exchanged(builder, *pair, width)) for pair in pairs]
        width *= 2
    return vectors[0]


def spread(builder: Any, number: Any) -> Any:
    """A vector of the same number."""
    return spread_over(builder, number, LANES).value
