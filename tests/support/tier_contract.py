"""What every tier does. Each tier's test module makes a class of its own of this, with a fixture named `tier`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.batch import Batch
from kvstore.keys import tenant_scope
from kvstore.object_key import ObjectKey
from kvstore.tier import Deadline, Outcome, Put, Status, Tier, TierEvent, Want
from tests.support.kv_objects import DIGEST, PART, key_of, object_of

LIMIT_S = 60.0
"""Only a hang takes so long."""

SIZE = PART.object_bytes


def soon() -> Deadline:
    return Deadline.after(LIMIT_S)


def outcomes(batch: Batch) -> list[Outcome]:
    assert batch.wait(soon()), "a piece was never reported"
    return [outcome for outcome in batch.outcomes if outcome is not None]


def statuses(batch: Batch) -> list[Status]:
    return [outcome.status for outcome in outcomes(batch)]


def save(tier: Tier, numbers: Sequence[int], deadline: Deadline | None = None, scope: bytes | None = None) -> Batch:
    of_scope = {} if scope is None else {"scope": scope}
    batch = Batch(len(numbers))
    puts = [Put(key_of(n, **of_scope), (memoryview(object_of(n, **of_scope)),)) for n in numbers]
    tier.save(puts, deadline or soon(), batch.report)
    return batch


def load(tier: Tier, keys: Sequence[ObjectKey], deadline: Deadline | None = None) -> tuple[Batch, list[bytearray]]:
    targets = [bytearray(b"\xee" * SIZE) for _ in keys]
    batch = Batch(len(keys))
    wants = [Want(key, memoryview(target)) for key, target in zip(keys, targets, strict=True)]
    tier.load(wants, deadline or soon(), batch.report)
    return batch, targets


def loaded(tier: Tier, numbers: Sequence[int]) -> list[Status]:
    """Load objects and check that what is "ok" is right."""
    batch, targets = load(tier, [key_of(number) for number in numbers])
    found = statuses(batch)
    for number, status, target in zip(numbers, found, targets, strict=True):
        if status == "ok":
            assert target[PART.header_bytes :] == object_of(number)[PART.header_bytes :], f"wrong bytes for {number}"
    return found


def probe(tier: Tier, keys: Sequence[ObjectKey]) -> int:
    batch = Batch(1)
    tier.probe(keys, soon(), batch.report)
    return outcomes(batch)[0].size_bytes


class TierContract:
    """Subclasses give a fixture `tier`, empty, with room for at least 40 objects, and one `events` that it tells."""

    def test_saved_objects_are_loaded_byte_for_byte(self, tier: Tier) -> None:
        assert statuses(save(tier, range(8))) == ["ok"] * 8
        assert loaded(tier, range(8)) == ["ok"] * 8
        stats = tier.stats()
        assert stats.loads == stats.saves == {"ok": 8}
        assert stats.load_bytes_total == stats.save_bytes_total == 8 * SIZE
        assert stats.load_busy_s_total > 0

    def test_parts_are_laid_end_to_end(self, tier: Tier) -> None:
        whole = memoryview(object_of(5))
        batch = Batch(1)
        tier.save([Put(key_of(5), (whole[:1], whole[1:5000], whole[5000:]))], soon(), batch.report)
        assert statuses(batch) == ["ok"]
        assert loaded(tier, [5]) == ["ok"]

    def test_what_is_not_there_is_a_miss(self, tier: Tier) -> None:
        save(tier, [1]).wait(soon())
        assert loaded(tier, [2]) == ["miss"]
        other = [key_of(1, scope=tenant_scope(b"k" * 32, "a", salt)) for salt in ("", "x")]
        batch, _ = load(tier, other)
        assert statuses(batch) == ["miss", "miss"]
        assert tier.stats().loads == {"miss": 3}

    def test_probes_count_what_leads(self, tier: Tier) -> None:
        assert statuses(save(tier, [0, 1, 2, 4])) == ["ok"] * 4
        keys = [key_of(number) for number in range(5)]
        assert [probe(tier, keys), probe(tier, keys[3:]), probe(tier, [])] == [3, 0, 0]

    def test_saving_again_is_fine(self, tier: Tier) -> None:
        assert statuses(save(tier, [3])) == statuses(save(tier, [3])) == ["ok"]
        assert loaded(tier, [3]) == ["ok"]
        assert tier.stats().objects in (0, 1)

    def test_nothing_begins_after_its_deadline(self, tier: Tier) -> None:
        assert statuses(save(tier, [1])) == ["ok"]
        past = Deadline.after(-1)
        assert statuses(save(tier, [2, 3], past)) == ["late", "late"]
        batch, _ = load(tier, [key_of(1)], past)
        assert statuses(batch) == ["late"]
        assert loaded(tier, [1, 2, 3]) == ["ok", "miss", "miss"]

    def test_deleted_objects_are_misses_at_once(self, tier: Tier) -> None:
        assert statuses(save(tier, range(4))) == ["ok"] * 4
        tier.delete([key_of(1), key_of(99)])
        assert loaded(tier, range(4)) == ["ok", "miss", "ok", "ok"]
        assert statuses(save(tier, [1])) == ["ok"]
        assert loaded(tier, [1]) == ["ok"]

    def test_a_namespace_or_an_owner_is_dropped(self, tier: Tier) -> None:
        scopes = [tenant_scope(b"k" * 32, tenant) for tenant in ("a", "b")]
        for scope in scopes:
            assert statuses(save(tier, range(3), scope=scope)) == ["ok"] * 3
        keys = [[key_of(number, scope=scope) for number in range(3)] for scope in scopes]
        tier.drop(bytes(32))
        assert [probe(tier, one) for one in keys] == [3, 3]
        tier.drop(DIGEST, keys[0][0].owner)
        assert [probe(tier, one) for one in keys] == [0, 3]
        tier.drop(DIGEST)
        assert [probe(tier, one) for one in keys] == [0, 0]
        assert statuses(save(tier, range(3), scope=scopes[0])) == ["ok"] * 3
        assert probe(tier, keys[0]) == 3
        tier.drop()
        assert probe(tier, keys[0]) == 0

    def test_what_is_saved_wrong_is_never_served(self, tier: Tier) -> None:
        """Objects under other keys, torn ones and noise: whoever put them there, a load says so and forgets them."""
        torn = object_of(11)
        torn[-1] ^= 1
        wrong = {10: object_of(20), 11: torn, 12: bytearray(b"\x55" * SIZE)}
        batch = Batch(len(wrong))
        tier.save([Put(key_of(n), (memoryview(data),)) for n, data in wrong.items()], soon(), batch.report)
        assert batch.wait(soon())
        assert loaded(tier, [10, 11, 12]) == ["corrupt"] * 3
        assert loaded(tier, [10, 11, 12]) == ["miss"] * 3
        assert tier.stats().corrupt == {"identity": 1, "payload": 1, "magic": 1}

    def test_objects_of_another_size_are_never_served(self, tier: Tier) -> None:
        short = memoryview(object_of(7))[:-4096]
        batch = Batch(1)
        tier.save([Put(key_of(7), (short,))], soon(), batch.report)
        assert batch.wait(soon())
        assert loaded(tier, [7])[0] in ("corrupt", "failed")

    def test_events_tell_what_can_be_found(self, tier: Tier, events: list[TierEvent]) -> None:
        assert statuses(save(tier, range(3))) == ["ok"] * 3
        assert {event.key for event in events if event.kind == "stored"} == {key_of(number) for number in range(3)}
        tier.delete([key_of(0)])
        assert events[-1] == TierEvent("removed", key_of(0))

    def test_many_threads_at_once(self, tier: Tier) -> None:
        failures: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for _ in range(3):
                    save(tier, range(first, first + 10)).wait(soon())
                    assert set(loaded(tier, range(first, first + 10))) <= {"ok", "miss"}
                    tier.delete([key_of(first)])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 5, 10, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_after_close_everything_is_reported(self, tier: Tier) -> None:
        batch = save(tier, range(4))
        tier.close(soon())
        assert set(statuses(batch)) <= {"ok", "cancelled"}
        after, _ = load(tier, [key_of(0)])
        assert statuses(save(tier, range(4))) + statuses(after) == ["cancelled"] * 5
        tier.close(soon())
