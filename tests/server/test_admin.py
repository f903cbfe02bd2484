"""The operator's routes: who may use them, and what they do to a real engine process behind two API processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from server.access.credentials import Credentials
from server.access.guard import _is_loopback
from server.access.keys import KeyEntry, digest_of
from tests.support.api_server import completion_body, serving
from tests.support.fake_engine import FakeEngine
from tests.support.processes import api_processes, text_core
from tests.support.until import until

TENANT, ADMIN = "hr-tenant-0123456789abcdef", "hr-admin-0123456789abcdef"
ASKED = 40
"""So often all of two processes are reached: the chance of missing one is 2 to the power of -39."""

WITH_KEYS = Credentials(keys=(KeyEntry(digest_of(TENANT), "a"),), admin_digests=(digest_of(ADMIN),))


class FakeAdmin:
    def __init__(self) -> None:
        self.resets = 0
        self.aborted: list[str] = []

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def abort_requests(self, request_id: str) -> int:
        self.aborted.append(request_id)
        return 2


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_the_admin_key_opens_what_no_other_key_does() -> None:
    admin = FakeAdmin()
    async with serving(FakeEngine(), credentials=WITH_KEYS, admin=admin) as server:

        async def reset(headers: dict[str, str]) -> httpx.Response:
            return await server.client.post("/admin/reset_prefix_cache", headers=headers)

        for headers, status, code in [
            ({}, 401, "invalid_api_key"),
            (bearer("wrong-0123456789abcdef"), 401, "invalid_api_key"),
            (bearer(TENANT), 403, "permission_denied"),
        ]:
            answer = await reset(headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert ("www-authenticate" in answer.headers) == (status == 401)
        assert admin.resets == 0
        assert (await reset(bearer(ADMIN))).json() == {"status": "ok"}
        assert admin.resets == 1
        # It is no key for anything else.
        assert (await server.client.get("/v1/models", headers=bearer(ADMIN))).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://example.com"},
        {"origin": "null"},
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"via": "1.1 proxy"},
        {"x-real-ip": "127.0.0.1"},
    ],
)
async def test_without_an_admin_key_only_programs_of_this_machine_get_in(headers: dict[str, str]) -> None:
    admin = FakeAdmin()
    async with serving(FakeEngine(), admin=admin) as server:
        refused = await server.client.post("/admin/reset_prefix_cache", headers=headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
        assert admin.resets == 0
        assert (await server.client.post("/admin/reset_prefix_cache")).status_code == 200


@pytest.mark.parametrize(
    ("client", "local"),
    [
        (("127.0.0.1", 1), True),
        (("127.8.9.1", 1), True),
        (("::1", 1), True),
        (("::ffff:127.0.0.1", 1), True),
        (("10.0.0.1", 1), False),
        (("::ffff:10.0.0.1", 1), False),
        (("testclient", 1), False),
        (None, False),
    ],
)
def test_loopback_is_told_by_the_peers_address(client: tuple[str, int] | None, local: bool) -> None:
    assert _is_loopback({"type": "http", "client": client}) is local


async def test_bad_bodies_and_unknown_admin_urls_are_refused_in_our_shape() -> None:
    async with serving(FakeEngine(), admin=FakeAdmin()) as server:
        for body, param in [
            ({}, "request_id"),
            ({"request_id": ""}, "request_id"),
            ({"request_id": 5}, "request_id"),
            ({"request_id": "x" * 300}, "request_id"),
            ({"request_id": "a", "id": "b"}, "id"),
            ([], None),
        ]:
            answer = await server.client.post("/admin/abort", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert (await server.client.post("/admin/nothing")).status_code == 404
        assert (await server.client.get("/admin/drain")).status_code == 405
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (await server.client.post("/admin/drain", content=b"a=b", headers=form)).status_code == 400


async def test_an_engine_without_these_operations_says_so() -> None:
    async with serving(FakeEngine()) as server:
        answer = await server.client.post("/admin/reset_prefix_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_abort_and_drain_reach_requests_of_every_api_process(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e"
    with text_core(address), api_processes(address, count=2) as apis:
        # Connections of their own: which process takes a request is the kernel's choice.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=apis[0].url, timeout=30, limits=limits, trust_env=False) as client:

            async def is_ready() -> bool:
                try:
                    return (await client.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            for _ in range(ASKED):
                await until(is_ready, "ready")

            async def stream(length: int, started: asyncio.Future[str]) -> str:
                body = completion_body(max_tokens=length, n=2, stream=True)
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    text = ""
                    async for part in answer.aiter_text():
                        text += part
                        if not started.done():
                            started.set_result(text.split('"id":"')[1].split('"')[0])
                    return text

            loop = asyncio.get_running_loop()
            begun = [loop.create_future() for _ in range(6)]
            tasks = [asyncio.create_task(stream(90_000, one)) for one in begun[:5]]
            tasks.append(asyncio.create_task(stream(2_000, begun[5])))
            ids = await asyncio.wait_for(asyncio.gather(*begun), 30)
            assert (await client.post("/admin/abort", json={"request_id": "cmpl-other"})).json()["aborted"] == 0
            for answer_id, task in zip(ids[:5], tasks[:5], strict=True):
                told = (await client.post("/admin/abort", json={"request_id": answer_id})).json()
                assert told == {"request_id": answer_id, "aborted": 2}
                text = await asyncio.wait_for(task, 30)
                assert "aborted_by_operator" in text.rstrip().rsplit("\n\n", 1)[-1]
                assert "[DONE]" not in text
                # It has ended: there is nothing to abort a second time.
                assert (await client.post("/admin/abort", json={"request_id": answer_id})).json()["aborted"] == 0
            assert (await client.post("/admin/drain")).json() == {"status": "draining"}

            async def refuses() -> bool:
                answers = [
                    await client.post("/v1/completions", json=completion_body(max_tokens=1)) for _ in range(ASKED)
                ]
                return all(answer.status_code == 503 for answer in answers)

            await until(refuses, "all processes refuse")
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            assert (await asyncio.wait_for(tasks[5], 30)).endswith("[DONE]\n\n")
