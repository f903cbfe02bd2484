"""`OpenAIWorker` in front of a real llama-server, where one is at hand: its path is in HEADRACE_LLAMA_SERVER."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from engine.loader.packaged import ensure
from engine.protocol import AssetRef, GenerateRequest, SamplingParams, TextAssets, TokenOutput
from server.foreign.info import foreign_info
from server.foreign.llama_server import LlamaServer
from server.foreign.registry import detect
from server.foreign.worker import OpenAIWorker
from tests.support import smollm2
from tests.support.headrace_server import HeadraceServer, gateway
from tests.support.until import until

BINARY = os.environ.get("HEADRACE_LLAMA_SERVER", "")

pytestmark = [
    pytest.mark.skipif(not BINARY, reason="HEADRACE_LLAMA_SERVER names no llama-server"),
    pytest.mark.soak,
]


class LlamaServerProcess:
    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        options = ["--host", "127.0.0.1", "--port", str(port), "-c", "2048", "-np", "2", "-t", "1", "--metrics"]
        with (directory / f"llama-{port}.log").open("wb") as log:
            self.process = subprocess.Popen([BINARY, "-m", str(ensure("smollm2")), *options], stdout=log, stderr=log)
        self.url = f"http://127.0.0.1:{port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = LlamaServerProcess(tmp_path_factory.mktemp("llama"))
    try:
        yield server.url
    finally:
        server.kill()


async def ask(worker: OpenAIWorker, **fields: object) -> list[TokenOutput]:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, seed=1, logprobs=2)
    prompt_ids = smollm2.codec().encode("The capital of France is", parse_special=False)
    asked = GenerateRequest(request_id="r", prompt_ids=prompt_ids, sampling=sampling, **fields)  # type: ignore[arg-type]
    return [output async for output in worker.generate(asked)]


async def test_ids_go_in_and_come_out_and_streams_can_be_resumed(url: str) -> None:
    info = foreign_info(
        "smollm2",
        "llama_server",
        TextAssets(tokenizer=AssetRef("0", 0)),
        max_model_len=512,
        vocab_size=smollm2.codec().vocab_size,
        eos_ids=(0, 2),
    )
    worker = OpenAIWorker(url, LlamaServer(), info, {})
    worker.open()
    try:
        await worker.wait_ready()
        async with aiohttp.ClientSession() as session:
            assert await detect(session, url, "smollm2") == "llama_server"
        outputs = await ask(worker)
        ids = [token for output in outputs for token in output.token_ids]
        assert len(ids) == 12
        assert outputs[-1].finish_reason == "length"
        assert "Paris" in smollm2.codec().decode(ids, show_special=False)
        assert all(len(output.logprobs or ()) == len(output.token_ids) for output in outputs)
        resumed = await ask(worker, resume_ids=ids[:5])
        assert resumed[0].offset == 5
        assert [token for output in resumed for token in output.token_ids] == ids[5:]
    finally:
        await worker.close()


async def test_tokens_within_characters_are_told_as_well(url: str) -> None:
    """Its streams leave out the ids of tokens that end within a character; its whole answers have them."""
    prompt = list(range(100, 160))
    info = foreign_info(
        "m", "llama_server", TextAssets(tokenizer=AssetRef("0", 0)), max_model_len=512, vocab_size=49152, eos_ids=(2,)
    )
    worker = OpenAIWorker(url, LlamaServer(), info, {})
    worker.open()
    try:
        await worker.wait_ready()
        body = {"prompt": prompt, "n_predict": 40, "temperature": 0, "return_tokens": True, "stream": False}
        async with worker.session.post(f"{url}/completion", json=body) as answer:
            expected = (await answer.json())["tokens"]
        sampling = SamplingParams(temperature=0.0, max_tokens=40, seed=1)
        asked = GenerateRequest(request_id="r", prompt_ids=prompt, sampling=sampling)
        outputs = [output async for output in worker.generate(asked)]
        assert [token for output in outputs for token in output.token_ids] == expected
        assert outputs[-1].finish_reason == "length"
        offsets = [output.offset for output in outputs]
        assert offsets == sorted(offsets)
        assert len(offsets) > 2
    finally:
        await worker.close()


async def test_a_gateway_moves_streams_between_two_of_them(tmp_path: Path) -> None:
    servers = [LlamaServerProcess(tmp_path) for _ in range(2)]
    try:
        records = [
            {"worker_id": f"llama{number}", "model": "smollm2", "http_url": server.url, "dialect": "auto"}
            for number, server in enumerate(servers)
        ]
        (tmp_path / "workers.json").write_text(json.dumps(records))
        with gateway(
            tmp_path,
            "smollm2",
            register=f"static:{tmp_path}/workers.json",
            tokenizer="smollm2",
            routing_policy="least_requests",
        ) as door:
            await door.wait_ready()
            async with await door.client() as client:

                async def both_serve() -> bool:
                    samples = await door.metrics()
                    return (
                        sum(value for name, value in samples.items() if name.startswith("headrace_target_ready")) == 2
                    )

                await until(both_serve, "both serve", limit_s=120)
                undisturbed = [await answer(client, number) for number in range(4)]
                answers = [asyncio.create_task(answer(client, number)) for number in range(4)]
                await until(both_busy(door), "both have requests", limit_s=60)
                servers[0].kill()
                assert await asyncio.gather(*answers) == undisturbed
    finally:
        for server in servers:
            server.kill()


async def answer(client: httpx.AsyncClient, number: int) -> str:
    chat = [{"role": "user", "content": f"Write a poem about the number {number}."}]
    body = {"model": "smollm2", "messages": chat, "max_tokens": 120, "temperature": 0}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def both_busy(door: HeadraceServer) -> Callable[[], Awaitable[bool]]:
    async def are_busy() -> bool:
        samples = await door.metrics()
        counts = [value for name, value in samples.items() if name.startswith("headrace_target_in_flight")]
        return len(counts) == 2 and min(counts) > 0

    return are_busy


def test_the_binary_is_one() -> None:
    assert Path(BINARY).is_file()
