"""The packaged model's tokenizer and template, read once per test process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from engine.loader.gguf import GGUFFile
from engine.loader.packaged import ensure
from engine.text.gguf_tokenizer import tokenizer_json
from engine.text.tokenizer import TextCodec


@cache
def metadata() -> Mapping[str, object]:
    with GGUFFile(ensure("smollm2")) as file:
        return file.metadata


@cache
def tokenizer_bytes() -> bytes:
    return tokenizer_json(metadata())


@cache
def codec() -> TextCodec:
    return TextCodec(tokenizer_bytes())


def chat_template() -> str:
    source = metadata()["tokenizer.chat_template"]
    assert isinstance(source, str)
    return source
