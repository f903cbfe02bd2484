"""What a worker tells a registry of itself. Pure: from its ranks' states to a record."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence

from engine.protocol import EngineInfo
from router.registry.base import RankAddress, WorkerRecord
from router.registry.compat import compatibility_digest
from router.values import TargetState
from server.config import WorkerConfig
from server.worker.addresses import is_reachable_from_outside


def state_of(ready: Sequence[bool], draining: Sequence[bool], *, is_stopping: bool) -> TargetState:
    """A worker is ready while any of its ranks is; which of them are, their wires tell."""
    if is_stopping or all(draining):
        return "draining"
    return "ready" if any(ready) else "starting"


def make_record(
    config: WorkerConfig,
    worker_id: str,
    incarnation: str,
    state: TargetState,
    ranks: Sequence[RankAddress],
    *,
    info: EngineInfo | None,
    http_url: str,
    public_key: str | None,
) -> WorkerRecord:
    """`info` is of any rank, or None while no model has been loaded."""
    return WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        model=(info and info.model) or config.engine.served_model_name or config.engine.model,
        role=config.role,
        state=state,
        ranks=tuple(ranks),
        compatibility="" if info is None else compatibility_digest(info),
        numerics="" if info is None else info.numerics_fingerprint,
        http_url=http_url,
        public_key=public_key,
        pid=None if is_reachable_from_outside(config.listen) else os.getpid(),
    )


def default_worker_id(first_wire: str) -> str:
    """A name that no other worker of this machine has at the same time."""
    place = first_wire.rpartition(":")[2].replace("/", "_")
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{socket.gethostname()}-{place}")[:120]
