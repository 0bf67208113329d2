"""What strangers send: other people's tokens, paths, SQL, headers, floods, guesses, and a clock."""

import http.client
import json
import secrets
import socket
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from served import Service, issued

from epsilons.service import Keys, Store, issue, refresh, rotate
from epsilons.service.guard import MOST_BYTES
from epsilons.service.server import REQUEST_SECONDS

STATEMENT = "/api/v1/statement"
INJECTIONS = (
    "' OR '1'='1", "'; DROP TABLE epsilons_token; --", '" OR ""="', "\\x00", "%00", "%27%20OR%201",
    "x' UNION SELECT digest, owner FROM epsilons_token --", "{{7*7}}", "${7*7}", "\u202e\u0000",
)  # fmt: skip
PATHS = (
    "/../../private/service.key", "/%2e%2e/%2e%2e/private/journal.sqlite", "/static/../etc/passwd",
    "//etc/passwd", "/statement/..%2f..%2fservice.key", "/style.css/../icon.svg%00.py",
    "/..\\..\\private", "/statement.json/../../x", "/.git/config", "/public/plan.json",
)  # fmt: skip


def raw(port, request, seconds=10):
    """What the server answers to these bytes, until it closes or goes silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as stream:
        stream.sendall(request)
        answer = b""
        try:
            while part := stream.recv(65536):
                answer += part
        except (TimeoutError, ConnectionResetError):
            pass
        return answer


def test_nobodys_token_opens_another_ones_statement(client, tokens):
    for mine, other in (("person-1", "person-2"), ("household", "person-1")):
        for headers, path in (
            ({"Authorization": f"Bearer {tokens[mine]}"}, f"{STATEMENT}?owner={other}"),
            ({"Authorization": f"Bearer {tokens[mine]}", "X-Owner": other}, STATEMENT),
            ({"Authorization": f"Bearer {tokens[mine]}, Bearer {tokens[other]}"}, STATEMENT),
            ({"Authorization": f"Bearer {tokens[mine]} {tokens[other]}"}, STATEMENT),
        ):
            answer = client.get(path, headers=headers)
            assert f'"{other}"' not in answer.text


def test_a_token_in_the_url_opens_nothing(client, tokens):
    token = tokens["person-1"]
    for path in (f"{STATEMENT}?token={token}", f"/statement?token={token}", f"/?token={token}"):
        assert "person-1" not in client.get(path).text
    assert client.post(f"/statement?token={token}").status_code == 401


@pytest.mark.parametrize("wrong", INJECTIONS)
def test_injected_sql_and_templates_are_unknown_tokens(client, store, wrong):
    count = len(store.owners())
    header = {b"Authorization": b"Bearer " + wrong.replace("\0", "").encode()}
    assert client.get(STATEMENT, headers=header).status_code == 401
    answer = client.post(f"/statement?lang={wrong.replace(chr(0), '')}", data={"token": wrong})
    assert answer.status_code == 401
    assert wrong not in answer.text
    assert "49" not in answer.text
    assert len(store.owners()) == count


@given(junk=st.binary(max_size=300))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_as_form_cookie_or_token_are_refused_in_order(client, junk):
    assert client.post("/statement", content=junk).status_code == 401
    clean = junk.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b"")
    for name in (b"cookie", b"authorization", b"accept-language"):
        answer = client.get(STATEMENT, headers={name: b"epsilons_session=" + clean})
        assert answer.status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_paths_lead_nowhere(live, path):
    answer = raw(live.port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), answer[:100]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\nSet-Cookie: b\r\nConnection: close\r\n\r\n",
        b"GET /?lang=%0d%0aSet-Cookie:%20x=y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: evil.example\r\n"
        b"X-Forwarded-Prefix: /evil\r\nConnection: close\r\n\r\n",
        b"POST /leave?lang=%0d%0aX-Evil:1 HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n"
        b"Connection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /statement HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nx=y",
        b"POST /statement HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_headers_are_not_injected(live, request_bytes):
    answer = raw(live.port, request_bytes, seconds=2).lower()
    head = answer.partition(b"\r\n\r\n")[0]
    assert b"set-cookie: b" not in head
    assert b"set-cookie: x" not in head
    assert b"x-evil" not in head
    assert b"evil" not in answer
    assert b"traceback" not in answer


def test_oversized_requests_are_refused_and_not_kept(live):
    large = b"x" * 10_000_000
    announced = b"POST /statement HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(large)
    assert raw(live.port, announced).startswith(b"HTTP/1.1 413")
    chunked = b"POST /statement HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    some = b"%x\r\n" % (MOST_BYTES + 1) + b"x" * (MOST_BYTES + 1) + b"\r\n"
    assert raw(live.port, chunked + some, seconds=3).startswith(b"HTTP/1.1 413")
    header = b"GET / HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 100_000
    assert raw(live.port, header, seconds=3).startswith((b"HTTP/1.1 400", b""))
    assert b"200 OK" in raw(
        live.port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )


def test_slow_requests_are_given_up_while_others_are_answered(live):
    starts = (
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /statement HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
        b"",
    )
    slow = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(60)]
    begun = time.monotonic()
    for k, stream in enumerate(slow):
        stream.sendall(starts[k % 3])
    closed = set()
    while len(closed) < len(slow) and time.monotonic() < begun + 4 * REQUEST_SECONDS:
        for k, stream in enumerate(slow):
            if k not in closed:
                try:
                    stream.settimeout(0.01)
                    if k % 3 < 2:
                        stream.sendall(b"x")
                    if stream.recv(9999) == b"":
                        closed.add(k)
                except TimeoutError:
                    pass
                except OSError:
                    closed.add(k)
        answer = raw(live.port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
    for stream in slow:
        stream.close()
    assert len(closed) == len(slow)


def test_logs_have_no_token_no_owner_no_address_and_no_epsilon(live):
    token = live.tokens["person-11"]
    for request in (
        f"GET {STATEMENT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n",
        f"GET /{token}?token={token} HTTP/1.1\r\nHost: x\r\nReferer: http://x/{token}\r\n",
        f"POST /statement?{token} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(token) + 6}\r\n",
        f"BAD{token[:9]} / HTTP/1.1\r\nHost: x\r\nUser-Agent: {token}\r\n",
    ):
        body = f"token={token}" if request.startswith("POST") else ""
        raw(live.port, f"{request}Connection: close\r\n\r\n{body}".encode())
    text = live.log_file.read_text(encoding="utf-8")
    assert token not in text
    assert token[:9] not in text
    assert "person-11" not in text
    requests = live.events("request")
    assert len(requests) >= 4
    fields = {"time", "level", "event", "method", "route", "status", "ms", "client"}
    for line in requests:
        assert set(line) == fields
        assert "127.0.0.1" not in json.dumps(line)
    assert {line["method"] for line in requests} >= {"OTHER"}


def ask(connection, token):
    """The status of one request for a statement, on a kept connection."""
    connection.request("GET", STATEMENT, headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.slow
def test_a_hundred_thousand_guesses_find_nothing(live):
    statuses = []

    def guess(count):
        with closing(http.client.HTTPConnection("127.0.0.1", live.port)) as connection:
            statuses.extend(ask(connection, secrets.token_urlsafe(32)) for _ in range(count))

    guessing = [threading.Thread(target=guess, args=(25_000,)) for _ in range(4)]
    for thread in guessing:
        thread.start()
    for thread in guessing:
        thread.join()
    assert statuses == [401] * 100_000


@pytest.mark.slow
def test_limits_answer_a_hundred_guesses_of_ten_thousand(run, tmp_path):
    with Service(
        run.path, tmp_path, "--store", f"sqlite:///{tmp_path / 's'}", limits=()
    ) as service:
        begun = time.monotonic()
        with closing(http.client.HTTPConnection("127.0.0.1", service.port)) as connection:
            statuses = [ask(connection, secrets.token_urlsafe(32)) for _ in range(10_000)]
        minutes = (time.monotonic() - begun) / 60
    assert set(statuses) == {401, 429}
    assert statuses.count(401) <= 120 * (1 + minutes) + 1


@pytest.mark.slow
def test_the_time_of_a_refusal_does_not_tell_why(run, tmp_path):
    """Unknown, revoked, expired: a correct service fails one in a thousand times."""
    where = f"sqlite:///{tmp_path / 'store.sqlite'}"
    keys = Keys.of_run(run)
    with Store.of_run(run, where) as store:
        refresh(run.path, store)
        issue(store, keys, tmp_path / "revoked.csv")
        rotate(store, keys, tmp_path / "expired.csv", days=1e-6)
    some = {
        name: list(issued(tmp_path / f"{name}.csv").values()) for name in ("revoked", "expired")
    }
    some["unknown"] = [secrets.token_urlsafe(32) for _ in some["revoked"]]
    times = {name: [] for name in some}
    rng = np.random.default_rng(1)
    with (
        Service(run.path, tmp_path, "--store", where) as service,
        closing(http.client.HTTPConnection("127.0.0.1", service.port)) as connection,
    ):
        for k in range(4000):
            for name in rng.permutation(sorted(some)):  # others use this machine too
                begun = time.perf_counter()
                assert ask(connection, some[name][k % len(some[name])]) == 401
                times[name].append(time.perf_counter() - begun)
    for name in ("revoked", "expired"):
        assert mannwhitneyu(times[name], times["unknown"]).pvalue > 0.0005
