"""Where an operator's orders are carried out: beside the engine's loop, which hands them in and collects the answers.

Whatever may wait happens in threads of this desk, a bounded number at once. What concerns the engine's own cache
happens in the loop's calls, which return at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.errors import EngineError, HeadraceError, PressureError, RequestError
from engine.kv.open_store import OpenStore
from engine.kv.store_orders import (
    MAX_PIN_S,
    MAX_WAIT_S,
    Done,
    Drop,
    Flush,
    Flushed,
    Kept,
    LookUp,
    NewWeights,
    Pin,
    Prefetch,
    Prefetched,
    PromptHeld,
    ReadStats,
    SetQuota,
    StoreAnswer,
    StoreOrder,
    StoreReport,
    WeightsEpoch,
)
from kvstore.keys import KEY_BYTES, OWNER_BYTES, KeyChain, tokens_of_words
from kvstore.manager.figures import StoreStats
from kvstore.object_key import ObjectKey
from kvstore.tier import Deadline, TierName

log = logging.getLogger(__name__)

MAX_PENDING = 16
THREADS = 4
STATS_AGE_S = 1.0
LOOK_UP_S = 2.0
MAX_EPOCH_CHARACTERS = 128
DeviceBlocks = Callable[[Sequence[bytes]], int]


class StoreDesk:
    """`begin`, `take` and `stats` belong to the engine's loop. `device_blocks` tells, in that loop, how many of a
    chain's leading blocks the device holds. `wake` is called when there is something to take."""

    def __init__(self, opened: OpenStore, device_blocks: DeviceBlocks, wake: Callable[[], None]) -> None:
        self._opened, self._device_blocks, self._wake = opened, device_blocks, wake
        self._workers = ThreadPoolExecutor(THREADS, "kv-orders")
        self._counter = ThreadPoolExecutor(1, "kv-stats")
        self._pending = 0
        self._ended: deque[tuple[object, StoreAnswer | HeadraceError, Sequence[bytes]]] = deque()
        self._stats = opened.store.stats()
        self._counted_s = time.monotonic()

    def begin(self, ticket: object, order: StoreOrder) -> None:
        """Carry out an order; its answer is taken later. Raises PressureError and RequestError at once."""
        if self._pending >= MAX_PENDING:
            raise PressureError(f"{MAX_PENDING} orders are being carried out already.")
        self._check(order)
        self._pending += 1
        if isinstance(order, NewWeights):
            self._ended.append((ticket, WeightsEpoch(epoch=self._opened.new_weights(order.epoch)), ()))
            self._wake()
        else:
            self._workers.submit(self._run, ticket, order)

    def take(self) -> list[tuple[object, StoreAnswer | HeadraceError]]:
        """Return the answers that are there."""
        taken: list[tuple[object, StoreAnswer | HeadraceError]] = []
        while self._ended:
            ticket, answer, keys = self._ended.popleft()
            self._pending -= 1
            if isinstance(answer, PromptHeld):
                answer = PromptHeld(
                    block_size=answer.block_size,
                    blocks=answer.blocks,
                    device=self._device_blocks(keys),
                    tiers=answer.tiers,
                )
            taken.append((ticket, answer))
        return taken

    @property
    def stats(self) -> StoreStats:
        """What the store told last, a second ago or so: tiers may be slow to be asked."""
        now = time.monotonic()
        if now - self._counted_s >= STATS_AGE_S:
            self._counted_s = now
            self._counter.submit(self._count)
        return self._stats

    def close(self) -> None:
        """Before the store is closed. What is still waited for ends by its own deadline."""
        for pool in (self._workers, self._counter):
            pool.shutdown(wait=True, cancel_futures=True)

    # ---- in the desk's threads

    def _count(self) -> None:
        try:
            self._stats = self._opened.store.stats()
        except Exception:
            log.exception("the KV store could not be counted")

    def _run(self, ticket: object, order: StoreOrder) -> None:
        keys: list[bytes] = []
        answer: StoreAnswer | HeadraceError
        try:
            if isinstance(order, LookUp | Prefetch | Pin) or (isinstance(order, Drop) and order.scope is not None):
                keys = KeyChain(order.scope or b"", self._opened.info.block_size).extend(tokens_of_words(order.tokens))
            answer = self._answer(order, keys)
        except HeadraceError as error:
            answer = error
        except Exception:
            # An operator's order must not end an engine, whatever the tiers have missed.
            log.exception("an order to the KV store failed")
            answer = EngineError("The KV store failed to carry it out; the engine's log says why.")
        self._ended.append((ticket, answer, keys))
        self._wake()

    def _answer(self, order: StoreOrder, keys: Sequence[bytes]) -> StoreAnswer:
        store, client = self._opened.store, self._opened.client
        match order:
            case ReadStats():
                epoch = self._opened.weights_epoch
                return StoreReport(stats=store.stats(), owners=store.owners(), weights_epoch=epoch)
            case LookUp(scope=scope):
                tiers = store.held(client, scope, keys, Deadline.after(LOOK_UP_S))
                return PromptHeld(block_size=self._opened.info.block_size, blocks=len(keys), device=0, tiers=tiers)
            case Prefetch():
                return self._prefetch(order, keys)
            case Pin(scope=scope, seconds=seconds, tier=tier):
                return Kept(blocks=len(keys), objects=store.pin(client, scope, keys, seconds, tier))
            case Drop(scope=scope, owner=owner, tier=tier):
                if scope is not None:
                    store.delete(client, scope, keys, tier)
                else:
                    store.drop(owner=owner, only=tier)
                    if owner is not None and self._opened.tier_blocks is not None:
                        self._opened.tier_blocks.drop(owner, tier)
                return self._done(tier)
            case SetQuota(owner=owner, limit_bytes=limit, tier=tier):
                store.set_quota(owner, limit, tier)
                return self._done(tier)
            case Flush(wait_s=wait_s):
                return Flushed(in_time=store.flush(Deadline.after(wait_s)))
            case NewWeights():
                raise AssertionError("it is carried out at once")

    def _done(self, tier: TierName | None) -> Done:
        return Done(tiers=[one.name for one in self._opened.store.tiers(tier)])

    def _prefetch(self, order: Prefetch, keys: Sequence[bytes]) -> Prefetched:
        store, client, deadline = self._opened.store, self._opened.client, Deadline.after(order.wait_s)
        # What is nowhere must not push anything out of memory.
        held = store.held(client, order.scope, keys, deadline)
        wanted = keys[: max(held.values(), default=0)]
        ended, fetched, come = 0, 0, threading.Condition()

        def on_fetched(key: ObjectKey, found: bool) -> None:
            nonlocal ended, fetched
            with come:
                ended += 1
                fetched += found
                come.notify_all()

        objects = store.prefetch(client, order.scope, wanted, deadline, on_fetched)
        with come:
            come.wait_for(lambda: ended >= objects, deadline.left_s)
        ram = store.held(client, order.scope, keys, Deadline.after(LOOK_UP_S)).get("ram", 0)
        return Prefetched(blocks=len(keys), ram_blocks=ram, objects=objects, fetched=fetched)

    # ---- the door

    def _check(self, order: StoreOrder) -> None:
        """Refuse what no store could do; the other end of the wire may be anybody's."""
        scope = getattr(order, "scope", None)
        if scope is not None and len(scope) != KEY_BYTES:
            raise RequestError(f"A scope has {KEY_BYTES} bytes.", param="scope")
        owner = getattr(order, "owner", None)
        if owner is not None and len(owner) != OWNER_BYTES:
            raise RequestError(f"An owner has {OWNER_BYTES} bytes.", param="owner")
        if len(getattr(order, "tokens", b"")) % 4:
            raise RequestError("The prompt ends within a token id.", param="token_ids")
        if not 0 <= getattr(order, "wait_s", 0.0) <= MAX_WAIT_S:
            raise RequestError(f"One may wait for 0 to {MAX_WAIT_S:g} s.", param="timeout_s")
        if not 0 <= getattr(order, "seconds", 0.0) <= MAX_PIN_S:
            raise RequestError(f"A pin lasts for up to {MAX_PIN_S:g} s.", param="seconds")
        if isinstance(order, NewWeights) and not 0 < len(order.epoch) <= MAX_EPOCH_CHARACTERS:
            raise RequestError(f"An epoch has 1 to {MAX_EPOCH_CHARACTERS} characters.", param="epoch")
        if isinstance(order, SetQuota) and order.limit_bytes is not None and order.limit_bytes < 0:
            raise RequestError("A quota is not negative.", param="quota_bytes", value=order.limit_bytes)
        tier = getattr(order, "tier", None)
        if tier is not None and not self._opened.store.tiers(tier):
            names = ", ".join(one.name for one in self._opened.store.tiers())
            raise RequestError(f"This store has no tier {tier!r}; it has {names}.", param="tier", value=tier)
