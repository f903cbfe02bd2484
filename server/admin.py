"""The operator's routes under /admin. The guard has checked who asks; here it is passed on to the engine.

Every answer is a JSON object, every body is optional but that of /admin/abort. What they do holds for the whole server,
whichever of its API processes answers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import UnsupportedError
from engine.protocol import Admin
from server.openai.body import parse_body
from server.openai.json_endpoint import Answer, Reply
from server.service import Service

logger = logging.getLogger("headrace.admin")


class AbortBody(BaseModel):
    """`request_id` is the id of an answer (chatcmpl-..., cmpl-...)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: Annotated[str, Field(min_length=1, max_length=256)]


async def drain(service: Service, body: bytes) -> Reply:
    """Take no new requests and let the running ones finish. There is no way back but a restart."""
    for model in service.models.served():
        await model.engine.drain()
    logger.info("draining, as an operator asked")
    return Reply({"status": "draining"})


async def reset_prefix_cache(service: Service, body: bytes) -> Reply:
    for admin in _admins(service):
        await admin.reset_prefix_cache()
    logger.info("the prefix cache was reset, as an operator asked")
    return Reply({"status": "ok"})


async def abort(service: Service, body: bytes) -> Reply:
    """End a client's request with all its choices. One that has ended already is no error: it counts as 0."""
    request = await parse_body(body, AbortBody)
    aborted = sum([await admin.abort_requests(request.request_id) for admin in _admins(service)])
    logger.info("an operator ended a request", extra={"answer": request.request_id, "choices": aborted})
    return Reply({"request_id": request.request_id, "aborted": aborted})


ADMIN_ROUTES: Mapping[str, Answer] = {
    "/admin/drain": drain,
    "/admin/reset_prefix_cache": reset_prefix_cache,
    "/admin/abort": abort,
}


def _admins(service: Service) -> list[Admin]:
    admins = [model.admin for model in service.models.served() if model.admin is not None]
    if not admins:
        raise UnsupportedError("This server's engine has no such operation.")
    return admins
