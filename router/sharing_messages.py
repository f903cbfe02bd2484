"""What processes that route tell each other of their leases, and its bounds. Knows no sockets.

A frame is one msgpack array: a tag, then the fields in order.

    follower (DEALER)             teller (ROUTER)
    Follow ---------------------> Snapshot, one or more: what is under way now, the last with `is_last`
                                  Changes: at most `BATCH_S` after they happen, and at least every `HEARTBEAT_S`
    Ask ------------------------> Told: what it has decided about a request
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.decision import Decision
from router.dispatches import Dispatch
from router.registry.base import GatewayRecord

SHARING_VERSION = 1

BATCH_S = 0.02
HEARTBEAT_S = 0.5
SILENCE_S = 2.5
"""After so long without a word a peer is given up, and with it its leases."""

MAX_FOLLOWER_FRAME_BYTES = 1024
MAX_TELLER_FRAME_BYTES = 8 * 1024 * 1024
MAX_EVENTS = 2_048
"""In one message. With MAX_BATCH_KEYS it keeps every frame below its limit."""

MAX_BATCH_KEYS = 32_768
MAX_KEY_BYTES = 64
MAX_ID_BYTES = 256
MAX_POOLS = 1_024
MAX_PEER_LEASES = 131_072
MAX_PEERS = 1_024

MAX_PAGE_BYTES = 128 * 1024
"""Of decisions in one message: what a follower does not read stays small."""

MAX_PAGES = 64
"""Of one request. All decisions that a process remembers are fewer."""


@dataclass(frozen=True)
class PeerAddress:
    """Where a peer tells its leases. `public_key` (Z85) is needed where CURVE is used."""

    address: str
    public_key: str | None = None

    @classmethod
    def of(cls, record: GatewayRecord) -> PeerAddress:
        return cls(record.dispatches, record.public_key)


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """`stream` is the follower's own number for what it asks for; the answers carry it."""

    version: int
    stream: int


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """What has been decided about this request, but for the first `skip` decisions? Only followers may ask; the answer
    has the same `number`."""

    number: int
    request_id: str
    skip: int


FollowerMessage = Follow | Ask


class Dispatched(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    pool: str
    dispatch: Dispatch


class FirstOutput(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    pool: str
    lease_id: int


class Released(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    pool: str
    lease_id: int


Event = Dispatched | FirstOutput | Released


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """`peer_id` names one life of the teller. Messages of a stream are numbered from 0 on."""

    stream: int
    number: int
    peer_id: str
    events: list[Event]
    is_last: bool


class Changes(msgspec.Struct, frozen=True, array_like=True, tag="changes"):
    stream: int
    number: int
    events: list[Event]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    version: int


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Decisions of the teller's own, the oldest first; `left` more stand behind them."""

    number: int
    decisions: list[Decision]
    left: int


TellerMessage = Snapshot | Changes | Refused | Told
