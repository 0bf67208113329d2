"""Who gets which statement: limits first, then the token, by one question to the store.

A token that is unknown, revoked, expired or malformed takes the same path: it is hashed, asked for,
compared, and refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import anyio
from starlette.types import Scope

from epsilons.service.guard import client_network
from epsilons.service.limits import Bucket, Limits
from epsilons.service.metrics import Metrics
from epsilons.service.store import CONNECTIONS, Store
from epsilons.service.tokens import Keys, same

_NOBODY = bytes(32)
_Answer = TypeVar("_Answer")


class Refused(Exception):
    """A request without a token that holds."""


class TooMany(Exception):
    """A request over a limit; `seconds`: until the next one is answered."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = max(1, math.ceil(seconds))


class Access:
    """The statements of a store, for those who may see them."""

    def __init__(self, store: Store, keys: Keys, limits: Limits, metrics: Metrics) -> None:
        self.store, self.keys = store, keys
        self._metrics = metrics
        self._addresses = Bucket(limits.per_address)
        self._tokens = Bucket(limits.per_token)
        self._threads = anyio.CapacityLimiter(CONNECTIONS)

    async def statement(self, scope: Scope, digest: bytes | None) -> str:
        """The statement, as JSON, for the token with this digest; None: none was given."""
        self._within("address", self._addresses, client_network(scope).encode())
        if digest is not None:
            self._within("token", self._tokens, digest)
        asked = _NOBODY if digest is None else digest
        found = await self._asked(partial(self.store.statement, asked, int(time.time())))
        stored, body = (_NOBODY, "") if found is None else found
        if not same(stored, asked) or found is None:
            raise Refused
        return body

    async def public(self) -> str | None:
        """What everyone may know, as JSON; None before anything was computed."""
        return await self._asked(self.store.public)

    async def _asked(self, question: Callable[[], _Answer]) -> _Answer:
        """The store's answer; no more are asked for at a time than there are connections."""
        return await anyio.to_thread.run_sync(question, limiter=self._threads)

    def _within(self, name: str, bucket: Bucket, key: bytes) -> None:
        seconds = bucket.wait(key)
        if seconds:
            self._metrics.limited.labels(name).inc()
            raise TooMany(seconds)


def bearer(headers: Mapping[str, Any]) -> str | None:
    """The token of an Authorization header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token.strip() else None
