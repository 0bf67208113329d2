"""The pages: the statement in words, in every language, and nothing that runs or is fetched."""

import re
import string
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from served import MARKUP, issued
from starlette.testclient import TestClient

import epsilons.service
from epsilons import Examples, Plan, Run
from epsilons.accounting.printed import epsilon_text
from epsilons.release import owner_statement
from epsilons.report.dossier import FORMATS, dossier, read_facts
from epsilons.service import (
    Keys,
    Limits,
    Store,
    create_app,
    issue,
    refresh,
    revoke,
    views,
)
from epsilons.service.catalogue import catalogues, chosen
from epsilons.service.sessions import COOKIE, SECONDS

FOLDER = Path(epsilons.service.__file__).parent
ROUTES = (
    "/", "/statement", "/statement.json", "/statement.html", "/style.css", "/icon.svg", "/healthz",
    "/api/v1/statement", "/api/v1/public", "/api/v1/openapi.json", "/nothing", "/statement/../..",
)  # fmt: skip


def enter(client, token, lang="en"):
    """Post the token, and open what it leads to."""
    client.cookies.clear()
    found = client.post(f"/statement?lang={lang}", data={"token": token})
    assert found.status_code == 303, found.text
    return client.get(found.headers["location"])


def shown(page):
    """The text of a page."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


@pytest.mark.parametrize("owner", ["household", "person-7"])
def test_the_page_shows_the_owners_figures_rounded_up(client, tokens, run, owner):
    text = shown(enter(client, tokens[owner]).text)
    statement = owner_statement(run, owner)
    assert f"For {owner} alone." in text
    assert f"ε = {epsilon_text(statement.worst_case)}" in text
    assert f"ε = {epsilon_text(statement.individual)}" in text
    for record in statement.records:
        assert f"{record.id} {epsilon_text(record.training_epsilon)}" in text
    assert ("All together" in text) == (owner == "household")
    assert "50 % of all records are below" in text


def test_an_owners_name_is_text_and_never_markup(client, tokens):
    page = enter(client, tokens[MARKUP]).text
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_same_page_in_german(client, tokens):
    text = shown(enter(client, tokens["household"], lang="de").text)
    assert "Nur für household." in text
    assert re.search(r"ε = \d,\d{3}", text)
    assert not re.search(r"\d\.\d", text.replace("i.e.", ""))


def test_the_language_is_the_browsers_unless_asked_for():
    assert chosen(None, "de-AT,de;q=0.9,en;q=0.8").language == "de"
    assert chosen("en", "de").language == "en"
    assert chosen("../../etc", "fr, *;q=0.1").language == "en"


def placeholders(text):
    return sorted({name for _, name, _, _ in string.Formatter().parse(text) if name is not None})


def test_every_language_has_the_same_messages_with_the_same_placeholders():
    english = catalogues()["en"].texts
    others = [m.texts for m in catalogues().values() if m.language != "en"]
    assert others
    for other in others:
        assert other.keys() == english.keys()
        for key, text in english.items():
            assert placeholders(other[key]) == placeholders(text), key


def test_every_message_is_used_and_every_used_one_is_there():
    sources = "".join(
        file.read_text("utf-8") for file in FOLDER.rglob("*") if file.suffix in (".py", ".j2")
    )
    literal = set(re.findall(r'"([a-z_]+\.[a-z_0-9]+)"', sources))
    made = {f"{name}.{part}" for name in ("individual", "promised", "worst_case")
            for part in ("label", "says", "nothing")}  # fmt: skip
    made |= {f"kind.{kind}" for kind in ("exact", "bound", "estimate", "none")}
    keys = set(catalogues()["en"].texts)
    assert keys - literal - made == set()
    assert made <= keys


POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
EXPECTED = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Page(HTMLParser):
    """What in a page could run, load, or style without the style sheet."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name.startswith("on") or name == "style":
                self.found.append((tag, name))
            if name in ("src", "href", "action") and re.match(r"[a-z]+:|//", value or ""):
                self.found.append((tag, value))
        if tag in ("script", "iframe", "object", "embed", "base", "img", "style"):
            self.found.append(tag)


def test_pages_run_nothing_and_load_nothing_from_elsewhere(client, tokens):
    assert Page(client.get("/").text).found == []
    assert Page(enter(client, tokens["household"]).text).found == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD"])
def test_every_answer_has_every_header(client, route, method):
    answer = client.request(method, route)
    for name, value in EXPECTED.items():
        assert answer.headers[name] == value
    assert "camera=()" in answer.headers["permissions-policy"]
    assert "server" not in answer.headers


def test_downloads_are_the_owners_and_complete(client, tokens):
    enter(client, tokens["household"])
    as_json = client.get("/statement.json")
    assert as_json.headers["content-disposition"].startswith("attachment")
    assert as_json.json()["statement"]["owner"] == "household"
    as_html = client.get("/statement.html")
    assert as_html.headers["content-disposition"].startswith("attachment")
    assert "stylesheet" not in as_html.text
    assert "<form" not in as_html.text
    assert "household" in as_html.text


def test_without_a_session_there_is_no_statement(client, tokens):
    enter(client, tokens["household"])
    good = client.cookies[COOKIE]
    for cookie in ("", "x", good[:-4] + "AAAA", good + "; other=1"):
        client.cookies.clear()
        client.cookies.set(COOKIE, cookie)
        for path in ("/statement", "/statement.json", "/statement.html"):
            answer = client.get(path)
            if cookie.startswith(good):
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401
                assert "household" not in answer.text


def test_a_session_ends_by_itself_by_leaving_and_with_its_token(client, store, tokens, monkeypatch):
    enter(client, tokens["person-8"])
    ended = client.post("/leave").headers["set-cookie"]
    assert f"{COOKIE}=;" in ended
    assert "Max-Age=0" in ended
    enter(client, tokens["person-8"])
    kept = {"cookie": f"{COOKIE}={client.cookies[COOKIE]}"}
    client.cookies.clear()
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + SECONDS + 5)
        assert client.get("/statement", headers=kept).status_code == 401
    assert client.get("/statement", headers=kept).status_code == 200
    revoke(store, owners=["person-8"])
    assert client.get("/statement", headers=kept).status_code == 401


def test_the_cookie_is_for_this_page_alone_and_secure_under_tls(store, keys, tokens):
    for base, secure in (("http://testserver", False), ("https://testserver", True)):
        app = create_app(store, keys)
        with TestClient(app, base_url=base, follow_redirects=False) as client:
            answer = client.post("/statement", data={"token": tokens["person-9"]})
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={SECONDS}"} <= set(
            cookie.split("; ")
        )
        assert ("Secure" in cookie) == secure
        assert ("strict-transport-security" in answer.headers) == secure


def test_behind_a_proxy_every_link_has_its_path(store, keys, tokens):
    app = create_app(store, keys, limits=Limits(1e9, 1e9))
    with TestClient(app, root_path="/privacy", follow_redirects=False) as client:
        answer = client.post("/privacy/statement", data={"token": tokens["person-9"]})
        assert answer.headers["location"].startswith("/privacy/statement?")
        assert "Path=/privacy;" in answer.headers["set-cookie"]
        page = client.get("/privacy/").text
    assert 'href="/privacy/style.css"' in page
    assert 'action="/privacy/statement?lang=en"' in page


def test_a_form_on_someone_elses_page_is_refused(client, tokens):
    data = {"token": tokens["person-9"]}
    for site, status in (("cross-site", 401), ("same-site", 401), ("same-origin", 303)):
        answer = client.post("/statement", data=data, headers={"Sec-Fetch-Site": site})
        assert answer.status_code == status


def statement(**changes):
    return {
        "individual": 0.2, "worst_case": 2.0, "delta": 1e-5, "kind": "exact", "per": "record",
        "randomness": {"secret": True}, "sums_covered": True, "steps": 10, "planned_steps": None,
        "repeated_steps": 0, "releases": 0, "date": "2026-01-01", "promised": None,
    } | changes  # fmt: skip


def test_a_promised_value_stands_between_the_others_where_there_is_one():
    m = catalogues()["en"]
    names = [figure.name for figure in views.figures(statement(promised=1.0), m)]
    assert names == ["individual", "promised", "worst_case"]
    marks = {mark.name: mark.x for mark in views.scale(statement(promised=1.0), m).marks}
    assert marks["individual"] < marks["promised"] < marks["worst_case"]
    assert [figure.name for figure in views.figures(statement(), m)] == ["individual", "worst_case"]


def test_a_guarantee_without_meaning_is_called_that():
    m = catalogues()["en"]
    for worst in (None, 9.0):
        says = views.figures(statement(worst_case=worst), m)[-1].says
        assert "no meaningful guarantee" in says
        assert "%" not in says
    assert views.scale(statement(individual=None, worst_case=None), m) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "estimate"}, "are estimates"),
        ({"per": "person"}, "per person"),
        ({"randomness": {"secret": False}}, "not secret"),
        ({"sums_covered": False}, "Rounding of floating-point sums is not covered"),
        ({"repeated_steps": 3}, "10 steps and 3 that were repeated"),
    ],
)
def test_what_weakens_the_figures_is_said(change, said):
    m = catalogues()["en"]
    assert said in " ".join(views.caveats(statement(**change), m))
    assert said not in " ".join(views.caveats(statement(), m))


@pytest.mark.parametrize("largest", [0.0, 1e-7, 0.03, 0.5, 1.0, 2.0001, 9.99, 123.0, 4e5])
def test_every_scale_holds_its_largest_value_in_at_most_six_steps(largest):
    found = views.scale(statement(individual=0.0, worst_case=largest), catalogues()["en"])
    assert 2 <= len(found.ticks) <= 7
    assert len({tick.text for tick in found.ticks}) == len(found.ticks)
    place = found.marks[-1].x
    assert views.LEFT <= place <= views.RIGHT
    if largest:
        assert place > views.LEFT + (views.RIGHT - views.LEFT) / 3


def test_where_a_person_is_the_unit_the_page_speaks_of_persons(tmp_path):
    plan = Plan(
        n=60, batch_size=6, steps=10, noise_multiplier=2.0, max_grad_norm=1.0, delta=1e-5,
        refresh_every=10, unit="owner", max_records_per_owner=4,
    )  # fmt: skip
    run = Run.create(tmp_path / "run", plan, Examples(ids=[f"person-{k}" for k in range(60)]))
    run.journal.record(0, [0.5] * 60)
    run.journal.charge(0, 9)
    with Store.of_run(run) as opened:
        refresh(run.path, opened)
        issue(opened, Keys.of_run(run), tmp_path / "tokens.csv")
        with TestClient(create_app(opened, Keys.of_run(run))) as client:
            token = issued(tmp_path / "tokens.csv")["person-3"]
            text = shown(client.post("/statement", data={"token": token}).text)
    assert "all your records as one" in text
    assert "They are per person" in text
    assert "Record " not in text
    facts = read_facts(run.path)
    for name in FORMATS:
        paper = re.sub(r"\s+", " ", dossier(facts, name))
        assert "all records of one person added or removed" in paper or name == "nist"
        assert "of the records" not in paper
        assert "one training record" not in paper
