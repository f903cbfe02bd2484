"""GET /v1/models and /v1/models/{id}: the served models, with the limits that tools read."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.protocol import EngineInfo
from server.service import Service


def model_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1/models")
    created = int(time.time())

    @router.get("", summary="The served models")
    async def models(request: Request) -> Response:
        service.check_open()
        ready = [model for model in service.models.served() if model.opened.is_set()]
        return _json({"object": "list", "data": [_card(model.info, created) for model in ready]})

    @router.get("/{model_id:path}", summary="One served model")
    async def model(request: Request) -> Response:
        return _json(_card(service.model(request.path_params["model_id"]).info, created))

    return router


def _card(info: EngineInfo, created: int) -> dict[str, object]:
    return {
        "id": info.model,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len or None,
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
