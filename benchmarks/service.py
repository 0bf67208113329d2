"""How many statements per second the owners' page answers, how fast, and in how much memory.

    python benchmarks/service.py [--seconds 300] [--rate 500] [--store postgresql://…]

A service of its own process on loopback is asked by this process over kept connections: first as
fast as it answers, then at a fixed rate, by a clock that doesn't wait for slow answers (a request's
time counts from when it was due). On a machine that others use, the figures are theirs too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [
    str(Path(__file__).parent.parent / "tests" / room) for room in ("service", "release")
]

from folders import make_run  # noqa: E402
from served import Service, issued  # noqa: E402

from epsilons.service import Keys, Store, issue, refresh, rotate  # noqa: E402

OWNERS = 3000
CONNECTIONS = 8


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def statement(self, token: str) -> None:
        lines = (
            "GET /api/v1/statement HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {token}",
            "",
            "",
        )
        self._writer.write("\r\n".join(lines).encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None
        await self._reader.readexactly(int(found[1]))


async def as_fast_as_it_goes(port: int, tokens: list[str], seconds: float) -> float:
    """Answers per second, of as many connections as `CONNECTIONS` in a closed loop."""
    end, count = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal count
        async with Client(port) as client:
            while time.perf_counter() < end:
                await client.statement(random.choice(tokens))
                count += 1

    begun = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))
    return count / (time.perf_counter() - begun)


async def at_a_rate(port: int, tokens: list[str], rate: float, seconds: float) -> list[float]:
    """The seconds of every answer, counted from when its request was due."""
    begun, times = time.perf_counter(), []

    async def ask(which: int) -> None:
        async with Client(port) as client:
            for k in range(which, int(rate * seconds), 4 * CONNECTIONS):
                due = begun + k / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await client.statement(random.choice(tokens))
                times.append(time.perf_counter() - due)

    await asyncio.gather(*(ask(which) for which in range(4 * CONNECTIONS)))
    return times


def megabytes(process: int) -> float:
    """Resident memory, on Linux."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(process: int) -> float:
    """Time on processors, on Linux: other programs on the machine hardly change it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--store", help="URL of an empty database [a SQLite file]")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = make_run(folder / "run", n=OWNERS)
        where = asked.store or f"sqlite:///{folder / 'store.sqlite'}"
        with Store.of_run(run, where) as store:
            begun = time.perf_counter()
            refresh(run.path, store)
            computed = time.perf_counter() - begun
            give = rotate if store.holders(int(time.time())) else issue
            give(store, Keys.of_run(run), folder / "tokens.csv")
        tokens = list(issued(folder / "tokens.csv").values())
        with Service(run.path, folder, "--store", where) as service:
            fastest = asyncio.run(as_fast_as_it_goes(service.port, tokens, min(20, asked.seconds)))
            memory, times = [megabytes(service.process.pid)], []
            before = cpu_seconds(service.process.pid)
            for _ in range(10):
                part = asked.seconds / 10
                times += asyncio.run(at_a_rate(service.port, tokens, asked.rate, part))
                memory.append(megabytes(service.process.pid))
            used = cpu_seconds(service.process.pid) - before
    figures = {
        "store": where.split(":")[0],
        "load of the machine": os.getloadavg()[0],
        "statements computed per second": round(OWNERS / computed, 1),
        "most answers per second": round(fastest, 1),
        "asked per second": asked.rate,
        "answered per second": round(len(times) / asked.seconds, 1),
        "milliseconds": {
            f"p{q:g}": round(1000 * float(np.percentile(times, q)), 2) for q in (50, 90, 99, 99.9)
        },
        "milliseconds of processor per answer": round(1000 * used / len(times), 3),
        "megabytes": [round(value, 1) for value in memory],
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
