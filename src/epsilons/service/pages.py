"""The pages: a form for the token, the statement, its downloads; no script, no one else's asset.

The token is posted, never in a URL. A short session follows, so that the statement can be opened,
printed and saved.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

import jinja2
from fastapi import APIRouter, Request, Response

from epsilons.service import views
from epsilons.service.access import Access, Refused
from epsilons.service.catalogue import Messages, catalogues, chosen
from epsilons.service.guard import secure
from epsilons.service.sessions import Sessions

_FOLDER = files("epsilons.service").joinpath("templates")
_STYLE = _FOLDER.joinpath("style.css").read_text("utf-8")
_ICON = _FOLDER.joinpath("icon.svg").read_text("utf-8")
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FunctionLoader(lambda name: _FOLDER.joinpath(name).read_text("utf-8")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_CSS, _SVG = "text/css", "image/svg+xml"


def messages_for(request: Request) -> Messages:
    """The language of the answer: as asked for by `lang`, else as the browser prefers."""
    asked = request.query_params.get("lang")
    return chosen(asked, request.headers.get("accept-language", ""))


def page(name: str, m: Messages, prefix: str, status: int = 200, **values: Any) -> Response:
    """A page of the templates."""
    return Response(_rendered(name, m, prefix, **values), status, media_type="text/html")


def form(request: Request, status: int = 200, problem: str | None = None) -> Response:
    """The form for the token, with what is wrong about the last one."""
    m = messages_for(request)
    return page("form.html.j2", m, _prefix(request), status, problem=problem and m(problem))


def routes(access: Access, sessions: Sessions) -> APIRouter:
    """The pages' routes, on statements of `access`."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def start(request: Request) -> Response:
        return form(request)

    @router.post("/statement")
    async def enter(request: Request) -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused  # someone else's page sent it
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=8)
        digest = access.keys.digest(fields.get("token", [""])[0])
        await access.statement(request.scope, digest)
        m, prefix = messages_for(request), _prefix(request)
        cookie = sessions.begin(digest, path=prefix or "/", secure=secure(request.scope))
        where = f"{prefix}/statement?lang={m.language}"
        return Response(status_code=303, headers={"location": where, "set-cookie": cookie})

    @router.get("/statement")
    async def statement(request: Request) -> Response:
        m = messages_for(request)
        values = _shown(await _own(request), await access.public(), m)
        return page("statement.html.j2", m, _prefix(request), **values)

    @router.get("/statement.json")
    async def as_json(request: Request) -> Response:
        return _file(await _own(request), "application/json", "privacy-statement.json")

    @router.get("/statement.html")
    async def as_html(request: Request) -> Response:
        m = messages_for(request)
        values = _shown(await _own(request), await access.public(), m)
        text = _rendered("statement.html.j2", m, _prefix(request), inline=_STYLE, **values)
        return _file(text, "text/html", "privacy-statement.html")

    @router.post("/leave")
    async def leave(request: Request) -> Response:
        m, prefix = messages_for(request), _prefix(request)
        cookie = sessions.end(path=prefix or "/", secure=secure(request.scope))
        where = f"{prefix}/?lang={m.language}"
        return Response(status_code=303, headers={"location": where, "set-cookie": cookie})

    @router.get("/style.css")
    async def style() -> Response:
        return Response(_STYLE, media_type=_CSS)

    @router.get("/icon.svg")
    async def icon() -> Response:
        return Response(_ICON, media_type=_SVG)

    async def _own(request: Request) -> str:
        digest = sessions.digest(request.headers.get("cookie", ""))
        return await access.statement(request.scope, digest)

    return router


def _shown(body: str, public: str | None, m: Messages) -> dict[str, Any]:
    """The values of the statement's template."""
    found = json.loads(body)
    statement = found["statement"]
    statistics = json.loads(public)["statistics"] if public else {"quantiles": {}, "mean": None}
    return {
        "statement": statement,
        "journal": found["journal"],
        "figures": views.figures(statement, m),
        "scale": views.scale(statement, m),
        "width": views.WIDTH,
        "axis": (views.LEFT, views.RIGHT),
        "caveats": views.caveats(statement, m),
        "records": views.records(statement, m),
        "together": m.epsilon(statement["individual"]),
        "worst": m.epsilon(statement["worst_case"]),
        "published": views.published(statistics, statement["unit"], m),
    }


def _rendered(name: str, m: Messages, prefix: str, **values: Any) -> str:
    languages = [(known, texts("language.name")) for known, texts in catalogues().items()]
    given = {"inline": None, **values}
    return _TEMPLATES.get_template(name).render(m=m, prefix=prefix, languages=languages, **given)


def _file(text: str, media_type: str, name: str) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type=media_type, headers=headers)


def _prefix(request: Request) -> str:
    """The path under which a reverse proxy has the service; as it was started, never as asked."""
    return str(request.scope.get("root_path", ""))
