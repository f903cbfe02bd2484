"""What is written down of each request, and what is computed from it. Pure: the same records give the same summary.

Times are seconds from the start of the load. A request's latencies count from `scheduled_s`, when it was due, and not
from when the client came to send it: a client or server that falls behind cannot hide it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True):
    """`text_s` has the arrival of every chunk with text. Token counts are None where the server gave no usage."""

    conversation: int
    turn: int
    scheduled_s: float
    sent_s: float
    end_s: float
    text_s: list[float] = []
    max_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The kind: `http 429`, `connection`, `timeout`, `error event`, `cut stream` or `malformed`."""
    message: str | None = None

    @property
    def output_tokens(self) -> int:
        """By usage, else one for each chunk with text."""
        return len(self.text_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        """An answer without text shows its first token when it ends."""
        return (self.text_s[0] if self.text_s else self.end_s) - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token after the first; None for a single one."""
        if len(self.text_s) < 2 or self.output_tokens < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks with text. What arrives together has gaps of 0."""
        return [later - earlier for earlier, later in zip(self.text_s, self.text_s[1:], strict=False)]


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that a good request keeps, each; None limits nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def kept_by(self, record: RequestRecord) -> bool:
        tpot_s = record.tpot_s
        return (
            record.error is None
            and (self.ttft_s is None or record.ttft_s <= self.ttft_s)
            and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)
        )


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    count: int


class ErrorKind(msgspec.Struct, frozen=True):
    count: int
    first_message: str


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """`share` is of all requests: a failed one keeps no limit."""

    good: int
    share: float
    requests_per_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`elapsed_s` reaches from the first due time to the last end. Tokens are those of requests without errors."""

    requests: int
    completed: int
    failed: int
    elapsed_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    output_tokens_counted_by: str
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    ttft_ms: Latency | None
    tpot_ms: Latency | None
    itl_ms: Latency | None
    e2e_ms: Latency | None
    send_delay_ms: Latency | None
    goodput: Goodput | None
    errors: dict[str, ErrorKind]


def summarise(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    """Compute every figure of a run from its records, of which there is at least one."""
    done = [record for record in records if record.error is None]
    elapsed_s = max(record.end_s for record in records) - min(record.scheduled_s for record in records)
    per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
    output_tokens = sum(record.output_tokens for record in done)
    prompt_tokens = _total(record.prompt_tokens for record in done)
    return Summary(
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        elapsed_s=elapsed_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=_total(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        output_tokens_counted_by=_counted_by(done),
        requests_per_s=len(done) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=None if prompt_tokens is None else (prompt_tokens + output_tokens) * per_s,
        ttft_ms=latency(record.ttft_s for record in done),
        tpot_ms=latency(tpot_s for record in done if (tpot_s := record.tpot_s) is not None),
        itl_ms=latency(gap for record in done for gap in record.gaps_s),
        e2e_ms=latency(record.e2e_s for record in done),
        send_delay_ms=latency(record.sent_s - record.scheduled_s for record in records),
        goodput=None if slo is None else _goodput(records, slo, per_s),
        errors=_errors(records),
    )


def latency(values_s: Iterable[float]) -> Latency | None:
    """Summarise seconds as milliseconds; None without any."""
    values = sorted(1e3 * value for value in values_s)
    if not values:
        return None
    return Latency(
        mean=sum(values) / len(values),
        p50=percentile(values, 50),
        p90=percentile(values, 90),
        p99=percentile(values, 99),
        max=values[-1],
        count=len(values),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the two nearest of the ordered values."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _total(counts: Iterable[int | None]) -> int | None:
    """A sum that one missing count makes unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _counted_by(done: Sequence[RequestRecord]) -> str:
    with_usage = sum(record.completion_tokens is not None for record in done)
    if with_usage == len(done):
        return "usage"
    return "chunks" if with_usage == 0 else "usage and chunks"


def _goodput(records: Sequence[RequestRecord], slo: Slo, per_s: float) -> Goodput:
    good = sum(slo.kept_by(record) for record in records)
    return Goodput(good=good, share=good / len(records), requests_per_s=good * per_s)


def _errors(records: Sequence[RequestRecord]) -> dict[str, ErrorKind]:
    counts = Counter(record.error for record in records if record.error is not None)
    first: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            first.setdefault(record.error, record.message or "")
    return {kind: ErrorKind(count, first[kind]) for kind, count in counts.most_common()}
