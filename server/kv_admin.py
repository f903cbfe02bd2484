"""The operator's routes under /admin/kv: what the engines' KV stores hold, and what they are told to do.

Every answer is {"engines": [...]}, with what each engine's store told. A prompt is named as text or token ids, with the
tenant (the name of its API key) and the cache salt of those whose it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import RequestError
from kvstore.keys import KeyChain
from kvstore.manager.verbs import (
    MAX_FLUSH_S,
    MAX_SECONDS,
    KVDrop,
    KVFlush,
    KVLookUp,
    KVNewWeights,
    KVPin,
    KVPrefetch,
    KVQuota,
    KVStats,
    KVVerb,
)
from server.admin import admins_of
from server.openai.body import parse_body
from server.openai.json_endpoint import Answer, Reply
from server.service import Service

logger = logging.getLogger("headrace.admin")

MAX_BYTES = 1 << 60


class ModelBody(BaseModel):
    """`model` is the one whose engines are asked; without it those of all models are."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class OwnerBody(ModelBody):
    tenant: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class PromptBody(OwnerBody):
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    add_special_tokens: bool = True


class PinBody(PromptBody):
    seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]


class DropBody(OwnerBody):
    prompt: (
        Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None
    ) = None
    add_special_tokens: bool = True
    everything: bool = False


class QuotaBody(ModelBody):
    tenant: Annotated[str, Field(min_length=1, max_length=256)]
    bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] | None


class FlushBody(ModelBody):
    timeout_s: Annotated[float, Field(ge=0, le=MAX_FLUSH_S, allow_inf_nan=False)] = 30.0


class WeightsBody(ModelBody):
    epoch: Annotated[str, Field(min_length=1, max_length=256)] | None = None


async def stats(service: Service, body: bytes) -> Reply:
    request = await parse_body(body, ModelBody) if body else ModelBody()
    return await _told(service, request, KVStats())


async def look_up(service: Service, body: bytes) -> Reply:
    request = await parse_body(body, PromptBody)
    return await _told(service, request, KVLookUp(*await _blocks(service, request, request.prompt)))


async def prefetch(service: Service, body: bytes) -> Reply:
    request = await parse_body(body, PromptBody)
    return await _told(service, request, KVPrefetch(*await _blocks(service, request, request.prompt)))


async def pin(service: Service, body: bytes) -> Reply:
    request = await parse_body(body, PinBody)
    return await _told(service, request, KVPin(*await _blocks(service, request, request.prompt), request.seconds))


async def drop(service: Service, body: bytes) -> Reply:
    """Forget a prompt, a tenant, or everything; the last only when it says so."""
    request = await parse_body(body, DropBody)
    named = request.prompt is not None or request.tenant is not None
    if named == request.everything:
        raise RequestError("Name a 'prompt', a 'tenant', or 'everything': true.", param="everything")
    if request.prompt is not None:
        verb = KVDrop(*await _blocks(service, request, request.prompt))
    elif request.cache_salt is not None:
        raise RequestError("What a salt's prompts are is not known: name a 'prompt'.", param="cache_salt")
    else:
        verb = KVDrop() if request.everything else KVDrop(service.cache_scope(request.tenant, None))
    logger.info("stored KV is dropped, as an operator asked", extra={"tenant": request.tenant})
    return await _told(service, request, verb)


async def quota(service: Service, body: bytes) -> Reply:
    request = await parse_body(body, QuotaBody)
    return await _told(service, request, KVQuota(service.cache_scope(request.tenant, None), request.bytes))


async def flush(service: Service, body: bytes) -> Reply:
    request = await parse_body(body, FlushBody) if body else FlushBody()
    return await _told(service, request, KVFlush(request.timeout_s))


async def weights_updated(service: Service, body: bytes) -> Reply:
    request = await parse_body(body, WeightsBody) if body else WeightsBody()
    logger.info("the weights were changed, an operator says")
    return await _told(service, request, KVNewWeights(request.epoch))


KV_ADMIN_ROUTES: Mapping[str, Answer] = {
    "/admin/kv/stats": stats,
    "/admin/kv/lookup": look_up,
    "/admin/kv/prefetch": prefetch,
    "/admin/kv/pin": pin,
    "/admin/kv/drop": drop,
    "/admin/kv/quota": quota,
    "/admin/kv/flush": flush,
    "/admin/kv/weights_updated": weights_updated,
}


async def _told(service: Service, request: ModelBody, verb: KVVerb) -> Reply:
    if request.model is not None:
        service.model(request.model)  # unknown ones are told
    told = [one for admin in admins_of(service, request.model) for one in await admin.ask_store(verb)]
    return Reply({"engines": told})


async def _blocks(service: Service, request: OwnerBody, prompt: str | list[int]) -> tuple[bytes, list[bytes]]:
    """Return the scope and the keys of a prompt's full blocks."""
    text = service.model(request.model).require_text()
    add_special = getattr(request, "add_special_tokens", True)
    (ids,) = await text.prompts_ids([prompt], add_special_tokens=add_special, to_run=False)
    scope = service.cache_scope(request.tenant, request.cache_salt)
    try:
        keys = KeyChain(scope, text.info.block_size).extend(ids)
    except OverflowError:
        raise RequestError("There is no such token.", param="prompt") from None
    if not keys:
        raise RequestError(
            f"The prompt has {len(ids)} tokens and no full block of {text.info.block_size}.", param="prompt"
        )
    return scope, keys
