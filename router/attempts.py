"""What the supervisor remembers of one request across its attempts. Knows no pools and no wire."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec

from engine.errors import (
    DeadlineError,
    DrainingError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    HeadraceError,
    LoadingError,
    PressureError,
    RequestError,
    RequestFailedError,
)
from engine.protocol import Engine, GenerateRequest, Outcome, TokenOutput

T = TypeVar("T")

EndCause = Literal["finish", "abort", "deadline"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How often one request is tried.

    A request that kills engines shows as faults without a token between them: after `suspect_faults` of these it is a
    suspect, after `stalled_faults` it is given up. Engines that are killed by others take some innocents that far, so
    the second is larger. `faults` bounds all. A request that finds no room is offered to `pressure_rechoices` other
    targets: when they are full as well, the pool is. A started stream that finds no room is offered again
    `pressure_rounds` times, with growing pauses.
    """

    suspect_faults: int = 2
    stalled_faults: int = 5
    faults: int = 16
    pressure_rechoices: int = 2
    pressure_rounds: int = 30
    first_pause_s: float = 0.05
    max_pause_s: float = 2.0


class RunEnded(Exception):
    """The request ended otherwise than by its engine; `Run.ended_by` says how."""


class Run:
    """One request from its first attempt to its end.

    `engine` is the one that has the request now. `full` and `faulty` are targets (ids) to pass over. `next_offset` is
    the output index of the token that comes next. Lives on the running loop.
    """

    def __init__(self, request: GenerateRequest, limits: Limits, suspects: asyncio.Lock) -> None:
        sampling = request.sampling
        if sampling.seed is None:
            # Drawn here and not by the engine, so that every attempt samples with the same noise.
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        self.request = msgspec.structs.replace(request, sampling=sampling)
        self.engine: Engine | None = None
        self.ended_by: EndCause | None = None
        self.full: set[str] = set()
        self.faulty: set[str] = set()
        self.has_started = False
        self._started_by = 0
        self._limits = limits
        self.next_offset = len(request.resume_ids)
        self._emitted: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._attempt = request.attempt - 1
        self._faults = 0
        self._stalled_faults = 0
        self._full_targets = 0
        self._pressure_rounds = 0
        self._suspects = suspects
        self._is_alone = False
        self._interrupted = False
        self._waiting_task: asyncio.Task[object] | None = None

    @property
    def so_far(self) -> GenerateRequest:
        """The request with everything emitted so far as output to resume: what another target is chosen for."""
        if not self._emitted:
            return self.request
        return msgspec.structs.replace(self.request, resume_ids=[*self.request.resume_ids, *self._emitted])

    def next_attempt(self) -> GenerateRequest:
        """Return the request for a new attempt: the same seed, and everything emitted so far as output to resume."""
        self._attempt += 1
        request = msgspec.structs.replace(self.so_far, attempt=self._attempt)
        # They came with the first output, and computing them again would keep the prompt out of the prefix cache.
        return msgspec.structs.replace(request, prompt_logprobs=None) if self.has_started else request

    def accept(self, output: TokenOutput) -> TokenOutput | None:
        """Return the output as the client is to see it, or None when it is a late duplicate.

        To the client it is all one attempt: the one that it asked for.
        Raises EngineDiedError when tokens are missing: another attempt supplies them.
        """
        if output.attempt != self._attempt or output.offset < self.next_offset:
            return None
        if output.offset > self.next_offset:
            raise EngineDiedError("The engine skipped tokens.")
        if output.error_code == DeadlineError.code:
            # The engine's clock was a little ahead of ours: the same end, told in one way.
            raise DeadlineError("The request's deadline passed before it finished.")
        if output.token_ids:
            self._emitted += output.token_ids
            self.next_offset += len(output.token_ids)
            if self._stalled_faults:
                self._stalled_faults = 0
                self.step_back()
        if not self.has_started:
            self._started_by = output.attempt
        elif output.attempt != self._started_by and (output.cached is not None or output.prompt_logprobs is not None):
            # A resumed attempt finds the client's own tokens in the cache: the first attempt's count is the truth.
            output = msgspec.structs.replace(output, cached=None, prompt_logprobs=None)
        if output.attempt != self.request.attempt:
            output = msgspec.structs.replace(output, attempt=self.request.attempt)
        self.has_started = True
        return output

    def survive(self, error: HeadraceError, target_id: str, *, is_gone: bool) -> None:
        """Note how an attempt failed. Raises what ends the request, and returns when another attempt may follow.

        A target that `is_gone` is not passed over: it is asked again only when it is back, in another life, and that
        may be before any other is there.
        """
        if isinstance(error, RequestFailedError) or not isinstance(error, EngineError | PressureError):
            raise error
        if self.ended_by is not None:
            raise RunEnded
        if isinstance(error, PressureError):
            self.full.add(target_id)
            if not isinstance(error, DrainingError | LoadingError):
                self._full_targets += 1
            if not self.has_started and self._full_targets > self._limits.pressure_rechoices:
                raise error
            return
        if not is_gone:
            self.faulty.add(target_id)
        self._faults += 1
        # One that is silent may be slow, and so may the next: whoever asked it has killed nothing.
        self._stalled_faults += not isinstance(error, EngineSilentError)
        if self._stalled_faults >= self._limits.stalled_faults or self._faults >= self._limits.faults:
            raise RequestFailedError(f"The request was given up: {self._faults} attempts lost their engine.") from error

    @staticmethod
    def is_moved_by(error: HeadraceError) -> bool:
        """Whether the next attempt only moves work: the engine does nothing more for this request, so the fleet has no
        more to do than before."""
        return isinstance(error, EngineDiedError)

    def pause_for_room(self, error: PressureError) -> float:
        """Return for how long a started stream waits before it asks a full pool again; any other request is refused."""
        self._pressure_rounds += 1
        if not self.has_started or self._pressure_rounds > self._limits.pressure_rounds:
            raise error
        self.full.clear()
        return min(self._limits.max_pause_s, self._limits.first_pause_s * 2.0 ** (self._pressure_rounds - 1))

    async def step_forward(self) -> None:
        """Wait for the turn of a suspect. Requests that lost two engines in a row without a token go one at a time, so
        that the one that kills them is found and takes no other with it."""
        if self._stalled_faults >= self._limits.suspect_faults and not self._is_alone:
            await self.wait(self._suspects.acquire)
            self._is_alone = True

    def step_back(self) -> None:
        """End the turn, if this is a suspect that has one."""
        if self._is_alone:
            self._is_alone = False
            self._suspects.release()

    def end_output(self) -> TokenOutput:
        """Return the terminal output of a request that ended while no engine had it."""
        reason: Literal["stop", "abort"] = "stop" if self.ended_by == "finish" else "abort"
        return TokenOutput(self.request.request_id, self.request.attempt, self.next_offset, [], reason)

    async def wait(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await what `begin` returns; `interrupt` ends the wait, or the next one when none is under way."""
        if self._interrupted:
            raise RunEnded
        # Asked each time: one task may begin a stream and another go on with it.
        self._waiting_task = task = asyncio.current_task(self._loop)
        try:
            return await begin()
        except asyncio.CancelledError:
            # Ours only when nobody else cancels the task as well.
            if not self._interrupted or task is None or task.uncancel() > 0:
                raise
            raise RunEnded from None
        finally:
            self._waiting_task = None

    def interrupt(self, cause: EndCause) -> None:
        """End the request without its engine."""
        if not self._interrupted:
            self._interrupted = True
            self.ended_by = self.ended_by or cause
            if self._waiting_task is not None:
                self._waiting_task.cancel()


def outcome_of(error: HeadraceError) -> Outcome:
    """Tell the pool how an attempt went that ended in this error."""
    if isinstance(error, RequestError):
        return "client_error"
    if isinstance(error, PressureError):
        return "pressure"
    return "fault" if isinstance(error, EngineError) else "cancelled"
