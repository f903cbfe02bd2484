"""Waiting for a server that a benchmark has started."""

from __future__ import annotations

import time
import urllib.request


def wait_ready(url: str, name: str) -> None:
    """Return once the server at `url` says that it is ready. Raises SystemExit, with its name, when it does not."""
    for _ in range(3000):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.01)
    raise SystemExit(f"{name} did not become ready")
