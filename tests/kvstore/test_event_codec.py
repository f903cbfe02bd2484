"""Batches in all the shapes that publishers send."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvstore.events.codec import BadEventError, decode_batch, encode_batch
from kvstore.events.digest import Digest
from kvstore.events.foreign import ForeignChain
from kvstore.events.media import tier_of
from kvstore.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvstore.keys import PUBLIC_SCOPE, KeyChain
from tests.support.event_world import numbered_key, removed, stored

HASHES = [2**64 - 1, 12]


def test_our_own_batches_come_back_as_they_were() -> None:
    batch = EventBatch(
        1.5,
        [stored([numbered_key(1)], "ram"), removed([numbered_key(2)]), AllBlocksCleared()],
        3,
        99,
        {"GPU": Digest(4, 2**64 - 1)},
    )
    assert decode_batch(encode_batch(batch)) == batch


class TheirStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """As consumers of other engines' events declare it: some fields have no default."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class TheirRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class TheirCleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class TheirBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[TheirStored | TheirRemoved | TheirCleared]
    data_parallel_rank: int | None = None


def test_others_can_read_our_batches() -> None:
    keys = [numbered_key(1), numbered_key(2)]
    ours = EventBatch(2.5, [stored(keys), removed(keys), AllBlocksCleared()], 1, 77, {"GPU": Digest()})
    theirs = msgspec.msgpack.decode(encode_batch(ours), type=TheirBatch)
    assert theirs == TheirBatch(
        2.5,
        [TheirStored(list(keys), None, [7] * 8, 4, None, "GPU", None), TheirRemoved(list(keys), "GPU"), TheirCleared()],
        1,
    )


@pytest.mark.parametrize(
    "event",
    [
        {
            "type": "BlockStored",
            "block_hashes": HASHES,
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "ownership": "shared",
            "lookahead_token_ids": [5],
        },
        ["BlockStored", HASHES, None, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockStored", HASHES, None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0, "full_attention", 4096, "local"],
    ],
)
def test_other_engines_blocks_in_maps_and_arrays(event: object) -> None:
    batch = decode_batch(msgspec.msgpack.encode([1.0, [event], 1]))
    (decoded,) = batch.events
    assert isinstance(decoded, BlockStored)
    assert (decoded.block_hashes, decoded.token_ids, decoded.block_size) == (HASHES, [1, 2, 3, 4], 2)
    assert (tier_of(decoded.medium), batch.data_parallel_rank, batch.epoch) == ("device", 1, 0)


def test_removals_clears_and_kinds_that_nobody_knows() -> None:
    events = [["BlockRemoved", HASHES, "CPU_PINNED"], {"type": "Weather", "rain": True}, ["AllBlocksCleared"]]
    batch = decode_batch(msgspec.msgpack.encode([1.0, events]))
    assert batch.events == [BlockRemoved(block_hashes=list(HASHES), medium="CPU_PINNED"), AllBlocksCleared()]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_the_one_error(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except BadEventError:
        return
    assert isinstance(batch, EventBatch)


@pytest.mark.parametrize(
    "value", [5, [], [1.0], [1.0, 2], [1.0, [3]], [1.0, [{"no": 1}]], ["x", []], [1.0, [["BlockRemoved", 3]]]]
)
def test_batches_of_a_wrong_shape(value: object) -> None:
    with pytest.raises(BadEventError):
        decode_batch(msgspec.msgpack.encode(value))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadEventError):
        decode_batch(b"\x91" * 1_000_000)


def foreign(hashes: list[bytes | int], parent: bytes | int | None, tokens: list[int], **fields: object) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=2,
        **fields,  # type: ignore[arg-type]
    )


def test_foreign_blocks_are_told_under_the_keys_of_their_tokens() -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    keys = KeyChain(PUBLIC_SCOPE, 2).extend(tokens)
    chain = ForeignChain()
    first, second = chain.translate([foreign([11, 22], None, tokens[:4]), foreign([b"x"], 22, tokens[4:])])
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.block_hashes + second.block_hashes == keys
    (gone,) = chain.translate([BlockRemoved(block_hashes=[22, 77])])
    assert gone == BlockRemoved(block_hashes=[keys[1]])
    assert chain.translate([BlockRemoved(block_hashes=[22])]) == []
    chain.translate([AllBlocksCleared()])
    assert len(chain) == 0


def test_foreign_blocks_that_are_more_than_their_tokens_are_left_out() -> None:
    chain = ForeignChain()
    events = [
        foreign([1], None, [1, 2], lora_name="adapter"),
        foreign([2], None, [1, 2], extra_keys=[["image"]]),
        foreign([3], 999, [1, 2]),
        foreign([4], None, [1, 2, 3]),
        foreign([5], None, [1, 2], medium="TAPE"),
        foreign([6], None, [1, 2], group_idx=1),
    ]
    assert chain.translate(events) == []
    assert len(chain) == 0


def test_a_foreign_block_is_known_as_long_as_a_tier_has_it() -> None:
    chain = ForeignChain()
    chain.translate([foreign([1], None, [1, 2]), foreign([1], None, [1, 2], medium="CPU")])
    assert len(chain.translate([BlockRemoved(block_hashes=[1], medium="GPU")])) == 1
    assert len(chain.translate([foreign([2], 1, [3, 4])])) == 1
    assert len(chain.translate([BlockRemoved(block_hashes=[1], medium="CPU")])) == 1
    assert chain.translate([foreign([3], 1, [3, 4])]) == []
