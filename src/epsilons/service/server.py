"""The server: uvicorn with TLS, deadlines and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from epsilons.runs import Run
from epsilons.service.app import create_app
from epsilons.service.limits import Limits
from epsilons.service.logs import log_to, say
from epsilons.service.metrics import Metrics
from epsilons.service.statements import refresh
from epsilons.service.store import Store
from epsilons.service.tokens import Keys

REQUEST_SECONDS = 10.0  # a request that isn't there in full by then is given up
_IDLE_SECONDS = 5  # a connection without a request
_END_SECONDS = 10  # requests that are being answered may take so long after a SIGTERM
_LOOK_SECONDS = 60.0  # between two looks at whether the run has changed
_CONNECTIONS = 1000
_HEADER_BYTES = 16_384


def serve(
    run: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    store: str | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    root_path: str = "",
    proxies: str = "",
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    limits: Limits | None = None,
) -> None:
    """Serve the owners' page of the run in folder `run`, until SIGTERM or Ctrl-C.

    `host`, `port`: where, by default 127.0.0.1:8080. `store`: URL of the database, by default a
    SQLite file in the run's private half. `tls_cert`, `tls_key`: PEM files, both or none.
    `root_path`: the path under which a reverse proxy has the page, `/privacy` say. `proxies`:
    addresses whose X-Forwarded headers are believed, with commas. `metrics_host`, `metrics_port`:
    where Prometheus asks; no port, no metrics. `limits`: how much is answered.

    ValueError for a run that was tampered with, and for options that don't fit; OSError if the
    port is taken or the store can't be reached.
    """
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("a certificate and its key belong together; give both or neither")
    if root_path and (not root_path.startswith("/") or root_path.endswith("/")):
        raise ValueError(f"root path {root_path!r} must begin with / and not end with it")
    opened = Run.checked(run)
    keys, metrics = Keys.of_run(opened), Metrics()
    with Store.of_run(opened, store) as statements:
        refresh(run, statements)
        metrics.computed.set_to_current_time()
        log_to()
        app = create_app(statements, keys, limits=limits, metrics=metrics, root_path=root_path)
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=_Deadline,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=None if tls_cert is None else str(tls_cert),
            ssl_keyfile=None if tls_key is None else str(tls_key),
            root_path=root_path,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=proxies or None,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_END_SECONDS,
            limit_concurrency=_CONNECTIONS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        stop_metrics = None if metrics_port is None else metrics.serve(metrics_host, metrics_port)
        watching = _Watch(run, statements, metrics)
        try:
            watching.start()
            _Server(config).run()
        finally:
            watching.stop()
            if stop_metrics is not None:
                stop_metrics()
            say("stopped")


class _Server(uvicorn.Server):
    """Says where it listens, and fails as the command line expects."""

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn has logged why
            place = f"{self.config.host}:{self.config.port}"
            raise OSError(f"can't listen at {place}: is the port taken?") from None
        if self.started:
            scheme = "https" if self.config.is_ssl else "http"
            bound = self.servers[0].sockets[0].getsockname()
            say("listening", url=f"{scheme}://{self.config.host}:{bound[1]}{self.config.root_path}")


class _Watch(threading.Thread):
    """Looks now and then at whether the run has changed, and computes the statements anew."""

    def __init__(self, run: str | os.PathLike[str], store: Store, metrics: Metrics) -> None:
        super().__init__(daemon=True)
        self._run, self._store, self._metrics = Path(run), store, metrics
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                if refresh(self._run, self._store):
                    say("computed")
                self._metrics.computed.set_to_current_time()
            except Exception as error:  # the statements stay as they were
                say("not computed", level=logging.ERROR, error=error)

    def stop(self) -> None:
        self._ended.set()


class _Deadline(H11Protocol):
    """A connection whose request isn't there in full within `REQUEST_SECONDS` is closed."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._look)

    def _look(self) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            self._wait()  # it is there, and being answered
        else:
            with suppress(Exception):
                self.transport.abort()
