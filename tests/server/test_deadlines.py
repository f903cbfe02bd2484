"""Requests that take longer than --request-timeout: 504 before the first byte, an error event after it."""

from __future__ import annotations

import json

from server.config import ServeConfig
from tests.support.api_server import completion_body, serving
from tests.support.fake_engine import FakeEngine, Gate


async def test_a_request_that_takes_too_long_gets_504_before_the_first_byte() -> None:
    from router.supervisor import Supervisor
    from tests.support.static_pool import StaticPool, StaticTarget

    class Watched(FakeEngine):
        is_ready = True

        async def wait_ready(self):  # noqa: ANN202
            return self.info

    engine = Watched()
    supervisor = Supervisor(StaticPool([StaticTarget("one", engine)]))
    engine.gate = Gate(after=0)
    async with serving(supervisor, config=ServeConfig(request_timeout_s=0.2)) as server:
        whole = await server.complete()
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
        stream = await server.complete(stream=True)
        assert (stream.status_code, stream.json()["error"]["code"]) == (504, "deadline_exceeded")
        engine.gate = Gate(after=2)
        text = (await server.post("/v1/completions", completion_body(stream=True))).text
        last = text.strip().rsplit("\n\n", 1)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert text.count("data: ") >= 2
        assert "[DONE]" not in text
        assert engine.running == set()


async def test_the_engines_own_deadline_is_the_same_answer() -> None:
    from engine.protocol import TokenOutput

    engine = FakeEngine()
    engine.cuts = [100]
    async with serving(engine) as server:
        engine.terminal = TokenOutput("x", 0, 0, [], "abort", error="late", error_code="deadline_exceeded")
        answer = await server.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
