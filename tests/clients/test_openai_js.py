"""OpenAI's client for JavaScript: openai_js.test.mjs under Node's own test runner."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

from tests.clients.serving import KEY, MODEL, Server

SCRIPT = Path(__file__).with_name("openai_js.test.mjs")
LIMIT_S = 240
CANCELLED = 2
"""Streams that the script leaves before their end."""


def test_the_client_for_javascript(server: Server) -> None:
    before = server.aborts()
    run = subprocess.run(
        ["node", "--test", "--test-reporter=spec", str(SCRIPT)],
        env={**os.environ, "CLIENT_BASE_URL": server.base_url, "CLIENT_KEY": KEY, "CLIENT_MODEL": MODEL},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    asyncio.run(server.wait_aborts(before + CANCELLED))
