"""Errors cross the wire without loss."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import errors
from engine.protocol import CachedTokens, TokenLogprobs, TokenOutput
from engine.wire.errors import WireError, from_wire, to_wire
from engine.wire.merge import merge_outputs

EVERY_ERROR = [
    errors.HeadraceError("root"),
    errors.ConfigError("c", hint="try this"),
    errors.ModelError("m", hint=None),
    errors.RequestError("r", param="top_p", value=1.5, code="own_code"),
    errors.RequestError("r", param=None, value=[1, "a", None]),
    errors.PromptTooLongError(5000, 4096, param="messages"),
    errors.UnsupportedError("u", param="grammar", value="ebnf"),
    errors.PressureError("p", retry_after_s=2.5),
    errors.DrainingError("d", retry_after_s=3.0),
    errors.LoadingError("l", progress=0.25, retry_after_s=4.0),
    errors.DeadlineError("dl"),
    errors.EngineError("e"),
    errors.EngineDiedError("ed"),
    errors.EngineSilentError("es"),
    errors.RequestFailedError("rf"),
]


def over_the_wire(error: errors.HeadraceError) -> errors.HeadraceError:
    frame = msgspec.msgpack.encode(to_wire(error))
    return from_wire(msgspec.msgpack.decode(frame, type=WireError))


def test_the_list_of_errors_is_the_whole_tree() -> None:
    def tree(cls: type) -> set[type]:
        return {cls}.union(*(tree(child) for child in cls.__subclasses__() if child.__module__ == "engine.errors"))

    assert {type(error) for error in EVERY_ERROR} == tree(errors.HeadraceError)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_an_error_is_rebuilt_exactly(error: errors.HeadraceError) -> None:
    rebuilt = over_the_wire(error)
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    assert rebuilt.code == error.code
    assert vars(rebuilt) | {"code": error.code} == vars(error) | {"code": error.code}


@pytest.mark.parametrize(
    "value", [2**80, -(2**70), b"\xff", {"a": object()}, "x" * 100_000, [2**99, (1,)], float("inf")]
)
def test_a_value_that_msgpack_cannot_hold_does_not_break_the_refusal(value: object) -> None:
    rebuilt = over_the_wire(errors.RequestError("bad", param="seed", value=value))
    assert isinstance(rebuilt, errors.RequestError)
    assert rebuilt.param == "seed"
    assert len(repr(rebuilt.value)) < 10_000


def test_an_unlisted_subclass_travels_as_its_parent() -> None:
    class Odd(errors.PressureError):
        pass

    rebuilt = over_the_wire(Odd("odd", retry_after_s=9.0))
    assert type(rebuilt) is errors.PressureError
    assert rebuilt.retry_after_s == 9.0


def test_an_unknown_type_becomes_an_engine_error() -> None:
    assert type(from_wire(WireError("FromTheFuture", "text", "code"))) is errors.EngineError


@given(st.integers(1, 40), st.data(), st.booleans())
def test_merged_outputs_equal_the_whole_for_every_split(count: int, data: st.DataObject, with_logprobs: bool) -> None:
    ids = list(range(count))
    logprobs = [TokenLogprobs(-float(i)) for i in ids] if with_logprobs else None
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=8)))
    bounds = list(zip([0, *cuts], [*cuts, count], strict=True))
    pieces = [
        TokenOutput(
            "r",
            3,
            5 + start,
            ids[start:end],
            "stop" if number == len(bounds) - 1 else None,
            count - 1 if number == len(bounds) - 1 else None,
            logprobs[start:end] if logprobs else None,
            CachedTokens(device=64) if number == 0 else None,
        )
        for number, (start, end) in enumerate(bounds)
    ]
    assert merge_outputs(pieces) == TokenOutput("r", 3, 5, ids, "stop", count - 1, logprobs, CachedTokens(device=64))
