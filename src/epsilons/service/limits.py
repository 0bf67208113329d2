"""How often one token and one address may ask: a token bucket each, in bounded memory."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

_MOST = 65_536  # keys remembered at a time; the longest unused is forgotten first


@dataclass(frozen=True)
class Limits:
    """Requests per minute that are answered: for one token, known or not, and for one address.

    `per_token` (by default 30) and `per_address` (by default 120), both > 0, else ValueError. As
    many may come at once after a minute of silence. An IPv6 address is the /64 network that it is
    in, since whoever has one address there has them all.
    """

    per_token: float = 30.0
    per_address: float = 120.0

    def __post_init__(self) -> None:
        for name in ("per_token", "per_address"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name):g} answers nobody; expected > 0")


@dataclass
class Bucket:
    """What is left of each key: requests that may come now, and when that was so."""

    per_minute: float
    clock: Callable[[], float] = time.monotonic
    most: int = _MOST
    _left: OrderedDict[bytes, tuple[float, float]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._left)

    def wait(self, key: bytes) -> float:
        """Take one request of `key`; 0 if it may come, else the seconds until one may."""
        now, rate = self.clock(), self.per_minute / 60
        full = max(1.0, self.per_minute)
        left, since = self._left.get(key, (full, now))
        left = min(full, left + (now - since) * rate)
        allowed = left >= 1
        self._left[key] = (left - 1 if allowed else left, now)
        self._left.move_to_end(key)
        if len(self._left) > self.most:
            self._left.popitem(last=False)
        return 0.0 if allowed else (1 - left) / rate


def network(address: str) -> str:
    """The address as it is limited: IPv4 by itself, IPv6 by its /64; anything else as it is.

    >>> network("192.0.2.7"), network("2001:db8::1:2:3:4"), network("a socket")
    ('192.0.2.7', '2001:db8::', 'a socket')
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False).network_address)
    return str(found)
