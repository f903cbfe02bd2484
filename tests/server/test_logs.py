"""Log lines: one an event whatever is in it, readable by machines when asked, and no probes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from server.logs import LogFormat, configure, log_request


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def fail() -> None:
    raise ValueError("two\nlines")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_event_is_one_line_also_with_a_forged_break_and_a_failure(
    stream: io.StringIO, log_format: LogFormat
) -> None:
    configure("info", log_format, stream)
    try:
        fail()
    except ValueError:
        logging.getLogger("server.x").exception("asked %r by %s", 1, "me\n2026 forged", extra={"request": "a\nb"})
    assert stream.getvalue().count("\n") == 1
    assert "ValueError" in stream.getvalue()


def test_json_has_the_extra_fields_as_members_and_the_trace(stream: io.StringIO) -> None:
    configure("info", "json", stream)
    try:
        fail()
    except ValueError:
        logging.getLogger("server.x").exception("done", extra={"request": "r1", "tokens": 3})
    event = json.loads(stream.getvalue())
    assert (event["logger"], event["level"], event["message"]) == ("server.x", "error", "done")
    assert (event["request"], event["tokens"]) == ("r1", 3)
    assert "in fail" in event["exception"]


def test_text_appends_the_trace_at_level_debug_only(stream: io.StringIO) -> None:
    configure("debug", "text", stream)
    try:
        fail()
    except ValueError:
        logging.getLogger("server.x").exception("done")
    assert "Traceback" in stream.getvalue()


def test_probes_are_left_out_and_requests_are_not(stream: io.StringIO) -> None:
    configure("info", "text", stream)
    for path in ("/health", "/ready", "/metrics", "/load", "/v1/models"):
        log_request("GET", path, "200", 0.25, "req-1")
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.endswith("headrace.requests: GET /v1/models 200 seconds=0.25 request=req-1\n")


def test_probes_are_told_at_level_debug(stream: io.StringIO) -> None:
    configure("debug", "text", stream)
    log_request("GET", "/health", "503", 0.001, "req-1")
    assert "GET /health 503" in stream.getvalue()


def test_path_cannot_forge_a_line(stream: io.StringIO) -> None:
    configure("info", "text", stream)
    log_request("GET", "/x\r\n2026 forged", "404", 0.001, "req-1")
    assert stream.getvalue().count("\n") == 1


def test_level_decides_and_a_second_set_up_replaces_the_first(stream: io.StringIO) -> None:
    configure("error", "text", io.StringIO())
    configure("warning", "text", stream)
    logging.getLogger("server.x").info("quiet")
    logging.getLogger("server.x").warning("loud", extra={"count": 2})
    assert stream.getvalue().endswith("WARNING server.x: loud count=2\n")
    assert stream.getvalue().count("\n") == 1
