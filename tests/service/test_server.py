"""The server as it is started: its end, its crash, TLS, metrics, and options that don't fit."""

import datetime
import http.client
import inspect
import json
import re
import signal
import socket
import ssl
import threading
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from served import Service, issued

from epsilons.cli.serve import serve as verb_of_cli
from epsilons.service import Keys, Store, issue, refresh, revoke, serve

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def stored(run, tmp_path):
    """URL of a store with statements and tokens, and the tokens."""
    where = f"sqlite:///{tmp_path / 'store.sqlite'}"
    with Store.of_run(run, where) as opened:
        refresh(run.path, opened)
        issue(opened, Keys.of_run(run), tmp_path / "tokens.csv")
    return where, issued(tmp_path / "tokens.csv")


def get(url, token=None, context=None):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return answer.read().decode()


def test_killed_at_any_moment_it_loses_nothing(run, stored, tmp_path):
    where, tokens = stored
    with Service(run.path, tmp_path, "--store", where) as service:
        before = {
            o: get(f"{service.url}/api/v1/statement", tokens[o]) for o in ("household", "person-1")
        }
        ended = threading.Event()

        def ask():
            while not ended.is_set():
                try:
                    get(f"{service.url}/api/v1/statement", tokens["person-2"])
                except (OSError, http.client.HTTPException):
                    return

        asking = threading.Thread(target=ask)
        asking.start()
        with Store.of_run(run, where) as store:
            revoke(store, owners=["person-3"])  # while it answers
        assert service.stop(signal.SIGKILL) == -signal.SIGKILL
        ended.set()
        asking.join()
    with Service(run.path, tmp_path, "--store", where) as service:
        after = {o: get(f"{service.url}/api/v1/statement", tokens[o]) for o in before}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{service.url}/api/v1/statement", tokens["person-3"])
    assert after == before


def test_sigterm_ends_it_after_the_answers_that_are_under_way(run, stored, tmp_path):
    where, tokens = stored
    with Service(run.path, tmp_path, "--store", where) as service:
        body = f"token={tokens['person-1']}"
        with socket.create_connection(("127.0.0.1", service.port)) as half:
            half.sendall(
                b"POST /statement HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            time.sleep(0.3)
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            half.sendall(body.encode())
            assert half.recv(9999).startswith(b"HTTP/1.1 303")
        assert service.process.wait(30) == 0
    assert service.events("stopped")


def test_tls_metrics_and_a_path_behind_a_proxy(run, stored, tmp_path):
    where, tokens = stored
    certificate(tmp_path)
    port = free_port()
    with Service(
        run.path, tmp_path, "--store", where, "--metrics-port", str(port),
        "--root-path", "/privacy", "--tls-cert", str(tmp_path / "cert.pem"),
        "--tls-key", str(tmp_path / "key.pem"),
    ) as service:  # fmt: skip
        at = f"https://localhost:{service.port}"
        trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        assert "household" in get(f"{at}/api/v1/statement", tokens["household"], trusted)
        assert 'href="/privacy/style.css"' in get(at, context=trusted)
        metrics = get(f"http://127.0.0.1:{port}/metrics")
    assert re.search(
        r'epsilons_requests_total\{method="GET",route="/api/v1/statement",status="200"\} 1\.0',
        metrics,
    )
    assert "household" not in metrics


def test_a_port_that_is_taken_is_an_error_in_one_sentence(live, tmp_path, run):
    taken = Service(run.path, tmp_path, "--port", str(live.port))
    with pytest.raises(AssertionError), taken:
        pass
    assert taken.process.wait(30) == 2
    assert "is the port taken?" in taken.log_file.read_text()
    assert "Traceback" not in taken.log_file.read_text()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tls_cert": "cert.pem"}, "belong together"),
        ({"root_path": "privacy"}, "must begin with /"),
        ({"root_path": "/privacy/"}, "must begin with /"),
    ],
)
def test_options_that_do_not_fit_are_refused(run, options, error):
    with pytest.raises(ValueError, match=error):
        serve(run.path, **options)


def test_the_container_file_installs_and_starts_what_there_is():
    text = (ROOT / "examples" / "Containerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert re.search(r"'/source\[(\w+)\]'", text)[1] in project["optional-dependencies"]
    program, verb, folder, *options = json.loads(re.search(r"ENTRYPOINT (.*)", text)[1])
    assert program in project["scripts"]
    assert (verb, folder) == ("serve", "/run-folder")
    known = inspect.signature(verb_of_cli).parameters
    assert {name.removeprefix("--") for name in options[::2]} <= set(known)
    for source in re.search(r"COPY (.*) /source/\n", text)[1].split():
        assert (ROOT / source).is_file()
    assert re.search(r"USER (?!root)", text)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def certificate(folder):
    """A certificate for localhost that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    found = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(found.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
