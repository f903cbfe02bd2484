"""What another server tells of itself when it is asked: its models, its window, how it splits text into tokens.

Everything here may be missing. Nothing that is told is trusted further than it is used for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import msgspec

from router.registry.base import Dialect as DialectName
from server.foreign.load import READERS, LoadReader, block_size_of
from server.foreign.watch import fetch

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

PROBE_TEXTS = ("Hello, world! 1 + 1 = 2", "Who wrote Faust? \u00e9\u4e2d\U0001f642", "def f(x):\n\treturn x**2")
"""Texts that all servers of a model must split into the same token ids."""

Probe = tuple[tuple[int, ...], ...]
"""Their token ids."""

MAX_MODELS = 1000
ANSWER_TIMEOUT_S = 10.0


class Card(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class Cards(msgspec.Struct, frozen=True):
    data: list[Card] = []


class Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class GenerationSettings(msgspec.Struct, frozen=True):
    n_ctx: int | None = None


class Props(msgspec.Struct, frozen=True):
    """Of llama.cpp's server. `n_ctx` is one slot's window."""

    default_generation_settings: GenerationSettings = GenerationSettings()


class ServerInfo(msgspec.Struct, frozen=True):
    """Of SGLang."""

    context_length: int | None = None
    max_total_num_tokens: int | None = None


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`models` are the names that requests may have, empty where that is not told. `probe` has the token ids of
    `PROBE_TEXTS`, None where the server tells no ids of texts. `load_reader` reads its load, None where it tells none.
    """

    dialect: DialectName
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    block_size: int | None = None
    probe: Probe | None = None
    load_reader: LoadReader | None = None


async def learn(session: aiohttp.ClientSession, url: str, model: str, dialect: DialectName) -> ServerFacts:
    """Ask the server at `url`. Raises aiohttp.ClientError, TimeoutError and OSError while it is away."""
    cards = await _ask(session, f"{url}/v1/models", Cards) or Cards()
    window = next((card.max_model_len for card in cards.data if card.id == model), None)
    if dialect == "llama_server":
        props = await _ask(session, f"{url}/props", Props)
        window = None if props is None else props.default_generation_settings.n_ctx
    elif dialect == "sglang" and window is None:
        info = await _ask(session, f"{url}/get_server_info", ServerInfo)
        window = None if info is None else info.context_length
    reader, block_size = await _load_reader(session, url)
    return ServerFacts(
        dialect=dialect,
        models=tuple(card.id for card in cards.data[:MAX_MODELS]),
        max_model_len=window if window is not None and window > 1 else None,
        block_size=block_size,
        probe=await _probe(session, url, model, dialect),
        load_reader=reader,
    )


async def _probe(session: aiohttp.ClientSession, url: str, model: str, dialect: DialectName) -> Probe | None:
    bodies: list[dict[str, object]] = [
        {"content": text, "add_special": False, "parse_special": True}
        if dialect == "llama_server"
        else {"model": model, "prompt": text, "add_special_tokens": False}
        for text in PROBE_TEXTS
    ]
    answers = await asyncio.gather(*(_ask(session, f"{url}/tokenize", Tokens, body) for body in bodies))
    told = [tuple(answer.tokens) for answer in answers if answer is not None]
    return tuple(told) if len(told) == len(PROBE_TEXTS) else None


async def _load_reader(session: aiohttp.ClientSession, url: str) -> tuple[LoadReader | None, int | None]:
    """Return who can read what the server tells of its load, and the size of its KV blocks."""
    block_size = None
    for reader in READERS:
        status, body = await fetch(session, url + reader.path, timeout_s=ANSWER_TIMEOUT_S)
        if status == 200:
            block_size = block_size or block_size_of(body)
            if reader.read(body) is not None:
                return reader, block_size
    return None, block_size


async def _ask(session: aiohttp.ClientSession, url: str, kind: type[T], body: object = None) -> T | None:
    """Return a good answer, None for any other."""
    status, data = await fetch(session, url, body, timeout_s=ANSWER_TIMEOUT_S)
    if status != 200:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
