"""What an operator sees and steers of a KV store in a real server, with one engine, with replicas, and of a worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from engine.protocol import GenerateRequest, SamplingParams
from tests.e2e.test_kv_store import BLOCK, PROMPT, ask, flags, stop
from tests.support.headrace_server import HeadraceServer, headrace
from tests.support.until import until
from tests.support.wire_requests import collect
from tests.support.worker_process import connections, worker_command

FULL = len(PROMPT) // BLOCK


async def post(server: HeadraceServer, path: str, body: object | None = None) -> httpx.Response:
    async with await server.client() as client:
        return await client.post(path, json={} if body is None else body)


async def told(server: HeadraceServer, path: str, body: object | None = None) -> list[dict[str, Any]]:
    """Return what each worker says, the order of which is not told."""
    answer = await post(server, path, body)
    assert answer.status_code == 200, answer.text
    workers: list[dict[str, Any]] = answer.json()["workers"]
    return workers


async def stats(server: HeadraceServer) -> list[dict[str, Any]]:
    async with await server.client() as client:
        answer = await client.get("/kv/stats")
    assert answer.status_code == 200, answer.text
    workers: list[dict[str, Any]] = answer.json()["workers"]
    return workers


async def held(server: HeadraceServer, prompt: str = PROMPT) -> dict[str, int]:
    (one,) = await told(server, "/kv/lookup", {"prompt": prompt})
    assert (one["block_size"], one["blocks"]) == (BLOCK, len(prompt) // BLOCK)
    return {"device": one["device"], **one["tiers"]}


async def test_an_operator_sees_and_steers_the_store_of_one_engine(tiny_model: Path, tmp_path: Path) -> None:
    with headrace(tmp_path, tiny_model, **flags(tmp_path)) as server:
        await server.wait_ready()
        assert await held(server) == {"device": 0, "ram": 0, "disk": 0}
        text, _ = await ask(server)
        (flushed,) = await told(server, "/kv/flush", {"timeout_s": 15})
        assert flushed["in_time"] is True
        everywhere = {"device": FULL, "ram": FULL, "disk": FULL}
        assert await held(server) == everywhere

        # Of memory alone, and back from the disk.
        (dropped,) = await told(server, "/kv/drop", {"prompt": PROMPT, "tier": "ram"})
        assert dropped["tiers"] == ["ram"]
        assert await held(server) == {**everywhere, "ram": 0}
        (fetched,) = await told(server, "/kv/prefetch", {"prompt": PROMPT, "timeout_s": 15})
        assert fetched["ram_blocks"] == fetched["blocks"] == FULL
        assert fetched["fetched"] == fetched["objects"] >= FULL
        assert await held(server) == everywhere

        for path in ("/kv/reset_prefix_cache", "/reset_prefix_cache", "/admin/reset_prefix_cache"):
            await ask(server)
            assert (await held(server))["device"] > 0
            assert (await post(server, path)).json()["status"] == "ok"
            assert (await held(server))["device"] == 0
        assert await ask(server) == (text, {"ram": FULL * BLOCK})

        (kept,) = await told(server, "/kv/pin", {"prompt": PROMPT, "seconds": 600})
        assert kept["objects"]["ram"] >= FULL
        (one,) = await stats(server)
        by_tier = {tier["tier"]: tier for tier in one["stats"]["tiers"]}
        assert by_tier["ram"]["pinned_bytes"] > 0
        assert by_tier["ram"]["capacity_bytes"] == 16 << 20
        assert by_tier["disk"]["loads"]["ok"] >= FULL
        assert sum(by_tier["disk"]["load_durations"]) == by_tier["disk"]["loads"]["ok"]
        assert one["stats"]["hits"]["ram"] >= FULL
        assert one["stats"]["misses"]["disk"] >= FULL
        (use,) = one["owners"]["ram"]
        assert use["used_bytes"] == by_tier["ram"]["used_bytes"]
        assert (use["quota_bytes"], use["tenant"]) == (None, "(everyone)")
        await until(lambda: _metrics_tell(server), "the metrics tell what has happened")
        (kept,) = await told(server, "/kv/unpin", {"prompt": PROMPT})
        assert kept["objects"] == {"ram": 0, "disk": 0}
        await told(server, "/kv/quota", {"quota_bytes": 12345})
        assert (await stats(server))[0]["owners"]["ram"][0]["quota_bytes"] == 12345
        await told(server, "/kv/quota", {"quota_bytes": None})
        assert (await stats(server))[0]["owners"]["ram"][0]["quota_bytes"] is None

        for line in ("KV store", "ram: 16 MiB", f"disk: 64 MiB, at {tmp_path / 'kv'}", "the page cache"):
            assert line in server.text

        # Other weights: nothing of before is found, on the device or below it.
        (weights,) = await told(server, "/kv/weights_updated", {"epoch": "two"})
        assert weights["epoch"] == "two"
        assert await held(server) == {"device": 0, "ram": 0, "disk": 0}
        assert await ask(server) == (text, {"device": 0})
        await told(server, "/kv/flush", {"timeout_s": 15})
        assert (await held(server))["ram"] == FULL
        assert (await stats(server))[0]["weights_epoch"] == "two"

        await told(server, "/kv/drop", {"everything": True})
        assert await held(server) == {"device": FULL, "ram": 0, "disk": 0}
        await refuses_what_cannot_be(server)
        await stop(server)


async def _metrics_tell(server: HeadraceServer) -> bool:
    """Whether the metrics, which are a second old, have come to what the test did."""
    samples = await server.metrics()
    assert samples['headrace_http_requests_total{route="/kv/flush",status="200"}'] == 1
    assert samples['headrace_http_requests_total{route="/reset_prefix_cache",status="200"}'] == 1

    def value(name: str, **labels: str) -> float:
        """Of a series that is there as soon as the engine has counted."""
        given = sorted({"model": server.model, "target": "engine0/0", **labels}.items())
        shown = ",".join(f'{name}="{one}"' for name, one in given)
        return samples.get(f"headrace_kv_{name}{{{shown}}}", -1.0)

    assert value("tier_capacity_bytes", tier="ram") == 16 << 20
    assert value("breaker_state", tier="disk", direction="load") == 0
    assert value("breaker_trips_total", tier="disk") == 0
    return (
        value("tier_used_bytes", tier="disk") > 0
        and value("loads_total", tier="disk", outcome="ok") >= FULL
        and value("load_bytes_total", tier="disk") > 0
        and value("load_seconds_count", tier="disk") >= FULL
        and value("lookup_blocks_total", tier="ram", result="hit") >= FULL
        and value("behind_ended_total", tier="disk", reason="ok") >= FULL
        and value("tier_pinned_bytes", tier="ram") > 0
    )


async def refuses_what_cannot_be(server: HeadraceServer) -> None:
    """Each body with the parameter that its error names."""
    prompt = {"prompt": "a"}
    table: list[tuple[str, object, str | None]] = [
        ("lookup", {}, "prompt"),
        ("lookup", [], None),
        ("lookup", {"prompt": 5}, "prompt"),
        ("lookup", {"prompt": "a", "token_ids": [1]}, "prompt"),
        ("lookup", {"token_ids": [-1]}, "token_ids[0]"),
        ("lookup", {"token_ids": [2**32]}, "token_ids[0]"),
        ("lookup", {"token_ids": ["a"]}, "token_ids[0]"),
        ("lookup", {**prompt, "tenant": "nobody"}, "tenant"),
        ("lookup", {**prompt, "scope": "00"}, "scope"),
        ("lookup", {**prompt, "scope": "0" * 64, "cache_salt": "a"}, "scope"),
        ("lookup", {**prompt, "more": 1}, "more"),
        ("lookup", {**prompt, "model": "other"}, "model"),
        ("prefetch", {**prompt, "timeout_s": 60}, "timeout_s"),
        ("prefetch", {**prompt, "timeout_s": -1}, "timeout_s"),
        ("pin", prompt, "seconds"),
        ("pin", {**prompt, "seconds": 0}, "seconds"),
        ("pin", {**prompt, "seconds": 1e9}, "seconds"),
        ("pin", {**prompt, "seconds": 1, "tier": "floppy"}, "tier"),
        ("pin", {**prompt, "seconds": 1, "tier": "remote"}, "tier"),
        ("drop", {}, "everything"),
        ("drop", {"everything": True, "prompt": "a"}, "everything"),
        ("drop", {"owner": "xyz"}, "owner"),
        ("drop", {"owner": "0" * 32, "prompt": "a"}, "owner"),
        ("drop", {"cache_salt": "a"}, "cache_salt"),
        ("drop", {"tenant": "nobody"}, "tenant"),
        ("quota", {"quota_bytes": -1}, "quota_bytes"),
        ("quota", {"quota_bytes": "1GiB"}, "quota_bytes"),
        ("quota", {"tenant": "nobody", "quota_bytes": 1}, "tenant"),
        ("flush", {"timeout_s": 1000}, "timeout_s"),
        ("weights_updated", {"epoch": ""}, "epoch"),
        ("weights_updated", {"epoch": "x" * 200}, "epoch"),
        ("flush?worker=other", {}, "worker"),
    ]
    async with await server.client() as client:
        for path, body, param in table:
            answer = await client.post(f"/kv/{path}", json=body)
            expected = 404 if param == "model" else 400
            assert (answer.status_code, answer.json()["error"]["param"]) == (expected, param), (path, body, answer.text)
        assert (await client.get("/kv/lookup")).status_code == 405
        assert (await client.post("/kv/stats")).status_code == 405
        assert (await client.post("/kv/nothing")).status_code == 404
        assert (await client.get("/kv/stats", headers={"x-forwarded-for": "127.0.0.1"})).status_code == 403


async def test_a_server_without_a_store_says_so_and_still_forgets_its_prefixes(
    tiny_model: Path, tmp_path: Path
) -> None:
    with headrace(tmp_path, tiny_model, threads=1, block_size=BLOCK) as server:
        await server.wait_ready()
        for path, body in [("lookup", {"prompt": "a"}), ("flush", {}), ("drop", {"everything": True})]:
            answer = await post(server, f"/kv/{path}", body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "kv_store_off"), answer.text
        await ask(server)
        assert (await ask(server))[1]["device"] > 0
        (one,) = await told(server, "/kv/weights_updated")
        assert one["epoch"] == ""
        assert (await ask(server))[1] == {"device": 0}
        await stop(server)


async def test_orders_reach_all_replicas_or_the_one_that_is_named(tiny_model: Path, tmp_path: Path) -> None:
    alone = {**flags(tmp_path), "kv_store": ["ram=16MiB"]}
    with headrace(tmp_path, tiny_model, **alone, replicas=2) as server:
        await server.wait_ready()
        await until(lambda: _has_workers(server, 2), "both replicas are there")
        await ask(server)
        both = await told(server, "/kv/flush", {"timeout_s": 15})
        names = [one["worker"] for one in both]
        assert len(set(names)) == 2
        found = await told(server, "/kv/lookup", {"prompt": PROMPT})
        assert sorted(one["tiers"]["ram"] for one in found) == [0, FULL]
        has = next(one["worker"] for one in found if one["tiers"]["ram"])
        (one,) = await told(server, f"/kv/drop?worker={has}", {"everything": True})
        assert one["worker"] == has
        found = await told(server, "/kv/lookup", {"prompt": PROMPT})
        assert [one["tiers"]["ram"] for one in found] == [0, 0]
        epochs = {one["epoch"] for one in await told(server, "/kv/weights_updated")}
        assert len(epochs) == 1, "replicas with the same weights share what they store"
        assert epochs != {""}
        await stop(server)


async def _has_workers(server: HeadraceServer, count: int) -> bool:
    async with await server.client() as client:
        answer = await client.get("/kv/stats")
    if answer.status_code != 200:
        return False
    workers = answer.json()["workers"]
    return len(workers) == count and all("error" not in one for one in workers)


async def sent(server: HeadraceServer, prompt: str = PROMPT) -> tuple[dict[str, Any], dict[str, int]]:
    """Ask once; return why it went where it went, and the cached tokens by tier."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    async with await server.client() as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        why = await client.get("/router/explain", params={"request_id": answer.json()["id"]})
    details = answer.json()["usage"]["prompt_tokens_details"]
    (decision,) = why.json()["decisions"]
    return decision, details.get("cached_tokens_by_tier", {"device": details["cached_tokens"]})


def options(decision: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["candidate"]["target_id"]: one for one in decision["options"]}


async def test_a_prompt_that_left_the_device_still_goes_to_whose_memory_has_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    alone = {**flags(tmp_path), "kv_store": ["ram=16MiB"]}
    with headrace(tmp_path, tiny_model, **alone, replicas=2) as server:
        await server.wait_ready()
        await until(lambda: _has_workers(server, 2), "both replicas are there")
        first, _ = await sent(server)
        home = first["target_id"]
        await told(server, "/kv/flush", {"timeout_s": 15})

        async def is_in_memory_alone() -> bool:
            """A prompt that is asked again is on the device afterwards: it is emptied before each look."""
            await post(server, "/kv/reset_prefix_cache")
            decision, cached = await sent(server)
            hit = options(decision)[home]["candidate"]["hit"]
            if decision["target_id"] != home or hit["ram"] != FULL * BLOCK:
                return False
            assert cached == {"ram": FULL * BLOCK}
            reasons = options(decision)[home]["score"]["reasons"]
            assert reasons["fetch_s"] > 0
            other = next(one for name, one in options(decision).items() if name != home)
            assert other["score"]["reasons"]["miss_s"] > reasons["miss_s"]
            return True

        await until(is_in_memory_alone, "the router has heard of the memory tier")
        await stop(server)


async def test_what_all_can_fetch_goes_to_who_has_less_to_do(tiny_model: Path, tmp_path: Path) -> None:
    shared = {**flags(tmp_path), "kv_store": ["ram=16MiB", f"shared={tmp_path / 'kv'},64MiB,min-free=1MiB"]}
    with headrace(tmp_path, tiny_model, **shared, replicas=2) as server:
        await server.wait_ready()
        await until(lambda: _has_workers(server, 2), "both replicas are there")
        await sent(server)
        await told(server, "/kv/flush", {"timeout_s": 15})
        body = {"model": server.model, "prompt": "b", "max_tokens": 400, "ignore_eos": True, "stream": True}

        async def goes_to_the_other() -> bool:
            await told(server, "/kv/drop", {"everything": True, "tier": "ram"})
            await post(server, "/kv/reset_prefix_cache")
            async with await server.client() as client, client.stream("POST", "/v1/completions", json=body) as busy:
                events = busy.aiter_lines()
                started = json.loads((await anext(events)).removeprefix("data: "))
                why = await client.get("/router/explain", params={"request_id": started["id"]})
                loaded = why.json()["decisions"][0]["target_id"]
                decision, cached = await sent(server)
            hits = {name: one["candidate"]["hit"] for name, one in options(decision).items()}
            if any(hit["remote"] != FULL * BLOCK for hit in hits.values()):
                return False
            assert decision["target_id"] != loaded
            assert cached == {"remote": FULL * BLOCK}
            return True

        await until(goes_to_the_other, "the router has heard of the shared tier")
        await stop(server)


async def test_tenants_have_their_own_kv_and_quota(tiny_model: Path, tmp_path: Path) -> None:
    one, other, admin = "hr-tenant-0123456789abcdef", "hr-other-0123456789abcdef", "hr-admin-0123456789abcdef"
    (tmp_path / "keys").write_text(f"{one}: one\n{other}: other\n")
    (tmp_path / "admin").write_text(admin)
    for name in ("keys", "admin"):
        (tmp_path / name).chmod(0o600)
    secured = {**flags(tmp_path), "api_keys_file": tmp_path / "keys", "admin_key_file": tmp_path / "admin"}
    with headrace(tmp_path, tiny_model, **secured) as server:
        await server.wait_ready()
        async with await server.client() as client:

            async def order(path: str, body: object, key: str = admin) -> httpx.Response:
                return await client.post(f"/kv/{path}", json=body, headers={"authorization": f"Bearer {key}"})

            async def in_ram(tenant: str, salt: str | None = None) -> int:
                answer = await order("lookup", {"prompt": PROMPT, "tenant": tenant, "cache_salt": salt})
                assert answer.status_code == 200, answer.text
                return int(answer.json()["workers"][0]["tiers"]["ram"])

            for key, salt in [(one, None), (one, "s"), (other, None)]:
                body = {"model": server.model, "prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
                answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == 200, answer.text
            assert (await order("flush", {"timeout_s": 15})).json()["workers"][0]["in_time"] is True
            assert [await in_ram("one"), await in_ram("one", "s"), await in_ram("other")] == [FULL, FULL, FULL]
            assert await in_ram("one", "t") == 0

            assert (await order("quota", {"tenant": "one", "quota_bytes": 1 << 20})).status_code == 200
            stats = await client.get("/kv/stats", headers={"authorization": f"Bearer {admin}"})
            owners = {use["tenant"]: use for use in stats.json()["workers"][0]["owners"]["ram"]}
            assert {name: use["quota_bytes"] for name, use in owners.items()} == {"one": 1 << 20, "other": None}
            assert owners["one"]["used_bytes"] == 2 * owners["other"]["used_bytes"] > 0

            assert (await order("drop", {"tenant": "one"})).status_code == 200
            assert [await in_ram("one"), await in_ram("one", "s"), await in_ram("other")] == [0, 0, FULL]
            assert (await order("drop", {"owner": owners["other"]["owner"]})).status_code == 200
            assert await in_ram("other") == 0

            for path, wrong, param, code in [
                ("lookup", {"prompt": "a"}, "tenant", "missing_required_parameter"),
                ("lookup", {"prompt": "a", "tenant": "nobody"}, "tenant", "unknown_tenant"),
                ("quota", {"quota_bytes": 1}, "tenant", "missing_required_parameter"),
                ("quota", {"tenant": "nobody", "quota_bytes": 1}, "tenant", "unknown_tenant"),
                ("drop", {"tenant": "nobody"}, "tenant", "unknown_tenant"),
            ]:
                error = (await order(path, wrong)).json()["error"]
                assert (error["param"], error["code"]) == (param, code), (path, wrong)
            assert (await order("flush", {}, one)).status_code == 403
            assert (await order("flush", {}, "hr-wrong-0123456789abcdef")).status_code == 401
            assert (await client.post("/reset_prefix_cache")).status_code == 401
        await stop(server)


async def test_a_workers_own_port_takes_the_orders_for_its_ranks(tiny_model: Path, tmp_path: Path) -> None:
    places = {"listen": "tcp://127.0.0.1:0", "http_port": 0, "dp": 2}
    settings = {"kv_store": "ram=16MiB", "block_size": BLOCK, "threads": 1, "kv_cache_memory": "8MiB"}
    prompt = list(range(10, 10 + 5 * BLOCK))
    with worker_command(tmp_path, str(tiny_model), **places, **settings) as worker:
        record = await worker.ready_ranks(2)
        targets = [f"{record.worker_id}/{number}" for number in (0, 1)]
        with connections(record) as engines:
            await asyncio.gather(*(engine.wait_ready() for engine in engines))
            wanted = GenerateRequest(request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_tokens=1))
            await collect(engines[0], wanted)
        async with httpx.AsyncClient(base_url=await worker.url(), timeout=60, trust_env=False) as client:

            async def order(path: str, body: object) -> list[dict[str, Any]]:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                workers: list[dict[str, Any]] = answer.json()["workers"]
                return workers

            await order("/kv/flush", {"timeout_s": 15})
            held = {one["worker"]: one for one in await order("/kv/lookup", {"token_ids": prompt})}
            assert {name: held[name]["tiers"] for name in targets} == {targets[0]: {"ram": 5}, targets[1]: {"ram": 0}}
            assert [held[name]["device"] for name in targets] == [5, 0]
            (one,) = await order(f"/kv/lookup?worker={targets[1]}", {"token_ids": prompt, "scope": "0" * 64})
            assert one["tiers"] == {"ram": 0}
            assert len((await client.get("/kv/stats")).json()["workers"]) == 2
            assert len(await order("/reset_prefix_cache", {})) == 2
            assert [one["device"] for one in await order("/kv/lookup", {"token_ids": prompt})] == [0, 0]
            samples = (await client.get("/metrics")).text
            assert 'headrace_kv_tier_capacity_bytes{dp_rank="1",tier="ram"} 1.6777216e+07' in samples
            for body, param in [
                ({"prompt": "a"}, "prompt"),
                ({"token_ids": [1], "tenant": "a"}, "tenant"),
                ({"token_ids": [1], "cache_salt": "a"}, "cache_salt"),
                ({"token_ids": [-1]}, "token_ids[0]"),
                ([], None),
            ]:
                answer = await client.post("/kv/lookup", json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert (await client.post("/kv/lookup", content=b"{")).json()["error"]["code"] == "invalid_json"
            assert (await client.get("/kv/lookup")).status_code == 405
        worker.terminate()
        assert await worker.exit_code() == 0
