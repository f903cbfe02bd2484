"""What decides the last bit of a result beside the settings: the code that computes, its libraries, its processor."""

from __future__ import annotations

import hashlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

import torch

ENGINE = Path(__file__).parent.parent

COMPUTING = ("attention", "cpu_ops", "kernels", "layers", "models", "sampler")
"""The engine's packages that compute."""

_SOURCES = {".py", ".h", ".cpp"}


def arithmetic_digest(device: torch.device, engine: Path = ENGINE) -> str:
    """Return 16 hex digits. Where they are equal, equal settings give equal bits (in invariant mode, for any batch);
    where they differ nothing is known, so KV of one is not used by the other. `engine` is the package's folder."""
    digest = hashlib.sha256(f"torch {torch.__version__}\0{_processor(device)}\0".encode())
    for package in COMPUTING:
        for path in sorted((engine / package).rglob("*")):
            if path.suffix in _SOURCES:
                digest.update(f"{path.relative_to(engine)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    triton = version("triton") if importlib.util.find_spec("triton") else "none"
    return f"{torch.cuda.get_device_name(device)} cuda {torch.version.cuda} triton {triton}"
