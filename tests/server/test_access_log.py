"""The access log: a line for every request, with numbers and without text, whatever happens to the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.access import log as access_log
from server.access.credentials import Credentials
from server.access.keys import KeyEntry, digest_of
from server.access.log import AccessLog, check_writable
from server.access.record import RequestRecord
from server.config import ServeConfig
from tests.support.api_server import chat_body, completion_body, serving
from tests.support.fake_engine import FakeEngine

KEY = "hr-acme-0123456789abcdef"
SECRETS = (KEY, "sesame-prompt", "sesame-salt", "sesame-user", "sesame-answer", "sesame-query", "sesame-path")


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_request_is_one_line_without_any_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    engine = FakeEngine()
    engine.say("sesame-answer")
    credentials = Credentials(keys=(KeyEntry(digest_of(KEY), "acme"),))
    headers = {"authorization": f"Bearer {KEY}"}
    async with serving(engine, config=ServeConfig(access_log=str(path)), credentials=credentials) as server:
        client = server.client
        client.headers.update(headers)
        chat = chat_body(messages=[{"role": "user", "content": "sesame-prompt"}], cache_salt="sesame-salt")
        whole = await client.post("/v1/chat/completions", json={**chat, "n": 2}, headers={"x-request-id": "mine"})
        streamed = await client.post(
            "/v1/completions?q=sesame-query", json=completion_body(prompt="sesame-prompt", stream=True, max_tokens=3)
        )
        assert streamed.text.endswith("[DONE]\n\n")
        await client.post("/v1/completions", json=completion_body(prompt="sesame-prompt", top_p=7, user="sesame-user"))
        await client.get("/v1/models/sesame-path")
        await client.get("/sesame-path")
        await client.post("/tokenize", json={"prompt": "sesame-prompt"})
        await client.get("/v1/models", headers={"authorization": "Bearer sesame-key-0123456789"})
        for probe in ("/health", "/ready", "/metrics", "/load"):
            await client.get(probe)
    text = path.read_text()
    assert not [secret for secret in (*SECRETS, "sesame") if secret in text]
    lines = events(path)
    assert [(one["method"], one["route"], one["status"], one["tenant"]) for one in lines] == [
        ("POST", "/v1/chat/completions", 200, "acme"),
        ("POST", "/v1/completions", 200, "acme"),
        ("POST", "/v1/completions", 400, "acme"),
        ("GET", "/v1/models/{id}", 404, "acme"),
        ("GET", "other", 404, "acme"),
        ("POST", "/tokenize", 200, "acme"),
        ("GET", "/v1/models", 401, None),
    ]
    first, second = lines[:2]
    usage = whole.json()["usage"]
    assert first["request_id"] == "mine"
    assert first["id"] == whole.json()["id"]
    assert (first["prompt_tokens"], first["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert first["cached_tokens"] == 0
    assert first["finish_reasons"] == ["stop", "stop"]
    assert 0 <= first["ttft_s"] <= first["duration_s"]  # type: ignore[operator]
    assert (first["stream"], second["stream"]) == (False, True)
    assert second["finish_reasons"] == ["length"]
    assert lines[2]["error"] == "invalid_value"
    assert lines[6]["error"] == "invalid_api_key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_stream_that_fails_is_a_200_with_an_error(tmp_path: Path) -> None:
    from engine.errors import RequestFailedError

    engine = FakeEngine()
    engine.failure, engine.fail_at = RequestFailedError("m"), 2
    async with serving(engine, config=ServeConfig(access_log=str(tmp_path / "a"))) as server:
        await server.complete(stream=True)
    (line,) = events(tmp_path / "a")
    assert (line["status"], line["error"], line["finish_reasons"]) == (200, "request_failed", [None])


def write(log: AccessLog, request_id: str) -> None:
    log.write(RequestRecord(request_id), method="GET", route="/v1/models", status=200, duration_s=0.5)


def names(path: Path) -> list[object]:
    return [one["request_id"] for one in events(path)]


def test_two_processes_append_to_one_file_and_a_restart_keeps_it(tmp_path: Path) -> None:
    logs = [AccessLog(str(tmp_path / "a")) for _ in range(2)]
    for number in range(200):
        write(logs[number % 2], str(number))
    for log in logs:
        log.close()
    again = AccessLog(str(tmp_path / "a"))
    write(again, "200")
    again.close()
    assert sorted(map(int, names(tmp_path / "a"))) == list(range(201))  # type: ignore[arg-type]


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    log = AccessLog(str(path))
    path.rename(tmp_path / "a.1")
    write(log, "one")
    log.close()
    assert names(path) == ["one"]
    assert (tmp_path / "a.1").read_text() == ""


def test_a_reader_that_stops_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(access_log, "MAX_QUEUED_LINES", 50)
    monkeypatch.setattr(access_log, "CLOSE_TIMEOUT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = AccessLog(str(tmp_path / "pipe"))
        for number in range(5000):
            write(log, "x" * 100 + str(number))
        log.close()
        assert log.dropped > 0
    finally:
        os.close(reader)


def test_a_path_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="access log"):
        check_writable(str(tmp_path / "missing" / "a"))
    check_writable(str(tmp_path / "a"))
    check_writable("-")
