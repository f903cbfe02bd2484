"""A server with a KV store: what a prompt cost once is not paid again, also by another engine and after a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.headrace_server import HeadraceServer, headrace

PROMPT = "What a prompt cost once is not paid again. " * 6
BLOCK = 16


def flags(directory: Path, **more: object) -> dict[str, object]:
    return {
        "kv_store": ["ram=16MiB", f"disk={directory / 'kv'},64MiB,min-free=1MiB"],
        "block_size": BLOCK,
        "threads": 1,
        "numerics": "invariant",
        "dtype": "float32",
        "kv_store_load": "always",
        **more,
    }


async def ask(
    server: HeadraceServer, prompt: str = PROMPT, *, key: str = "", **fields: object
) -> tuple[str, dict[str, int]]:
    """Return the text and the cached tokens by tier."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": server.model, "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0, **fields}
    async with await server.client() as client:
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    by_tier = details.get("cached_tokens_by_tier", {"device": details["cached_tokens"]})
    assert sum(by_tier.values()) == details["cached_tokens"]
    return answer.json()["choices"][0]["text"], by_tier


async def stop(server: HeadraceServer) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert await server.exit_code() == 0, server.text


async def test_a_restart_costs_no_prompt(tiny_model: Path, tmp_path: Path) -> None:
    with headrace(tmp_path, tiny_model, **flags(tmp_path)) as server:
        await server.wait_ready()
        text, cached = await ask(server)
        assert cached == {"device": 0}
        assert await ask(server) == (text, {"device": len(PROMPT) // BLOCK * BLOCK})
        assert (await ask(server, "nothing of this is to be kept. " * 6, kv_store=False))[1] == {"device": 0}
        await stop(server)
    with headrace(tmp_path, tiny_model, **flags(tmp_path)) as server:
        await server.wait_ready()
        assert await ask(server) == (text, {"disk": len(PROMPT) // BLOCK * BLOCK})
        assert (await ask(server, "nothing of this is to be kept. " * 6))[1] == {"device": 0}
        samples = await server.metrics()
        assert samples['headrace_loaded_prompt_tokens_total{tier="disk"}'] == len(PROMPT) // BLOCK * BLOCK
        await stop(server)


async def test_what_one_replica_stored_another_finds(tiny_model: Path, tmp_path: Path) -> None:
    with headrace(tmp_path, tiny_model, **flags(tmp_path, replicas=2, routing_policy="round_robin")) as server:
        await server.wait_ready()
        tiers: set[str] = set()
        for number in range(40):  # each asks once of either replica; what is still being written is computed anew
            prompt = f"{number:04d} {PROMPT}"
            text, _ = await ask(server, prompt)
            again, cached = await ask(server, prompt)
            assert again == text
            tiers |= {tier for tier, tokens in cached.items() if tokens}
            if "disk" in tiers:
                break
        assert "disk" in tiers, "the other replica computed it anew again and again"
        await stop(server)


@pytest.mark.parametrize("spec", ["floppy=/x", "disk=", "ram=1KiB"], ids=["kind", "path", "size"])
async def test_a_tier_that_cannot_be_is_told_at_the_start(tiny_model: Path, tmp_path: Path, spec: str) -> None:
    with headrace(tmp_path, tiny_model, threads=1, kv_store=spec) as server:
        assert await server.exit_code() == 2
        assert spec in server.text


async def test_tenants_and_salts_find_their_own_blocks_only(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-tenants-secret-key: one\nsecond-tenants-secret-key: two\n")
    keys.chmod(0o600)
    one, two = "first-tenants-secret-key", "second-tenants-secret-key"
    whole = len(PROMPT) // BLOCK * BLOCK
    with headrace(tmp_path, tiny_model, **flags(tmp_path, api_keys_file=keys)) as server:
        await server.wait_ready()
        text, cached = await ask(server, key=one)
        assert cached == {"device": 0}
        assert await ask(server, key=two, cache_salt="pepper") == (text, {"device": 0})
        await stop(server)
    with headrace(tmp_path, tiny_model, **flags(tmp_path, api_keys_file=keys)) as server:
        await server.wait_ready()
        assert await ask(server, key=two) == (text, {"device": 0})
        assert await ask(server, key=one, cache_salt="pepper") == (text, {"device": 0})
        assert await ask(server, key=two, cache_salt="salt") == (text, {"device": 0})
        assert await ask(server, key=one) == (text, {"disk": whole})
        assert await ask(server, key=two, cache_salt="pepper") == (text, {"disk": whole})
        await stop(server)
