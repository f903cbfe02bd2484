"""A KVPort over the fake runner's memory: late, failing, and jealous of the blocks it was given.

It copies published blocks into a store some polls after it heard of them (so the engine must keep them while their
request runs or is held), and loads them back some polls after it was asked. Until a load is done it scribbles over the
blocks it was given: whoever else uses them reads nonsense. A failing load leaves nonsense in its last part.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.plan import NULL_BLOCK
from engine.protocol import FullBlock, HoldDone, KVTier, LoadDone, LoadPlan
from tests.support.fake_runner import Entry, FakeKVMemory

SCRIBBLE: Entry = (-1, -1, -1)


@dataclass
class FakeLoad:
    plan: LoadPlan
    block_ids: Sequence[Sequence[int]]
    polls_left: int
    good_blocks: int
    contents: list[list[list[Entry | None]]]


@dataclass
class FakeCopy:
    block: FullBlock
    polls_left: int
    sliding: dict[int, list[Entry | None]]
    """Contents of the sliding windows' blocks, which may be gone when the copy is made."""


@dataclass
class FakeKVPort:
    memory: FakeKVMemory
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    max_late: int = 3
    fail: float = 0.0
    hold: float = 0.5
    tier: KVTier = "ram"
    max_stored: int = 10_000
    slow_looks: bool = False

    def __post_init__(self) -> None:
        self.store: dict[bytes, list[list[Entry | None]]] = {}
        self.loads: dict[str, FakeLoad] = {}
        self.copies: deque[FakeCopy] = deque()
        self.holds: dict[str, int] = {}
        self.looks: dict[str, int] = {}
        self.loads_ended = 0
        self.blocks_loaded = 0
        self.holds_ended = 0

    def look_up(
        self, request_id: str, scope: bytes, keys: Sequence[bytes], start_block: int, *, save: bool = True
    ) -> None:
        assert request_id not in self.looks, "announced twice"
        assert request_id not in self.loads, "announced while it is loading"
        self.looks[request_id] = self.rng.randint(0, self.max_late) if self.slow_looks else 0

    def match(self, request_id: str, keys: Sequence[bytes], start_block: int) -> LoadPlan | Literal["later"] | None:
        assert request_id not in self.loads, "asked for a request that is loading"
        if self.looks[request_id] > 0:
            self.looks[request_id] -= 1
            return "later"
        found = []
        for key in keys[start_block:]:
            if key not in self.store:
                break
            found.append(key)
        if not found or self.rng.random() < 0.1:
            return None
        tiers = (self.tier,) * len(found)
        return LoadPlan(request_id=request_id, start_block=start_block, keys=tuple(found), tiers=tiers)

    def start_load(self, plan: LoadPlan, block_ids: Sequence[Sequence[int]]) -> None:
        assert all(len(ids) == len(plan.keys) for ids in block_ids)
        good = len(plan.keys)
        if self.rng.random() < self.fail:
            good = self.rng.randrange(good)
        contents = [self.store[key] for key in plan.keys]
        self.loads[plan.request_id] = FakeLoad(plan, block_ids, self.rng.randint(0, self.max_late), good, contents)
        self._fill(self.loads[plan.request_id], good=0)

    def poll(self) -> Sequence[LoadDone | HoldDone]:
        done: list[LoadDone | HoldDone] = []
        for load in list(self.loads.values()):
            load.polls_left -= 1
            self._fill(load, good=load.good_blocks if load.polls_left < 0 else 0)
            if load.polls_left < 0:
                del self.loads[load.plan.request_id]
                self.loads_ended += 1
                self.blocks_loaded += load.good_blocks
                failed = load.good_blocks < len(load.plan.keys)
                done.append(
                    LoadDone(
                        request_id=load.plan.request_id,
                        loaded_blocks=load.good_blocks,
                        error="the fake tier failed" if failed else None,
                    )
                )
        for copy in self.copies:
            copy.polls_left -= 1
        while self.copies and self.copies[0].polls_left < 0:
            self._copy(self.copies.popleft())
        for request_id in list(self.holds):
            self.holds[request_id] -= 1
            if self.holds[request_id] < 0 and all(copy.block.request_id != request_id for copy in self.copies):
                del self.holds[request_id]
                self.holds_ended += 1
                done.append(HoldDone(request_id=request_id))
        return done

    def on_full(self, blocks: Sequence[FullBlock]) -> None:
        for block in blocks:
            sliding = {
                group: list(self.memory.block(group, block_id))
                for group, block_id in enumerate(block.block_ids)
                if self.memory.windows[group] is not None
            }
            self.copies.append(FakeCopy(block, self.rng.randint(0, self.max_late), sliding))

    def on_finish(self, request_id: str, keep_tokens: int) -> Literal["free", "hold"]:
        assert request_id not in self.loads, "ended while loading"
        del self.looks[request_id]
        if self.rng.random() < self.hold:
            self.holds[request_id] = self.rng.randint(0, self.max_late)
            return "hold"
        self.copies = deque(copy for copy in self.copies if copy.block.request_id != request_id)
        return "free"

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        pass

    def layer_done(self, step: int, layer: int) -> None:
        pass

    def _copy(self, copy: FakeCopy) -> None:
        while len(self.store) >= self.max_stored:
            del self.store[next(iter(self.store))]
        self.store[copy.block.key] = [
            copy.sliding.get(group) or list(self.memory.block(group, block_id))
            for group, block_id in enumerate(copy.block.block_ids)
        ]

    def _fill(self, load: FakeLoad, good: int) -> None:
        for group, ids in enumerate(load.block_ids):
            for index, block_id in enumerate(ids):
                if block_id == NULL_BLOCK:
                    continue
                nonsense: list[Entry | None] = [SCRIBBLE] * self.memory.block_size
                self.memory.block(group, block_id)[:] = load.contents[index][group] if index < good else nonsense
