"""Orders of eviction, and the books of a tier: quotas, pins, and whose object goes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvstore.books import COMPARED_ORDERS, Books, Quotas
from kvstore.eviction import LRU, MAX_USES, POLICIES, SMALL_SHARE, Adaptive, Eviction, S3Fifo
from kvstore.keys import PUBLIC_SCOPE, tenant_scope
from kvstore.object_key import ObjectKey
from tests.support.kv_objects import key_of

SIZE = 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def owner_key(owner: str, number: int) -> ObjectKey:
    return key_of(number, scope=tenant_scope(b"s" * 32, owner))


def evict(policy: Eviction[int]) -> int | None:
    key = policy.candidate(lambda _: True)
    if key is not None:
        policy.remove(key, evicted=True)
    return key


class ListS3Fifo:
    """The paper's algorithm on plain lists."""

    def __init__(self) -> None:
        self.small: list[list[int]] = []
        self.main: list[list[int]] = []
        self.ghosts: list[int] = []

    def add(self, key: int) -> None:
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append([key, 0])
        else:
            self.small.append([key, 0])

    def use(self, key: int) -> None:
        for pair in self.small + self.main:
            if pair[0] == key:
                pair[1] = min(pair[1] + 1, MAX_USES)

    def evict(self) -> int:
        total = len(self.small) + len(self.main)
        if len(self.small) > SMALL_SHARE * total or not self.main:
            while self.small:
                key, uses = self.small.pop(0)
                if uses > 1:
                    self.main.append([key, 0])
                    continue
                self.ghosts.append(key)
                self.ghosts = self.ghosts[-max(1, total - 1) :]
                return key
        while True:
            key, uses = self.main.pop(0)
            if not uses:
                return key
            self.main.append([key, uses - 1])


def test_lru_takes_what_was_not_used_for_longest() -> None:
    policy: LRU[int] = LRU()
    for key in range(4):
        policy.add(key)
    policy.add(9, oldest=True)
    policy.use(0)
    assert [evict(policy) for _ in range(6)] == [9, 1, 2, 3, 0, None]


def test_s3fifo_is_the_papers() -> None:
    rng = random.Random(3)
    ours, twin, held, evicted = S3Fifo[int](), ListS3Fifo(), set[int](), 0
    for _ in range(6_000):
        key = min(int(rng.expovariate(0.02)), 400)
        if key in held:
            ours.use(key)
            twin.use(key)
            continue
        if len(held) == 60:
            gone = evict(ours)
            assert gone == twin.evict()
            assert gone is not None
            held.remove(gone)
            evicted += 1
        ours.add(key)
        twin.add(key)
        held.add(key)
    assert evicted > 500
    assert len(ours) == len(held)


@pytest.mark.parametrize("name", POLICIES)
def test_what_may_not_go_stays_and_all_else_goes(name: str) -> None:
    policy = POLICIES[name]()
    for key in range(50):
        policy.add(key)
        for _ in range(key % 4):
            policy.use(key)
    gone = []
    while (key := policy.candidate(lambda key: isinstance(key, int) and key % 3 != 0)) is not None:
        policy.remove(key, evicted=True)
        gone.append(key)
    assert sorted(gone, key=int) == [key for key in range(50) if key % 3]
    assert len(policy) == 17


def test_tails_go_before_the_prefixes_that_they_need() -> None:
    books = Books(10_000)
    chain = [key_of(number) for number in range(6)]
    for key in chain:
        books.add(key, SIZE, SIZE)
    books.touch(chain)
    order = []
    while (entry := books.candidate()) is not None:
        order.append(books.remove(entry.key, evicted=True).key)
    assert order == chain[::-1]


def test_what_is_used_or_pinned_does_not_go() -> None:
    clock = Clock()
    books = Books(1_000, clock=clock)
    keys = [key_of(number) for number in range(6)]
    entries = [books.add(key, SIZE, SIZE) for key in keys]
    entries[0].users += 1
    assert books.pin(keys[1:], seconds=10) == 3  # three tenths of the capacity
    assert books.pinned_bytes == 3 * SIZE
    assert books.pin(keys[1:2], seconds=20) == 1  # again, for longer
    assert [entry.key for entry in [books.candidate()] if entry] == [keys[4]]
    books.remove(keys[4])
    books.remove(keys[5])
    assert books.candidate() is None
    clock.now = 10.0
    assert books.pinned_bytes == SIZE
    candidate = books.candidate()
    assert candidate is not None
    assert candidate.key in keys[2:4]
    books.pin(keys[1:2], seconds=0)
    assert books.pinned_bytes == 0
    books.check_integrity()


def test_owners_over_their_quota_evict_their_own() -> None:
    rich, poor = owner_key("rich", 0).owner, owner_key("poor", 0).owner
    books = Books(10_000, Quotas({poor: 3 * SIZE}))
    for number in range(3):
        books.add(owner_key("poor", number), SIZE, SIZE)
    books.add(owner_key("rich", 0), SIZE, SIZE)
    assert books.over_quota(poor, SIZE)
    assert not books.over_quota(rich, 1 << 40)
    candidate = books.candidate(poor)
    assert candidate is not None
    assert candidate.key == owner_key("poor", 0)
    books.set_quota(poor, None)
    assert not books.over_quota(poor, SIZE)
    books.set_quota(rich, SIZE)
    assert books.over_quota(rich, SIZE)
    books.check_integrity()


def test_without_quotas_nobody_is_limited() -> None:
    """Quotas that are not known, after a restart for example, cost nobody anything."""
    assert not Books(100).over_quota(owner_key("a", 1).owner, 1 << 50)


def test_with_many_owners_everything_can_still_go() -> None:
    books = Books(1 << 30, Quotas(default=1 << 20))
    owners = [f"tenant {number}" for number in range(3 * COMPARED_ORDERS)]
    for number, owner in enumerate(owners):
        books.add(owner_key(owner, number), SIZE, SIZE)
    kept = books.get(owner_key(owners[-1], len(owners) - 1))
    assert kept is not None
    kept.users += 1
    gone = 0
    while (entry := books.candidate()) is not None:
        books.remove(entry.key, evicted=True)
        gone += 1
        books.check_integrity()
    assert gone == len(owners) - 1


@pytest.mark.parametrize("name", POLICIES)
def test_books_agree_with_themselves_whatever_happens(name: str) -> None:
    rng = random.Random(name)
    keys = [owner_key(owner, number) for owner in "abc" for number in range(30)]
    quotas = Quotas({keys[0].owner: 5 * SIZE})
    books = Books(20 * SIZE, quotas, POLICIES[name])  # type: ignore[arg-type]  # a policy of any keys
    for _ in range(3_000):
        key = rng.choice(keys)
        entry = books.get(key)
        match rng.randrange(6):
            case 0 | 1 if entry is None:
                books.add(key, rng.choice([SIZE, 2 * SIZE]), SIZE, oldest=rng.random() < 0.2)
            case 2 if entry is not None:
                books.remove(key, evicted=rng.random() < 0.5)
            case 3:
                books.touch(rng.sample(keys, 5))
            case 4:
                books.pin(rng.sample(keys, 3), rng.choice([0, 60]))
            case 5:
                owner = rng.choice(keys).owner
                books.set_quota(owner, rng.choice([None, 4 * SIZE]))
        while books.used_bytes > 20 * SIZE:
            victim = books.candidate()
            assert victim is not None
            books.remove(victim.key, evicted=True)
        books.check_integrity()
        assert books.pinned_bytes <= 0.3 * 20 * SIZE
    owner = keys[0].owner
    assert Counter(key.owner for key in books.select(None, None))[owner] == len(books.select(None, owner))
    assert books.select(b"\0" * 32, None) == []
    assert PUBLIC_SCOPE[:16] not in {key.owner for key in keys}


def hit_rate(policy: Eviction[int], capacity: int, asked: list[int]) -> float:
    held: set[int] = set()
    hits = 0
    for key in asked:
        if key in held:
            hits += 1
            policy.use(key)
            continue
        if len(held) == capacity:
            held.remove(evict(policy) or 0)
        policy.add(key)
        held.add(key)
    return hits / len(asked)


def once_and_often(rng: random.Random) -> list[int]:
    """What is asked for again is lost among much that is not: S3-FIFO's."""
    return [rng.randrange(1, 400) if rng.random() < 0.3 else 10_000 + number for number in range(40_000)]


def soon_or_never(rng: random.Random) -> list[int]:
    """What is asked for is asked for again a while later, and then no more: LRU's."""
    return [key for number in range(1, 20_001) for key in (number, max(1, number - rng.randrange(1, 500)))]


@pytest.mark.parametrize("load", [once_and_often, soon_or_never])
def test_adaptive_is_nearly_as_good_as_the_better_policy(load: Callable[[random.Random], list[int]]) -> None:
    asked = load(random.Random(5))
    rates = {name: hit_rate(policy(), 800, asked) for name, policy in POLICIES.items()}
    best, worst = max(rates["lru"], rates["s3fifo"]), min(rates["lru"], rates["s3fifo"])
    assert best - worst > 0.03, "the load makes no difference"
    assert rates["adaptive"] > best - 0.01


def test_adaptive_changes_with_the_load() -> None:
    policy = Adaptive[int]()
    rng = random.Random(5)
    hit_rate(policy, 800, once_and_often(rng))
    assert isinstance(policy.better, S3Fifo)
    while evict(policy) is not None:
        pass
    hit_rate(policy, 800, [100_000 + key for key in soon_or_never(rng)])
    assert isinstance(policy.better, LRU)
