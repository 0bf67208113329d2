"""Matrix products inside compiled loops, by the library that torch's own are made with.

Called by one thread of a team, the library works on that thread alone: what a loop has just written
is still in the thread's cache when the product reads it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from epsilons.training.compiled import known_as, made_known
from epsilons.training.lanes import SINGLES, address

_PRODUCT = "SGEMM"
HAS_PRODUCT = made_known(_PRODUCT)

_LETTER, _SINGLE = ir.IntType(8), ir.FloatType()
_intrinsic: Any = intrinsic  # numba itself gives the first argument
cgutils: Any = _cgutils


@_intrinsic
def multiply(typing: Any, a: Any, b: Any, out: Any, at: Any, n: Any, p: Any, d: Any) -> Any:
    """out[at : at + p·d] = aᵀb for a (n, p) and b (n, d), all of them flat, row by row.

    Sizes are below 2³¹. Where torch has the library (`HAS_PRODUCT`).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, out, at, *sizes = args
        n, p, d = (_kept(builder, size) for size in sizes)  # read as 32 bits, or as 64
        start = ir.IntType(64)(0)
        left, right = (address(context, builder, SINGLES, array, start) for array in (a, b))
        to = address(context, builder, SINGLES, out, at)
        as_is, transposed = (_kept(builder, _LETTER(ord(letter))) for letter in "NT")
        one, zero = (_kept(builder, _SINGLE(number)) for number in (1.0, 0.0))
        # Column by column, as the library has it, out is bᵀ by a.
        operands = [as_is, transposed, d, p, n, one, right, d, left, p, zero, to, d]
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        library = cgutils.get_or_insert_function(builder.module, kind, known_as(_PRODUCT))
        builder.call(library, operands)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(SINGLES, SINGLES, SINGLES, whole, whole, whole, whole), generate


def _kept(builder: Any, value: Any) -> Any:
    return cgutils.alloca_once_value(builder, value)
