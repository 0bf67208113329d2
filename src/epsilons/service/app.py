"""The application: routes, and one answer for every way to fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from epsilons.service import api, pages
from epsilons.service.access import Access, Refused, TooMany
from epsilons.service.guard import Guard, TooLarge
from epsilons.service.limits import Limits
from epsilons.service.metrics import Metrics
from epsilons.service.sessions import Sessions
from epsilons.service.store import Store
from epsilons.service.tokens import Keys

_Answer = Callable[[Request, Any], Awaitable[Response]]


def create_app(
    store: Store,
    keys: Keys,
    *,
    limits: Limits | None = None,
    metrics: Metrics | None = None,
    root_path: str = "",
) -> ASGIApp:
    """The owners' page and its API as an ASGI application.

    `store` and `keys`: those of the run. `limits`: how much is answered, by default `Limits()`.
    `metrics`: where requests are counted. `root_path`: the path under which a reverse proxy has it.
    """
    metrics = Metrics() if metrics is None else metrics
    access = Access(store, keys, Limits() if limits is None else limits, metrics)
    app = FastAPI(
        title="Privacy statements",
        version=version("epsilons"),
        description="What one training revealed about one person, for that person alone.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        root_path=root_path,
        root_path_in_servers=False,
    )
    app.include_router(api.routes(access))
    app.include_router(pages.routes(access, Sessions(keys)))
    for error, answer in _ANSWERS.items():
        app.add_exception_handler(error, answer)
    return Guard(app, keys, metrics)


async def _refused(request: Request, error: Refused) -> Response:
    """The same for every token that doesn't hold, whatever the reason."""
    if _is_api(request):
        headers = {"www-authenticate": "Bearer"}
        return JSONResponse({"detail": "no valid token"}, 401, headers)
    posted = request.method == "POST"
    return pages.form(request, 401, "form.refused" if posted else "form.ended")


async def _too_many(request: Request, error: TooMany) -> Response:
    headers = {"retry-after": str(error.seconds)}
    if _is_api(request):
        return JSONResponse({"detail": "too many requests"}, 429, headers)
    answer = pages.form(request, 429, "form.too_many")
    answer.headers.update(headers)
    return answer


async def _too_large(request: Request, error: TooLarge) -> Response:
    return JSONResponse({"detail": "the request is too large"}, 413, {"connection": "close"})


async def _no_store(request: Request, error: sa.exc.SQLAlchemyError) -> Response:
    if _is_api(request):
        return JSONResponse({"detail": "the store doesn't answer"}, 503, {"retry-after": "10"})
    return pages.form(request, 503, "form.unavailable")


async def _http(request: Request, error: HTTPException) -> Response:
    detail = HTTPStatus(error.status_code).phrase.lower()  # never what was sent
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "something went wrong here; try again later"}, 500)


_ANSWERS: dict[int | type[Exception], _Answer] = {
    Refused: _refused,
    TooMany: _too_many,
    TooLarge: _too_large,
    sa.exc.SQLAlchemyError: _no_store,
    HTTPException: _http,
    Exception: _failed,
}


def _is_api(request: Request) -> bool:
    path = str(getattr(request.scope.get("route"), "path", ""))
    return path.startswith("/api/") or path == "/healthz"
