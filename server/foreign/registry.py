"""Which language another server speaks: by name, or found out by asking it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.errors import ConfigError
from router.registry.base import Dialect as DialectName
from server.foreign.dialect import Dialect
from server.foreign.llama_server import LlamaServer
from server.foreign.openai_ids import OpenAIIds
from server.foreign.sglang import SGLang
from server.foreign.watch import fetch

if TYPE_CHECKING:
    import aiohttp

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (OpenAIIds(), SGLang(), LlamaServer())}

ANSWER_TIMEOUT_S = 30.0
"""A token takes a while where much else is computed."""


def dialect_named(name: str) -> Dialect:
    """Raises ConfigError."""
    if name not in DIALECTS:
        raise ConfigError(f"No engine speaks {name!r}.", hint=f"Known are: {', '.join(sorted(DIALECTS))}.")
    return DIALECTS[name]


async def detect(session: aiohttp.ClientSession, url: str, model: str) -> DialectName:
    """Return what the server at `url` speaks; "text" when it gives no token ids in any way that is known here.

    One token of the model is computed. Raises aiohttp.ClientError and TimeoutError while the server is away.
    """
    url = url.rstrip("/")
    if "default_generation_settings" in await _ask(session, f"{url}/props"):
        return "llama_server"
    if "model_path" in await _ask(session, f"{url}/get_model_info"):
        return "sglang"
    probe = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    choices = (await _ask(session, f"{url}/v1/completions", probe)).get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict) and choices[0].get("token_ids"):
        return "openai"
    return "text"


async def _ask(session: aiohttp.ClientSession, url: str, body: object = None) -> dict[str, object]:
    """Return the JSON object of a good answer, {} for any other."""
    status, answer = await fetch(session, url, body, timeout_s=ANSWER_TIMEOUT_S)
    try:
        return msgspec.json.decode(answer, type=dict[str, object]) if status == 200 else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
