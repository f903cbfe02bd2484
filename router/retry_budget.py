"""Keeps retries a small part of the load: a service in trouble must not be asked for twice the work.

The token bucket of Finagle's RetryBudget: every request pays in a tenth, every retry takes out one.
"""

from __future__ import annotations


class RetryBudget:
    """At most `ratio` retries per request in the long run; `reserve` of them may be used up at once."""

    def __init__(self, *, ratio: float = 0.1, reserve: float = 100.0) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._balance = reserve

    @property
    def balance(self) -> float:
        """Retries that may follow now, in [0, reserve]."""
        return self._balance

    def deposit(self) -> None:
        """A request has begun."""
        self._balance = min(self._reserve, self._balance + self._ratio)

    def withdraw(self) -> bool:
        """Take one retry; False when there is none."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
