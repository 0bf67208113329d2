"""Sessions: a cookie that stands for a token for some minutes.

It holds the token's keyed hash and an end, encrypted and authenticated; the service remembers
nothing. A token that is revoked ends its sessions, since every request looks the hash up.
"""

from __future__ import annotations

import base64
from http.cookies import CookieError, SimpleCookie

from cryptography.fernet import Fernet, InvalidToken

from epsilons.service.tokens import Keys

COOKIE = "epsilons_session"
SECONDS = 900


class Sessions:
    """Cookies made and read with the service's keys."""

    def __init__(self, keys: Keys) -> None:
        self._fernet = Fernet(base64.urlsafe_b64encode(keys.sessions))

    def begin(self, digest: bytes, *, path: str, secure: bool) -> str:
        """The header that starts a session of the token with this digest."""
        value = self._fernet.encrypt(digest).decode()
        return _header(value, SECONDS, path, secure)

    def end(self, *, path: str, secure: bool) -> str:
        """The header that ends it."""
        return _header("", 0, path, secure)

    def digest(self, cookies: str) -> bytes | None:
        """The digest of the token that a request's cookies stand for; None if they don't."""
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
            if morsel is None:
                return None
            return self._fernet.decrypt(morsel.value.encode(), ttl=SECONDS)
        except (CookieError, InvalidToken, UnicodeError):
            return None


def _header(value: str, seconds: int, path: str, secure: bool) -> str:
    flags = "; Secure" if secure else ""
    return f"{COOKIE}={value}; Max-Age={seconds}; Path={path}; HttpOnly; SameSite=Strict{flags}"
