"""W3C trace context: what is accepted, what is ignored, and where it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.access.trace import TraceContext, trace_of
from server.config import ServeConfig
from tests.support.api_server import completion_body, serving
from tests.support.fake_engine import FakeEngine

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def found(*headers: tuple[str, str]) -> TraceContext | None:
    return trace_of([(name.encode(), value.encode("latin-1")) for name, value in headers])


@pytest.mark.parametrize(
    ("value", "passed_on"),
    [
        (PARENT, PARENT),
        (f" {PARENT}\t", PARENT),
        (f"00-{TRACE}-{SPAN}-ff", f"00-{TRACE}-{SPAN}-ff"),
        (f"01-{TRACE}-{SPAN}-01", PARENT),
        (f"cc-{TRACE}-{SPAN}-03-what the future brings", PARENT),
    ],
)
def test_a_parent_is_passed_on_as_version_00(value: str, passed_on: str) -> None:
    context = found(("traceparent", value))
    assert context == TraceContext(passed_on)
    assert context.trace_id == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        "-",
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-more",
        PARENT.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01.",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"{PARENT}\n",
        "\xe9" * 55,
    ],
)
def test_a_malformed_parent_is_ignored_with_its_state(value: str) -> None:
    assert found(("traceparent", value), ("tracestate", "a=1")) is None


def test_of_two_parents_neither_counts() -> None:
    assert found(("traceparent", PARENT), ("traceparent", PARENT)) is None
    assert found(("tracestate", "a=1")) is None


@pytest.mark.parametrize(
    ("values", "passed_on"),
    [
        (["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"], "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (["a=1", "b=2"], "a=1,b=2"),
        ([" a=1 , ,b=2,"], "a=1,b=2"),
        (["0tenant@system=x y"], "0tenant@system=x y"),
        ([",".join(f"k{i}=v" for i in range(32))], ",".join(f"k{i}=v" for i in range(32))),
        ([",".join(f"k{i}=v" for i in range(33))], None),
        (["a=1,a=2"], None),
        (["A=1"], None),
        (["a"], None),
        (["a="], None),
        (["a=b=c"], None),
        (["a=\xe9"], None),
        ([f"a={'b' * 256}"], f"a={'b' * 256}"),
        ([f"a={'b' * 257}"], None),
        ([",".join(f"k{i}={'v' * 100}" for i in range(6))], None),
        ([""], None),
    ],
)
def test_a_state_is_whole_or_nothing(values: list[str], passed_on: str | None) -> None:
    context = found(("traceparent", PARENT), *(("tracestate", value) for value in values))
    assert context == TraceContext(PARENT, passed_on)


async def test_the_engine_gets_it_and_the_access_log_tells_its_trace(tmp_path: Path) -> None:
    log = tmp_path / "a"
    engine = FakeEngine()
    async with serving(engine, config=ServeConfig(access_log=str(log))) as server:
        for headers in ({"traceparent": PARENT, "tracestate": "a=1"}, {"traceparent": "junk"}):
            answer = await server.client.post("/v1/completions", json=completion_body(), headers=headers)
            assert answer.status_code == 200
    traced, junk = engine.seen
    assert (traced.traceparent, traced.tracestate) == (PARENT, "a=1")
    assert (junk.traceparent, junk.tracestate) == (None, None)
    first, second = map(json.loads, log.read_text().splitlines())
    assert first["trace_id"] == TRACE
    assert "trace_id" not in second
