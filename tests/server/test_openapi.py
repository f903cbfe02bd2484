"""The OpenAPI document and the server agree: generated requests get answers of the described kinds, never a 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from server.admin import ADMIN_ROUTES
from server.openai.chat_body import ChatBody
from server.openai.completion_body import CompletionBody
from tests.support.api_server import serving
from tests.support.fake_engine import FakeEngine

EXAMPLES = 30
BODIES = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
GENERATING = list(BODIES)
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": "tiny", "prompt": "a"},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on a loop in a thread of its own: the generated tests are synchronous."""
    started: list[str] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(FakeEngine()) as server:
            started.append(server.url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert up.wait(30)
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive()
    loop.close()


@pytest.fixture(scope="module")
def document(url: str) -> Any:  # noqa: ANN401  (parsed JSON)
    return schemathesis.openapi.from_url(url + "/openapi.json")


def check_shape(response: schemathesis.Response) -> None:
    """An answer, or an error in OpenAI's shape."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_a_generated_body_gets_an_answer_or_a_proper_error(
    url: str,
    document: Any,  # noqa: ANN401
    path: str,
    mode: GenerationMode,
) -> None:
    """Bodies as described, whole or some fields of them beside what is needed, and bodies that break the description.
    All are for the served model, so that they get past its name."""
    statuses: Counter[int] = Counter()
    fields = sorted(BODIES[path].model_fields)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        case=document[path]["POST"].as_strategy(generation_mode=mode),
        kept=st.none() | st.sets(st.sampled_from(fields), max_size=4),
    )
    def call(case: schemathesis.Case, kept: set[str] | None) -> None:
        if isinstance(case.body, dict):
            if kept is not None:
                case.body = NEEDED[path] | {name: value for name, value in case.body.items() if name in kept}
            if isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"
        response = case.call(timeout=30)
        check_shape(response)
        statuses[response.status_code] += 1

    call()
    if mode is GenerationMode.POSITIVE:  # chance may find none that is served: the description leaves much open
        assert httpx.post(url + path, json=NEEDED[path]).status_code == 200
    else:
        assert statuses[400], statuses


def test_generated_requests_to_the_other_routes_are_answered(document: Any) -> None:  # noqa: ANN401
    paths = set()
    for operation in (result.ok() for result in document.get_all_operations()):
        if operation.path not in (*GENERATING, "/admin/drain"):  # a server that drains answers nothing else
            paths.add(operation.path)

            @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def call(case: schemathesis.Case) -> None:
                assert case.call(timeout=30).status_code < 500

            call()
    assert {"/health", "/ready", "/v1/models"} <= paths


def test_the_document_has_the_operators_routes_too(url: str) -> None:
    paths = httpx.get(url + "/openapi.json").json()["paths"]
    with_body = {path for path in ADMIN_ROUTES if "requestBody" in paths[path]["post"]}
    assert with_body == {"/admin/abort"}


def test_the_document_describes_every_field_of_the_bodies(url: str) -> None:
    described = httpx.get(url + "/openapi.json").json()
    for path, body in BODIES.items():
        content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(content["properties"]) == set(body.model_fields)


def test_what_the_document_gives_as_bounds_is_refused_outside_them(url: str) -> None:
    described = httpx.get(url + "/openapi.json").json()
    checked = 0
    for path, fields in NEEDED.items():
        content = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for name, rules in content["properties"].items():
            for rule in rules.get("anyOf", [rules]):
                for bound, step in (("minimum", -1), ("maximum", 1)):
                    if bound in rule:
                        response = httpx.post(url + path, json={**fields, name: rule[bound] + step})
                        assert response.status_code == 400, (path, name, response.text)
                        assert response.json()["error"]["param"] == name
                        checked += 1
    assert checked > 20
