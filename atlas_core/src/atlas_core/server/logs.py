"""How the log is written: lines for people, or one JSON object a line for programs."""

import logging
import time

import msgspec

REQUESTS = "atlas.request"
"""The logger of requests, whose messages are JSON objects already where those are wanted."""


class JsonFormatter(logging.Formatter):
    """``time`` (UTC, RFC 3339), ``level``, ``logger``, and ``message`` or the members of a request; ``exception`` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        found = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        message = record.getMessage()
        if record.name == REQUESTS and message.startswith("{"):
            return msgspec.json.encode(found).decode()[:-1] + "," + message[1:]
        found["message"] = message
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(found).decode()


def configure(level: str, *, as_json: bool) -> None:
    """Set up the loggers ``atlas`` and ``uvicorn``: to standard error, and to nobody else."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else text)
    for name, least in (("atlas", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False
