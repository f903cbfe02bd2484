"""A gateway before engines that speak HTTP: real servers of our own stand in for them, and one of our workers too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.support.headrace_server import HeadraceServer, gateway, headrace
from tests.support.until import until
from tests.support.worker_process import worker_command

ENGINE = {"numerics": "invariant", "dtype": "float32", "block_size": 16, "kv_cache_memory": "8MiB", "threads": 1}
MODEL = "tiny"


class Site:
    """A list of workers, the servers on it, and a gateway."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack) -> None:
        self.list = directory / "workers.json"
        self.model = model
        self._directory, self._stack = directory, stack
        self._records: dict[str, dict[str, object]] = {}
        self._write()

    def server(self, name: str, **flags: object) -> HeadraceServer:
        (self._directory / name).mkdir()
        known = {**ENGINE, "served_model_name": MODEL, **flags}
        return self._stack.enter_context(headrace(self._directory / name, self.model, **known))

    async def enlist(self, name: str, server: HeadraceServer, **fields: object) -> None:
        record = {"worker_id": name, "model": MODEL, "http_url": await server.url(), "dialect": "openai", **fields}
        self._records[name] = record
        self._write()

    def enlist_record(self, record: dict[str, object]) -> None:
        self._records[str(record["worker_id"])] = record
        self._write()

    def gateway(self, **flags: object) -> HeadraceServer:
        known = {"register": f"static:{self.list}", **flags}
        return self._stack.enter_context(gateway(self._directory, MODEL, **known))

    def _write(self) -> None:
        fresh = self.list.with_suffix(".new")
        fresh.write_text(json.dumps({"workers": list(self._records.values())}))
        fresh.replace(self.list)


@pytest.fixture
def site(tmp_path: Path, tiny_model: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, tiny_model, stack)


def body(number: int, tokens: int = 200, **fields: object) -> dict[str, object]:
    """Greedy: what differs between engines' noise plays no part."""
    plain = {"model": MODEL, "prompt": f"Hello {number}", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**plain, **fields}


async def answer(client: httpx.AsyncClient, number: int, tokens: int = 200) -> str:
    response = await client.post("/v1/completions", json=body(number, tokens))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def serving(client: httpx.AsyncClient, *names: str) -> None:
    """Return once the gateway routes to these and no others."""

    async def routes() -> bool:
        lines = (await client.get("/metrics")).text.splitlines()
        ready = [one for one in lines if one.startswith("headrace_target_ready{") and one.endswith(" 1.0")]
        return sorted(one.split('target="')[1].split("/")[0] for one in ready) == sorted(names)

    await until(routes, f"{names} serve", limit_s=120)


async def test_streams_move_between_servers_of_token_ids(site: Site) -> None:
    first, second = site.server("first"), site.server("second")
    await site.enlist("first", first)
    door = site.gateway(tokenizer=site.model)
    await door.wait_ready()
    async with await door.client() as client, await first.client() as direct:
        undisturbed = [await answer(direct, number) for number in range(6)]
        assert [await answer(client, number) for number in range(6)] == undisturbed
        await site.enlist("second", second, dialect="auto")
        await serving(client, "first", "second")

        answers = [asyncio.create_task(answer(client, number)) for number in range(6)]
        first.kill()
        assert await asyncio.gather(*answers) == undisturbed
        await serving(client, "second")

        await site.enlist("first", first, state="draining")
        assert await answer(client, 0) == undisturbed[0]

        async def is_idle() -> bool:
            workers = {one["worker_id"]: one for one in (await client.get("/router/workers")).json()}
            status = workers["second"]["status"]
            if workers["second"]["connection"] != "ready" or status["load"] is None:
                return False
            return status["in_flight"] == status["load"]["running"] == 0

        await until(is_idle, "it tells that nothing runs")
        refused = await client.post("/v1/completions", json=body(1, bad_words=["x"]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bad_words")


async def test_one_of_ours_and_one_of_another_make_serve_together(site: Site, tmp_path: Path) -> None:
    other = site.server("other")
    (tmp_path / "ours").mkdir()
    flags = {**ENGINE, "served_model_name": MODEL, "listen": "tcp://127.0.0.1:0", "http_port": 0, "worker_id": "ours"}
    with worker_command(tmp_path / "ours", str(site.model), **flags) as ours:
        record = await ours.record()
        site.enlist_record(msgspec.to_builtins(record))
        await site.enlist("other", other)
        door = site.gateway()
        await door.wait_ready()
        async with await door.client() as client:
            await serving(client, "ours", "other")
            undisturbed = [await answer(client, number) for number in range(6)]

            answers = [asyncio.create_task(answer(client, number)) for number in range(6)]
            other.kill()
            assert await asyncio.gather(*answers) == undisturbed
            await serving(client, "ours")
            assert [await answer(client, number) for number in range(6)] == undisturbed
            bad_words = await client.post("/v1/completions", json=body(1, 5, bad_words=["x"]))
            assert bad_words.status_code == 200, "ours can do what the other cannot"


async def test_who_splits_text_otherwise_or_has_another_model_is_refused(site: Site, tmp_path: Path) -> None:
    named_otherwise = site.server("named", served_model_name="another")
    await site.enlist("named", named_otherwise)
    door = site.gateway(tokenizer="smollm2")
    await named_otherwise.wait_ready()
    await until(lambda: "serves 'another' and not 'tiny'" in door.text, "it is told", limit_s=60)
    await site.enlist("named", named_otherwise, model="another", worker_id="split")
    await until(lambda: "worker split may not serve another" in door.text, "it is told", limit_s=60)
    (line,) = (one for one in door.text.splitlines() if "worker split may not serve another" in one)
    digests = {word.strip(",") for word in line.split() if len(word.strip(",")) == 64}
    assert len(digests) == 2, line


async def test_text_is_relayed_without_a_tokenizer(site: Site) -> None:
    first, second = site.server("first"), site.server("second")
    await site.enlist("first", first, dialect="text")
    door = site.gateway()
    await door.wait_ready()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0}
    async with await door.client() as client, await first.client() as direct:
        plain = (await direct.post("/v1/chat/completions", json=chat)).json()
        headers = {"x-request-id": "mine-1"}
        whole = await client.post("/v1/chat/completions", json={**chat, "unheard_of": 1}, headers=headers)
        assert whole.json()["choices"] == plain["choices"]
        assert whole.headers["x-headrace-relay"] == "text"
        assert whole.headers["x-request-id"] == "mine-1"
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == [MODEL]

        streamed = await client.post("/v1/chat/completions", json={**chat, "stream": True}, headers=headers)
        events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks)
        assert text == plain["choices"][0]["message"]["content"]
        assert all(one["choices"] for one in chunks), "usage that nobody asked for is counted and not passed on"
        asked = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        with_usage = (await client.post("/v1/chat/completions", json=asked)).text
        assert '"usage":{' in with_usage
        usage = plain["usage"]
        metrics = await door.metrics()
        assert metrics["headrace_generation_tokens_total"] == 3 * usage["completion_tokens"]
        assert metrics["headrace_prompt_tokens_total"] == 3 * usage["prompt_tokens"]
        why = (await client.get("/router/explain?request_id=mine-1")).json()
        assert {one["target_id"] for one in why["decisions"]} == {"first/0"}

        wrong = await client.post("/v1/chat/completions", json={**chat, "temperature": 9})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
        unsafe = await client.post("/v1/chat/completions", json={**chat, "kv_transfer_params": {"host": "x"}})
        assert (unsafe.status_code, unsafe.json()["error"]["param"]) == (400, "kv_transfer_params")
        assert (await client.post("/tokenize", json={"model": MODEL, "prompt": "x"})).status_code == 400

        await site.enlist("second", second, dialect="text")
        await serving(client, "first", "second")
        first.kill()
        again = [client.post("/v1/chat/completions", json=chat) for _ in range(4)]
        for response in await asyncio.gather(*again):
            assert response.json()["choices"] == plain["choices"], "what has not begun is asked of the other one"
        await serving(client, "second")


async def test_a_relayed_stream_whose_server_dies_ends_in_an_error(site: Site) -> None:
    only = site.server("only")
    await site.enlist("only", only, dialect="text")
    door = site.gateway()
    await door.wait_ready()
    async with await door.client() as client:
        asked = body(1, 400, stream=True)
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            only.kill()
            rest = [line async for line in lines if line.startswith("data: ")]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
