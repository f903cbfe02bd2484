"""`headrace gateway` before workers: real processes, a real Valkey, keys, and streams that outlive a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from engine.wire.curve import KeyPair
from tests.support.headrace_server import HeadraceServer, gateway
from tests.support.until import until
from tests.support.valkey_server import ValkeyServer, valkey_server
from tests.support.worker_process import WorkerProcess, worker_command

ENGINE = {"numerics": "invariant", "dtype": "float32", "block_size": 16, "kv_cache_memory": "8MiB", "threads": 1}


class Site:
    """A registry with its workers and gateways, which share keys."""

    def __init__(self, directory: Path, model: Path, registry: ValkeyServer, stack: ExitStack) -> None:
        self.registry = registry
        self._directory, self._model, self._stack = directory, model, stack
        pairs = {"worker": KeyPair.new(), "gateway": KeyPair.new()}
        for name, pair in pairs.items():
            pair.write(directory / f"{name}.key")
        (directory / "clients").write_text(f"{pairs['gateway'].public} gateways\n", encoding="ascii")

    def worker(self, name: str, **flags: object) -> WorkerProcess:
        (self._directory / name).mkdir()
        known = {
            "worker_id": name,
            "register": self.registry.url,
            "listen": "tcp://127.0.0.1:0",
            "http_port": 0,
            "wire_key_file": self._directory / "worker.key",
            "wire_clients_file": self._directory / "clients",
            "served_model_name": "tiny",
        }
        return self._stack.enter_context(
            worker_command(self._directory / name, str(self._model), **{**known, **ENGINE, **flags})
        )

    def gateway(self, name: str = "gateway", **flags: object) -> HeadraceServer:
        (self._directory / name).mkdir()
        keys = {"wire_key_file": self._directory / "gateway.key", "wire_clients_file": self._directory / "clients"}
        return self._stack.enter_context(
            gateway(self._directory / name, "tiny", register=self.registry.url, **{**keys, **flags})
        )


@pytest.fixture
def site(tmp_path: Path, tiny_model: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, tiny_model, stack.enter_context(valkey_server(tmp_path)), stack)


def body(seed: int, tokens: int, **fields: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": f"Hello {seed}",
        "seed": seed,
        "max_tokens": tokens,
        "ignore_eos": True,
        **fields,
    }


async def answer(client: httpx.AsyncClient, seed: int, tokens: int = 300) -> str:
    response = await client.post("/v1/completions", json=body(seed, tokens))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def serving(client: httpx.AsyncClient, count: int) -> None:
    """Return once the gateway routes to so many engines."""

    async def routes() -> bool:
        samples = (await client.get("/metrics")).text.splitlines()
        ready = [one for one in samples if one.startswith("headrace_target_ready{") and one.endswith(" 1.0")]
        return len(ready) == count

    await until(routes, f"{count} engines serve", limit_s=120)


async def test_workers_come_die_and_drain_while_streams_go_on(site: Site) -> None:
    server = site.gateway()
    first = site.worker("first")
    await server.wait_ready()
    async with await server.client() as client:
        undisturbed = [await answer(client, seed) for seed in range(6)]
        second = site.worker("second")
        await serving(client, 2)

        answers = [asyncio.create_task(answer(client, seed)) for seed in range(6)]
        (core,) = first.cores
        core.kill()
        assert await asyncio.gather(*answers) == undisturbed
        await serving(client, 2)

        answers = [asyncio.create_task(answer(client, seed)) for seed in range(6)]
        first.process.kill()
        assert await asyncio.gather(*answers) == undisturbed
        await serving(client, 1)

        answers = [asyncio.create_task(answer(client, seed)) for seed in range(6)]
        third = site.worker("third")
        await serving(client, 2)
        assert await asyncio.gather(*answers) == undisturbed

        answers = [asyncio.create_task(answer(client, seed)) for seed in range(6)]
        second.terminate()
        assert await asyncio.gather(*answers) == undisturbed
        assert await second.exit_code() == 0
        assert await answer(client, 1) == undisturbed[1]
        assert third.process.is_running()


async def test_a_gateway_serves_on_without_its_registry_and_tells_which_models_there_are(
    site: Site, tmp_path: Path
) -> None:
    server = site.gateway(api_processes=2, dispatches_listen=f"ipc://{tmp_path}/told")
    site.worker("first")
    site.worker("other", served_model_name="second-model")
    await server.wait_ready()
    async with await server.client() as client:
        await serving(client, 2)

        async def lists_both() -> bool:
            models = (await client.get("/v1/models")).json().get("data", [])
            return {model["id"] for model in models} == {"tiny", "second-model"}

        await until(lists_both, "both models are listed", limit_s=60)
        own = (await client.get("/gateway")).json()
        assert own["dispatches"] in (f"ipc://{tmp_path}/told", f"ipc://{tmp_path}/told.1")
        for _ in range(4):
            other = await client.post("/v1/completions", json=body(1, 3, model="second-model"))
            assert other.status_code == 200, other.text
            unknown = await client.post("/v1/completions", json=body(1, 3, model="none"))
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert "second-model" in unknown.json()["error"]["message"]
        site.registry.stop()
        assert len(await answer(client, 1)) > 0
    server.process.terminate()
    assert await server.exit_code() == 0


async def test_a_worker_that_computes_otherwise_is_refused_with_both_digests(site: Site) -> None:
    server = site.gateway()
    site.worker("first")
    await server.wait_ready()
    odd = site.worker("odd", dtype="bfloat16", numerics="default")
    await odd.ready_ranks(1)
    await until(lambda: "may not serve tiny" in server.text, "the mismatch is told", limit_s=60)
    (line,) = (one for one in server.text.splitlines() if "may not serve tiny" in one)
    digests = [word.strip(",") for word in line.split() if len(word.strip(",")) == 64]
    assert len(set(digests)) == 2, line
