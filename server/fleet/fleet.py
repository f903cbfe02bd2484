"""The fleet behind one HTTP process: follows the registry, connects to every worker, and keeps a pool for each model.

The registry says who is there; whether a worker can serve is known from its own connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import zmq

from engine.errors import ConfigError
from engine.wire.curve import KeyPair, secure_client
from router.decision import Decision
from router.registry.base import GatewayRecord, RankAddress, Registry, WorkerRecord
from router.registry.compat import CompatibilityGate, compatibility_digest
from router.registry.records import MAX_RECORDS
from router.sharing import DispatchSharing, peers_of
from router.values import TargetState
from server.config import RoutingConfig
from server.connection import max_connections
from server.fleet.foreign_link import ForeignLink
from server.fleet.link import FleetLink, RankLink, target_id
from server.fleet.model_pool import ModelPool, stop
from server.foreign.gate import ForeignGate
from server.foreign.settings import ForeignSettings
from server.foreign.texts import PoolText, Texts
from server.foreign.worker import HEALTH_INTERVAL_S
from server.served_model import ServedModel

log = logging.getLogger("headrace.fleet")

HEALTH_LOOKS = 5
"""How often the health of a worker of another make is looked at within the time after which it counts as stalled."""

MAX_LINKS = 2048
"""Ranks of all workers. Each has two threads here."""

LINK_FDS = 12
"""Of a link and its KV events. ZeroMQ ends a process that has none left, so links take half of them at most."""

MAX_MODELS = 256


class Fleet:
    """The `Models` of a process that routes. `start` on the loop that uses it, `close` at the end; the registry and the
    sharing are the caller's, opened before and closed after.

    `gateways` are peers that the registry need not list. It is not ready before its peers have told what they have
    under way, or are silent. Without `with_events` nothing publishes what it caches, and prompts are not looked up.
    With `keys` a worker on another machine needs one as well, unless `insecure`. `foreign` is what workers of other
    makes need. `unready_after_s` is given where all engines are of this machine
    (server/loop_watch.py).
    """

    def __init__(
        self,
        registry: Registry,
        config: RoutingConfig,
        *,
        keys: KeyPair | None = None,
        insecure: bool = False,
        sharing: DispatchSharing | None = None,
        gateways: Sequence[GatewayRecord] = (),
        with_events: bool = True,
        foreign: ForeignSettings | None = None,
        unready_after_s: float | None = None,
    ) -> None:
        self.pools: dict[str, ModelPool] = {}
        self.opened = asyncio.Event()
        """Set once the text of a first model is there, and not reset."""
        self._registry = registry
        self._config = config
        self._keys, self._insecure = keys, insecure
        self._sharing = sharing
        self._gateways = tuple(gateways)
        self._with_events = with_events
        self._unready_after_s = unready_after_s
        self._is_synced = sharing is None
        self._max_links = min(MAX_LINKS, max_connections() // 2 // LINK_FDS)
        self._context: zmq.Context[zmq.Socket[Any]] = zmq.Context()
        self._gate = CompatibilityGate()
        self._records: tuple[WorkerRecord, ...] = ()
        self._links: dict[str, FleetLink] = {}
        self._foreign = foreign or ForeignSettings()
        self._foreign_gate = ForeignGate()
        self._texts = Texts(self._foreign.tokenizers, self._reconcile)
        self._told: dict[str, str] = {}
        self._changes: set[asyncio.Task[None]] = set()
        self._waits: set[asyncio.Task[None]] = set()
        self._notes: dict[str, asyncio.Task[None]] = {}
        self._watches: list[asyncio.Task[None]] = []
        if sharing is not None:
            sharing.find_decisions = self._find_decisions

    def served(self) -> Sequence[ServedModel]:
        return [pool.model for pool in self.pools.values()]

    @property
    def links(self) -> Sequence[FleetLink]:
        """All ranks that are connected to, also those that may not serve."""
        return list(self._links.values())

    async def explain(self, request_id: str) -> tuple[list[Decision], int]:
        """Return what was decided about a request, by this process or by a peer, and how many peers did not answer."""
        found = self._find_decisions(request_id)
        return (found, 0) if found or self._sharing is None else await self._sharing.explain(request_id)

    async def start(self) -> None:
        self._watches = [asyncio.create_task(self._watch_workers())]
        if self._sharing is not None:
            self._watches.append(asyncio.create_task(self._watch_gateways(self._sharing)))

    async def close(self) -> None:
        for task in (*self._watches, *self._waits, *self._notes.values()):
            await stop(task)
        if self._changes:
            await asyncio.wait(self._changes)
        for pool in self.pools.values():
            await pool.close()
        await self._texts.close()
        for link in self._links.values():
            await link.close()
        self._context.term()

    def _find_decisions(self, request_id: str) -> list[Decision]:
        return [one for pool in self.pools.values() for one in pool.pool.decisions.find(request_id)]

    async def _watch_workers(self) -> None:
        async for records in self._registry.watch():
            self._records = records
            try:
                self._connect()
                self._reconcile()
            except Exception:
                # Whatever somebody has written into the registry, the next list counts.
                log.exception("a list of workers could not be followed")

    async def _watch_gateways(self, sharing: DispatchSharing) -> None:
        async for gateways in self._registry.watch_gateways():
            sharing.set_peers(peers_of((*self._gateways, *gateways)))
            await sharing.wait_synced()
            self._is_synced = True

    def _complain(self, about: str, text: str) -> None:
        """Warn, unless that was said already."""
        if self._told.get(about) != text:
            if len(self._told) >= MAX_RECORDS:
                self._told.clear()
            self._told[about] = text
            log.warning("%s", text)

    def _connect(self) -> None:
        """Have one link for every listed rank, and none for any other."""
        listed = {
            target_id(record.worker_id, 0 if rank is None else rank.dp_rank): (record, rank)
            for record in self._records
            if record.state != "dead"
            for rank in (record.ranks if record.is_ours else (None,))
        }
        for name, link in list(self._links.items()):
            entry = listed.get(name)
            if entry is not None and link.leads_to(*entry):
                link.record = entry[0]
                continue
            del self._links[name]
            if (pool := self.pools.get(link.record.model)) is not None:
                _keep(self._changes, pool.drop(name))
            _keep(self._waits, link.retire())
        for name, (record, rank) in listed.items():
            if name in self._links:
                continue
            if len(self._links) >= self._max_links:
                self._complain("links", f"more than {self._max_links} ranks are listed: the last are not used")
                return
            try:
                link = self._link(record, rank)
                link.open()
            except ConfigError as error:
                told = f"worker {record.worker_id} cannot be connected to: {error} {error.hint or ''}"
                self._complain(name, told.rstrip())
                continue
            self._links[name] = link

    def _link(self, record: WorkerRecord, rank: RankAddress | None) -> FleetLink:
        if rank is not None:
            return RankLink(record, rank, self._keys, self._changed, insecure=self._insecure)
        interval_s = min(HEALTH_INTERVAL_S, self._config.stall_timeout_s / HEALTH_LOOKS)
        return ForeignLink(record, self._changed, api_key=self._foreign.api_key, health_interval_s=interval_s)

    def _changed(self, link: FleetLink, is_new_process: bool) -> None:
        if self._links.get(link.target_id) is not link:
            return
        if is_new_process and (pool := self.pools.get(link.record.model)) is not None:
            _keep(self._changes, pool.renew(link.target_id))
        self._reconcile()

    def _reconcile(self) -> None:
        """Let serve who may: listed, compatible with the others of its model, and not at its end."""
        known = [_as_known(record, self._links) for record in self._records if record.is_ours]
        admitted = self._gate.admit(known)
        others = {record.model for record in self._records if not record.is_ours}
        allowed = set()
        for record in admitted:
            if not self._may_open(record):
                continue
            pool = self._pool(record.model)
            if pool.is_relayed:
                continue
            allowed.add(record.worker_id)
            for rank in record.ranks:
                link = self._links.get(target_id(record.worker_id, rank.dp_rank))
                if link is not None:
                    pool.use(link, _target_state(record, link))
                    pool.learn(link)
                    if link.info is not None and record.model in others:
                        self._texts.offer(record.model, link.engine, link.info)
        for link in list(self._links.values()):
            if isinstance(link, ForeignLink) and self._use_foreign(link):
                allowed.add(link.record.worker_id)
        for pool in self.pools.values():
            for link in list(pool.links.values()):
                if link.record.worker_id not in allowed:
                    _keep(self._changes, pool.drop(link.target_id))

    def _may_open(self, record: WorkerRecord) -> bool:
        """Whether a model has a pool or gets one: there is room, also at the place of one that nobody has any more."""
        if record.model in self.pools or len(self.pools) < MAX_MODELS:
            return True
        listed = {one.model for one in self._records}
        gone = next((name for name, pool in self.pools.items() if name not in listed and not pool.is_busy), None)
        if gone is None:
            self._complain("models", f"more than {MAX_MODELS} models are listed: {record.model} is not served")
            return False
        _keep(self._changes, self.pools.pop(gone).close())
        self._notes.pop(gone).cancel()
        if self._sharing is not None:
            self._sharing.detach(gone)
        return True

    def _use_foreign(self, link: ForeignLink) -> bool:
        """Let a worker of another make serve if it may. Returns whether it may, as far as is known."""
        record, facts = link.record, link.facts
        if not self._may_open(record):
            return False
        if facts is None:
            # What it is its record may say before it can be reached: the model is known then, and loading.
            if record.dialect != "auto":
                self._pool(record.model, is_relayed=record.dialect == "text")
            return True
        is_relay = facts.dialect == "text"
        pool, text = self._pool(record.model, is_relayed=is_relay), None
        expected = next((one.probe for one in pool.links.values() if isinstance(one, ForeignLink) and one.probe), None)
        if not is_relay:
            if (text := self._text_of(record)) is None:
                return True
            expected = text.probe
        if not self._foreign_gate.admits(record, facts, expected, relayed=pool.is_relayed):
            return False
        link.serve(text)
        pool.use(link, _target_state(record, link))
        pool.learn(link)
        return True

    def _text_of(self, record: WorkerRecord) -> PoolText | None:
        """Return what turns text into the worker's token ids and back; say once where nothing does."""
        model = record.model
        self._texts.want(model)
        has_own = any(one.model == model and one.is_ours for one in self._records)
        if not has_own and not self._texts.has_source(model):
            self._complain(
                f"text of {record.worker_id}",
                f"worker {record.worker_id} is not used: nothing here knows the tokenizer of {model}. Give --tokenizer,"
                " or list it with the dialect text",
            )
        return self._texts.get(model)

    def _pool(self, model: str, *, is_relayed: bool = False) -> ModelPool:
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = ModelPool(
                model,
                self._config,
                context=self._context,
                secure=None if self._keys is None else self._secure,
                sharing=self._sharing,
                with_events=self._with_events,
                is_open=lambda: self._is_synced,
                is_relayed=is_relayed,
                unready_after_s=self._unready_after_s,
            )
            pool.start()
            self._notes[model] = asyncio.create_task(self._note_opened(pool.model))
        return pool

    async def _note_opened(self, model: ServedModel) -> None:
        await model.opened.wait()
        self.opened.set()

    def _secure(self, socket: zmq.Socket[Any], server_key: str) -> None:
        assert self._keys is not None
        secure_client(socket, keys=self._keys, server_key=server_key)


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Run it as one of `tasks`, which keep it alive to its end."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _as_known(record: WorkerRecord, links: dict[str, FleetLink]) -> WorkerRecord:
    """Return the record with what its engine says of itself, where the worker has not told it."""
    if record.compatibility:
        return record
    for rank in record.ranks:
        link = links.get(target_id(record.worker_id, rank.dp_rank))
        if link is not None and link.info is not None:
            state: TargetState = "ready" if record.state == "starting" else record.state
            return msgspec.structs.replace(record, state=state, compatibility=compatibility_digest(link.info))
    return record


def _target_state(record: WorkerRecord, link: FleetLink) -> TargetState:
    """A rank whose engine cannot be reached keeps its state: whether it can, its pool asks it."""
    if record.state in ("draining", "dead"):
        return record.state
    return "draining" if link.engine.state().state == "draining" else "ready"
