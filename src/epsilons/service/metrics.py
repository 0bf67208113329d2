"""Metrics for Prometheus, on a port of their own: how much is asked for, never by whom."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Metrics:
    """What the service counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "epsilons_requests", "Requests by route, method and status.",
            ["route", "method", "status"], registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "epsilons_request_seconds", "Seconds until a response was sent.", ["route"],
            buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.limited = Counter(
            "epsilons_limited", "Requests that were too many, by what was limited.", ["by"],
            registry=self.registry,
        )  # fmt: skip
        self.computed = Gauge(
            "epsilons_statements_computed_timestamp_seconds",
            "When the statements were last found to be up to date.", registry=self.registry,
        )  # fmt: skip

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Answer Prometheus at `host` and `port`, until what comes back is called."""
        server, thread = start_http_server(port, host, self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
