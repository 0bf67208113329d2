"""Around every request: security headers, a limit of size, the access log, and metrics."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epsilons.service.limits import network
from epsilons.service.logs import say
from epsilons.service.metrics import Metrics
from epsilons.service.tokens import Keys, short_hash

MOST_BYTES = 4096  # of a request's body: a token is 43
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}
_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), interest-cohort=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "cache-control": "no-store",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
_NAMES = {name for name, _ in _HEADERS}
_HSTS = (b"strict-transport-security", b"max-age=31536000")


class TooLarge(Exception):
    """A body of more than `MOST_BYTES`."""


class Guard:
    """The application `app` inside it never sees a large body, and answers with all headers."""

    def __init__(self, app: ASGIApp, keys: Keys, metrics: Metrics) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, received = time.perf_counter(), 0, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_BYTES:
                raise TooLarge
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _with_headers(message.get("headers", []), scope)
            await send(message)

        try:
            if _announced(scope) > MOST_BYTES:
                await _too_large(answer)
            else:
                await self._app(scope, counted, answer)
        except Exception as error:  # answered inside; its message may hold values
            say("failed", level=logging.ERROR, error=error, route=_route(scope))
        finally:
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        route = _route(scope)
        self._metrics.requests.labels(route, method, str(status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        say(
            "request",
            method=method,
            route=route,
            status=status,
            ms=round(1000 * seconds, 2),
            client=short_hash(self._keys.addresses, client_network(scope)),
        )


def client_network(scope: Scope) -> str:
    """Who asks, as limits know them."""
    client = scope.get("client")
    return network(client[0]) if client else ""


def secure(scope: Scope) -> bool:
    """Whether the request came over TLS, to us or to a proxy that we trust."""
    return scope.get("scheme") == "https"


async def _too_large(send: Send) -> None:
    body = b'{"detail":"the request is too large"}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # what is left of the request is not read
    ]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_headers(given: Any, scope: Scope) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in given if name.lower() not in _NAMES]
    return [*kept, *_HEADERS, *([_HSTS] if secure(scope) else [])]


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else MOST_BYTES + 1
    return 0


def _route(scope: Scope) -> str:
    """The route that was found, not the path that was asked for: a path may be anything."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
