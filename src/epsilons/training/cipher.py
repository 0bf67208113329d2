"""AES-256 in counter mode inside compiled loops, by the instructions that processors have for it.

Every thread of a loop makes the words that it needs. The library that `keystream` reads from gives
the same words, on one thread: where a processor lacks the instructions, they are taken from there.
Nothing is looked up in a table, so that the time it takes says nothing about the key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from epsilons.training.compiled import FEATURES
from epsilons.training.lanes import WORDS, Lanes, address, called, counted, loaded, spread

_Words = NDArray[np.uint64]

HAS_AES = "aes" in FEATURES
KEY_WORDS = 30  # of fifteen round keys

_SEVERAL = {"vaes", "avx512f"} <= FEATURES  # blocks in one register
_LANES, _WIDTH = (8, ".512") if _SEVERAL else (2, "")
_VECTORS = 8  # at a time, so that no round waits for the one before it
_STRETCH = _VECTORS * _LANES  # words

_PLACE = ir.IntType(32)
_intrinsic: Any = intrinsic  # numba itself gives the first argument


@njit(cache=True, nogil=True, error_model="numpy")
def cipher_words(keys: _Words, nonce: np.uint64, block: np.uint64, words: _Words) -> None:
    """Fill `words`, an even number, with AES(key, nonce ‖ j) for j from `block` on.

    For processors that have the instructions (`HAS_AES`). For others a loop that would call it can
    be compiled, and fails where it does.

    Two words make a block, low bytes first; `nonce` is the input's first eight bytes in that
    order, j its last eight in the other. `keys` are those of `round_keys`.
    """
    if not HAS_AES:
        raise RuntimeError  # words that nobody made must not pass for random ones
    whole = words.size - words.size % _STRETCH
    for at in range(0, whole, _STRETCH):
        _encrypt(keys, nonce, block + np.uint64(at // 2), words, at)
    if whole < words.size:
        scratch = np.empty(_STRETCH, np.uint64)
        _encrypt(keys, nonce, block + np.uint64(whole // 2), scratch, 0)
        words[whole:] = scratch[: words.size - whole]


def round_keys(key: bytes | bytearray) -> _Words:
    """The fifteen round keys of a key of 32 bytes (FIPS 197, section 5.2)."""
    keys = np.empty(KEY_WORDS, np.uint64)
    _expand(np.frombuffer(key, np.uint32), keys.view(np.uint32))
    return keys


@njit(cache=True, nogil=True, error_model="numpy")
def _expand(key: NDArray[np.uint32], keys: NDArray[np.uint32]) -> None:
    keys[: key.size] = key
    constant = np.uint32(1)
    for i in range(key.size, keys.size):
        word = keys[i - 1]
        if i % key.size == 0:
            turned = word >> np.uint32(8) | word << np.uint32(24)
            word = _substituted(turned) ^ constant
            constant <<= np.uint32(1)
        elif i % key.size == 4:
            word = _substituted(word)
        keys[i] = keys[i - key.size] ^ word


@_intrinsic
def _substituted(typing: Any, word: Any) -> Any:
    """Each byte of a 32-bit word replaced by the cipher's substitution.

    It is what the last round does to a block of four such words, whose rows are all alike.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        four = spread(builder, args[0], 4).value
        block = builder.bitcast(four, ir.VectorType(ir.IntType(64), 2))
        nothing = counted(builder, [0, 0]).value
        found = called(builder, "llvm.x86.aesni.aesenclast", block.type, [block, nothing])
        return builder.extract_element(builder.bitcast(found, four.type), ir.Constant(_PLACE, 0))

    return types.uint32(types.uint32), generate


@_intrinsic
def _encrypt(typing: Any, keys: Any, nonce: Any, block: Any, words: Any, at: Any) -> Any:
    """words[at : at + _STRETCH] are the blocks from `block` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_AES:  # there is no code for it
            return context.get_dummy_value()
        keys, nonce, block, words, at = args
        first, start = (spread(builder, word, _LANES) for word in (nonce, block))
        place = counted(builder, [lane % 2 for lane in range(_LANES)])
        states = []
        for vector in range(_VECTORS):
            places = [(vector * _LANES + lane) // 2 for lane in range(_LANES)]
            numbers = (start + counted(builder, places)).reversed()
            states.append(place.equals(0).choose(first, numbers))
        for number in range(KEY_WORDS // 2):
            key = _round_key(builder, address(context, builder, WORDS, keys, _whole(2 * number)))
            if number == 0:
                states = [state ^ key for state in states]
                continue
            name = "aesenc" if number < KEY_WORDS // 2 - 1 else "aesenclast"
            function = f"llvm.x86.aesni.{name}{_WIDTH}"
            states = [
                Lanes(builder, called(builder, function, key.value.type, [state.value, key.value]))
                for state in states
            ]
        for vector, state in enumerate(states):
            to = builder.add(at, _whole(vector * _LANES))
            state.store(address(context, builder, WORDS, words, to))
        return context.get_dummy_value()

    return types.void(WORDS, types.uint64, types.uint64, WORDS, types.int64), generate


def _round_key(builder: Any, start: Any) -> Lanes:
    """The two words at an address, for every block of a vector."""
    key = loaded(builder, start, 2).value
    order = ir.Constant(ir.VectorType(_PLACE, _LANES), [0, 1] * (_LANES // 2))
    return Lanes(builder, builder.shuffle_vector(key, key, order))


def _whole(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)
