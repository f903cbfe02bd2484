"""What the steps in flight use. One rule: nothing that a launched step may touch is given away before it completes.

Abort, preemption and finish only mark a request; it is released when the last step with a row of it has come back.
Steps complete in launch order, so the number of a request's last step says all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.plan import StepPlan
from engine.request import Request


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """`requests[i]` is the owner of `plan.rows[i]`. Results name slots, which may have a new owner by then."""

    plan: StepPlan
    requests: list[Request]


class InFlightLedger:
    """Owns nothing: it tells when the scheduler may take back slots and blocks."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._releases: dict[int, list[Request]] = {}
        self._completed_step = -1

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._steps)

    @property
    def awaits_release(self) -> bool:
        """Slots and blocks will come back with the steps in flight."""
        return bool(self._releases)

    @property
    def newest(self) -> LaunchedStep:
        return self._steps[-1]

    def uses(self, request: Request) -> bool:
        return request.last_step > self._completed_step

    def open(self, plan: StepPlan, requests: list[Request]) -> None:
        self._steps.append(LaunchedStep(plan, requests))

    def release_after_flight(self, request: Request) -> None:
        self._releases.setdefault(request.last_step, []).append(request)

    def close(self, step: int) -> LaunchedStep:
        """Note that `step`, the oldest in flight, has completed."""
        launched = self._steps.popleft()
        assert launched.plan.step == step, f"result of step {step}, expected {launched.plan.step}"
        self._completed_step = step
        return launched

    def take_released(self) -> Iterable[Request]:
        """Return the requests that waited for the step just closed, in the order they were marked."""
        return self._releases.pop(self._completed_step, ())

    def owners(self) -> list[Request]:
        """Return the requests marked for release, for the integrity check."""
        return [request for requests in self._releases.values() for request in requests]
