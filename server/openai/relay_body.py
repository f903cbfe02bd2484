"""The body of a request that is passed on to a server which gives text only: what is looked at, and what is changed.

Everything else goes as it came, unknown fields included: what they mean is that server's to say. Refused is what would
reach past the request itself: into other machines, files, or code.
"""

from __future__ import annotations

import asyncio
import re

import msgspec

from engine.errors import RequestError, UnsupportedError
from server.openai.body import PARSE_IN_THREAD_BYTES, check_structure

UNSAFE = frozenset(
    {"kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
    | {"disagg_prefill_dp_rank", "data_parallel_rank", "routed_dp_rank", "lora_path", "prompt_embeds"}
    | {"custom_logit_processor", "logits_processors", "chat_template"}
)
"""They name hosts to talk to, ranks to run on, files to load, and code or templates to run."""

NOTHING = (b"null", b"[]", b"{}", b"false", b'""')

Fields = dict[str, msgspec.Raw]

PATH = re.compile(r"`\$\.(\w+)")
"""Of the field that a message of the decoder is about."""


class Named(msgspec.Struct, frozen=True):
    model: str | None = None


class Looked(msgspec.Struct, frozen=True):
    """What is looked at."""

    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    priority: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: object = None
    user: object = None


class RelayBody:
    """`wants_usage` is whether the client asked for the usage of a stream: it is always asked for."""

    def __init__(self, looked: Looked, fields: Fields) -> None:
        options = looked.stream_options or {}
        self.stream = looked.stream or False
        self.wants_usage = options.get("include_usage") is True
        self.priority = looked.priority
        self.cache_salt = looked.cache_salt or None
        most = looked.max_completion_tokens or looked.max_tokens or 0
        self.max_output_tokens = max(0, most) * max(1, looked.n or 1)
        self.session_fields = {"prompt_cache_key": looked.prompt_cache_key, "user": looked.user}
        self._fields = fields
        if self.stream:
            self._fields["stream_options"] = msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))

    def encoded(self, cache_salt: str | None) -> bytes:
        """Return what is sent. `cache_salt` keeps tenants' caches apart; None leaves it as it is."""
        if cache_salt is not None:
            self._fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(cache_salt))
        return msgspec.json.encode(self._fields)


def model_named(body: bytes) -> str | None:
    """Return the model of a body, None where it names none or is no JSON."""
    try:
        return msgspec.json.decode(body, type=Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


async def read_relay_body(body: bytes) -> RelayBody:
    """Raises RequestError, and UnsupportedError for fields that are not passed on."""
    if len(body) > PARSE_IN_THREAD_BYTES:
        return await asyncio.to_thread(_read_large, body)
    return _read(body)


def _read_large(body: bytes) -> RelayBody:
    check_structure(body)
    return _read(body)


def _read(body: bytes) -> RelayBody:
    try:
        fields = msgspec.json.decode(body, type=Fields)
        looked = msgspec.json.decode(body, type=Looked)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    for name in UNSAFE.intersection(fields):
        if bytes(fields[name]) not in NOTHING:
            raise UnsupportedError(f"The parameter '{name}' is not passed on to this model's engines.", param=name)
    return RelayBody(looked, fields)


def _wrong_type(message: str) -> RequestError:
    found = PATH.search(message)
    if found is None:
        return RequestError("The request body must be a JSON object.", code="invalid_type")
    return RequestError(f"Invalid type for '{found[1]}': {message}.", param=found[1], code="invalid_type")
