"""The routes of the OpenAPI document that bypass the framework, so that it cannot know them, and their bodies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from server.admin import ADMIN_ROUTES, AbortBody
from server.openai.chat_body import ChatBody
from server.openai.completion_body import CompletionBody
from server.openai.tokenize_body import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/tokenize": TokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/admin/abort": AbortBody,
}
REFERENCE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI) -> None:
    """Make `app.openapi()` include them."""
    plain = app.openapi

    def with_bodies() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            shared = schema.setdefault("components", {}).setdefault("schemas", {})
            for path, body in BODIES.items():
                described = body.model_json_schema(ref_template=REFERENCE)
                shared.update(described.pop("$defs", {}))
                schema["paths"][path] = {"post": _with_body(described)}
            for path in ADMIN_ROUTES:
                schema["paths"].setdefault(path, {"post": _operation()})
        return app.openapi_schema or {}

    app.openapi = with_bodies  # type: ignore[method-assign]


def _with_body(body: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}, **_operation()}


def _operation() -> dict[str, Any]:
    return {
        "responses": {
            "200": {
                "description": "JSON, or with `stream` server-sent events",
                "content": {"application/json": {}, "text/event-stream": {}},
            },
            "4XX": {"description": "{error: {message, type, param, code}}"},
            "5XX": {"description": "{error: {message, type, param, code}}"},
        },
    }
