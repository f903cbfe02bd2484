"""Objects encrypted with AES-256-GCM, for places that others can read: disks that are sold, servers that are shared.

The operator has one secret. Each owner's key is drawn from it (HKDF-SHA256), so that it opens that owner's
objects alone. What is encrypted is the payload and the fingerprint of the tokens, by which a prompt could be guessed.
The rest of the header stays readable, for inspection and for the checksums, which are those of the encrypted bytes; it
is authenticated as associated data: an object that was moved to another name, cut or changed in any bit is corrupt.

    what the codec keeps in the header: nonce (12 bytes), tag (16 bytes)

Nonces are 96 random bits. Two equal ones under one key would give both objects away; with 2^32 objects of one owner,
some 4 PiB, that has a chance below 2^-32, which is the bound that NIST SP 800-38D sets for random nonces.

Names, sizes and times are not hidden, and neither is which objects are asked for. Whoever can write can put an older
object of the same name back: it was valid, and still is.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.block_format import (
    CODEC_AES_GCM,
    CODEC_PLAIN,
    Arrived,
    BlockHeader,
    check,
    payload_checksum,
    read_header,
    recode,
)
from kvstore.errors import CorruptObjectError, TierUnusableError
from kvstore.object_key import ObjectKey

NONCE_BYTES = 12
TAG_BYTES = 16
KEY_BYTES = 32
MAX_KEYS = 10_000
_PURPOSE = b"headrace kv object aes-256-gcm v1"
_SECRET = re.compile(rb"(?:[0-9a-f]{2}){32,}\s*", re.IGNORECASE)
_MAX_SECRET_BYTES = 4096


class AesGcmCodec:
    """Raises TierUnusableError when the package for it is missing."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise TierUnusableError(
                "encryption needs the package cryptography: pip install 'headrace[encryption]'"
            ) from None
        self._aes, self._gcm, self._cipher, self._invalid = algorithms.AES256, modes.GCM, Cipher, InvalidTag
        self._hkdf, self._sha256, self._secret = HKDF, SHA256, secret
        self._keys: dict[bytes, bytes] = {}
        self._scratch = threading.local()

    def seal(self, key: ObjectKey, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        plain = (
            parts[0] if len(parts) == 1 else _joined(parts, self._memory("plain", sum(part.nbytes for part in parts)))
        )
        parsed = read_header(plain)
        if parsed.key != key or parsed.codec != CODEC_PLAIN or parsed.object_bytes != plain.nbytes:
            raise CorruptObjectError("identity", "not the plain object of its key")
        nonce = os.urandom(NONCE_BYTES)
        header, payload = bytearray(plain[: parsed.header_bytes]), self._memory("result", parsed.payload_bytes)
        recode(memoryview(header), codec=CODEC_AES_GCM, codec_data=nonce)
        encryptor = self._cipher(self._aes(self._key(key.owner)), self._gcm(nonce)).encryptor()
        encryptor.authenticate_additional_data(header)
        fingerprint = encryptor.update(parsed.fingerprint)
        encryptor.update_into(plain[parsed.header_bytes :], payload)
        encryptor.finalize()
        recode(
            memoryview(header),
            codec=CODEC_AES_GCM,
            fingerprint=fingerprint,
            checksum=payload_checksum(payload),
            codec_data=nonce + encryptor.tag,
        )
        return [memoryview(header), payload]

    def open(self, data: memoryview, key: ObjectKey, arrived: Arrived | None = None) -> None:
        parsed = check(data, key, codec=CODEC_AES_GCM, arrived=arrived)
        fingerprint, plain = self._decrypt(data, parsed)
        header, payload = data[: parsed.header_bytes], data[parsed.header_bytes :]
        payload[:] = plain
        recode(
            header,
            codec=CODEC_PLAIN,
            fingerprint=fingerprint,
            checksum=payload_checksum(payload),
        )

    def _decrypt(self, data: memoryview, parsed: BlockHeader) -> tuple[bytes, memoryview]:
        """Return fingerprint and payload. Nothing of what is decrypted is used before all of it is authentic."""
        nonce, tag = parsed.codec_data[:NONCE_BYTES], parsed.codec_data[NONCE_BYTES:][:TAG_BYTES]
        header, plain = bytearray(data[: parsed.header_bytes]), self._memory("result", parsed.payload_bytes)
        recode(memoryview(header), codec=CODEC_AES_GCM, codec_data=nonce)
        decryptor = self._cipher(self._aes(self._key(parsed.key.owner)), self._gcm(nonce, tag)).decryptor()
        decryptor.authenticate_additional_data(header)
        fingerprint = decryptor.update(parsed.fingerprint)
        decryptor.update_into(data[parsed.header_bytes :], plain)
        try:
            decryptor.finalize()
        except self._invalid:
            raise CorruptObjectError("cipher", "not encrypted with this secret, or changed since") from None
        return fingerprint, plain

    def _memory(self, name: str, size: int) -> memoryview:
        """Return a thread's own memory: fresh pages for every object would cost more than its encryption."""
        memory: memoryview | None = getattr(self._scratch, name, None)
        if memory is None or memory.nbytes < size:
            memory = memoryview(bytearray(size))
            setattr(self._scratch, name, memory)
        return memory[:size]

    def _key(self, owner: bytes) -> bytes:
        found = self._keys.get(owner)
        if found is None:
            if len(self._keys) >= MAX_KEYS:
                self._keys.clear()
            found = self._hkdf(self._sha256(), KEY_BYTES, salt=None, info=_PURPOSE + owner).derive(self._secret)
            self._keys[owner] = found
        return found


def _joined(parts: Sequence[memoryview], target: memoryview) -> memoryview:
    at = 0
    for part in parts:
        target[at : at + part.nbytes] = part
        at += part.nbytes
    return target


def read_secret(path: Path) -> bytes:
    """Return the secret of a file: 64 or more hexadecimal digits that nobody else may read. Raises
    TierUnusableError."""
    try:
        # Without blocking, so that a pipe in the file's place is refused below and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TierUnusableError(f"the secret {path} cannot be read: {error.strerror}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise TierUnusableError(f"the secret {path} is no file")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TierUnusableError(f"the secret {path} is open to other users: run chmod 600 {path}")
        content = os.read(descriptor, _MAX_SECRET_BYTES)
    finally:
        os.close(descriptor)
    if not _SECRET.fullmatch(content):
        raise TierUnusableError(f"the secret {path} holds none: make one with openssl rand -hex 32")
    return bytes.fromhex(content.decode())
