"""A statement of a run, signed with Ed25519: who has the public key can check who says it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from epsilons.report.dossier.facts import Facts
from epsilons.report.dossier.papers import claims

# What is signed begins with this, so that no signature made for something else fits.
_PURPOSE = b"epsilons run statement 1\n"
_MAKE = "openssl genpkey -algorithm ed25519 -out KEY.pem"


def sign(facts: Facts, key: str | os.PathLike[str]) -> str:
    """The statement of the run of `facts`, signed with the private key in the PEM file `key`.

    JSON: `"statement"`, and `"signature"` with the public key. ValueError for a file that is no
    Ed25519 key, is locked by a password, or can be read by others.
    """
    private = _private_key(Path(key))
    statement = claims(facts)
    public = private.public_key().public_bytes_raw()
    page = {
        "statement": statement,
        "signature": {
            "algorithm": "Ed25519",
            "public_key": base64.b64encode(public).decode(),
            "value": base64.b64encode(private.sign(_signed_bytes(statement))).decode(),
        },
    }
    return json.dumps(page, indent=2, ensure_ascii=False) + "\n"


def check_signed(
    file: str | os.PathLike[str],
    public_key: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The statement in `file`, if it was signed with the private half of `public_key`, a PEM file.

    `run`: a run folder, or a copy of its public half, whose files must be those that were signed.
    ValueError if the signature is another one's, or anything was changed.
    """
    public = _public_key(Path(public_key))
    try:
        page = json.loads(Path(file).read_text(encoding="utf-8"))
        statement, signature = page["statement"], page["signature"]
        value = base64.b64decode(signature["value"], validate=True)
        if set(page) != {"statement", "signature"} or signature["algorithm"] != "Ed25519":
            raise ValueError("it has other parts than a statement and an Ed25519 signature")
        message = _signed_bytes(statement)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no signed statement: {error!r}") from error
    try:
        public.verify(value, message)
    except InvalidSignature:
        raise ValueError(
            f"{file} was not signed with this key, or was changed since: nothing in it can be "
            "trusted"
        ) from None
    if run is not None:
        _expect_files(statement["files"], Path(run) / "public")
    found: dict[str, Any] = statement
    return found


def _signed_bytes(statement: dict[str, Any]) -> bytes:
    """One text for one statement, however its JSON is laid out."""
    text = json.dumps(statement, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _PURPOSE + text.encode("ascii")


def _expect_files(signed: dict[str, str], folder: Path) -> None:
    for name, digest in signed.items():
        file = folder / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise ValueError(
                f"{file} is not the file that the statement is about: it was changed since, or is "
                "another run's"
            )


def _private_key(file: Path) -> Ed25519PrivateKey:
    content = file.read_bytes()
    if os.name == "posix" and file.stat().st_mode & 0o077:
        raise ValueError(f"{file} can be read by others than its owner; chmod 600 {file}")
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError:
        raise ValueError(f"{file} is locked by a password; give a key without one") from None
    except ValueError:
        raise ValueError(f"{file} is no private key in PEM; make one by {_MAKE}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{file} is no Ed25519 key; make one by {_MAKE}")
    return key


def _public_key(file: Path) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(file.read_bytes())
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(
            f"{file} is no public Ed25519 key in PEM; the signer makes it by openssl pkey -in "
            "KEY.pem -pubout -out PUBLIC.pem"
        )
    return key
