"""What the engine tells of its prefix cache: in order, with the tokens, and never more than it can serve."""

from __future__ import annotations

from engine.kv.blocks import BlockEvent
from engine.kv.event_log import KVEventLog
from kvstore.events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from kvstore.keys import KeyChain
from tests.support.core_world import FULL, World, make_request, sliding

SCOPE = bytes(range(32))


def test_a_prompt_is_told_with_its_tokens_and_scope_and_its_reuse_as_removals() -> None:
    world = World(num_blocks=(6,))
    prompt = list(range(1, 14))
    world.submit(make_request("first", prompt, max_tokens=1, cache_scope=SCOPE))
    world.step()
    (stored,) = world.event_log.take()
    keys = KeyChain(SCOPE, 4).extend(prompt)
    assert stored == BlockStored(
        block_hashes=list(keys),
        parent_block_hash=None,
        token_ids=prompt[:12],
        block_size=4,
        medium="GPU",
        scope=SCOPE,
    )
    world.submit(make_request("second", list(range(20, 37)), max_tokens=1))
    while world.core.has_work:
        world.step()
    events = world.event_log.take()
    removed = [key for event in events if isinstance(event, BlockRemoved) for key in event.block_hashes]
    assert removed == list(reversed(keys))


def test_a_longer_conversation_goes_on_where_the_known_part_ends() -> None:
    world = World()
    first, second = list(range(1, 9)), list(range(1, 17))
    world.submit(make_request("a", first, max_tokens=1))
    world.run()
    world.submit(make_request("b", second, max_tokens=1))
    while world.core.has_work:
        world.step()
    (stored,) = world.event_log.take()
    keys = KeyChain(make_request().cache_scope, 4).extend(second)
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.block_hashes) == (keys[1], keys[2:])
    assert stored.token_ids == second[8:]


def test_where_the_window_has_gone_a_prefix_has_no_end() -> None:
    world = World(specs=[FULL, sliding(4)], num_blocks=(65, 5), max_step_tokens=4)
    world.submit(make_request("long", list(range(1, 42)), max_tokens=1))
    world.run()
    full, window = world.core.kv.pools
    assert sum(full.key_of(block) is not None for block in range(full.num_blocks)) == 10
    assert len(world.told.by_tier["device_run"]) == 10
    assert (
        len(world.told.by_tier["device_end"])
        == sum(window.key_of(block) is not None for block in range(window.num_blocks))
        <= 4
    )


def test_a_reset_is_told_once_and_nothing_is_told_when_nobody_listens() -> None:
    world = World(specs=[FULL, sliding(9)], num_blocks=(33, 33))
    world.submit(make_request("a", list(range(1, 14)), max_tokens=1))
    world.run()
    world.core.reset_prefix_cache()
    world.core.reset_prefix_cache()
    assert world.event_log.take() == [AllBlocksCleared()]
    deaf = KVEventLog([None], 4)
    deaf.on_block(0, BlockEvent("stored", b"x" * 32))
    deaf.stored(SCOPE, [b"x" * 32], 0, [1, 2, 3, 4])
    assert deaf.take() == []
