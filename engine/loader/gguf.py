"""Reads GGUF files: key/values and the table of tensors, checked against the file's size before anything is trusted.

Knows the container only. What the tensors mean is engine/loader/gguf_checkpoint.py's business, how their blocks are
decoded engine/loader/gguf_blocks.py's. Needs no torch, so a tokenizer can be read without it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType

from engine.errors import ModelError
from engine.loader.files import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_ITEMS = 2**23
"""Over all arrays. Those of a vocabulary have a million or two; an item of a byte takes up to sixty as an object."""
MAX_STRING_BYTES = 2**24
MAX_PAIRS = 2**16
MAX_TENSORS = 2**18
"""Files may be sparse: what is read at once is bounded by these, not by the file's size."""

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Storage of one tensor type: `values` consecutive elements of a row take `size_bytes`."""

    name: str
    values: int
    size_bytes: int


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    30: BlockFormat("BF16", 1, 2),
}
_OTHER_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file. `shape` is row-major (GGUF stores it reversed); the bytes are [start, start + size)."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    start: int
    size_bytes: int


class GGUFFile:
    """An open file: `metadata` are its key/values as Python objects, `tensors` its entries by name.

    Without `arrays`, which hold the vocabulary, the arrays are left out of the metadata and little is read.
    """

    def __init__(self, path: Path, *, arrays: bool = True) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path}: cannot be read as a GGUF file: {error}") from error
        try:
            cursor = _Cursor(self._map, path)
            tensor_count, pair_count = _read_header(cursor)
            self.metadata: Mapping[str, object] = _read_metadata(cursor, pair_count, arrays=arrays)
            self.tensors: Mapping[str, TensorEntry] = _read_tensor_table(cursor, tensor_count, self.metadata)
        except ModelError:
            self._map.close()
            raise

    def read(self, name: str) -> bytes:
        """Return a tensor's stored bytes (a copy, so that closing the file is always safe)."""
        entry = self.tensors[name]
        return self._map[entry.start : entry.start + entry.size_bytes]

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0
        self.items_left = MAX_ARRAY_ITEMS

    def fail(self, problem: str) -> ModelError:
        return ModelError(
            f"{self.path}: {problem} (at byte {self.position} of {len(self.data)})",
            hint="The file may be incomplete or damaged: fetch it again.",
        )

    def take(self, size: int) -> int:
        """Return the start of the next `size` bytes and step over them."""
        start = self.position
        if size > len(self.data) - start:
            raise self.fail("truncated GGUF file")
        self.position = start + size
        return start

    def scalar(self, code: str) -> int | float | bool:
        layout = struct.Struct("<" + code)
        value: int | float | bool = layout.unpack_from(self.data, self.take(layout.size))[0]
        return value

    def uint(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        start = self.skip_string()
        size = self.position - start
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.fail("corrupt GGUF file: a string is not UTF-8") from error

    def skip_string(self) -> int:
        """Step over a string and return where its bytes start."""
        size = self.uint("Q")
        if size > MAX_STRING_BYTES and size <= len(self.data) - self.position:
            raise self.fail(f"corrupt GGUF file: a string of {size} bytes")
        return self.take(size)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.take(len(MAGIC))
    if cursor.data[start : start + len(MAGIC)] != MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file (it does not start with {MAGIC.decode()!r})")
    version = cursor.uint("I")
    if version not in VERSIONS:
        raise ModelError(f"{cursor.path}: GGUF version {version} is not supported, only {VERSIONS}, little-endian")
    tensors, pairs = cursor.uint("Q"), cursor.uint("Q")
    if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
        raise cursor.fail(f"corrupt GGUF file: {tensors} tensors and {pairs} key/values")
    return tensors, pairs


def _read_metadata(cursor: _Cursor, pairs: int, *, arrays: bool) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(pairs):
        key = cursor.string()
        if key in metadata:
            raise cursor.fail(f"corrupt GGUF file: key {key!r} appears twice")
        kind = cursor.uint("I")
        if kind != _ARRAY:
            metadata[key] = _read_value(cursor, kind)
        elif arrays:
            metadata[key] = _read_array(cursor)
        else:
            _skip_array(cursor)
    return metadata


def _read_value(cursor: _Cursor, kind: int) -> object:
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string()
    raise cursor.fail(f"corrupt GGUF file: unknown value type {kind}")


def _array_head(cursor: _Cursor) -> tuple[int, int]:
    """Return the items' type and their count. The format allows arrays of arrays; no known file has them."""
    kind, count = cursor.uint("I"), cursor.uint("Q")
    if count > cursor.items_left:
        raise cursor.fail(f"corrupt GGUF file: an array of {count} items")
    cursor.items_left -= count
    return kind, count


def _skip_array(cursor: _Cursor) -> None:
    kind, count = _array_head(cursor)
    if kind in _SCALARS:
        cursor.take(count * struct.calcsize("<" + _SCALARS[kind]))
    elif kind == _STRING:
        for _ in range(count):
            cursor.skip_string()
    elif count:
        raise cursor.fail(f"corrupt GGUF file: unknown value type {kind}")


def _read_array(cursor: _Cursor) -> list[object]:
    kind, count = _array_head(cursor)
    if kind in _SCALARS:
        layout = struct.Struct("<" + _SCALARS[kind])
        start = cursor.take(count * layout.size)
        raw = cursor.data[start : start + count * layout.size]
        return [value for (value,) in layout.iter_unpack(raw)]
    # A lying count ends at the file's end: every value takes bytes.
    return [_read_value(cursor, kind) for _ in range(count)]


def _read_tensor_table(cursor: _Cursor, count: int, metadata: Mapping[str, object]) -> dict[str, TensorEntry]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise cursor.fail(f"corrupt GGUF file: general.alignment is {alignment!r}")
    found = []
    for _ in range(count):
        name = cursor.string()
        dimensions = cursor.uint("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise cursor.fail(f"corrupt GGUF file: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(cursor.uint("Q") for _ in range(dimensions))[::-1]
        found.append((name, shape, cursor.uint("I"), cursor.uint("Q")))
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise cursor.fail(f"corrupt GGUF file: tensor {name!r} appears twice")
        tensors[name] = _checked_entry(cursor, name, shape, kind, data_start, offset, alignment)
    _check_apart(cursor, tensors.values())
    return tensors


def _check_apart(cursor: _Cursor, entries: Collection[TensorEntry]) -> None:
    """Tensors that share bytes would let a small file stand for a model of any size."""
    in_order = sorted(entries, key=lambda entry: entry.start)
    for before, behind in pairwise(in_order):
        if before.start + before.size_bytes > behind.start:
            raise cursor.fail(f"corrupt GGUF file: tensors {before.name!r} and {behind.name!r} overlap")


def _checked_entry(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, data_start: int, offset: int, alignment: int
) -> TensorEntry:
    layout = FORMATS.get(kind)
    if layout is None:
        supported = ", ".join(sorted(known.name for known in FORMATS.values()))
        kind_name = _OTHER_NAMES.get(kind, f"number {kind}")
        raise ModelError(
            f"{cursor.path}: tensor {name!r} has type {kind_name}, which is not supported (supported: {supported})"
        )
    if min(shape) < 1 or shape[-1] % layout.values:
        raise cursor.fail(f"corrupt GGUF file: tensor {name!r} has shape {shape} in type {layout.name}")
    size = prod(shape) // layout.values * layout.size_bytes
    if offset % alignment:
        raise cursor.fail(f"corrupt GGUF file: tensor {name!r} starts at an unaligned offset {offset}")
    if data_start + offset + size > len(cursor.data):
        raise cursor.fail(f"truncated GGUF file: tensor {name!r} ends at byte {data_start + offset + size}")
    return TensorEntry(name, shape, layout, data_start + offset, size)
