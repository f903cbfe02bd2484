"""Bytes of server-sent events. Per token only the text is encoded: everything around it is built once per choice."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from engine.protocol import CachedTokens, EngineInfo
from server.openai.generation import Usage
from server.version import VERSION

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
NOT_FINISHED = b'"finish_reason":null'

encode_json = msgspec.json.encode


def encoded(value: object) -> msgspec.Raw:
    """A part of an answer, written already: what it was made of can go before the next part is made."""
    return msgspec.Raw(encode_json(value))


LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""UTF-8 of Unicode's line ends, and their escapes: JSON allows them in strings, but some clients split lines there."""


def json_text(text: str) -> bytes:
    """Encode a string for the inside of an event."""
    return encode_json(text) if text.isascii() else event_json(text)


def event_json(value: object) -> bytes:
    """Encode any value for the inside of an event."""
    encoded = encode_json(value)
    for line_end, escape in LINE_ENDS:
        encoded = encoded.replace(line_end, escape)
    return encoded


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks and the whole answer of one request share."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def new_envelope(prefix: str, info: EngineInfo) -> Envelope:
    """Draw an id that no other answer has. The fingerprint names everything that decides on tokens."""
    fingerprint = _fingerprint(f"{info.weights_digest}/{info.numerics_fingerprint}/{VERSION}")
    return Envelope(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), info.model, fingerprint)


@lru_cache(maxsize=64)
def _fingerprint(identity: str) -> str:
    return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:10]


class Frame:
    """The constant bytes around one request's chunks of kind `object`."""

    def __init__(self, envelope: Envelope, kind: str, include_usage: bool) -> None:
        self._opening = b"data: " + event_json(envelope.fields(kind))[:-1]
        self.end = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def before_choice(self, index: int) -> bytes:
        return self._opening + b',"choices":[{"index":' + str(index).encode()

    def after_choice(self, finish: bytes = NOT_FINISHED, behind: bytes = b"") -> bytes:
        """`behind` are members of the chunk itself."""
        return b"," + finish + b"}]" + behind + self.end

    def with_usage(self, chunk: bytes, usage: Usage) -> bytes:
        """Return a chunk with the usage so far in place of null."""
        return chunk.removesuffix(self.end) + b',"usage":' + encode_json(usage_fields(usage)) + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self._opening + b',"choices":[],"usage":' + encode_json(usage_fields(usage)) + b"}\n\n"


def finished(reason: str, stop_reason: str | int | None) -> bytes:
    return b'"finish_reason":"' + reason.encode() + b'","stop_reason":' + event_json(stop_reason)


def usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": _details(usage.cached),
    }


def _details(cached: CachedTokens) -> dict[str, object]:
    """Tiers are told of where one beyond the device had a part in it."""
    details: dict[str, object] = {"cached_tokens": cached.total}
    if cached.total > cached.device:
        by_tier = {tier: getattr(cached, tier) for tier in CachedTokens.__struct_fields__}
        details["cached_tokens_by_tier"] = {tier: tokens for tier, tokens in by_tier.items() if tokens}
    return details
