"""The limits of one API key as one request meets them: what it takes and holds, and the headers that tell of it.

Requests count when they arrive, tokens when they are used; what a request may use at most is held from its beginning to
its end, so that no two are promised the same tokens. Header names and times are OpenAI's.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Send

from server.access.keys import UNLIMITED, KeyEntry
from server.access.usage_table import KEY_BYTES, MINUTE_S, Limits, UsageTable
from server.errors import RateLimitError, TokensOverLimitError

EVERYBODY = b"everybody".ljust(KEY_BYTES)
"""Whose usage is counted where no keys are asked for."""


class RateLimiter:
    """`defaults` are for keys that have no limits of their own. `on_refused` is told "requests" or "tokens"."""

    def __init__(self, table: UsageTable, defaults: Limits, on_refused: Callable[[str], None]) -> None:
        self.on_refused = on_refused
        self.table = table
        self._defaults = defaults

    def quota_of(self, entry: KeyEntry | None) -> Quota | None:
        """Return what a new request of this key may use, or None where nothing is limited. Without an entry it is one
        of everybody's."""
        limits = self._defaults
        if entry is not None:
            limits = Limits(
                requests=_chosen(entry.requests_per_minute, limits.requests),
                tokens=_chosen(entry.tokens_per_minute, limits.tokens),
            )
        if limits.requests is None and limits.tokens is None:
            return None
        return Quota(self, EVERYBODY if entry is None else bytes.fromhex(entry.digest)[:KEY_BYTES], limits)


def _chosen(own: int | None, default: int | None) -> int | None:
    return default if own is None else None if own == UNLIMITED else own


class Quota:
    """One request's part. Every hold is followed by a `spend`; only the first one counts."""

    def __init__(self, limiter: RateLimiter, key: bytes, limits: Limits) -> None:
        self._limiter = limiter
        self._key = key
        self._limits = limits
        self._held: int | None = None

    def take_request(self) -> None:
        """Raises RateLimitError, and counts nothing then."""
        wait_s = self._limiter.table.take_request(self._key, self._limits)
        if wait_s > 0.0:
            self._refuse("requests", f"Limit {self._limits.requests}", wait_s)

    def hold(self, prompt_tokens: int, output_tokens: int) -> None:
        """Set aside what a request may use at most. Raises RateLimitError.

        One that might use more than the limit may run when nothing else is used; a prompt that has more never may.
        """
        limit = self._limits.tokens
        if limit is None:
            return
        if prompt_tokens > limit:
            self._limiter.on_refused("tokens")
            raise TokensOverLimitError(
                f"Request too large: its prompt has {prompt_tokens} tokens, and {limit} a minute is the limit."
            )
        held = min(limit, prompt_tokens + output_tokens)
        wait_s = self._limiter.table.hold_tokens(self._key, self._limits, held)
        if wait_s > 0.0:
            self._refuse("tokens", f"Limit {limit}, requested {prompt_tokens + output_tokens}", wait_s)
        self._held = held

    def spend(self, tokens: int) -> None:
        """The request has ended, and has used so many."""
        held, self._held = self._held, None
        if held is not None:
            self._limiter.table.spend_tokens(self._key, self._limits, held, tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left at this moment, and when all of it will be there if nothing else is used."""
        used = self._limiter.table.used(self._key, self._limits)
        headers: list[tuple[bytes, bytes]] = []
        for kind, limit, amount in (
            (b"requests", self._limits.requests, used.requests),
            (b"tokens", self._limits.tokens, used.tokens),
        ):
            if limit is not None:
                headers += [
                    (b"x-ratelimit-limit-" + kind, str(limit).encode()),
                    (b"x-ratelimit-remaining-" + kind, str(max(0, int(limit - amount))).encode()),
                    (b"x-ratelimit-reset-" + kind, duration(amount / limit * MINUTE_S).encode()),
                ]
        return headers

    def told_in(self, send: Send) -> Send:
        """Return a `send` that adds the headers to the answer."""

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self.headers()]}
            await send(message)

        return send_with_limits

    def _refuse(self, kind: str, what: str, wait_s: float) -> None:
        self._limiter.on_refused(kind)
        raise RateLimitError(
            f"Rate limit reached on {kind} per minute: {what}. Try again in {duration(wait_s)}.", retry_after_s=wait_s
        )


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 120ms, 7.66s, 6m0s, 1h2m3s."""
    milliseconds = round(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
