"""A service in a process of its own, as `epsilons serve` starts it."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

MARKUP = 'Müller <script>alert("ε")</script>'  # an owner's name
UNLIMITED = ("--per-token", "1e9", "--per-address", "1e9")


def issued(file):
    """The token of every owner in a file that `epsilons tokens` wrote."""
    with Path(file).open(encoding="utf-8", newline="") as rows:
        return {row["owner"]: row["token"] for row in csv.DictReader(rows)}


class Service:
    """`epsilons serve RUN` on any free port, until the block ends; its log is in `folder`."""

    def __init__(self, run, folder, *options, limits=UNLIMITED):
        self.log_file = Path(folder) / "service.log"
        self._command = [
            sys.executable, "-m", "epsilons", "serve", str(run), "--port", "0", *limits, *options,
        ]  # fmt: skip

    def __enter__(self):
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(self._command, stderr=log, stdout=log)
        deadline = time.monotonic() + 120
        while not (found := self.events("listening")):
            assert self.process.poll() is None, self.log_file.read_text()
            assert time.monotonic() < deadline, self.log_file.read_text()
            time.sleep(0.05)
        self.url = found[0]["url"]
        self.port = int(self.url.split(":")[2].split("/")[0])
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop()

    def stop(self, number=signal.SIGTERM):
        """End it by a signal; its exit code comes back."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def events(self, name=None):
        """The lines of its log, as far as they are complete."""
        lines = [
            json.loads(line)
            for line in self.log_file.read_text(encoding="utf-8").splitlines(keepends=True)
            if line.startswith("{") and line.endswith("\n")
        ]
        return [line for line in lines if name is None or line["event"] == name]
