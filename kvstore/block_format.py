"""The bytes of a stored object: the same in RAM, on disk, on a server and on the wire.

    header    a multiple of 4 KiB, zeros behind its last entry
        magic, size, version, checksum of all other bytes of the header
        identity: the object's key, the chain's value before its first block, its tokens' place, number and fingerprint
        origin: time and writer; codec; size and checksum of the payload
        what the codec keeps: nothing for plain objects
        one entry for each segment: plane, layer, dtype, shape, offset, size
    payload   the segments, without gaps

The header's checksum covers that of the payload, so no byte is outside. The payload has one and not one for each
segment: hashing lets go of the interpreter, and taking it back for every segment costs more than the hash. Checksums
are xxh3-128, made against accidents: who can write where objects are kept can write valid objects. All numbers are
little-endian, none is used before it is known to be in bounds, and nothing but numbers and bytes is ever decoded.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import NoReturn

from xxhash import xxh3_128, xxh3_128_digest

from kvstore.errors import CorruptObjectError, Fault
from kvstore.layout import (
    FIXED_HEADER_BYTES,
    HEADER_BYTES,
    SEGMENT_ENTRY_BYTES,
    ObjectLayout,
    SegmentSpec,
    header_bytes,
)
from kvstore.object_key import ObjectKey

MAGIC = b"HRKVBLK\n"
VERSION = 2
CODEC_PLAIN = 0
CODEC_AES_GCM = 1
"""Payload and fingerprint are encrypted, and the checksums are those of the encrypted bytes (kvstore/encryption.py)."""

CODECS = (CODEC_PLAIN, CODEC_AES_GCM)
WRITER_BYTES = 8

Arrived = Callable[[int], None]
"""Returns when so many bytes of an object are there, counted from its front."""

PLANES = ("k", "v", "latent", "index", "scale", "state", "logits")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
"""Codes are places in these lists: they only ever grow."""

# magic, header size, version, codec | checksum
_FRONT = struct.Struct("<8sIHH16s")
_CHECKED_FRONT_BYTES = 16
# namespace, owner, block, parent, group, span, layers, heads, first token, tokens, fingerprint, created, writer,
# segments, payload size and checksum
_IDENTITY = struct.Struct("<32s16s32s32sHHHHHHIQI16sQ8sIQ16s")
# plane, dtype, layer, shape, offset, size
_ENTRY = struct.Struct("<BBHIIIIQQ")

_FINGERPRINT_AT = _FRONT.size + struct.calcsize("<32s16s32s32sHHHHHHIQI")
_CODEC_AT = _FRONT.size + _IDENTITY.size
_COORDINATES_AT = _FRONT.size + struct.calcsize("<32s16s32s32s")
_SIZES_AT = _CODEC_AT - struct.calcsize("<IQ16s")

KEY_PLACE = slice(_FRONT.size, _FRONT.size + struct.calcsize("<32s16s32s"))
"""Where a header has its key's namespace, owner and block."""

CHECKSUM_PLACE = slice(_CODEC_AT - 16, _CODEC_AT)
"""Where it has the payload's checksum."""
CODEC_BYTES = FIXED_HEADER_BYTES - _CODEC_AT

assert CODEC_BYTES >= 64
assert _ENTRY.size <= SEGMENT_ENTRY_BYTES

MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """What an object is of. `parent` is the block key before its first block (or the scope), `first_token` the position
    of its first token; `token_ids` are those of all its blocks, as C unsigned ints."""

    key: ObjectKey
    parent: bytes
    first_token: int
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A header that was found whole. `fingerprint` is of the token ids, `created_unix_ms` is the writer's clock."""

    key: ObjectKey
    parent: bytes
    first_token: int
    num_tokens: int
    fingerprint: bytes
    created_unix_ms: int
    writer: bytes
    codec: int
    codec_data: bytes
    segments: tuple[SegmentSpec, ...]
    checksum: bytes
    header_bytes: int
    payload_bytes: int

    @property
    def object_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Encoded:
    """An object as pieces to be written one after another: the header, then the caller's own buffers."""

    parts: tuple[memoryview, ...]
    size_bytes: int


def fingerprint(token_ids: array[int]) -> bytes:
    """Return 16 bytes that tell the exact tokens, apart from the chain of keys."""
    words = token_ids
    if byteorder == "big":
        words = array("I", token_ids)
        words.byteswap()
    return xxh3_128_digest(words)


def encode(
    identity: Identity,
    layout: ObjectLayout,
    segments: Sequence[Sequence[memoryview]],
    writer: bytes = bytes(WRITER_BYTES),
) -> Encoded:
    """Return the object without copying: `segments[i]` are the pieces that make up `layout.segments[i]`.

    The pieces must stay as they are until the object has been written. Raises ValueError when they do not fit.
    """
    pieces = [[piece.cast("B") for piece in segment] for segment in segments]
    for spec, segment in zip(layout.segments, pieces, strict=True):
        if sum(piece.nbytes for piece in segment) != spec.size_bytes:
            raise ValueError(f"the pieces of {spec.plane} of layer {spec.layer} are not {spec.size_bytes} bytes")
    flat = tuple(piece for segment in pieces for piece in segment)
    header = _header(identity, layout, _checksum(flat), writer)
    return Encoded((memoryview(header), *flat), layout.object_bytes)


def seal(target: memoryview, identity: Identity, layout: ObjectLayout, writer: bytes = bytes(WRITER_BYTES)) -> None:
    """Make an object of `target`, whose payload is already in its place: take its sum and write the header."""
    payload = target[layout.header_bytes : layout.object_bytes]
    target[: layout.header_bytes] = _header(identity, layout, payload_checksum(payload), writer)


def _header(identity: Identity, layout: ObjectLayout, checksum: bytes, writer: bytes) -> bytes:
    key = identity.key
    if key != layout.key(key.namespace, key.owner, key.block):
        raise ValueError("the key is not that of the layout")
    header = bytearray(layout.header_bytes)
    _IDENTITY.pack_into(
        header,
        _FRONT.size,
        key.namespace,
        key.owner,
        key.block,
        identity.parent,
        key.group,
        key.span,
        key.layer_start,
        key.layer_stop,
        key.head_start,
        key.head_stop,
        0,
        identity.first_token,
        len(identity.token_ids),
        fingerprint(identity.token_ids),
        int(time.time() * 1000),
        writer,
        len(layout.segments),
        layout.payload_bytes,
        checksum,
    )
    at = FIXED_HEADER_BYTES
    for spec in layout.segments:
        place = (PLANES.index(spec.plane), DTYPES.index(spec.dtype), spec.layer)
        _ENTRY.pack_into(header, at, *place, *spec.shape, spec.offset, spec.size_bytes)
        at += SEGMENT_ENTRY_BYTES
    _FRONT.pack_into(header, 0, MAGIC, len(header), VERSION, CODEC_PLAIN, bytes(16))
    header[_CHECKED_FRONT_BYTES : _FRONT.size] = _header_checksum(memoryview(header))
    return bytes(header)


def layout_places(segments: int) -> list[slice]:
    """Return where the header of a plain object of so many segments has what its layout alone tells."""
    return [
        slice(0, _CHECKED_FRONT_BYTES),
        slice(_COORDINATES_AT, _COORDINATES_AT + struct.calcsize("<HHHHHHI")),
        slice(_SIZES_AT, CHECKSUM_PLACE.start),
        slice(FIXED_HEADER_BYTES, header_bytes(segments)),
    ]


def header_is_whole(header: memoryview) -> bool:
    """Return whether a header, of which nothing else is known, has the checksum of its bytes."""
    return _header_checksum(header) == header[_CHECKED_FRONT_BYTES : _FRONT.size]


def read_header(data: memoryview) -> BlockHeader:
    """Return the header at the front of `data`, which may end behind it. Raises CorruptObjectError."""
    if data.nbytes < _FRONT.size:
        _fail("short", f"{data.nbytes} bytes")
    magic, size, version, codec, checksum = _FRONT.unpack_from(data)
    if magic != MAGIC:
        _fail("magic", "not an object of this store")
    if version != VERSION or codec not in CODECS:
        _fail("version", f"version {version}, codec {codec}")
    if not FIXED_HEADER_BYTES <= size <= MAX_HEADER_BYTES:
        _fail("bounds", f"a header of {size} bytes")
    if data.nbytes < size:
        _fail("short", f"{data.nbytes} of the header's {size} bytes")
    if _header_checksum(data[:size]) != checksum:
        _fail("header", "the header's checksum differs")
    return _fields(data[:size], codec)


def _fields(data: memoryview, codec: int) -> BlockHeader:
    """Read a header whose checksum is right. A liar may have made that one too, so bounds are checked all the same."""
    (
        namespace,
        owner,
        block,
        parent,
        group,
        span,
        *ranges,
        _,
        first,
        tokens,
        print_,
        created,
        writer,
        count,
        payload,
        checksum,
    ) = _IDENTITY.unpack_from(data, _FRONT.size)
    if header_bytes(count) != data.nbytes:
        _fail("bounds", f"{count} segments in a header of {data.nbytes} bytes")
    segments, at = [], 0
    for index in range(count):
        entry = _ENTRY.unpack_from(data, FIXED_HEADER_BYTES + index * SEGMENT_ENTRY_BYTES)
        plane, dtype, layer, *shape, offset, size = entry
        if plane >= len(PLANES) or dtype >= len(DTYPES) or offset != at or size > payload - at:
            _fail("bounds", f"segment {index}")
        segments.append(SegmentSpec(PLANES[plane], layer, DTYPES[dtype], tuple(shape), offset, size))
        at += size
    if at != payload:
        _fail("bounds", f"segments of {at} bytes in a payload of {payload}")
    try:
        key = ObjectKey(namespace, owner, block, group, span, *ranges)
    except ValueError as error:
        _fail("bounds", str(error))
    return BlockHeader(
        key,
        parent,
        first,
        tokens,
        print_,
        created,
        writer,
        codec,
        bytes(data[_CODEC_AT:FIXED_HEADER_BYTES]),
        tuple(segments),
        checksum,
        data.nbytes,
        payload,
    )


def recode(
    header: memoryview,
    *,
    codec: int,
    fingerprint: bytes = bytes(16),
    checksum: bytes = bytes(16),
    codec_data: bytes = b"",
) -> None:
    """Change what depends on the codec in a header that was read, in place, and its checksum. Zeros where nothing is
    given."""
    struct.pack_into("<H", header, _FRONT.size - 18, codec)
    header[_FINGERPRINT_AT : _FINGERPRINT_AT + 16] = fingerprint
    header[_CODEC_AT:FIXED_HEADER_BYTES] = codec_data.ljust(CODEC_BYTES, b"\0")
    header[CHECKSUM_PLACE] = checksum
    header[_CHECKED_FRONT_BYTES : _FRONT.size] = _header_checksum(header)


def payload_checksum(payload: memoryview) -> bytes:
    return xxh3_128_digest(payload)


def check(
    data: memoryview,
    key: ObjectKey,
    layout: ObjectLayout | None = None,
    token_ids: array[int] | None = None,
    codec: int | None = CODEC_PLAIN,
    arrived: Arrived | None = None,
) -> BlockHeader:
    """Return the header of `data`, which is exactly the object of `key`, whole; else raise CorruptObjectError.

    `layout` and `token_ids`, where they are known, are compared too. `codec` None takes objects of any. With `arrived`
    the object may still be on its way: what has come is summed while it is in the processor's caches.
    """
    if arrived is not None:
        arrived(min(HEADER_BYTES, data.nbytes))
        arrived(min(max(HEADER_BYTES, _claimed_header_bytes(data)), data.nbytes))
    header = read_header(data)
    if codec is not None and header.codec != codec:
        _fail("version", f"codec {header.codec} where {codec} is used")
    if header.object_bytes != data.nbytes:
        _fail("short", f"{data.nbytes} of {header.object_bytes} bytes")
    if header.key != key:
        _fail("identity", "the object of another key")
    if layout is not None and header.segments != layout.segments:
        _fail("identity", "the object has other segments")
    if token_ids is not None and (len(token_ids), fingerprint(token_ids)) != (header.num_tokens, header.fingerprint):
        _fail("tokens", "the object of other tokens")
    payload = data[header.header_bytes :]
    if (payload_checksum(payload) if arrived is None else _arriving(payload, header, arrived)) != header.checksum:
        _fail("payload", "the payload's checksum differs")
    return header


def _arriving(payload: memoryview, header: BlockHeader, arrived: Arrived) -> bytes:
    """Return the checksum of a payload that comes segment by segment."""
    whole = xxh3_128()
    for spec in header.segments:
        end = spec.offset + spec.size_bytes
        arrived(header.header_bytes + end)
        whole.update(payload[spec.offset : end])
    return whole.digest()


def _claimed_header_bytes(data: memoryview) -> int:
    """Return how long the header says that it is: as much of `data` has to be there before it can be read."""
    return int(_FRONT.unpack_from(data)[1]) if data.nbytes >= _FRONT.size else 0


def segment_views(data: memoryview, layout: ObjectLayout) -> list[memoryview]:
    """Return the segments of an object that was checked, as parts of its own memory."""
    payload = data[layout.header_bytes :]
    return [payload[spec.offset : spec.offset + spec.size_bytes] for spec in layout.segments]


def _checksum(pieces: Sequence[memoryview]) -> bytes:
    if len(pieces) == 1:
        return xxh3_128_digest(pieces[0])
    whole = xxh3_128()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()


def _header_checksum(header: memoryview) -> bytes:
    """Checksum all of the header but the checksum."""
    return _checksum((header[:_CHECKED_FRONT_BYTES], header[_FRONT.size :]))


def _fail(fault: Fault, detail: str) -> NoReturn:
    raise CorruptObjectError(fault, detail)
