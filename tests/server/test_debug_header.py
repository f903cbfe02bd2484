"""`X-Headrace-Debug`: who is answered, and what."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from server.access.credentials import Credentials
from server.access.keys import KeyEntry, digest_of
from server.config import RoutingConfig, ServeConfig
from server.fleet.fleet import Fleet
from tests.support.api_server import chat_body, completion_body, serving, serving_models
from tests.support.fake_engine import FakeEngine
from tests.support.listed_registry import ListedRegistry
from tests.support.processes import text_core, worker_at
from tests.support.until import until

ASK = {"x-headrace-debug": "1"}
ADMIN = "hr-admin-0123456789abcdef"
KEY = "hr-a-0123456789abcdef"


@pytest.mark.parametrize(
    ("headers", "with_admin_key", "for_all", "is_told"),
    [
        ({}, False, True, False),
        ({"x-headrace-debug": "0"}, False, True, False),
        (ASK, False, False, True),
        ({**ASK, "x-forwarded-for": "10.0.0.1"}, False, False, False),
        ({**ASK, "origin": "http://elsewhere"}, False, False, False),
        ({**ASK, "x-forwarded-for": "10.0.0.1"}, False, True, True),
        (ASK, True, False, False),
        (ASK, True, True, True),
    ],
    ids=["unasked", "zero", "local", "proxy", "browser", "proxy-for-all", "admin-key", "admin-key-for-all"],
)
async def test_who_is_told(headers: dict[str, str], with_admin_key: bool, for_all: bool, is_told: bool) -> None:
    credentials = Credentials(admin_digests=(digest_of(ADMIN),) if with_admin_key else ())
    config = ServeConfig(debug_header=for_all)
    async with serving(FakeEngine(), credentials=credentials, config=config) as server:
        for stream in (False, True):
            answer = await server.client.post("/v1/completions", json=completion_body(stream=stream), headers=headers)
            assert answer.status_code == 200
            assert ("x-headrace-debug" in answer.headers) is is_told


async def test_who_has_no_key_is_told_nothing() -> None:
    credentials = Credentials(keys=(KeyEntry(digest_of(KEY), "a"),))
    async with serving(FakeEngine(), credentials=credentials, config=ServeConfig(debug_header=True)) as server:
        for key, status in ((KEY, 200), ("hr-wrong-0123456789abcdef", 401)):
            headers = {**ASK, "authorization": f"Bearer {key}"}
            answer = await server.client.post("/v1/completions", json=completion_body(), headers=headers)
            assert answer.status_code == status
            assert ("x-headrace-debug" in answer.headers) is (status == 200)


async def test_a_stream_and_a_whole_answer_tell_where_they_come_from(tmp_path: Path) -> None:
    with text_core(f"ipc://{tmp_path}/a"), text_core(f"ipc://{tmp_path}/b"):
        workers = [msgspec.structs.replace(worker_at(f"ipc://{tmp_path}/{name}"), worker_id=name) for name in "ab"]
        fleet = Fleet(ListedRegistry(*workers), RoutingConfig(policy="session"))
        async with serving_models(fleet) as server:
            await fleet.opened.wait()
            (pool,) = fleet.pools.values()
            await until(lambda: sum(one.engine.is_ready for one in pool.links.values()) == 2, "both serve")
            for fields in ({}, {"stream": True}, {"n": 3}):
                body = chat_body(max_tokens=3, user="u", **fields)
                answer = await server.client.post("/v1/chat/completions", json=body, headers=ASK)
                assert answer.status_code == 200, answer.text
                told = dict(field.split("=") for field in answer.headers["x-headrace-debug"].split("; "))
                decision = [one for one in pool.pool.decisions if one.request_id.endswith("-0-0")][-1]
                assert told == {
                    "target": decision.target_id,
                    "policy": "session",
                    "hit_blocks": "0",
                    "prompt_blocks": str(decision.prompt_tokens // decision.block_size),
                    "candidates": "2",
                    "attempts": "1",
                }
            refused = await server.client.post("/v1/chat/completions", json=chat_body(model="none"), headers=ASK)
            assert (refused.status_code, "x-headrace-debug" in refused.headers) == (404, False)
