"""The check of a plain object by who knows its layout, at a fraction of the full check's cost."""

from __future__ import annotations

from array import array

from xxhash import xxh3_128_digest

from kvstore.block_format import CHECKSUM_PLACE, KEY_PLACE, Identity, header_is_whole, layout_places, seal
from kvstore.keys import KEY_BYTES, OWNER_BYTES
from kvstore.layout import ObjectLayout
from kvstore.object_key import ObjectKey


def key_bytes(key: ObjectKey) -> bytes:
    """Return a key as a header has it, without what its layout tells."""
    return key.namespace + key.owner + key.block


class QuickCheck:
    """Compares the bytes of a header with those that the layout gives it, instead of reading them. Usable from any
    thread; hashing lets go of the interpreter."""

    def __init__(self, layout: ObjectLayout) -> None:
        blank = layout.key(bytes(KEY_BYTES), bytes(OWNER_BYTES), bytes(KEY_BYTES))
        model = bytearray(layout.object_bytes)
        seal(memoryview(model), Identity(blank, bytes(KEY_BYTES), 0, array("I")), layout)
        self._object_bytes, self._header_bytes = layout.object_bytes, layout.header_bytes
        self._fixed = [(place, bytes(model[place])) for place in layout_places(len(layout.segments))]

    def passes(self, data: memoryview, key: ObjectKey) -> bool:
        """Return whether `data` is exactly the object of `key`, which is one of the layout, whole. It implies that
        `kvstore.block_format.check` passes; where it is False that one says what is wrong."""
        return self.matches(data, key_bytes(key))

    def matches(self, data: memoryview, key: bytes) -> bool:
        """The same for `key_bytes` of the key."""
        if data.nbytes != self._object_bytes or not header_is_whole(data[: self._header_bytes]):
            return False
        header = data[: self._header_bytes].tobytes()
        if header[KEY_PLACE] != key:
            return False
        for place, expected in self._fixed:
            if header[place] != expected:
                return False
        return xxh3_128_digest(data[self._header_bytes :]) == header[CHECKSUM_PLACE]
