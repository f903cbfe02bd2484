"""What is known of one HTTP request while it runs: made by the outermost layer, filled in by those below it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from starlette.types import Scope

from server.access.trace import TraceContext

if TYPE_CHECKING:
    from server.access.quota import Quota

_SCOPE_KEY = "headrace.record"


@dataclass(slots=True)
class RequestRecord:
    """Never holds text, keys or salts: it goes into logs. `tenant` is None where no keys are asked for.

    `answer_id` is the id that the client reads in the body, `error` the code of the error that it was told. `quota` is
    what its key may use, None where nothing is limited; `priority` is what a header said, unchecked. `debug` is when
    the response's head tells where the request went (server/debug_header.py).
    """

    request_id: str
    tenant: str | None = None
    answer_id: str | None = None
    model: str | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    finish_reasons: list[str | None] = field(default_factory=list)
    error: str | None = None
    trace: TraceContext | None = None
    session: str | None = None
    debug: bool = False
    priority: str | None = None
    quota: Quota | None = None


def attach_record(scope: Scope, record: RequestRecord) -> None:
    scope[_SCOPE_KEY] = record


def record_of(scope: Scope) -> RequestRecord:
    return cast(RequestRecord, scope[_SCOPE_KEY])


@dataclass(frozen=True)
class Caller:
    """Who asks, as far as the engine needs to know: `deadline_unix_s` is in seconds of the wall clock, `priority` what
    a header said, unchecked."""

    tenant: str | None = None
    deadline_unix_s: float | None = None
    trace: TraceContext | None = None
    session: str | None = None
    priority: str | None = None
