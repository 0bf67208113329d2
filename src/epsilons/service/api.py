"""The JSON API: `/api/v1/statement`, `/api/v1/public`, `/healthz`; its schema is OpenAPI."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, create_model

from epsilons.release import Record, Statement
from epsilons.service.access import Access, bearer


def described(source: type, name: str, **more: Any) -> type[BaseModel]:
    """The model of a dataclass as JSON has it: an ε without a bound is null."""
    fields: dict[str, Any] = {}
    for key, kind in get_type_hints(source).items():
        if key in {field.name for field in dataclasses.fields(source)}:
            fields[key] = (float | None if kind is float else kind, ...)
    return create_model(name, __config__=ConfigDict(extra="allow"), **(fields | more))


_RECORD = described(Record, "Record")


class Journal(BaseModel):
    """Head, length and seal of the run's journal when the statement was computed."""

    head: str | None
    length: int | None
    seal: str | None


class OwnStatement(BaseModel):
    """What one owner is told about their records."""

    statement: described(  # type: ignore[valid-type]
        Statement,
        "Statement",
        records=(list[_RECORD], ...),
        randomness=(dict[str, str | bool], ...),
        others=(list[str], ...),
        per=(str, Field(description="person: all records of the owner together; or record")),
        detection=(dict[str, float | bool | str], ...),
    )
    journal: Journal
    computed: str = Field(description="when, in UTC")


class Public(BaseModel):
    """What everyone may know of the run; see docs/runs.md for its files."""

    run: str
    plan: dict[str, Any] = Field(description="public/plan.json")
    anchor: dict[str, Any] = Field(description="public/anchor.json")
    publications: dict[str, Any] | None = Field(description="public/publications.json")
    statistics: dict[str, Any] = Field(description="mean and quantiles of ε, as last published")


class Health(BaseModel):
    """Whether statements can be handed out."""

    status: str


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str


_PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "no valid token"},
    429: {"model": Problem, "description": "too many requests; see Retry-After"},
    503: {"model": Problem, "description": "the store doesn't answer, or nothing was computed"},
}


def some(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: _PROBLEMS[status] for status in statuses}


def routes(access: Access) -> APIRouter:
    """The API's routes, on statements of `access`."""
    router = APIRouter()
    scheme = HTTPBearer(auto_error=False, description="the token that you were given")

    @router.get(
        "/api/v1/statement",
        response_model=OwnStatement,
        responses=some(401, 429, 503),
        dependencies=[Depends(scheme)],
        summary="The statement of the token's owner",
    )
    async def statement(request: Request) -> Response:
        token = bearer(request.headers)
        digest = None if token is None else access.keys.digest(token)
        body = await access.statement(request.scope, digest)
        return Response(body, media_type="application/json")

    @router.get(
        "/api/v1/public",
        response_model=Public,
        responses=some(503),
        summary="What everyone may know of the run",
    )
    async def public() -> Response:
        body = await access.public()
        if body is None:
            return Response('{"detail":"nothing is computed yet"}', 503, media_type=JSON)
        return Response(body, media_type=JSON)

    @router.get(
        "/healthz", response_model=Health, responses=some(503), summary="Whether the service works"
    )
    async def healthz() -> Response:
        ready = await access.public() is not None
        text = '{"status":"ok"}' if ready else '{"detail":"nothing is computed yet"}'
        return Response(text, 200 if ready else 503, media_type=JSON)

    return router


JSON = "application/json"
