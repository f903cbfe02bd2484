"""The command `llm`, configured as its manual says for servers that speak OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.serving import KEY, MODEL, Server
from tests.clients.shapes import QUESTION, City

COMMAND = Path(sys.executable).with_name("llm")
LIMIT_S = 120
CHAT = ("-m", "headrace", "-o", "temperature", "0")
TEXT = ("-m", "headrace-text", "-o", "temperature", "0")
END_TOKEN = "2"
ANSWER = "The capital of France is Paris."

MODELS = """
- model_id: headrace
  model_name: {model}
  api_base: {base_url}
  api_key_name: headrace
  supports_schema: true
- model_id: headrace-text
  model_name: {model}
  api_base: {base_url}
  api_key_name: headrace
  completion: true
- model_id: headrace-unknown
  model_name: another
  api_base: {base_url}
  api_key_name: headrace
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("llm")
    (directory / "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, base_url=server.base_url))
    (directory / "keys.json").write_text(json.dumps({"headrace": KEY}))
    return {**os.environ, "LLM_USER_PATH": str(directory)}


@pytest.fixture(scope="module")
def llm(environment: dict[str, str]) -> Run:
    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [COMMAND, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_an_answer_streams_and_comes_whole_with_its_usage(llm: Run) -> None:
    for form in ((), ("--no-stream",)):
        done = llm(*CHAT, *form, "--usage", QUESTION)
        assert done.stdout.strip() == ANSWER
        assert "37 input, 8 output" in done.stderr


def test_a_conversation_goes_on(llm: Run) -> None:
    llm(*CHAT, "--system", "Be brief.", QUESTION)
    assert "Madrid" in llm("--continue", "-o", "temperature", "0", "And of Spain?").stdout


def test_options_reach_the_model(llm: Run) -> None:
    assert llm(*CHAT, "-o", "stop", "Paris", QUESTION).stdout.strip() == "The capital of France is"
    limited = ("-o", "max_tokens", "2", "-o", "seed", "3", "-o", "presence_penalty", "1")
    assert 0 < len(llm(*CHAT, *limited, QUESTION).stdout.split()) <= 2


def test_an_answer_has_the_form_of_a_schema(llm: Run) -> None:
    City.model_validate_json(llm(*CHAT, "--schema", json.dumps(City.model_json_schema()), QUESTION).stdout)


def test_raw_prompts_are_completed_with_logprobs(llm: Run) -> None:
    limited = ("-o", "max_tokens", "2", "-o", "logprobs", "2")
    assert "Paris" in llm(*TEXT, *limited, "The capital of France is").stdout
    (logged,) = json.loads(llm("logs", "--json", "--count", "1").stdout)
    assert "top_logprobs" in json.dumps(logged)


def test_refusals_are_told_in_one_line(llm: Run) -> None:
    assert "does not exist" in llm("-m", "headrace-unknown", QUESTION, code=1).stderr
    assert "not valid" in llm(*CHAT, "--key", "no-key-of-this-server", QUESTION, code=1).stderr
    assert "context length" in llm(*CHAT, "word " * 3000, code=1).stderr


def test_a_stream_that_is_interrupted_is_aborted(server: Server, environment: dict[str, str]) -> None:
    before = server.aborts()
    endless = ("-o", "logit_bias", json.dumps({END_TOKEN: -100}))
    command = [COMMAND, "-m", "headrace", *endless, "Tell me a story."]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)
        finally:
            process.kill()
    asyncio.run(server.wait_aborts(before + 1))
