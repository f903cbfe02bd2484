"""Attention back ends by name, and the choice for a device and a numerics mode. What cannot be had is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend
from engine.errors import ConfigError
from engine.protocol import Numerics


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Where a back end runs, in order of preference. `create` may raise ConfigError that names what to install."""

    name: str
    devices: tuple[str, ...]
    numerics: Numerics
    create: Callable[[], AttentionBackend]


def _torch() -> AttentionBackend:
    from engine.attention.torch_backend import TorchAttention

    return TorchAttention()


def _torch_invariant() -> AttentionBackend:
    from engine.attention.torch_invariant import TorchInvariantAttention

    return TorchInvariantAttention()


def _triton(name: str) -> AttentionBackend:
    try:
        from engine.attention.triton_backend import DEFAULT_TILES, INVARIANT_TILES, TritonAttention
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError(
            f"attention back end {name!r} needs triton, which is not installed",
            hint="Run: pip install 'headrace[cuda]'",
        ) from error
    return TritonAttention(name, INVARIANT_TILES if name == "triton_invariant" else DEFAULT_TILES)


BACKENDS = (
    BackendEntry("triton", ("cuda",), "default", lambda: _triton("triton")),
    BackendEntry("triton_invariant", ("cuda",), "invariant", lambda: _triton("triton_invariant")),
    BackendEntry("torch", ("cpu", "cuda"), "default", _torch),
    BackendEntry("torch_invariant", ("cpu",), "invariant", _torch_invariant),
)


def choose(device: torch.device, numerics: Numerics, name: str | None = None) -> AttentionBackend:
    """Return the back end `name`, or the first that serves the device in this numerics mode. Raises ConfigError."""
    named = [entry for entry in BACKENDS if name in (None, entry.name)]
    if not named:
        known = ", ".join(entry.name for entry in BACKENDS)
        raise ConfigError(f"attention back end {name!r} is unknown (known: {known})")
    for entry in named:
        if device.type in entry.devices and entry.numerics == numerics:
            return entry.create()
    what = f"attention back end {name!r}" if name else "attention"
    raise ConfigError(
        f"{what} is not available for device '{device.type}' with numerics '{numerics}'",
        hint="Use --numerics default, or --device cpu.",
    )
