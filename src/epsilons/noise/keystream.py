"""Keystream: secret random bits, which a seed can repeat.

AES-256 in counter mode (NIST SP 800-38A): whoever lacks the key cannot tell the bits from fair
coins. Noise and sampling draw from streams of one key that never overlap.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import weakref
from typing import NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting import checks

KEY_BYTES = 32
_BLOCK_BYTES = 16
_PURPOSE_BYTES = 8
COIN_BYTES = 8  # that each example's coin takes
_COINS = 1 << 16  # read at a time: they stay in the cache
_LENGTH = _BLOCK_BYTES << 64  # bytes in a stream: the block counter has 64 bits
_ZEROS = memoryview(bytes(1 << 17))  # what the cipher turns into the stream
_SEED_LABEL = b"epsilons: AES-256 key of a seeded run\0"


class Keystream:
    """The bits of one key and one purpose, from `position` (in bytes) on.

        block j = AES₂₅₆(key, purpose ‖ j),   purpose padded by zeros to 8 bytes, j big-endian

    Guarantee: no input to the cipher occurs twice among the streams of a key, since purposes are
    told apart by their padded bytes and j by its own.

    A stream belongs to the process that made it: a forked one would draw the same bits, so the key
    is destroyed there, and the process is compared at every draw.

    `Keystream.secret(purpose)` has a key from the operating system, `Keystream.seeded(seed,
    purpose)` one that everybody who knows the seed can compute. The key is in no `repr`, and the
    stream can't be pickled or copied. `key`: 32 bytes. `purpose`: up to 8 bytes, that say what the
    bits are for. `seeded`: whether somebody else could compute the key. ValueError for others.

    >>> stream = Keystream.seeded(7, b"noise")
    >>> stream
    <Keystream 'noise', seeded, at byte 0>
    >>> first = stream.read(5)
    >>> stream.seek(0)
    >>> stream.read(5) == first
    True
    """

    def __init__(
        self, key: bytes | bytearray, purpose: bytes, *, position: int = 0, seeded: bool = False
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"the key has {len(key)} bytes; AES-256 takes {KEY_BYTES}. "
                "Use Keystream.secret(purpose) for a key from the operating system."
            )
        self._nonce = _nonce(purpose)
        self._key = bytearray(key)
        self._seeded = bool(seeded)
        self._position = _checked(position)
        self._cipher: CipherContext | None = None  # made when it is read from
        self._destroyed = False
        self._process = os.getpid()
        _live.add(self)

    @classmethod
    def secret(cls, purpose: bytes) -> Keystream:
        """A stream for `purpose`, up to 8 bytes, whose key comes from the operating system."""
        return cls(os.urandom(KEY_BYTES), purpose)

    @classmethod
    def seeded(cls, seed: int, purpose: bytes) -> Keystream:
        """A stream whose key is SHA-256 of `seed`: reproducible, and so not secret.

        `purpose`: up to 8 bytes, that say what the bits are for.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed={seed!r} must be an int; a secret key needs none")
        return cls(hashlib.sha256(_SEED_LABEL + b"%d" % seed).digest(), purpose, seeded=True)

    @property
    def purpose(self) -> bytes:
        """What the bits are for."""
        return self._nonce.rstrip(b"\0")

    @property
    def is_seeded(self) -> bool:
        """Whether the key was computed from a seed."""
        return self._seeded

    @property
    def position(self) -> int:
        """How many bytes of the stream come before the next one read."""
        return self._position

    def fork(self, purpose: bytes) -> Keystream:
        """Another stream of the same key, from its start, for another `purpose`.

        ValueError for the stream's own purpose, whose bits would repeat.
        """
        self._alive()
        if _nonce(purpose) == self._nonce:
            raise ValueError(f"purpose {purpose!r} is this stream's own: its bits would repeat")
        return Keystream(self._key, purpose, seeded=self._seeded)

    def seek(self, position: int) -> None:
        """Make byte `position` of the stream the next one read."""
        self._alive()
        self._position = _checked(position)
        self._cipher = None

    def read(self, count: int) -> bytes:
        """The next `count` bytes."""
        drawn = self._ahead(count).update(bytes(count))
        self._position += count
        return drawn

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` integers, uniform on 0 … 2⁶⁴ − 1, from eight bytes each, low first."""
        return self.fill(np.empty(count, dtype=np.uint64))

    def fill(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """`words` themselves, a contiguous array, now holding the next integers of the stream."""
        _encrypt_zeros(self._ahead(words.nbytes), words)
        self._position += words.nbytes
        return words

    def skip(self, count: int) -> int:
        """Leave the next `count` bytes to `fill_at`; the position of the first of them."""
        self._expect_ahead(count)
        first = self._position
        self._position, self._cipher = first + count, None
        return first

    def fill_at(self, position: int, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Fill `words` as `fill` does, from byte `position` on; safe in several threads.

        The stream itself stays where it is.
        """
        self._alive()
        _encrypt_zeros(self._cipher_at(_checked(position)), words)
        return words

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """The next `count` numbers, uniform on the multiples of 2⁻⁵³ in [0, 1)."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def destroy(self) -> None:
        """Overwrite the keys; nothing can be read any more. Forks keep their own copy.

        The cipher's own expanded key is cleared by OpenSSL as its context is freed here. What the
        interpreter copied on the way (`os.urandom` returns immutable bytes) is out of reach.
        """
        self._key[:] = bytes(KEY_BYTES)
        self._cipher = None
        self._destroyed = True

    def __repr__(self) -> str:
        kind = "seeded" if self._seeded else "secret"
        life = "destroyed" if self._destroyed else f"at byte {self._position}"
        return f"<Keystream {self.purpose.decode('latin-1')!r}, {kind}, {life}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Keystream is not pickled or copied: its key would travel and its bits be used "
            "twice. Use fork(purpose) for another stream, and after a crash a new key."
        )

    def _ahead(self, count: int) -> CipherContext:
        """The cipher, if `count` more bytes may be read."""
        self._expect_ahead(count)
        if self._cipher is None:
            self._cipher = self._cipher_at(self._position)
        return self._cipher

    def _cipher_at(self, position: int) -> CipherContext:
        block, skipped = divmod(position, _BLOCK_BYTES)
        start = modes.CTR(self._nonce + block.to_bytes(_BLOCK_BYTES - _PURPOSE_BYTES, "big"))
        cipher = Cipher(algorithms.AES(self._key), start).encryptor()
        cipher.update(bytes(skipped))
        return cipher

    def _expect_ahead(self, count: int) -> None:
        self._alive()
        if self._position + count > _LENGTH:
            raise ValueError(
                f"{count} more bytes end beyond the stream's last, {_LENGTH}; start a new key"
            )

    def _alive(self) -> None:
        if self._process != os.getpid():
            raise ValueError(
                "the keystream belongs to the process that made it, and both would draw the same "
                "bits; after a fork make a new one by Keystream.secret(purpose) or SecureNoise()"
            )
        if self._destroyed:
            raise ValueError(
                "the keystream's key was destroyed; start a new one by Keystream.secret(purpose)"
            )


def _destroy_all() -> None:
    """In a forked process: it has a copy of every key."""
    for stream in list(_live):
        stream.destroy()


_live: weakref.WeakSet[Keystream] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_destroy_all)


def _checked(position: int) -> int:
    position = checks.whole("position", position, least=0)
    if position >= _LENGTH:
        raise ValueError(f"position={position} lies beyond the stream's 2⁶⁸ bytes")
    return position


def poisson_draw(
    stream: Keystream, n: int, rate: float, *, first: int = 0, last: int | None = None
) -> Tensor:
    """The indices, ascending, of a Poisson sample: each of 0 … n − 1 by its own coin.

        P(i drawn) = ⌊rate·2⁵³⌋ / 2⁵³      independently; never above `rate`

    Takes 8n bytes of the stream, whatever the outcome. `first`, `last`: of the same sample those
    from `first` to before `last` alone, whose coins alone are read.

    >>> poisson_draw(Keystream.seeded(7, b"sampling"), n=5, rate=1.0)
    tensor([0, 1, 2, 3, 4])
    """
    n = checks.whole("n", n, least=0)
    rate = float(checks.probability("sample_rate", rate))
    # down, not nearest: an example drawn more often than the plan says would be undercharged
    limit = np.uint64(math.floor(rate * 2.0**53))
    last = n if last is None else last
    if first:
        stream.skip(COIN_BYTES * first)
    drawn = [np.empty(0, np.int64)]
    for start in range(first, last, _COINS):
        coins = stream.words(min(_COINS, last - start)) >> np.uint64(11)
        drawn.append(np.flatnonzero(coins < limit) + start)
    if last < n:
        stream.skip(COIN_BYTES * (n - last))
    return torch.from_numpy(np.concatenate(drawn))


def _encrypt_zeros(cipher: CipherContext, words: NDArray[np.uint64]) -> None:
    """Fill a contiguous array with the next bytes of a counter-mode cipher, low bytes first."""
    raw = words.view(np.uint8).data
    for start in range(0, len(raw), len(_ZEROS)):
        part = raw[start : start + len(_ZEROS)]
        cipher.update_into(_ZEROS[: len(part)], part)
    if sys.byteorder == "big":
        words.byteswap(inplace=True)


def _nonce(purpose: bytes) -> bytes:
    """`purpose` padded to 8 bytes, differently for different purposes."""
    if not 1 <= len(purpose) <= _PURPOSE_BYTES or purpose.endswith(b"\0"):
        raise ValueError(
            f"purpose={purpose!r} must have 1 to {_PURPOSE_BYTES} bytes, the last not zero, "
            "e.g. b'noise'."
        )
    return purpose.ljust(_PURPOSE_BYTES, b"\0")
