"""The block format: what was written is read back, and nothing else is ever taken for it."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterable

import msgspec
import pytest
from xxhash import xxh3_128

from kvstore.block_format import check, encode, read_header, seal, segment_views
from kvstore.errors import CorruptObjectError
from kvstore.keys import PUBLIC_SCOPE
from kvstore.layout import GroupLayout
from kvstore.quick_check import QuickCheck
from tests.support.kv_objects import BLOCK_SIZE, NAMESPACE, PART, identity_of, key_of, object_of, payload_of

KEY = key_of(1)
QUICK = QuickCheck(PART)
FLIP_STEP = 5
"""One bit of so many is flipped in every run, all of them in the soak run."""

CHECKED_FRONT, FRONT = 16, 32


def faults(variants: Iterable[memoryview]) -> list[str]:
    """The first failed check of each; fails where none did."""
    found = []
    for variant in variants:
        with pytest.raises(CorruptObjectError) as caught:
            check(variant, KEY)
        assert not QUICK.passes(variant, KEY)
        found.append(caught.value.fault)
    return found


def undetected_flips(bits: Iterable[int], data: bytearray) -> list[int]:
    view, missed = memoryview(data), []
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        try:
            check(view, KEY)
            missed.append(bit)
        except CorruptObjectError:
            if QUICK.passes(view, KEY):
                missed.append(bit)
        data[bit // 8] ^= 1 << bit % 8
    return missed


def resealed(data: bytearray) -> memoryview:
    """Give a header that was changed the checksum that fits: what someone who may write objects can do."""
    size = int.from_bytes(data[8:12], "little")
    whole = xxh3_128(bytes(data[:CHECKED_FRONT]))
    whole.update(bytes(data[FRONT:size]))
    data[CHECKED_FRONT:FRONT] = whole.digest()
    return memoryview(data)


def test_what_was_encoded_is_read_back() -> None:
    data = memoryview(object_of(1))
    header = check(data, KEY, PART, identity_of(1).token_ids)
    assert (header.key, header.parent, header.first_token) == (KEY, PUBLIC_SCOPE, 0)
    assert header.num_tokens == BLOCK_SIZE * PART.span
    assert header.segments == PART.segments
    assert data.nbytes == header.object_bytes == PART.object_bytes
    assert b"".join(segment_views(data, PART)) == payload_of(1)


def test_the_quick_check_passes_the_object_of_its_layout_and_key_alone() -> None:
    data = memoryview(object_of(1))
    assert QUICK.passes(data, KEY)
    assert not QUICK.passes(data, key_of(2))
    assert not QUICK.passes(data, msgspec.structs.replace(KEY, owner=b"x" * 16))
    first = PART.segments[0]
    others = {
        "layers": msgspec.structs.replace(PART, layer_stop=PART.layer_stop + 1),
        "heads": msgspec.structs.replace(PART, head_start=PART.head_start + 1, head_stop=PART.head_stop + 1),
        "group": msgspec.structs.replace(PART, group=PART.group + 1),
        "dtype": msgspec.structs.replace(
            PART, segments=(msgspec.structs.replace(first, dtype="float16"), *PART.segments[1:])
        ),
        "plane": msgspec.structs.replace(
            PART, segments=(msgspec.structs.replace(first, plane="latent"), *PART.segments[1:])
        ),
    }
    for name, layout in others.items():
        assert layout.object_bytes == PART.object_bytes
        assert not QuickCheck(layout).passes(data, layout.key(KEY.namespace, KEY.owner, KEY.block)), name


def test_encoding_copies_nothing() -> None:
    """The pieces of the object are the caller's own buffers, however many make up a segment."""
    payload = bytearray(payload_of(1))
    half = PART.segments[0].size_bytes // 2
    pieces = [
        [memoryview(payload)[spec.offset :][:half], memoryview(payload)[spec.offset + half :][: spec.size_bytes - half]]
        for spec in PART.segments
    ]
    encoded = encode(identity_of(1), PART, pieces)
    whole = bytearray(b"".join(encoded.parts))
    assert encoded.size_bytes == len(whole) == PART.object_bytes
    check(memoryview(whole), KEY, PART)
    assert all(part.obj is payload for part in encoded.parts[1:])


def test_sealing_in_place_makes_the_same_object() -> None:
    target = bytearray(PART.object_bytes)
    target[PART.header_bytes :] = payload_of(1)
    seal(memoryview(target), identity_of(1), PART)
    check(memoryview(target), KEY, PART, identity_of(1).token_ids)
    assert target[PART.header_bytes :] == object_of(1)[PART.header_bytes :]


def test_objects_of_several_blocks_and_large_tables() -> None:
    layout = GroupLayout(NAMESPACE, 0, target_bytes=1 << 16)
    assert layout.span > 1
    for part in (layout.parts(layout.span)[0], layout.parts(1)[0]):
        data = memoryview(object_of(3, part=part))
        assert check(data, identity_of(3, part=part).key, part).key.span == part.span
    wide = msgspec.structs.replace(NAMESPACE.groups[0], layers=tuple(range(200)))
    part = GroupLayout(msgspec.structs.replace(NAMESPACE, groups=(wide,)), 0).parts(1)[0]
    assert part.header_bytes > 4096
    check(memoryview(object_of(3, part=part)), identity_of(3, part=part).key, part)


def test_pieces_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        encode(identity_of(1), PART, [[memoryview(b"x")] for _ in PART.segments])
    other = GroupLayout(NAMESPACE, 1, target_bytes=4096).parts(1)[0]
    with pytest.raises(ValueError, match="layout"):
        seal(memoryview(bytearray(other.object_bytes)), identity_of(1), other)


def test_some_flipped_bits_are_detected() -> None:
    data = object_of(1)
    assert undetected_flips(range(random.randrange(FLIP_STEP), len(data) * 8, FLIP_STEP), data) == []


@pytest.mark.soak
def test_all_flipped_bits_are_detected() -> None:
    """Every bit of small objects, and 100,000 random ones of an object of a mebibyte."""
    for number in range(1, 4):
        data = object_of(1)
        assert undetected_flips(range(len(data) * 8), data) == [], number
    group = msgspec.structs.replace(NAMESPACE.groups[0], head_dim=1024)
    part = GroupLayout(msgspec.structs.replace(NAMESPACE, groups=(group,)), 0).parts(1)[0]
    data = object_of(1, part=part)
    view, key, rng = memoryview(data), identity_of(1, part=part).key, random.Random(5)
    check(view, key)
    for _ in range(100_000):
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptObjectError):
            check(view, key)
        data[bit // 8] ^= 1 << bit % 8


def test_truncated_and_extended_objects_are_detected() -> None:
    data = memoryview(object_of(1))
    lengths = {*range(0, len(data), 61), *range(64), *range(len(data) - 64, len(data)), PART.header_bytes}
    assert set(faults(data[:length] for length in lengths)) <= {"short"}
    assert faults([memoryview(bytes(data) + b"\0")]) == ["short"]


def test_noise_is_detected() -> None:
    assert set(faults(memoryview(os.urandom(PART.object_bytes)) for _ in range(200))) == {"magic"}
    zeros = memoryview(bytes(PART.object_bytes))
    assert faults([zeros]) == ["magic"]


def test_two_torn_writes_are_detected() -> None:
    """The beginning of one object and the end of another, as after a crash or a race."""
    first, second = object_of(1), object_of(2)
    joints = range(1, len(first), 97)
    torn = [memoryview(first[:at] + second[at:]) for at in joints]
    assert set(faults(torn)) <= {"magic", "version", "header", "identity", "payload"}


def test_objects_of_other_keys_tokens_and_layouts_are_refused() -> None:
    with pytest.raises(CorruptObjectError) as caught:
        check(memoryview(object_of(2)), KEY)
    assert caught.value.fault == "identity"
    with pytest.raises(CorruptObjectError) as caught:
        check(memoryview(object_of(1)), KEY, PART, array("I", range(2, 2 + BLOCK_SIZE * PART.span)))
    assert caught.value.fault == "tokens"
    other = msgspec.structs.replace(PART, segments=PART.segments[::-1])
    with pytest.raises(CorruptObjectError) as caught:
        check(memoryview(object_of(1)), KEY, other)
    assert caught.value.fault == "identity"


def test_lies_under_a_valid_checksum_stay_in_bounds() -> None:
    """Any byte of a header may lie: what comes out is an error or a header whose segments lie within the object."""
    rng = random.Random(9)
    for _ in range(5_000):
        data = object_of(1)
        for _ in range(rng.randint(1, 4)):
            at = rng.choice([rng.randrange(8, CHECKED_FRONT), rng.randrange(FRONT, 700)])
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        try:
            header = read_header(resealed(data))
        except CorruptObjectError:
            continue
        assert sum(spec.size_bytes for spec in header.segments) == header.payload_bytes
        at = 0
        for spec in header.segments:
            assert spec.offset == at
            at += spec.size_bytes


@pytest.mark.parametrize(
    ("at", "value", "fault"), [(12, 1, "version"), (12, 3, "version"), (14, 2, "version"), (8, 1, "bounds")]
)
def test_other_versions_codecs_and_sizes_are_refused(at: int, value: int, fault: str) -> None:
    data = object_of(1)
    data[at : at + 2] = value.to_bytes(2, "little")
    assert faults([memoryview(data)]) == [fault]
