"""Keys over HTTP: what needs one, what is answered without, whose cache is whose, and a key file that changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from kvstore.keys import PUBLIC_SCOPE
from server.access import key_file
from server.access.credentials import Credentials
from server.access.keys import KeyEntry, digest_of
from server.config import ServeConfig
from tests.support.api_server import ApiServer, chat_body, completion_body, serving
from tests.support.fake_engine import FakeEngine
from tests.support.until import until

A, A2, B, ADMIN = (f"hr-{name}-0123456789abcdef" for name in ("a", "a2", "b", "admin"))
KEYS = Credentials(
    keys=(KeyEntry(digest_of(A), "a"), KeyEntry(digest_of(A2), "a"), KeyEntry(digest_of(B), "b")),
    scope_secret="5a" * 32,
)
LONG = "The same long prompt for everybody. " * 12


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(server: ApiServer, key: str | None = None, **fields: object) -> httpx.Response:
    headers = {} if key is None else bearer(key)
    return await server.client.post("/v1/completions", json=completion_body(**fields), headers=headers)


def check_401(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong-0123456789abcdef")],
        [("authorization", f"Bearer {A}x")],
        [("authorization", f"Basic {A}")],
        [("authorization", A)],
        [("authorization", "Bearer")],
        [("authorization", f"Bearer {digest_of(A)}")],
        [("authorization", f"Bearer {A}"), ("authorization", f"Bearer {A}")],
        [("x-api-key", A)],
        [("authorization", "Bearer " + "x" * 10_000)],
    ],
)
async def test_without_a_valid_key_nobody_gets_in(headers: list[tuple[str, str]]) -> None:
    engine = FakeEngine()
    async with serving(engine, credentials=KEYS) as server:
        for method, path in [
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("POST", "/v1/detokenize"),
            ("GET", "/openapi.json"),
            ("GET", "/v1/nothing"),
            ("GET", "//health"),
            ("GET", "/health/"),
            ("GET", "/%68ealth/../v1/models"),
        ]:
            check_401(await server.client.request(method, path, headers=headers))
        assert engine.seen == []
        assert (await ask(server, A)).status_code == 200


async def test_probes_metrics_and_options_need_no_key() -> None:
    async with serving(FakeEngine(), credentials=KEYS) as server:
        for path in ("/health", "/ready", "/version", "/metrics", "/load"):
            assert (await server.client.get(path)).status_code == 200
        assert (await server.client.options("/v1/chat/completions")).status_code == 405


async def test_metrics_can_be_closed() -> None:
    async with serving(FakeEngine(), credentials=KEYS, config=ServeConfig(open_metrics=False)) as server:
        for path in ("/metrics", "/load"):
            check_401(await server.client.get(path))
            assert (await server.client.get(path, headers=bearer(B))).status_code == 200
        assert (await server.client.get("/health")).status_code == 200


async def test_the_scheme_may_be_written_in_any_case() -> None:
    async with serving(FakeEngine(), credentials=KEYS) as server:
        headers = {"authorization": f"bEARER   {A}"}
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


async def test_the_openai_client_says_authentication_error() -> None:
    from openai import AsyncOpenAI, AuthenticationError

    async with serving(FakeEngine(), credentials=KEYS) as server:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong-0123456789abcdef") as client:
            with pytest.raises(AuthenticationError) as caught:
                await client.chat.completions.create(**chat_body())  # type: ignore[call-overload]
        assert caught.value.code == "invalid_api_key"
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=A) as client:
            answer = await client.chat.completions.create(**chat_body())  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "stop"


async def cached(server: ApiServer, key: str | None, **fields: object) -> int:
    answer = (await ask(server, key, prompt=LONG, **fields)).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_tenants_share_cached_tokens_with_themselves_alone() -> None:
    async with serving(FakeEngine(), credentials=KEYS) as server:
        assert await cached(server, A) == 0
        assert await cached(server, A2) > 0
        assert await cached(server, B) == 0
        assert await cached(server, B) > 0
        assert await cached(server, A, cache_salt="s") == 0
        assert await cached(server, B, cache_salt="s") == 0
        assert await cached(server, A2, cache_salt="s") > 0
        assert await cached(server, A, cache_salt="t") == 0
        # A salt that spells another tenant's name is still a salt.
        assert await cached(server, A, cache_salt="b") == 0


async def test_without_keys_everybody_shares_and_salts_separate() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        assert await cached(server, None) == 0
        assert await cached(server, A) > 0
        assert await cached(server, None, cache_salt="s") == 0
        assert await cached(server, None, cache_salt="s") > 0
    assert [request.cache_scope == PUBLIC_SCOPE for request in engine.seen] == [True, True, False, False]


async def test_a_scope_depends_on_the_secret_and_on_nothing_that_a_restart_changes() -> None:
    scopes = []
    for secret in ("5a" * 32, "5a" * 32, "5b" * 32):
        engine = FakeEngine()
        async with serving(engine, credentials=Credentials(keys=KEYS.keys, scope_secret=secret)) as server:
            await ask(server, A)
        scopes.append(engine.seen[0].cache_scope)
    assert scopes[0] == scopes[1] != scopes[2]


async def test_a_changed_key_file_is_followed_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.01)
    path = tmp_path / "keys"

    def replace(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)

    replace(f"{A}: a\n")
    async with serving(FakeEngine(), config=ServeConfig(api_keys_file=str(path))) as server:

        async def statuses() -> list[int]:
            return [(await ask(server, key)).status_code for key in (A, B)]

        assert await statuses() == [200, 401]

        async def now(expected: list[int]) -> bool:
            return await statuses() == expected

        replace(f"{A}: a\n{B}: b\n")
        await until(lambda: now([200, 200]), "the new key is known")
        replace(f"{B}: b\n")
        await until(lambda: now([401, 200]), "the old key is revoked")
        replace("")
        await until(lambda: now([401, 401]), "an empty file lets nobody in")


async def test_more_requests_than_allowed_are_refused_and_probes_are_not() -> None:
    from tests.support.fake_engine import Gate

    engine = FakeEngine()
    engine.gate = Gate(after=0)
    async with serving(engine, config=ServeConfig(max_concurrent_requests=2)) as server:
        running = [asyncio.create_task(ask(server)) for _ in range(2)]
        await engine.until(lambda: len(engine.running) == 2)
        refused = await ask(server)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_is_overloaded"
        for path in ("/health", "/ready", "/metrics"):
            assert (await server.client.get(path)).status_code == 200
        engine.gate.opened.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await ask(server)).status_code == 200


async def test_unknown_fields_are_refused_by_name_where_the_server_is_strict() -> None:
    engine = FakeEngine()
    async with serving(engine, config=ServeConfig(strict_params=True)) as server:
        refused = await ask(server, temprature=1, foo=2, user="fine")
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("unknown_parameter", "temprature")
        assert "'temprature', 'foo'" in error["message"]
        assert "x-ignored-params" not in refused.headers
        assert (await server.client.post("/tokenize", json={"prompt": "a", "foo": 1})).status_code == 400
        assert engine.seen == []
        assert (await ask(server, user="fine")).status_code == 200
