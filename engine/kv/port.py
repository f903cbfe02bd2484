"""The blocks that lie with a KVPort: under load before a request runs, or held after it ended.

Knows who owns which blocks when. Does not know why a request is admitted, or what the port does with the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.kv.groups import KVGroups, Tables
from engine.protocol import FullBlock, KVPort, LoadDone, LoadPlan
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Load:
    """`blocks` of the plan hold correct KV once the load has ended, counted from the plan's start."""

    request: Request
    plan: LoadPlan
    blocks: int = 0


class PortBlocks:
    """Stands between scheduler and port; without a port every call is cheap and answers "nothing"."""

    def __init__(self, kv: KVGroups, port: KVPort | None) -> None:
        self._kv = kv
        self._port = port
        # Whom the port knows by an id; None while it only holds that id's blocks.
        self._speakers: dict[str, Request | None] = {}
        self._loads: dict[str, Load] = {}
        self._held: dict[str, Tables] = {}
        self._full: list[FullBlock] = []

    @property
    def busy(self) -> bool:
        """The port has blocks, and will report on them."""
        return bool(self._loads or self._held)

    def look_up(self, request: Request, keys: Sequence[bytes], start_block: int) -> None:
        """Let the port find out about a request that begins to wait.

        Reports name ids, so an id belongs to one request (and one admission of it) at a time: while blocks of an
        earlier attempt are in use or held, a later one runs without the port.
        """
        if self._port is not None and request.request_id not in self._speakers:
            self._speakers[request.request_id] = request
            spec = request.spec
            self._port.look_up(request.request_id, spec.cache_scope, keys, start_block, save=spec.store_kv)

    def match(self, request: Request, keys: Sequence[bytes], start_block: int) -> LoadPlan | Literal["later"] | None:
        """Ask the port what follows on the device's prefix."""
        if self._port is None or len(keys) <= start_block:
            return None
        if self._speakers.get(request.request_id) is not request:
            return None
        plan = self._port.match(request.request_id, keys, start_block)
        if plan is None or plan == "later":
            return plan
        if plan.start_block != start_block or not plan.keys or len(plan.tiers) != len(plan.keys):
            return None
        if plan.keys != tuple(keys[start_block : start_block + len(plan.keys)]):
            return None
        return plan

    def start_load(self, request: Request, plan: LoadPlan) -> None:
        """Give the port the blocks of the plan until it reports their load as done."""
        assert self._port is not None
        self._loads[request.request_id] = Load(request, plan)
        self._port.start_load(plan, [tuple(table[plan.start_block :]) for table in request.tables])

    def poll(self) -> Iterator[Load]:
        """Yield the loads that ended; take back held blocks. Reports about unknown ids are late and mean nothing."""
        if self._port is None:
            return
        for done in self._port.poll():
            if isinstance(done, LoadDone):
                load = self._loads.pop(done.request_id, None)
                if load is not None:
                    blocks = max(0, min(done.loaded_blocks, len(load.plan.keys)))
                    yield Load(load.request, load.plan, blocks)
            elif done.request_id in self._held:
                self._kv.release(self._held.pop(done.request_id))
                del self._speakers[done.request_id]

    def publish(self, request: Request, index: int, key: bytes) -> None:
        """Tell the port of a block that was just published, with the next flush()."""
        if self._port is None or self._speakers.get(request.request_id) is not request:
            return
        size = request.block_size
        self._full.append(
            FullBlock(
                request_id=request.request_id,
                index=index,
                key=key,
                parent=request.chain.keys[index - 1] if index else request.chain.scope,
                token_ids=tuple(request.tokens[index * size : (index + 1) * size]),
                block_ids=tuple(table[index] for table in request.tables),
            )
        )

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        if self._port is not None:
            self._port.observe_prefill(tokens, seconds)

    def flush(self) -> None:
        if self._port is not None and self._full:
            full, self._full = self._full, []
            self._port.on_full(full)

    def end(self, request: Request) -> None:
        """Take the blocks of a request that ended or was preempted, and that no step uses: free them, or leave them to
        the port. A preempted request tells the port too, which may still be reading blocks that are up for reuse."""
        tables, request.tables = request.tables, []
        if self._port is not None and self._speakers.get(request.request_id) is request:
            self.flush()
            if self._port.on_finish(request.request_id, request.kept_tokens) == "hold":
                self._held[request.request_id] = tables
                self._speakers[request.request_id] = None
                return
            del self._speakers[request.request_id]
        self._kv.release(tables)

    def owned_tables(self) -> list[Tables]:
        """Return the held tables, for the integrity check; those under load still belong to their requests."""
        return list(self._held.values())

    def loading_requests(self) -> list[Request]:
        return [load.request for load in self._loads.values()]
