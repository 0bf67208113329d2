"""`epsilons serve`: the owners' page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

STORE = typer.Option(
    envvar="EPSILONS_STORE",
    help="URL of the database, postgresql://… [a SQLite file in the run's private half].",
    show_envvar=True,
)


def serve(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any.")] = 8080,
    store: Annotated[str | None, STORE] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    root_path: Annotated[
        str, typer.Option(help="Path under which a reverse proxy has the page, /privacy say.")
    ] = "",
    proxies: Annotated[
        str, typer.Option(help="Addresses of proxies whose X-Forwarded headers are believed.")
    ] = "",
    metrics_host: Annotated[str, typer.Option(help="Address of the metrics.")] = "127.0.0.1",
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of Prometheus metrics [none].")
    ] = None,
    per_token: Annotated[float, typer.Option(help="Requests per minute of one token.")] = 30.0,
    per_address: Annotated[float, typer.Option(help="Requests per minute of one address.")] = 120.0,
) -> None:
    """Serve every owner their own statement, for a token (see epsilons tokens).

    Statements are computed once, and again when the run has changed; the journal is only read.
    """
    from epsilons.service import Limits
    from epsilons.service import serve as serve_run

    for file in (tls_cert, tls_key):
        if file is not None and not file.is_file():
            raise ValueError(f"{file} is not there; expected a PEM file")
    with suppress(KeyboardInterrupt):  # asked to stop, and it did so in order
        serve_run(
            run,
            host=host,
            port=port,
            store=store,
            tls_cert=tls_cert,
            tls_key=tls_key,
            root_path=root_path,
            proxies=proxies,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            limits=Limits(per_token, per_address),
        )
