"""The JSON API: the statement of the token's owner, and for everyone else the same refusal."""

import json
import logging

import pytest
import schemathesis
import sqlalchemy as sa
from folders import make_run, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import issued
from starlette.testclient import TestClient

from epsilons.release import owner_statement
from epsilons.service import Keys, Limits, Store, create_app, issue, refresh, revoke, rotate

STATEMENT = "/api/v1/statement"


def ask(client, token, path=STATEMENT):
    return client.get(path, headers={b"Authorization": f"Bearer {token}".encode("latin-1")})


@pytest.mark.parametrize("owner", ["household", "person-7"])
def test_a_token_opens_its_owners_statement(client, tokens, run, owner):
    answer = ask(client, tokens[owner])
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    found, expected = answer.json()["statement"], owner_statement(run, owner).to_dict()
    assert found.keys() == expected.keys()
    for name in ("individual", "worst_case", "training_worst_case"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-5)
    for mine, theirs in zip(found.pop("records"), expected.pop("records"), strict=True):
        assert mine.pop("id") == theirs.pop("id")
        assert mine == pytest.approx(theirs, rel=1e-5)
    found.pop("detection"), expected.pop("detection")
    assert found == expected
    anchor = json.loads((run.path / "public" / "anchor.json").read_bytes())
    assert answer.json()["journal"]["head"] == anchor["head"]


def test_unknown_revoked_expired_and_missing_tokens_are_answered_alike(
    client, store, keys, tokens, tmp_path
):
    rotate(store, keys, tmp_path / "soon.csv", owners=["person-3"], days=1e-6)
    revoke(store, owners=["person-4"])
    refused = [
        ask(client, token)
        for token in (
            "x" * 43, "\xff" * 9, "", tokens["person-3"], tokens["person-4"],
            tokens["person-5"][:-1], issued(tmp_path / "soon.csv")["person-3"],
        )
    ]  # fmt: skip
    refused.append(client.get(STATEMENT))
    refused.append(client.get(STATEMENT, headers={"Authorization": "Basic eDp5"}))
    first = refused[0]
    assert first.status_code == 401
    assert first.json() == {"detail": "no valid token"}
    for other in refused[1:]:
        assert (other.status_code, other.content) == (401, first.content)
        assert other.headers == first.headers


def test_everyone_may_know_what_is_public_and_nothing_else(client, run):
    answer = client.get("/api/v1/public")
    page = answer.json()
    assert page["anchor"] == json.loads((run.path / "public" / "anchor.json").read_bytes())
    assert page["plan"]["plan"] == json.loads(json.dumps(run.plan.to_dict()))
    assert page["statistics"]["quantiles"].keys() == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    for secret in ("person-1", "household", "id-00001"):
        assert secret not in answer.text


def test_health_says_whether_statements_are_there(client, run, tmp_path):
    assert client.get("/healthz").json() == {"status": "ok"}
    with Store.of_run(run, f"sqlite:///{tmp_path / 'empty.sqlite'}") as empty:
        app = create_app(empty, Keys.of_run(run))
        with TestClient(app) as fresh:
            assert fresh.get("/healthz").status_code == 503
            assert fresh.get("/api/v1/public").status_code == 503


@pytest.mark.parametrize("per", ["token", "address"])
def test_too_many_requests_are_told_when_to_come_again(store, keys, tokens, per):
    limits = Limits(**{"per_token": 1e9, "per_address": 1e9, f"per_{per}": 5})
    app = create_app(store, keys, limits=limits)
    with TestClient(app, client=("192.0.2.1", 1)) as limited:
        for token in (tokens["person-1"], "unknown"):
            answers = [ask(limited, token) for _ in range(6)]
            last = answers[-1]
            assert last.status_code == 429
            assert 1 <= int(last.headers["retry-after"]) <= 12
            first = 200 if token != "unknown" else 401
            assert answers[0].status_code == (first if per == "token" else answers[0].status_code)
        assert limited.get("/healthz").status_code == 200
    with TestClient(app, client=("192.0.2.2", 1)) as other:
        assert ask(other, tokens["person-2"]).status_code == 200


def test_statements_are_computed_again_when_the_run_has_changed(tmp_path):
    run = make_run(tmp_path / "run", n=60, taken=50)
    with Store.of_run(run) as store:
        assert refresh(run.path, store)
        assert not refresh(run.path, store)
        keys = Keys.of_run(run)
        issue(store, keys, tmp_path / "tokens.csv")
        token = issued(tmp_path / "tokens.csv")["id-00007"]
        with TestClient(create_app(store, keys)) as client:
            before = ask(client, token).json()["statement"]
            train(run, 50)
            assert refresh(run.path, store)
            after = ask(client, token).json()["statement"]
    assert (before["steps"], after["steps"]) == (50, 100)
    assert after["individual"] > before["individual"]


def test_a_run_that_was_tampered_with_is_not_served(tmp_path):
    run = make_run(tmp_path / "run", n=60)
    file = run.path / "public" / "plan.json"
    file.write_text(file.read_text().replace('"repeated_steps": 0', '"repeated_steps": 1'))
    with Store.of_run(run) as store, pytest.raises(ValueError, match="differs from the journal"):
        refresh(run.path, store)


def test_a_store_that_fails_is_503_and_its_error_is_not_shown(store, keys):
    app = create_app(store, keys)
    with pytest.MonkeyPatch.context() as patch, TestClient(app) as client:

        def fail(*_):
            raise sa.exc.OperationalError("SELECT of person-9", {}, Exception("password"))

        patch.setattr(store, "statement", fail)
        answer = ask(client, "x")
        assert answer.status_code == 503
        assert answer.json() == {"detail": "the store doesn't answer"}
        assert client.post("/statement", data={"token": "x"}).status_code == 503


def test_an_error_of_ours_shows_nothing_and_logs_no_message(store, keys, caplog):
    app = create_app(store, keys)
    client = TestClient(app, raise_server_exceptions=False)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "epsilons.service"):
        patch.setattr(store, "statement", lambda *_: 1 / 0)
        logging.getLogger("epsilons.service").propagate = True
        answer = ask(client, "secret-token")
    assert answer.status_code == 500
    assert answer.json() == {"detail": "something went wrong here; try again later"}
    assert "secret-token" not in caplog.text


def test_openapi_describes_every_field_of_a_statement(client, tokens):
    schema = client.get("/api/v1/openapi.json").json()
    assert set(schema["paths"]) == {STATEMENT, "/api/v1/public", "/healthz"}
    described = schema["components"]["schemas"]["Statement"]["properties"]
    assert set(described) == set(ask(client, tokens["person-1"]).json()["statement"])


def test_schemathesis_finds_no_answer_outside_the_schema(store, keys, tokens):
    app = create_app(store, keys, limits=Limits(1e9, 1e9))
    api = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app)
    seen = set()
    for found in api.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy(), token=st.sampled_from([tokens["person-1"], "x", None]))
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case, token):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            seen.add((case.path, case.call_and_validate(headers=headers).status_code))

        check()
    assert {(STATEMENT, 200), (STATEMENT, 401), ("/api/v1/public", 200), ("/healthz", 200)} == seen
