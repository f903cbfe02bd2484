"""The start-up card tells what runs, and its curl line is one that a shell and the server understand."""

from __future__ import annotations

import io
import json
import shlex

import pytest

from engine.protocol import AssetRef, EngineInfo, KVTierInfo, TextAssets
from server.card import card, print_card
from tests.support.infos import engine_info


def info(**changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "model": "smollm2",
        "architecture": "llama",
        "dtype": "bfloat16",
        "operators": "torch",
        "max_model_len": 8192,
        "kv_capacity_tokens": 20480,
        "threads": 2,
        "text": TextAssets(tokenizer=AssetRef("0", 0), chat_template=AssetRef("1", 0)),
    }
    return engine_info(**{**values, **changes})


def test_card_tells_everything_that_decides_tokens_and_capacity() -> None:
    text = card(info(), "http://127.0.0.1:8000")
    for told in ("smollm2", "llama", "cpu, 2 threads", "bfloat16", "default", "torch", "8,192 tokens", "20,480 tokens"):
        assert told in text
    assert "2.5 requests at the full window" in text
    assert "http://127.0.0.1:8000\n" in text


def test_card_tells_the_tiers_of_the_store_without_passwords() -> None:
    tiers = (
        KVTierInfo(tier="ram", capacity_bytes=4 << 30),
        KVTierInfo(tier="disk", capacity_bytes=50 << 30, place="/kv", encrypted=True, is_direct=False),
        KVTierInfo(tier="remote", place="redis://cache:6379/0", answers=False),
    )
    text = card(info(kv_tiers=tiers), "http://h")
    for told in (
        "KV store   ram: 4.0 GiB\n",
        "disk: 50.0 GiB, at /kv, encrypted, through the page cache (no O_DIRECT)",
        "remote: capacity not known, at redis://cache:6379/0, IT DOES NOT ANSWER",
    ):
        assert told in text
    assert "KV store" not in card(info(), "http://h")


def test_card_counts_one_thread_as_one() -> None:
    assert "cpu, 1 thread\n" in card(info(threads=1), "http://h")


@pytest.mark.parametrize("name", ["smollm2", "it's a model", 'quo"ted', "naïve/modèle"])
def test_curl_line_survives_the_shell(name: str) -> None:
    text = card(info(model=name), "http://127.0.0.1:8000/")
    line = text[text.index("curl ") :].replace("\\\n", "")
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == name
    assert body["messages"][0]["role"] == "user"


@pytest.mark.parametrize(("eos_ids", "prompt"), [((0,), "Once upon a time"), ((), [1, 2, 3])])
def test_the_curl_line_asks_for_no_chat_where_there_is_no_template(eos_ids: tuple[int, ...], prompt: object) -> None:
    text = card(engine_info(eos_ids=eos_ids), "http://h")
    words = shlex.split(text[text.index("curl ") :].replace("\\\n", ""))
    assert words[1] == "http://h/v1/completions"
    assert json.loads(words[-1]) == {"model": "fake", "prompt": prompt}


def test_card_goes_to_the_given_stream_whole() -> None:
    out = io.StringIO()
    print_card(info(), "http://h:1", out)
    assert out.getvalue() == card(info(), "http://h:1") + "\n"
