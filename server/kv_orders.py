"""Bodies of the routes under /kv, and the orders that they are. Knows no HTTP and no engine.

Who answers for names and text says it through `Names`: an API process knows tenants and the model's text, a worker
neither.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import RequestError
from engine.kv.store_orders import (
    MAX_PIN_S,
    MAX_WAIT_S,
    Drop,
    Flush,
    LookUp,
    NewWeights,
    Pin,
    Prefetch,
    ReadStats,
    SetQuota,
    StoreOrder,
)
from kvstore.keys import KEY_BYTES, OWNER_BYTES, owner_of, token_words
from kvstore.tier import TierName
from server.openai.body import parse_body
from server.openai.fields import Whole

MAX_TOKENS = 2**20
DEFAULT_WAIT_S = 5.0

Tokens = Annotated[list[Annotated[Whole, Field(ge=0, lt=2**32)]], Field(max_length=MAX_TOKENS, fail_fast=True)]
Tenant = Annotated[str, Field(min_length=1, max_length=64)]
Scope = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
Owner = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * OWNER_BYTES}}}$")]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT_S)]


class KVBody(BaseModel):
    """`model` is needed where several are served, for what is said of a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None


class PromptBody(KVBody):
    """A prompt as text or as token ids, and whose it is: a tenant's (and a cache salt's), or a scope's in hex."""

    prompt: str | None = None
    token_ids: Tokens | None = None
    tenant: Tenant | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    scope: Scope | None = None


class PrefetchBody(PromptBody):
    timeout_s: Wait = DEFAULT_WAIT_S


class UnpinBody(PromptBody):
    tier: TierName | None = None


class PinBody(UnpinBody):
    seconds: Annotated[float, Field(gt=0, le=MAX_PIN_S)]


class DropBody(PromptBody):
    """A prompt, all that a tenant (or an owner, in hex) has, or everything, which has to be said."""

    owner: Owner | None = None
    everything: bool = False
    tier: TierName | None = None


class QuotaBody(KVBody):
    """`quota_bytes` null: the default holds again."""

    tenant: Tenant | None = None
    owner: Owner | None = None
    quota_bytes: Annotated[Whole, Field(ge=0, lt=2**60)] | None = None
    tier: TierName | None = None


class FlushBody(KVBody):
    timeout_s: Wait = DEFAULT_WAIT_S


class WeightsBody(KVBody):
    epoch: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class Names(Protocol):
    """What differs between those who take orders."""

    async def tokens(self, model: str | None, prompt: str) -> Sequence[int]:
        """Return a prompt's token ids, as a completion would have them."""
        ...

    def scope(self, tenant: str | None, salt: str | None) -> bytes:
        """Return the scope of a tenant's requests. Raises RequestError for one that is not known."""
        ...


Read = Callable[[bytes, Names], Awaitable[tuple[str | None, StoreOrder]]]
"""From a body to the model that it names and the order that it is."""


async def read_stats(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    return None, ReadStats()


async def read_look_up(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    asked = await parse_body(body, PromptBody)
    scope, tokens = await _prompt(asked, names)
    return asked.model, LookUp(scope=scope, tokens=tokens)


async def read_prefetch(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    asked = await parse_body(body, PrefetchBody)
    scope, tokens = await _prompt(asked, names)
    return asked.model, Prefetch(scope=scope, tokens=tokens, wait_s=asked.timeout_s)


async def read_pin(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    asked = await parse_body(body, PinBody)
    scope, tokens = await _prompt(asked, names)
    return asked.model, Pin(scope=scope, tokens=tokens, seconds=asked.seconds, tier=asked.tier)


async def read_unpin(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    asked = await parse_body(body, UnpinBody)
    scope, tokens = await _prompt(asked, names)
    return asked.model, Pin(scope=scope, tokens=tokens, seconds=0.0, tier=asked.tier)


async def read_drop(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    asked = await parse_body(body, DropBody)
    has_prompt = asked.prompt is not None or asked.token_ids is not None
    whose = asked.tenant is not None or asked.owner is not None
    if asked.everything and (has_prompt or whose):
        raise RequestError("'everything' excludes a prompt and a tenant.", param="everything")
    if asked.everything:
        return asked.model, Drop(tier=asked.tier)
    if has_prompt:
        if asked.owner is not None:
            raise RequestError("A prompt has a 'tenant' or a 'scope', and no 'owner'.", param="owner")
        scope, tokens = await _prompt(asked, names)
        return asked.model, Drop(scope=scope, tokens=tokens, tier=asked.tier)
    if asked.scope is not None or asked.cache_salt is not None:
        param = "scope" if asked.scope is not None else "cache_salt"
        raise RequestError(f"{param!r} needs a prompt: a tenant's KV is dropped as a whole.", param=param)
    if not whose:
        raise RequestError(
            "What is to be dropped? Give 'prompt', 'token_ids', 'tenant', 'owner', or 'everything': true.",
            param="everything",
            code="missing_required_parameter",
        )
    return asked.model, Drop(owner=_owner(asked.tenant, asked.owner, names), tier=asked.tier)


async def read_quota(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    asked = await parse_body(body, QuotaBody)
    owner = _owner(asked.tenant, asked.owner, names)
    return asked.model, SetQuota(owner=owner, limit_bytes=asked.quota_bytes, tier=asked.tier)


async def read_flush(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    asked = await parse_body(body or b"{}", FlushBody)
    return asked.model, Flush(wait_s=asked.timeout_s)


async def read_weights(body: bytes, names: Names) -> tuple[str | None, StoreOrder]:
    """One epoch for all engines that are told at once: they share what they store from then on."""
    asked = await parse_body(body or b"{}", WeightsBody)
    return asked.model, NewWeights(epoch=asked.epoch or secrets.token_hex(16))


KV_POSTS: dict[str, Read] = {
    "/kv/lookup": read_look_up,
    "/kv/prefetch": read_prefetch,
    "/kv/pin": read_pin,
    "/kv/unpin": read_unpin,
    "/kv/drop": read_drop,
    "/kv/quota": read_quota,
    "/kv/flush": read_flush,
    "/kv/weights_updated": read_weights,
}
KV_GETS: dict[str, Read] = {"/kv/stats": read_stats}
RESET_PATHS = ("/kv/reset_prefix_cache", "/reset_prefix_cache")
"""The second is vLLM's name."""


async def _prompt(asked: PromptBody, names: Names) -> tuple[bytes, bytes]:
    """Return scope and token words of a body's prompt."""
    if (asked.prompt is None) == (asked.token_ids is None):
        missing = asked.prompt is None
        raise RequestError(
            "Give the prompt, as 'prompt' or as 'token_ids'." if missing else "'prompt' excludes 'token_ids'.",
            param="prompt",
            code="missing_required_parameter" if missing else None,
        )
    if asked.scope is not None and (asked.tenant is not None or asked.cache_salt is not None):
        raise RequestError("'scope' excludes 'tenant' and 'cache_salt'.", param="scope")
    scope = names.scope(asked.tenant, asked.cache_salt) if asked.scope is None else bytes.fromhex(asked.scope)
    ids = asked.token_ids
    if ids is None:
        ids = list(await names.tokens(asked.model, asked.prompt or ""))
    return scope, token_words(ids)


def _owner(tenant: str | None, owner: str | None, names: Names) -> bytes:
    if tenant is not None and owner is not None:
        raise RequestError("'tenant' excludes 'owner'.", param="owner")
    return bytes.fromhex(owner) if owner is not None else owner_of(names.scope(tenant, None))
