"""The store's way to an engine's KV cache: right bytes in the right blocks, and nothing else touched."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.runner.kv_memory import KVMemory
from kvstore.manager.contract import Piece
from tests.support.kv_pieces import SHAPES, as_bytes, expected_payload, pieces_of, planes

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SHAPES)
def test_payloads_are_as_the_layout_says(name: str) -> None:
    shape = SHAPES[name]
    cache = shape.cache(CPU, seed=1)
    pieces = pieces_of(shape, (7, 2, 0, 11, 3))
    KVMemory(cache, shape.groups).read(pieces)
    for piece in pieces:
        assert bytes(piece.payload) == expected_payload(cache, piece)


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_come_back_elsewhere_and_others_stay(name: str) -> None:
    shape = SHAPES[name]
    source, target, before = (shape.cache(CPU, seed) for seed in (1, 2, 2))
    ids, new_ids = (7, 2, 0, 11, 3), (1, 0, 5, 9, 8)
    saved, loaded = pieces_of(shape, ids), pieces_of(shape, new_ids)
    KVMemory(source, shape.groups).read(saved)
    moved = [Piece(to.layout, to.block_ids, one.payload.toreadonly()) for one, to in zip(saved, loaded, strict=True)]
    KVMemory(target, shape.groups).write(moved)
    for old, now, base in zip(planes(source), planes(target), planes(before), strict=True):
        expected = as_bytes(base).clone()
        for old_id, new_id in zip(ids, new_ids, strict=True):
            if new_id:
                expected[new_id] = as_bytes(old)[old_id] if old_id else 0
        assert torch.equal(as_bytes(now), expected)


def test_a_piece_that_does_not_fit_is_refused() -> None:
    shape = SHAPES["whole-blocks"]
    cache = shape.cache(CPU, seed=1)
    memory = KVMemory(cache, shape.groups)
    (piece,) = pieces_of(shape, (3,))
    for ids in ((12,), (-1,), (1, 2), ()):
        with pytest.raises(ValueError, match="blocks"):
            memory.read([Piece(piece.layout, ids, piece.payload)])
    with pytest.raises(ValueError, match="payload of"):
        memory.write([Piece(piece.layout, (3,), piece.payload[:-1])])
    with pytest.raises(ValueError, match="cannot be written"):
        memory.read([Piece(piece.layout, (3,), piece.payload.toreadonly())])
    other = SHAPES["split-heads"]
    with pytest.raises(ValueError, match="segments"):
        KVMemory(other.cache(CPU, seed=1), other.groups).read([piece])


def test_reads_and_writes_go_on_side_by_side() -> None:
    shape = SHAPES["layer-runs"]
    cache = shape.cache(CPU, seed=1)
    memory = KVMemory(cache, shape.groups)
    stored, other = pieces_of(shape, (1, 2, 3)), pieces_of(shape, (1, 2, 3))
    memory.read(stored)
    moved = [Piece(one.layout, tuple(i + 6 for i in one.block_ids), one.payload) for one in stored]
    threads = [
        threading.Thread(target=memory.write, args=(moved,)),
        threading.Thread(target=memory.read, args=(other,)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes(one.payload) for one in other] == [bytes(one.payload) for one in stored]
    for tensor in planes(cache):
        assert torch.equal(as_bytes(tensor)[7:10], as_bytes(tensor)[1:4])
