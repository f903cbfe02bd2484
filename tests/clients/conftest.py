"""One server for all clients. These tests run with `make test-clients`, in the clients' own environment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.clients.serving import Server, listening, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve")) as (process, log):
        yield asyncio.run(listening(process, log))
