import json
import logging
import re
import sys

from atlas_core.server.logs import JsonFormatter


def told(name, message, *arguments, **more):
    record = logging.LogRecord(name, logging.WARNING, "", 0, message, arguments, more.get("exc_info"))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    return found


def test_a_message():
    assert told("atlas.server", "two\nlines %d", 7) == {
        "level": "warning",
        "logger": "atlas.server",
        "message": "two\nlines 7",
    }


def test_a_request():
    found = told("atlas.request", "%s", '{"id":"r1","status":200}')
    assert found == {"level": "warning", "logger": "atlas.request", "id": "r1", "status": 200}
    assert told("atlas.request", "request r1 failed")["message"] == "request r1 failed"


def test_an_exception():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        found = told("atlas.request", "failed", exc_info=sys.exc_info())
    assert "ZeroDivisionError" in found["exception"]
