"""Structured logs: one JSON object per line, without tokens, addresses or ε's.

A request is logged by its route, not by its path: whoever puts a token into a URL by mistake is
not logged with it. Errors are logged by type and place: a message may hold values.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

LOGGER = logging.getLogger("epsilons.service")


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, event, and the fields that were given."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            places = traceback.extract_tb(error.__traceback__)
            line["error"] = type(error).__name__
            line["at"] = [f"{place.name}:{place.lineno}" for place in places[-6:]]
        return json.dumps(line, ensure_ascii=False)


def log_to(stream: TextIO = sys.stderr) -> None:
    """Send what the service and its server have to say to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name in (LOGGER.name, "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def say(event: str, *, level: int = logging.INFO, error: BaseException | None = None,
        **fields: object) -> None:  # fmt: skip
    """Log an event with its fields."""
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)
