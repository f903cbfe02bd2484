"""Encrypted objects: what they hide, and that nothing but the object itself comes out of them again."""

from __future__ import annotations

import builtins
import os
import random
from array import array
from pathlib import Path

import pytest

from kvstore.block_format import CODEC_AES_GCM, check, payload_checksum, read_header, recode
from kvstore.disk.inspect import open_place, verify
from kvstore.disk.tier import DiskTier
from kvstore.encryption import AesGcmCodec, read_secret
from kvstore.errors import CorruptObjectError, TierUnusableError
from kvstore.keys import tenant_scope
from kvstore.tier import Tier, TierEvent
from tests.support.kv_objects import PART, identity_of, key_of, object_of
from tests.support.tier_contract import loaded, save, soon, statuses

SECRET = bytes(range(32))
GIB = 1 << 30


def sealed(number: int, codec: AesGcmCodec | None = None) -> bytearray:
    whole = memoryview(object_of(number))
    parts = [whole[:100], whole[100:5000], whole[5000:]]
    return bytearray(b"".join((codec or AesGcmCodec(SECRET)).seal(key_of(number), parts)))


def fault_of(data: bytearray, number: int = 1, codec: AesGcmCodec | None = None) -> str:
    with pytest.raises(CorruptObjectError) as corrupt:
        (codec or AesGcmCodec(SECRET)).open(memoryview(data), key_of(number))
    return corrupt.value.fault


def test_objects_come_back_byte_for_byte() -> None:
    codec = AesGcmCodec(SECRET)
    for number in range(5):
        data = sealed(number, codec)
        assert len(data) == PART.object_bytes
        AesGcmCodec(SECRET).open(memoryview(data), key_of(number))
        tokens = array("I", identity_of(number).token_ids)
        check(memoryview(data), key_of(number), PART, tokens)
        original = object_of(number)
        # All but the time at which each was made.
        assert data[PART.header_bytes :] == original[PART.header_bytes :]
        assert read_header(memoryview(data)).checksum == read_header(memoryview(original)).checksum


def test_neither_payload_nor_tokens_nor_their_checksums_can_be_seen() -> None:
    plain, data = read_header(memoryview(object_of(1))), sealed(1)
    header = check(memoryview(data), key_of(1), codec=None)
    assert header.codec == CODEC_AES_GCM
    assert header.fingerprint != plain.fingerprint
    assert header.checksum != plain.checksum
    payload = object_of(1)[PART.header_bytes :]
    assert not any(payload[at : at + 16] in data for at in range(0, len(payload), 16))


def test_no_two_encryptions_are_alike() -> None:
    codec = AesGcmCodec(SECRET)
    several = [sealed(1, codec) for _ in range(50)]
    assert len({bytes(read_header(memoryview(one)).codec_data) for one in several}) == 50
    assert len({bytes(one[PART.header_bytes :]) for one in several}) == 50


def test_owners_have_keys_of_their_own() -> None:
    """Also an owner who can write to the store cannot pass an object of another one off as theirs."""
    codec = AesGcmCodec(SECRET)
    scope = tenant_scope(b"k" * 32, "a")
    key = key_of(1, scope=scope)
    data = bytearray(b"".join(codec.seal(key, [memoryview(object_of(1, scope=scope))])))
    assert fault_of(data, 1, codec) == "identity"
    assert codec._key(key.owner) != codec._key(key_of(1).owner)


def test_another_secret_opens_nothing() -> None:
    assert fault_of(sealed(1), codec=AesGcmCodec(b"x" * 32)) == "cipher"


def test_plain_and_encrypted_objects_are_not_taken_for_each_other() -> None:
    assert fault_of(object_of(1)) == "version"
    with pytest.raises(CorruptObjectError, match="version"):
        check(memoryview(sealed(1)), key_of(1))


def test_an_object_under_another_name_is_not_opened() -> None:
    """Not even when its header says that name, with all checksums right: they are no secret."""
    assert fault_of(sealed(2), 1) == "identity"
    moved, own = sealed(2), sealed(1)
    moved[: PART.header_bytes] = own[: PART.header_bytes]
    assert fault_of(resealed(moved), 1) == "cipher"


def resealed(data: bytearray) -> bytearray:
    """Make the checksums right, as anybody can."""
    header = read_header(memoryview(data))
    recode(
        memoryview(data)[: header.header_bytes],
        codec=header.codec,
        fingerprint=header.fingerprint,
        checksum=payload_checksum(memoryview(data)[header.header_bytes :]),
        codec_data=header.codec_data,
    )
    return data


def test_every_flipped_bit_is_found_out() -> None:
    rng = random.Random(3)
    codec, original = AesGcmCodec(SECRET), sealed(1)
    for place in [*range(350 * 8), *(rng.randrange(len(original) * 8) for _ in range(2000))]:
        data = bytearray(original)
        data[place // 8] ^= 1 << place % 8
        fault_of(data, 1, codec)


def test_changes_with_right_checksums_are_found_out() -> None:
    rng = random.Random(4)
    codec, original = AesGcmCodec(SECRET), sealed(1)
    header = read_header(memoryview(original))
    for _ in range(500):
        data = bytearray(original)
        place = rng.randrange(PART.header_bytes * 8, len(data) * 8)
        data[place // 8] ^= 1 << place % 8
        assert fault_of(resealed(data), 1, codec) == "cipher"
    for number in range(28 * 8):
        kept = bytearray(header.codec_data)
        kept[number // 8] ^= 1 << number % 8
        data = bytearray(original)
        recode(
            memoryview(data)[: header.header_bytes],
            codec=header.codec,
            fingerprint=header.fingerprint,
            checksum=header.checksum,
            codec_data=bytes(kept),
        )
        assert fault_of(data, 1, codec) == "cipher"


def test_an_encrypted_disk(tmp_path: Path) -> None:
    """Its objects outlive a restart, are checked without the secret, and are gone with another one."""
    events: list[TierEvent] = []

    def open_tier(secret: bytes | None) -> DiskTier:
        codec = None if secret is None else AesGcmCodec(secret)
        return DiskTier(tmp_path / "kv", GIB, min_free_bytes=0, codec=codec, on_event=events.append)

    tier: Tier = open_tier(SECRET)
    assert statuses(save(tier, range(6))) == ["ok"] * 6
    assert loaded(tier, range(6)) == ["ok"] * 6
    tier.close(soon())
    assert [fault for _, fault in verify(open_place(tmp_path / "kv"))] == [None] * 6
    for secret, numbers, faults in (
        (SECRET, range(6), {}),
        (b"x" * 32, range(3), {"cipher": 3}),
        (None, [3], {"version": 1}),
    ):
        tier = open_tier(secret)
        assert set(loaded(tier, numbers)) == {"corrupt" if faults else "ok"}
        assert tier.stats().corrupt == faults
        assert loaded(tier, numbers)[0] == ("miss" if faults else "ok")
        tier.close(soon())


def test_secrets_are_files_that_nobody_else_may_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET.hex() + "\n")
    path.chmod(0o600)
    assert read_secret(path) == SECRET
    path.chmod(0o640)
    with pytest.raises(TierUnusableError, match="chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    for wrong in ("", "00" * 31, "secret", "zz" * 32):
        path.write_text(wrong)
        with pytest.raises(TierUnusableError, match="openssl rand"):
            read_secret(path)
    os.unlink(path)
    with pytest.raises(TierUnusableError, match="cannot be read"):
        read_secret(path)
    os.mkfifo(path, 0o600)
    with pytest.raises(TierUnusableError, match="no file"):
        read_secret(path)


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TierUnusableError, match=r"pip install 'headrace\[encryption\]'"):
        AesGcmCodec(SECRET)
