"""Bytes to batches. Ours and today's vLLM and SGLang decode in one go, older and newer shapes field by field."""

from __future__ import annotations

import msgspec

from kvstore.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

_TYPES: dict[str, type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}

POSITIONS = 10
"""How many fields of an event have the same place wherever events are arrays."""

_decode = msgspec.msgpack.Decoder(EventBatch).decode
encode_batch = msgspec.msgpack.Encoder().encode


class BadEventError(ValueError):
    """A payload that is no batch of events."""


def decode_batch(payload: bytes) -> EventBatch:
    """Return the batch. Raises BadEventError.

    Accepts events as maps with a type and as arrays that begin with one, fields that nobody here knows, and kinds of
    events that nobody here knows (left out).
    """
    try:
        return _decode(payload)
    except (msgspec.MsgspecError, RecursionError):
        pass  # not in one go; what follows says whether it is wrong
    try:
        fields = msgspec.msgpack.decode(payload)
        if not isinstance(fields, list) or len(fields) < 2 or not isinstance(fields[1], list):
            raise BadEventError("a batch is [time, events, ...]")
        events = [event for entry in fields[1] if (event := _read_event(entry)) is not None]
        batch = msgspec.convert([fields[0], [], *fields[2:5]], EventBatch)
    except (msgspec.MsgspecError, RecursionError, TypeError) as error:
        raise BadEventError(str(error)) from error
    batch.events = events
    return batch


def _read_event(entry: object) -> Event | None:
    if isinstance(entry, list) and entry:
        kind = _TYPES.get(str(entry[0]))
        names = kind.__struct_fields__[:POSITIONS] if kind is not None else ()
        entry = {"type": entry[0], **dict(zip(names, entry[1:], strict=False))}
    if not isinstance(entry, dict) or "type" not in entry:
        raise BadEventError("an event is a map or an array that names its type")
    kind = _TYPES.get(str(entry["type"]))
    return None if kind is None else msgspec.convert(entry, kind)
