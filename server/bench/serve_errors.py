"""What `headrace bench serve` cannot do, said so that the user can change it."""

from __future__ import annotations

from engine.errors import ConfigError, HeadraceError


class BenchError(HeadraceError):
    """The load cannot be sent, or nothing of it was answered. `hint` says what to try."""

    code = "bench_error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def missing_extra(module: str, purpose: str) -> ConfigError:
    """The error for a module of the extra `bench` that is not installed."""
    return ConfigError(f"{purpose} needs {module}, which is not installed.", hint="Run: pip install 'headrace[bench]'")
