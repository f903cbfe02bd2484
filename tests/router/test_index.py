"""The prefix index: equal to plain dictionaries under any history, bounded, and forgetful in O(1)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.events.digest import Digest
from kvstore.events.media import Tier
from kvstore.keys import PUBLIC_SCOPE, KeyChain
from router.index import FILL, PrefixIndex
from router.index_planes import PLANES
from router.target_bits import SWEEP_SLOTS
from router.values import Hit, Query
from tests.support.index_twin import IndexTwin

SIZE = 4


def chain(seed: int, blocks: int) -> list[bytes]:
    rng = random.Random(seed)
    return KeyChain(PUBLIC_SCOPE, SIZE).extend([rng.randrange(1000) for _ in range(blocks * SIZE)])


def query(keys: list[bytes], extra_tokens: int = 1) -> Query:
    return Query(request_id="r", prompt_tokens=len(keys) * SIZE + extra_tokens, keys=keys, block_size=SIZE)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Pair:
    """The index beside its twin. With `few_keys` 0 everything goes through arrays."""

    few_keys: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.index = PrefixIndex(4096, self.clock, few_keys=self.few_keys)
        self.twin = IndexTwin(4096, self.clock)


CHAINS = [chain(0, 12), *(chain(0, 4) + chain(seed, 5) for seed in (1, 2)), chain(3, 3)]
KEYS = sorted({key for keys in CHAINS for key in keys})
NAMES = [f"w{number}/0" for number in range(5)]

names = st.sampled_from(NAMES)
tiers = st.sampled_from(PLANES)
prefixes = st.tuples(st.sampled_from(CHAINS), st.integers(0, 12)).map(lambda pair: pair[0][: pair[1]])
some_keys = st.one_of(prefixes, st.lists(st.sampled_from(KEYS), max_size=6, unique=True))


class IndexMachine(RuleBasedStateMachine):
    few_keys = 4

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.few_keys)

    def both(self, method: str, *args: object, **fields: object) -> None:
        getattr(self.pair.index, method)(*args, **fields)
        getattr(self.pair.twin, method)(*args, **fields)

    @rule(name=names)
    def add(self, name: str) -> None:
        self.both("add_target", name)

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.both("drop_target", name)

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.both("clear", name)

    @rule(name=names, tier=tiers, stored=some_keys, removed=some_keys)
    def apply(self, name: str, tier: Tier, stored: list[bytes], removed: list[bytes]) -> None:
        self.both("apply", name, stored=stored, removed=removed, tier=tier)

    @rule(name=names, keys=prefixes, ttl_s=st.sampled_from([0.0, 0.5, 2.0]))
    def speculate(self, name: str, keys: list[bytes], ttl_s: float) -> None:
        self.both("speculate", name, keys, ttl_s)

    @rule(name=names, content=st.dictionaries(tiers, some_keys, max_size=4))
    def replace(self, name: str, content: dict[Tier, list[bytes]]) -> None:
        self.both("replace", name, content)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.pair.clock.now_s += seconds

    @rule(keys=prefixes, extra=st.integers(0, SIZE - 1))
    def look(self, keys: list[bytes], extra: int) -> None:
        if keys:
            asked = query(keys, extra)
            assert self.pair.index.lookup(asked) == self.pair.twin.lookup(asked)

    @invariant()
    def digests_are_equal(self) -> None:
        for name in NAMES:
            assert self.pair.index.digest(name) == self.pair.twin.digest(name)

    def teardown(self) -> None:
        for keys in CHAINS:
            assert self.pair.index.lookup(query(keys)) == self.pair.twin.lookup(query(keys))
        for name in NAMES:
            self.pair.index.drop_target(name)
        self.pair.clock.now_s += 10
        # Two rounds: one that may be under way, and one for what was retired meanwhile.
        for _ in range(2 + 2 * self.pair.index.max_blocks // SWEEP_SLOTS):
            self.pair.index.add_target("last")
            self.pair.index.apply("last")
        assert self.pair.index.num_blocks == 0, "blocks of dropped targets stayed"


class ArrayMachine(IndexMachine):
    few_keys = 0


TestIndex = IndexMachine.TestCase
TestIndexOfArrays = ArrayMachine.TestCase
TestIndex.settings = TestIndexOfArrays.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("few_keys", [0, 1000], ids=["arrays", "numbers"])
def test_what_one_target_has_in_a_shared_tier_all_have_that_share_it(few_keys: int) -> None:
    index, keys = PrefixIndex(1000, Clock(), few_keys=few_keys), chain(5, 6)
    names = [f"t{number}" for number in range(70)]  # over two words
    for name in names:
        index.add_target(name)
    for name in ("t0", "t1", "t69"):
        index.share(name, "redis://a:6379/0")
    index.share("t2", "redis://b:6379/0")
    index.apply("t0", stored=keys[:4], tier="remote")
    index.apply("t0", stored=keys[:1])
    index.apply("t1", stored=keys[:2], tier="ram")
    index.apply("t69", stored=keys[4:5], tier="remote")
    assert index.lookup(query(keys)) == {
        "t0": Hit(device=SIZE, remote=4 * SIZE),
        "t1": Hit(ram=2 * SIZE, remote=3 * SIZE),
        "t69": Hit(remote=5 * SIZE),
    }
    # What is told of each stays its own.
    assert index.digest("t1").keys() == {"ram"}
    assert index.digest("t0")["remote"].count == 4
    index.share("t1", None)
    assert index.lookup(query(keys))["t1"] == Hit(ram=2 * SIZE)
    index.drop_target("t0")
    assert index.lookup(query(keys)) == {"t1": Hit(ram=2 * SIZE)}
    index.add_target("t0")
    index.apply("t69", stored=keys[:2], tier="remote")
    assert index.lookup(query(keys))["t0"] == Hit(remote=2 * SIZE)


def test_many_targets_take_more_words_and_stay_apart() -> None:
    index = PrefixIndex(1000, Clock())
    keys = chain(5, 8)
    for number in range(150):
        index.add_target(f"t{number}")
        index.apply(f"t{number}", stored=keys[: 1 + number % 8])
    hits = index.lookup(query(keys))
    assert {name: hit.device // SIZE for name, hit in hits.items()} == {f"t{n}": 1 + n % 8 for n in range(150)}


def test_a_target_that_comes_and_goes_takes_no_more_room() -> None:
    index = PrefixIndex(1000, Clock())
    keys = chain(5, 8)
    index.add_target("steady")
    index.apply("steady", stored=keys)
    size_bytes = index.size_bytes
    for number in range(1000):
        index.add_target("flaps")
        index.apply("flaps", stored=keys[: number % 8])
        hits = index.lookup(query(keys))
        assert hits["steady"].device == len(keys) * SIZE
        assert hits.get("flaps", Hit()).device == number % 8 * SIZE
        index.drop_target("flaps")
    assert index.size_bytes == size_bytes


def test_long_prompts_are_followed_over_several_looks() -> None:
    index = PrefixIndex(10_000, Clock())
    keys = chain(6, 900)
    index.add_target("half")
    index.apply("half", stored=keys[:450])
    index.apply("half", stored=keys[440:800], tier="disk")
    assert index.lookup(query(keys)) == {"half": Hit(device=450 * SIZE, disk=350 * SIZE)}


def test_a_hit_of_an_engine_with_windows_ends_at_an_end_of_its_run() -> None:
    index = PrefixIndex(10_000, Clock())
    keys = chain(7, 700)
    for name, ends in (("late", keys[650:651]), ("early", keys[2:3] + keys[690:]), ("none", [])):
        index.add_target(name)
        index.apply(name, stored=keys[:680], tier="device_run")
        index.apply(name, stored=ends, tier="device_end")
    index.add_target("plain")
    index.apply("plain", stored=keys[:5])
    index.apply("early", stored=keys[3:6], tier="ram")
    expected = {
        "late": Hit(device=651 * SIZE),
        "early": Hit(device=3 * SIZE, ram=3 * SIZE),
        "plain": Hit(device=5 * SIZE),
    }
    assert index.lookup(query(keys)) == expected


@pytest.mark.parametrize("few_keys", [0, 1000])
def test_a_full_index_forgets_what_was_not_used_for_longest(few_keys: int) -> None:
    clock = Clock()
    index = PrefixIndex(4096, clock, few_keys=few_keys)
    index.add_target("t")
    used, unused = chain(1, 100), chain(2, 100)
    index.apply("t", stored=used + unused)
    for number in range(40):
        clock.now_s += 10
        index.lookup(query(used))
        index.apply("t", stored=chain(100 + number, 400))
    assert index.num_blocks <= 4096 / FILL + 8
    assert index.evicted > 10_000
    assert index.lookup(query(used))["t"].device == len(used) * SIZE
    assert index.lookup(query(unused)).get("t", Hit()).device < len(unused) * SIZE


@pytest.mark.parametrize("few_keys", [0, 5000])
def test_the_digest_tells_what_events_said_also_of_what_was_forgotten(few_keys: int) -> None:
    clock = Clock()
    index = PrefixIndex(256, clock, few_keys=few_keys)
    index.add_target("t")
    keys = [key for seed in range(40) for key in chain(seed, 100)]
    for start in range(0, len(keys), 100):
        clock.now_s += 1
        index.apply("t", stored=keys[start : start + 100])
    assert index.evicted > 3000
    assert index.digest("t") == {"device": Digest.of(keys)}
    index.apply("t", removed=keys[1000:])
    assert index.digest("t") == {"device": Digest.of(keys[:1000])}
    index.clear("t")
    assert index.digest("t") == {}


def test_more_blocks_at_once_than_there_is_room_for() -> None:
    index = PrefixIndex(64, Clock())
    index.add_target("t")
    keys = chain(9, 5000)
    index.replace("t", {"device": keys})
    assert index.num_blocks <= 64 / FILL + 8
    assert index.digest("t") == {"device": Digest.of(keys)}
