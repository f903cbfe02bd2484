"""Everything that serves one model: its targets, how requests are spread over them, and the model's text."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import zmq

from engine.protocol import CachedTokens
from kvstore.manager.figures import StoreStats
from router.admission import AdmissionLimits
from router.dispatcher import Dispatcher
from router.feed import IndexFeed
from router.hit_check import HitCheck
from router.index import PrefixIndex
from router.policies.registry import make_policy
from router.routed_pool import RoutedPool
from router.sharing import DispatchSharing
from router.supervisor import Supervisor
from router.values import Hit, TargetState
from server.config import RoutingConfig
from server.fleet.admin import EveryAdmin
from server.fleet.link import FleetEngine, FleetLink
from server.fleet.metrics import TargetsCollector
from server.fleet.readiness import EnginesReadiness
from server.fleet.stalls import StallWatch
from server.foreign.relay_supervisor import RelaySupervisor
from server.loop_watch import HeardEngine, LocalLoops
from server.served_model import ServedModel

SMALL_INDEX_BLOCKS = 1024
"""Where nothing publishes what it caches."""

Secure = Callable[[zmq.Socket[Any], str], None]


class ModelPool:
    """`links` are the targets in use. The fleet adds and removes them; `close` at the end. A pool that `is_relayed` has
    servers that give text only: what they answer is passed on. With `unready_after_s` the engines are of this machine,
    and one whose loop does not move for so long is not ready."""

    def __init__(
        self,
        name: str,
        config: RoutingConfig,
        *,
        context: zmq.Context[zmq.Socket[Any]],
        secure: Secure | None = None,
        sharing: DispatchSharing | None = None,
        with_events: bool = True,
        is_open: Callable[[], bool] = lambda: True,
        is_relayed: bool = False,
        unready_after_s: float | None = None,
    ) -> None:
        self.name = name
        self.is_relayed = is_relayed
        self.links: dict[str, FleetLink] = {}
        rng, clock = random.Random(), time.monotonic
        index = PrefixIndex(config.index_blocks if with_events else SMALL_INDEX_BLOCKS, clock)
        self.feed = IndexFeed(index, context=context, secure=secure)
        self.hits = HitCheck(self.feed.check_digest)
        self._with_events = with_events
        dispatcher = Dispatcher(make_policy(config.policy, clock, rng), index, clock, rng)
        dispatcher.on_answered = self._check_prediction
        if sharing is not None:
            dispatcher.observe(sharing.observer(name), sharing.peer_id)
            sharing.attach(name, dispatcher)
        limits = AdmissionLimits(
            budget_s=config.prefill_budget_s, max_queued=config.max_queued, max_wait_s=config.queue_timeout_s
        )
        self.pool = RoutedPool(dispatcher, admission_limits=limits)
        self.supervisor = Supervisor(self.pool, hedge_after_s=config.hedge_after_s)
        relays = RelaySupervisor(self.pool, self.supervisor) if is_relayed else None
        self._loops = None if unready_after_s is None else LocalLoops(self.engines, unready_after_s)
        self.readiness = EnginesReadiness(self.engines, is_open, self._is_stuck)
        admin = EveryAdmin(self.engines)
        targets = TargetsCollector(
            name,
            lambda: {name: link.engine.is_ready for name, link in self.links.items()},
            lambda: self.pool.in_flight,
            lambda: {one.target_id: one.drift for one in dispatcher.status() if one.drift is not None},
            self._stores,
        )
        self.model = ServedModel(
            self.supervisor,
            self.readiness,
            name=name,
            admin=admin,
            collector=targets,
            follow=self.pool.decisions.follow,
            relays=relays,
            stores=lambda: {name: link.engine for name, link in self.links.items()},
        )
        self._stalls = StallWatch(self.engines, config.stall_timeout_s)
        self._watches: list[asyncio.Task[None]] = []

    def engines(self) -> list[FleetEngine]:
        """Those of the targets in use."""
        return [link.engine for link in self.links.values()]

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way, also one that waits."""
        return self.supervisor.num_running > 0

    def start(self) -> None:
        self.model.start()
        self._watches.append(asyncio.create_task(self._stalls.run()))
        if self._loops is not None:
            self._watches.append(asyncio.create_task(self._loops.run()))

    async def close(self) -> None:
        for watch in self._watches:
            await stop(watch)
        await self.model.close()
        await self.feed.close()

    def use(self, link: FleetLink, state: TargetState) -> None:
        """Route to a target, or change its state."""
        if link.target_id in self.links:
            self.pool.set_state(link.target_id, state)
            return
        self.links[link.target_id] = link
        self.pool.add(link, state)
        link.engine.on_load = lambda load: self.pool.report_load(link.target_id, load, tells_tokens=link.tells_tokens)
        self.readiness.note_new_engine()

    async def drop(self, target_id: str) -> None:
        """Route to a target no more. Its streams go on."""
        link = self.links.pop(target_id, None)
        if link is None:
            return
        link.engine.on_load = None
        self.pool.remove(target_id)
        self.hits.forget(target_id)
        self.feed.index.share(target_id, None)
        await self.feed.close_target(target_id)

    async def renew(self, target_id: str) -> None:
        """Another process answers there now: nothing is cached, nothing is known of its speed."""
        link = self.links.get(target_id)
        if link is None:
            return
        self.hits.forget(target_id)
        await self.feed.close_target(target_id)
        if self.links.get(target_id) is link:
            self.pool.renew(target_id)
            self.learn(link)

    def learn(self, link: FleetLink) -> None:
        """Take what an engine says of itself, once it can: all of a pool agree on it. It publishes from then on."""
        if not self._with_events or link.info is None or self.is_relayed:
            return
        if self.pool.block_size is None:
            self.pool.block_size = link.info.block_size
        place, name = link.events, link.target_id
        remote = [tier.place for tier in link.info.kv_tiers if tier.tier == "remote"]
        self.feed.index.share(name, remote[0] if remote else None)
        if place is not None and not self.feed.follows(name):
            self.feed.open_target(
                name,
                place.address,
                place.replay,
                public_key=place.public_key,
                foreign=place.is_foreign,
                topic=place.topic,
            )

    def _stores(self) -> dict[str, StoreStats]:
        """What the engines' KV stores have told with their last load."""
        told = {name: link.kv_store for name, link in self.links.items()}
        return {name: stats for name, stats in told.items() if stats is not None}

    def _is_stuck(self, engine: HeardEngine) -> bool:
        return self._loops is not None and self._loops.is_stuck(engine)

    def _check_prediction(self, target_id: str, predicted: Hit, cached: CachedTokens, block_size: int) -> None:
        if self.feed.is_synced(target_id):
            self.hits.observe(target_id, predicted, cached, block_size)


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])
