"""Random engines' lives over a store whose tiers fill up, fail and lie: nothing is lost, leaked or wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.keys import PUBLIC_SCOPE, tenant_scope
from kvstore.manager.config import DirectorySpec, StoreConfig
from kvstore.manager.contract import Loaded, Released
from kvstore.manager.store import KVStore
from kvstore.tier import Deadline
from tests.support.kv_objects import BLOCK_SIZE, NAMESPACE
from tests.support.store_engine import StoreEngine

SCOPES = (PUBLIC_SCOPE, tenant_scope(b"s" * 32, "a"), tenant_scope(b"s" * 32, "b"))


@dataclass
class Life:
    """One request of the fuzz. `state` is what it waits for."""

    request_id: str
    scope: bytes
    tokens: list[int]
    keys: list[bytes]
    start: int
    state: str = "looking"
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    good: int = 0


class Fuzz:
    """One engine that runs several requests at once. Two of them share a store, and their lives go on in turns."""

    def __init__(self, store: KVStore, rng: random.Random) -> None:
        self.engine = StoreEngine(store, NAMESPACE, blocks=200)
        self.rng = rng
        self.lives: dict[str, Life] = {}
        self.leaving: dict[str, Life] = {}
        self.counts: dict[str, int] = {}

    def step(self) -> None:
        self._poll()
        if len(self.lives) < 6 and len(self.engine.free) > 60:
            self._begin()
        for life in self.rng.sample(list(self.lives.values()), k=min(2, len(self.lives))):
            self._go_on(life)

    def finish_all(self) -> None:
        while self.lives or self.leaving:
            self._poll()
            for life in list(self.lives.values()):
                self._go_on(life)

    def _count(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def _begin(self) -> None:
        rng = self.rng
        shared = random.Random(rng.randrange(12)).choices(range(999), k=BLOCK_SIZE * rng.randint(0, 5))
        tokens = [*shared, *rng.choices(range(999), k=BLOCK_SIZE * rng.randint(0, 3) + rng.randrange(BLOCK_SIZE))]
        scope = rng.choice(SCOPES)
        keys = self.engine.keys_of(tokens, scope)
        life = Life(self.engine.new_id(), scope, tokens, keys, start=rng.randint(0, len(keys)))
        self.engine.client.look_up(life.request_id, scope, keys, life.start, save=rng.random() < 0.9)
        # What the device holds already.
        life.blocks = self.engine.take(life.start)
        for block, key in zip(life.blocks, keys, strict=False):
            self.engine.memory.fill(block, key)
        self.lives[life.request_id] = life

    def _go_on(self, life: Life) -> None:
        if self.rng.random() < 0.05 and life.state != "loading":
            self._end(life)
        elif life.state == "looking":
            found = self.engine.client.found(life.request_id, life.start, len(life.keys))
            if found is None:
                return
            if not found.tiers:
                life.state, life.good = "computing", life.start
                return
            new = self.engine.take(len(found.tiers))
            life.blocks += new
            ids = [[block[group] for block in new] for group in range(self.engine.groups)]
            self.engine.client.load(life.request_id, life.start, ids)
            life.state = "loading"
        elif life.state == "computing":
            self._compute(life)

    def _compute(self, life: Life) -> None:
        """Compute what was not loaded, hand the new blocks over, and end."""
        life.blocks += self.engine.take(len(life.keys) - len(life.blocks))
        for block, key in list(zip(life.blocks, life.keys, strict=True))[life.good :]:
            self.engine.memory.fill(block, key)
        stored = self.engine.stored(life.request_id, life.tokens, life.keys, life.blocks, life.scope)
        if stored[life.good :]:
            self.engine.client.save(stored[life.good :])
        self._end(life)

    def _end(self, life: Life) -> None:
        del self.lives[life.request_id]
        keep = self.rng.randint(0, len(life.keys))
        if self.engine.client.finish(life.request_id, keep):
            self.leaving[life.request_id] = life
        else:
            self._free(life)

    def _free(self, life: Life) -> None:
        for block in life.blocks:
            self.engine.memory.scribble(block)
            self.engine.free.append(block[0])

    def _poll(self) -> None:
        for one in self.engine.client.poll():
            if isinstance(one, Released):
                self._count("released")
                self._free(self.leaving.pop(one.request_id))
            else:
                self._loaded(self.lives[one.request_id], one)

    def _loaded(self, life: Life, loaded: Loaded) -> None:
        assert life.state == "loading", "a load ended twice"
        life.state, life.good = "computing", life.start + loaded.blocks
        self._count("loaded blocks", loaded.blocks)
        self._count("cut loads", loaded.error is not None)
        for block, key in list(zip(life.blocks, life.keys, strict=False))[life.start : life.good]:
            assert self.engine.memory.holds(block, key), "a wrong block was loaded"


def run(directory: Path, seed: int, steps: int) -> dict[str, int]:
    rng = random.Random(seed)
    config = StoreConfig(
        ram_bytes=16 << 20,
        disk=DirectorySpec(str(directory), rng.choice((1 << 20, 64 << 20)), 1),
        always_load=True,
        quota_bytes=rng.choice((None, 8 << 20)),
    )
    store = KVStore(config)
    fuzzes = [Fuzz(store, rng), Fuzz(store, rng)]
    for number in range(steps):
        fuzz = rng.choice(fuzzes)
        fuzz.step()
        if number % 50 == 0:
            fuzz.engine.memory.delay_s = rng.choice((0.0, 0.0, 0.002))
            fuzz.engine.memory.fail = rng.choice((set(), set(), set(), {"read"}, {"write"}))
        if rng.random() < 0.01:
            store.drop(owner=rng.choice((None, SCOPES[1][:16])))
        if rng.random() < 0.02:
            _flip(store, rng)
    for fuzz in fuzzes:
        fuzz.finish_all()
        fuzz.engine.close()
        assert len(fuzz.engine.free) == 199, "a block was lost"
        assert not fuzz.engine.memory.using
    assert store.flush(Deadline.after(60.0))
    assert store.ram.overdue(0.0) == [], "a lease was left behind"
    assert not len(store._fetches), "a fetch was left behind"
    store.ram.check_integrity()
    store.close(Deadline.after(30.0))
    return {what: sum(fuzz.counts.get(what, 0) for fuzz in fuzzes) for what in fuzzes[0].counts | fuzzes[1].counts}


def _flip(store: KVStore, rng: random.Random) -> None:
    """Change a byte of an object in memory that nobody reads: a byte that changes after its check is not seen."""
    with store.ram._lock:
        if entries := [entry for entry in store.ram._books if not entry.users]:
            entry = rng.choice(entries)
            store.ram.arena.view(entry.place, entry.length)[rng.randrange(entry.length)] ^= 1 << rng.randrange(8)


@pytest.mark.parametrize("seed", range(4))
def test_two_engines_and_a_store_that_fails(seed: int, tmp_path: Path) -> None:
    counts = run(tmp_path, seed, 1500)
    assert counts["loaded blocks"] > 0
    assert counts["released"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 110))
def test_two_engines_and_a_store_that_fails_for_long(seed: int, tmp_path: Path) -> None:
    run(tmp_path, seed, 30_000)
