"""Compiled loops on torch's own threads.

Torch's kernels run on a team of OpenMP threads, which wait for the next one wide awake. A second
team, such as numba's, would compete with them for the same processors: it is theirs that go
through a loop of ours as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic, register_jitable

from epsilons.training.compiled import known_as, made_known

_PARALLEL, _PLACE, _SIZE = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
_BYTES, _WHOLE, _NUMBER = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
_EACH = ir.FunctionType(ir.VoidType(), [_BYTES])
_intrinsic: Any = intrinsic  # numba itself gives the first argument
cgutils: Any = _cgutils


def share_out(
    count: int, some: Callable[..., None], at_once: Callable[..., bool], *operands: Any
) -> None:
    """Have as many threads as torch's go through `count` items, `some(first, last, *operands)`.

    `at_once(threads, count, *operands)` is `go_through` with the same loop, compiled. On one thread
    no other is started: a process that has them must not fork. It too goes through `at_once`, since
    a loop that is compiled twice may be rounded in two ways.
    """
    threads = torch.get_num_threads() if count > 1 else 1
    if HAS_TEAM:
        if at_once(threads, count, *operands):
            raise MemoryError(
                "a compiled loop failed, most likely for want of memory for its scratch"
            )
        return
    if threads == 1:
        some(0, count, *operands)
    else:
        shares = [(t * count // threads, (t + 1) * count // threads) for t in range(threads)]
        for done in [_pool(threads).submit(some, *share, *operands) for share in shares]:
            done.result()


@register_jitable
def go_through(some: Any, threads: int, count: int, operands: Any) -> Any:
    """Call `some(first, last, *operands)` for a share of `count` items on each thread of the team.

    Whether one of the calls failed comes back.
    """
    return _go_through(some, threads, count, operands)


@_intrinsic
def _go_through(typing: Any, some: Any, threads: Any, count: Any, operands: Any) -> Any:
    inner = some.get_call_type(typing, (types.int64, types.int64, *operands.types), {})
    compiled = some.dispatcher.overloads[inner.args]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, threads, count, its = args
        context.active_code_library.add_linking_library(compiled.library)
        # how many shares failed, how many there are, and of what
        state = ir.LiteralStructType([_WHOLE] * 3 + [its.type])
        value = ir.Constant(state, ir.Undefined)
        for place, part in enumerate((_whole(0), threads, count, its)):
            value = builder.insert_value(value, part, place)
        data = cgutils.alloca_once_value(builder, value)
        each = _each(context, builder.module, state, compiled, inner, len(operands.types))
        kind = ir.FunctionType(ir.VoidType(), [_EACH.as_pointer(), _BYTES, _NUMBER, _NUMBER])
        team = cgutils.get_or_insert_function(builder.module, kind, known_as(_PARALLEL))
        number = builder.trunc(threads, _NUMBER)
        builder.call(team, [each, builder.bitcast(data, _BYTES), number, ir.Constant(_NUMBER, 0)])
        failed = builder.load(cgutils.gep_inbounds(builder, data, 0, 0))
        return builder.icmp_signed("!=", failed, _whole(0))

    return types.boolean(some, types.int64, types.int64, operands), generate


def _each(context: Any, module: Any, state: Any, compiled: Any, inner: Any, number: int) -> Any:
    """The function that every thread runs: its own share first, and those that nobody has.

    The team may be smaller than was asked for. A thread has the same share at every call, as it has
    in torch's kernels: what it needs may still be in its cache.
    """
    name = module.get_unique_name(f"{compiled.fndesc.mangled_name}.each")
    function = ir.Function(module, _EACH, name)
    function.linkage = "internal"
    entry = function.append_basic_block("entry")
    builder = ir.IRBuilder(entry)
    data = builder.bitcast(function.args[0], state.as_pointer())
    failed, *parts = (cgutils.gep_inbounds(builder, data, 0, i) for i in range(4))
    threads, count, its = (builder.load(part) for part in parts)
    kind = ir.FunctionType(_NUMBER, [])
    place, size = (
        builder.zext(
            builder.call(cgutils.get_or_insert_function(module, kind, known_as(name)), []), _WHOLE
        )
        for name in (_PLACE, _SIZE)
    )
    loop = builder.append_basic_block("share")
    work, done = builder.append_basic_block("work"), builder.append_basic_block("done")
    builder.branch(loop)

    builder.position_at_end(loop)
    t = builder.phi(_WHOLE)
    t.add_incoming(place, entry)
    builder.cbranch(builder.icmp_signed("<", t, threads), work, done)

    builder.position_at_end(work)
    first, last = (
        builder.sdiv(builder.mul(share, count), threads) for share in (t, builder.add(t, _whole(1)))
    )
    operands = cgutils.unpack_tuple(builder, its, number)
    status, _ = context.call_internal_no_propagate(
        builder, compiled.fndesc, inner, [first, last, *operands]
    )
    builder.atomic_rmw("add", failed, builder.zext(status.is_error, _WHOLE), "monotonic")
    t.add_incoming(builder.add(t, size), builder.block)
    builder.branch(loop)

    builder.position_at_end(done)
    builder.ret_void()
    return function


def _whole(value: int) -> Any:
    return ir.Constant(_WHOLE, value)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


HAS_TEAM = made_known(_PARALLEL, _PLACE, _SIZE)
