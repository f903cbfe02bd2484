"""Orders to an engine's store: refused at the door where they cannot be, bounded, and answered once each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from engine.errors import HeadraceError, PressureError, RequestError
from engine.kv.open_store import OpenStore
from engine.kv.store_desk import MAX_PENDING, StoreDesk
from engine.kv.store_orders import (
    Drop,
    Flush,
    Flushed,
    LookUp,
    NewWeights,
    Pin,
    Prefetch,
    Prefetched,
    PromptHeld,
    SetQuota,
    StoreAnswer,
    StoreOrder,
    WeightsEpoch,
)
from engine.kv.store_port import StorePort
from engine.protocol import KVGroupSpec
from kvstore.keys import PUBLIC_SCOPE, token_words
from kvstore.manager.config import StoreConfig
from kvstore.manager.store import KVStore
from kvstore.tier import Deadline
from tests.support.infos import engine_info
from tests.support.kv_objects import BLOCK_SIZE, NAMESPACE
from tests.support.store_engine import StoreEngine

WAIT_S = 60.0
PROMPT = list(range(4 * BLOCK_SIZE + 3))


class World:
    """A desk of a store in memory, in which an engine of numpy has computed a prompt."""

    def __init__(self) -> None:
        self.store = KVStore(StoreConfig(ram_bytes=16 << 20))
        self.engine = StoreEngine(self.store, NAMESPACE)
        self.woken = threading.Event()
        port = StorePort(self.engine.client, BLOCK_SIZE, slides=True)
        groups = (KVGroupSpec(layers=(0, 2), kv_heads=2, head_dim=8),)
        info = engine_info(block_size=BLOCK_SIZE, kv_groups=groups)
        opened = OpenStore(self.store, self.engine.client, port, cast(Any, self.engine.memory), info)
        self.desk = StoreDesk(opened, lambda keys: min(2, len(keys)), self.woken.set)
        self.engine.compute(PROMPT)
        assert self.store.flush(Deadline.after(WAIT_S))

    def close(self) -> None:
        self.desk.close()
        self.engine.close()
        self.store.close(Deadline.after(1.0))

    def answers(self, count: int) -> dict[object, StoreAnswer | HeadraceError]:
        found: dict[object, StoreAnswer | HeadraceError] = {}
        while len(found) < count:
            assert self.woken.wait(WAIT_S)
            self.woken.clear()
            for ticket, answer in self.desk.take():
                assert ticket not in found
                found[ticket] = answer
        return found

    def answer(self, order: StoreOrder) -> StoreAnswer | HeadraceError:
        self.desk.begin("one", order)
        return self.answers(1)["one"]


@pytest.fixture
def world() -> Iterator[World]:
    built = World()
    yield built
    built.close()


def test_no_more_orders_are_taken_than_are_answered(world: World) -> None:
    for number in range(MAX_PENDING):
        world.desk.begin(number, Flush(wait_s=1.0))
    with pytest.raises(PressureError):
        world.desk.begin("one more", Flush(wait_s=1.0))
    assert world.answers(MAX_PENDING) == dict.fromkeys(range(MAX_PENDING), Flushed(in_time=True))
    assert world.answer(Flush(wait_s=1.0)) == Flushed(in_time=True)


WORDS = token_words(PROMPT)


@pytest.mark.parametrize(
    ("order", "param"),
    [
        (LookUp(scope=b"short", tokens=WORDS), "scope"),
        (LookUp(scope=PUBLIC_SCOPE, tokens=b"abc"), "token_ids"),
        (Prefetch(scope=PUBLIC_SCOPE, tokens=WORDS, wait_s=1e9), "timeout_s"),
        (Prefetch(scope=PUBLIC_SCOPE, tokens=WORDS, wait_s=float("nan")), "timeout_s"),
        (Pin(scope=PUBLIC_SCOPE, tokens=WORDS, seconds=-1.0), "seconds"),
        (Pin(scope=PUBLIC_SCOPE, tokens=WORDS, seconds=float("inf")), "seconds"),
        (Pin(scope=PUBLIC_SCOPE, tokens=WORDS, seconds=1.0, tier="disk"), "tier"),
        (Drop(owner=b"short"), "owner"),
        (Drop(scope=b"short"), "scope"),
        (Drop(tier="remote"), "tier"),
        (SetQuota(owner=bytes(16), limit_bytes=-1), "quota_bytes"),
        (SetQuota(owner=b"", limit_bytes=1), "owner"),
        (Flush(wait_s=-1.0), "timeout_s"),
        (NewWeights(epoch=""), "epoch"),
        (NewWeights(epoch="x" * 10_000), "epoch"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_what_no_store_can_do_is_refused_at_the_door(world: World, order: StoreOrder, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        world.desk.begin("bad", order)
    assert refused.value.param == param
    # It takes no place.
    assert world.answer(Flush(wait_s=1.0)) == Flushed(in_time=True)


def test_a_prompt_that_is_nowhere_pushes_nothing_out_of_memory(world: World) -> None:
    other = token_words([token + 1 for token in PROMPT])
    before = world.store.ram.stats()
    answer = world.answer(Prefetch(scope=PUBLIC_SCOPE, tokens=other, wait_s=1.0))
    assert answer == Prefetched(blocks=4, ram_blocks=0, objects=0, fetched=0)
    after = world.store.ram.stats()
    assert (after.objects, after.used_bytes) == (before.objects, before.used_bytes)
    held = world.answer(LookUp(scope=PUBLIC_SCOPE, tokens=WORDS))
    assert isinstance(held, PromptHeld)
    assert (held.block_size, held.blocks, held.device) == (BLOCK_SIZE, 4, 2)


def test_new_weights_leave_nothing_of_before_and_are_answered_with_their_epoch(world: World) -> None:
    assert world.answer(NewWeights(epoch="two")) == WeightsEpoch(epoch="two")
    held = world.answer(LookUp(scope=PUBLIC_SCOPE, tokens=WORDS))
    assert isinstance(held, PromptHeld)
    assert held.tiers == {"ram": 0}


def test_a_store_that_cannot_be_asked_fails_the_order_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("the tier is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "pin", broken)
        answer = world.answer(Pin(scope=PUBLIC_SCOPE, tokens=WORDS, seconds=1.0))
    assert isinstance(answer, HeadraceError)
    assert "fire" not in str(answer)
    assert world.answer(Flush(wait_s=1.0)) == Flushed(in_time=True)
