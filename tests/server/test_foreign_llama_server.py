"""`OpenAIWorker` in front of a real llama-server, where one is at hand: its path is in HEADRACE_TEST_LLAMA_SERVER."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from engine.loader.packaged import ensure
from engine.protocol import AssetRef, GenerateRequest, SamplingParams, TextAssets, TokenOutput
from server.foreign.info import foreign_info
from server.foreign.llama_server import LlamaServer
from server.foreign.registry import detect
from server.foreign.worker import OpenAIWorker
from tests.support import smollm2

BINARY = os.environ.get("HEADRACE_TEST_LLAMA_SERVER", "")

pytestmark = [
    pytest.mark.skipif(not BINARY, reason="HEADRACE_TEST_LLAMA_SERVER names no llama-server"),
    pytest.mark.soak,
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "-c", "1024", "-np", "2", "-t", "1"]
    with (tmp_path_factory.mktemp("llama") / "log").open("wb") as log:
        process = subprocess.Popen([BINARY, "-m", str(ensure("smollm2")), *options], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


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


def test_the_binary_is_one() -> None:
    assert Path(BINARY).is_file()
